//! What can go wrong with a CUDA device.

/// A device that cannot be had or did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("this build has no CUDA support: build with --features cuda")]
    NotBuilt,
    #[error(
        "libcuda was not found: no NVIDIA driver is installed here, or its libraries are not on the loader's path"
    )]
    NoDriver,
    #[error("cuda:{ordinal} does not exist: {count} CUDA device(s) are visible here")]
    NoDevice { ordinal: usize, count: usize },
    #[error("{what} failed: {code}")]
    Call { what: &'static str, code: String },
    #[error("no device memory for {bytes} bytes: {free} of {total} are free")]
    OutOfMemory { bytes: usize, free: usize, total: usize },
    #[error("{0}")]
    Kernel(String),
    #[error("the CUDA kernels do not support {what} {value}, expected {expected}")]
    Unsupported { what: &'static str, value: usize, expected: &'static str },
    #[error("the CUDA emulator {path} cannot be used: {reason}")]
    Emulator { path: String, reason: String },
}
