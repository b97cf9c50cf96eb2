//! Devices, numbers and comparisons.

use std::path::Path;

use half::bf16;
use kernels::cuda::emulator::{Build, Mutation};
use kernels::cuda::{Buffer, CudaError, Gpu};
use kernels::{KvDtype, KvLayout};

/// Of bf16 results: the length of the difference, relative to the length of the exact result. Of its elements it cannot be
/// said: bf16 has 8 bits, so the nearest number may be 2^-8 (3.9e-3) of an element away, which makes 1.5e-3 of the length
/// where no few elements decide it. So a kernel's result is rounded once, and what is within it costs less than that.
pub const BF16: f64 = 2e-3;

/// Of f32 results.
pub const F32: f64 = 1e-5;

/// Where tests run: `cuda:N`, else the emulator.
const DEVICE: &str = "KVFERRY_TEST_DEVICE";

/// A library of scripts/cuda-emulator, for machines without g++ and the sources.
const EMULATOR: &str = "KVFERRY_TEST_EMULATOR";

/// Set in the process that runs with AddressSanitizer.
pub const ASAN: &str = "KVFERRY_TEST_ASAN";

/// Threads forward and backward; warps that race ahead of one another, with copies done late and early.
pub const SCHEDULES: [u32; 4] = [0, 1, 6, 7];

/// Of these, under AddressSanitizer: orders of threads change no address, but late copies and early ones are made at other times.
const ASAN_SCHEDULES: [u32; 2] = [0, 7];

/// Runs a check on the GPU, or in several schedules of the emulator: forward, backward and shuffled.
pub fn on_every_device(check: impl Fn(&Gpu)) {
    if let Ok(device) = std::env::var(DEVICE) {
        let ordinal = device.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        return check(&Gpu::open(ordinal.expect("KVFERRY_TEST_DEVICE is cuda:N")).expect("the GPU opens"));
    }
    let library = library(None, &[]);
    let schedules: &[u32] = if std::env::var_os(ASAN).is_some() { &ASAN_SCHEDULES } else { &SCHEDULES };
    for &schedule in schedules {
        check(&Gpu::emulated(&library, schedule).expect("the emulator loads"));
    }
}

pub fn runs_on_gpu() -> bool {
    std::env::var_os(DEVICE).is_some()
}

/// The kernels of `files` with a planted fault, on the emulator.
pub fn faulty(mutation: Mutation, files: &[&str], schedule: u32) -> Gpu {
    Gpu::emulated(&library(Some(mutation), files), schedule).expect("the emulator loads")
}

fn library(mutation: Option<Mutation>, files: &[&str]) -> std::path::PathBuf {
    if let (None, Some(library)) = (mutation, std::env::var_os(EMULATOR)) {
        return library.into();
    }
    let build = Build {
        sources: Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/cu")),
        cache: Path::new(env!("CARGO_TARGET_TMPDIR")),
        address_sanitizer: std::env::var_os(ASAN).is_some(),
        mutation,
        files,
    };
    build.library().expect("g++ compiles the kernels")
}

/// Numbers between -2 and 2 that bf16 holds exactly, always the same for a seed.
pub fn random(len: usize, seed: u32) -> Vec<f64> {
    let mut state = seed.wrapping_mul(2_654_435_761) | 1;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        ((state >> 8) as f32 / (1 << 23) as f32 - 1.0) * 2.0
    };
    (0..len).map(|_| bf16::from_f32(next()).to_f64()).collect()
}

pub fn bf16s(values: &[f64]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f64(*value)).collect()
}

pub fn f32s(values: &[f64]) -> Vec<f32> {
    values.iter().map(|value| *value as f32).collect()
}

/// `values` on the device in bf16.
pub fn upload_bf16(gpu: &Gpu, values: &[f64]) -> Buffer {
    gpu.buffer_of(&bf16s(values)).unwrap()
}

pub fn upload_f32(gpu: &Gpu, values: &[f64]) -> Buffer {
    gpu.buffer_of(&f32s(values)).unwrap()
}

/// What bf16 results on the device are.
pub fn read_bf16(buffer: &Buffer) -> Result<Vec<f64>, CudaError> {
    Ok(buffer.to_vec::<bf16>()?.iter().map(|value| value.to_f64()).collect())
}

pub fn read_f32(buffer: &Buffer) -> Result<Vec<f64>, CudaError> {
    Ok(buffer.to_vec::<f32>()?.iter().map(|value| f64::from(*value)).collect())
}

/// The length of the difference by the length of the exact result. Infinite where a result is not a number.
pub fn relative_error(got: &[f64], exact: &[f64]) -> f64 {
    assert_eq!(got.len(), exact.len());
    if got.iter().any(|value| !value.is_finite()) {
        return f64::INFINITY;
    }
    let length =
        |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    let difference = length(&mut got.iter().zip(exact).map(|(got, exact)| got - exact));
    difference / length(&mut exact.iter().copied()).max(f64::MIN_POSITIVE)
}

pub fn assert_close(got: &[f64], exact: &[f64], tolerance: f64, what: &str) {
    let error = relative_error(got, exact);
    assert!(error <= tolerance, "{what}: relative error {error:.2e}, expected at most {tolerance:.0e}");
}

/// A bf16 pool of three layers.
pub fn layout(num_kv_heads: usize, head_dim: usize, block_size: usize) -> KvLayout {
    KvLayout { num_layers: 3, num_kv_heads, head_dim, block_size, dtype: KvDtype::Bf16 }
}
