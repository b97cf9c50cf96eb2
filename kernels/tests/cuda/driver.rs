//! A build with CUDA on a machine that has none.

use kernels::cuda::Gpu;

use crate::support::runs_on_gpu;

/// Libraries of CUDA that this process has loaded.
fn loaded() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this system has /proc");
    let names = ["libcuda.so", "libcudart", "libcublas", "libnvidia-ml", "libnvrtc"];
    maps.lines().filter(|line| names.iter().any(|name| line.contains(name))).map(str::to_owned).collect()
}

/// Nothing of CUDA is linked, so that one program starts everywhere.
#[test]
fn a_build_with_cuda_starts_without_it_and_says_what_lacks() {
    if runs_on_gpu() {
        return;
    }
    assert_eq!(loaded(), Vec::<String>::new());
    match (Gpu::open(0), cfg!(feature = "cuda")) {
        (Ok(gpu), _) => assert!(gpu.info().capability >= (8, 0)),
        (Err(error), false) => assert!(error.to_string().contains("--features cuda"), "{error}"),
        (Err(error), true) if loaded().is_empty() => {
            assert!(error.to_string().starts_with("libcuda was not found: no NVIDIA driver"), "{error}");
        }
        // A driver without a device: whatever it says.
        (Err(error), true) => assert!(error.to_string().contains("cu"), "{error}"),
    }
}
