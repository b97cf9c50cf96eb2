//! CUDA: our own kernels (`kernels/cu`), the memory they work on, and what runs them.
//!
//! * [`Gpu`] is the seam: a device behind the driver API (feature `cuda`), or the same kernels on the CPU
//!   ([`emulator`], for tests). Nothing above it knows which.
//! * [`Buffer`] owns device memory, [`View`] borrows a part of it; launchers check that views are as long as the kernel
//!   reads and writes.
//! * [`linear`], [`attention`], [`qkv`], [`pointwise`], [`blocks`] and [`sample`] launch the kernels; shapes are theirs.
//!
//! Invariants: device memory comes from `cuMemAlloc`, which other processes can map (legacy IPC); kernels are launched on
//! the compute stream in program order; nothing between two steps waits for the GPU but the sampled ids' download.

pub mod attention;
mod backend;
pub mod blocks;
#[cfg(feature = "cuda")]
mod cublas;
#[cfg(feature = "cuda")]
mod driver;
pub mod emulator;
mod error;
mod gpu;
pub mod linear;
pub mod pointwise;
mod pool;
pub mod qkv;
pub mod sample;

pub use backend::{Backend, DeviceInfo, Dims, Launch, Mark, Product, ProductOutput, Stream};
pub use error::CudaError;
pub use gpu::{Buffer, Gpu, Graph, Pinned, View};
pub use pool::PoolView;
