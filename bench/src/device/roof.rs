//! What the device can do: copying and multiplying, measured.

use std::time::Instant;

use half::bf16;
use kernels::cuda::Gpu;
use kernels::cuda::blocks::{Side, copy_blocks};
use kernels::cuda::linear::{Into, Rows, Shape, multiply};
use serde::Serialize;

use crate::error::Result;

/// Limits of a device.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct Roof {
    /// Bytes read and written by a copy within the device's memory.
    pub copy_gb_per_s: f64,
    /// Of a bf16 product of three square matrices; not measured on the CPU, where `bench kernels` does.
    pub product_tflops: Option<f64>,
    /// Whose product it was, as of prompts: without cuBLASLt our own is compared with itself.
    pub product_by: Option<&'static str>,
}

/// Best of this many: what disturbs only slows.
const TRIES: usize = 5;

/// Bytes of a copy: larger than any cache.
const COPIED: usize = 512 << 20;

/// Copied in parts of a KV block of Qwen3-0.6B.
const PART: usize = 1_835_008;

/// Rows, columns and depth of the product.
const SQUARE: usize = 8192;

impl Roof {
    pub fn measure(gpu: Option<&Gpu>) -> Result<Self> {
        match gpu {
            Some(gpu) => of_gpu(gpu),
            None => Ok(of_cpu()),
        }
    }
}

fn of_gpu(gpu: &Gpu) -> Result<Roof> {
    // What stands in for a GPU is asked for little: only that it works.
    let (parts, square) = if gpu.is_emulated() { (1, 64) } else { (COPIED / PART, SQUARE) };
    let (from, to) = (gpu.zeroed(parts * PART)?, gpu.alloc(parts * PART)?);
    let side = |buffer| Side { blocks: buffer, ids: None };
    let copy = best(|| {
        copy_blocks(gpu, side(to.view()), side(from.view()), parts, PART)?;
        Ok(gpu.synchronize()?)
    })?;
    // Zeros would do for the sums, but multiplying them takes less power, and so runs faster than anything real.
    let (x, w) = (gpu.buffer_of(&random(square * square, 1))?, gpu.buffer_of(&random(square * square, 2))?);
    let y = gpu.alloc(2 * square * square)?;
    let shape = Shape { m: square, n: square, k: square };
    let product = best(|| {
        multiply(gpu, Rows::Bf16(x.view()), w.view(), Into::Bf16(y.view()), shape)?;
        Ok(gpu.synchronize()?)
    })?;
    Ok(Roof {
        copy_gb_per_s: 2.0 * (parts * PART) as f64 / copy / 1e9,
        product_tflops: Some(2.0 * (square as f64).powi(3) / product / 1e12),
        product_by: Some(if gpu.has_cublas() { "cuBLASLt" } else { "own kernels" }),
    })
}

/// Numbers between -1 and 1.
fn random(len: usize, seed: u32) -> Vec<bf16> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        bf16::from_f32((state >> 8) as f32 / (1 << 23) as f32 - 1.0)
    };
    (0..len).map(|_| next()).collect()
}

fn of_cpu() -> Roof {
    let (from, mut to) = (vec![1u8; COPIED / 4], vec![0u8; COPIED / 4]);
    let mut seconds = f64::INFINITY;
    for _ in 0..TRIES {
        let started = Instant::now();
        to.copy_from_slice(&from);
        std::hint::black_box(&mut to);
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Roof { copy_gb_per_s: 2.0 * from.len() as f64 / seconds / 1e9, product_tflops: None, product_by: None }
}

fn best(mut run: impl FnMut() -> Result<()>) -> Result<f64> {
    // Libraries choose their algorithms on the first call.
    run()?;
    let mut seconds = f64::INFINITY;
    for _ in 0..TRIES {
        let started = Instant::now();
        run()?;
        seconds = seconds.min(started.elapsed().as_secs_f64());
    }
    Ok(seconds)
}
