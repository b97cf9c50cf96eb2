//! What a device must do for the launchers above it.

use std::fmt::Debug;

use super::CudaError;

type Result<T> = std::result::Result<T, CudaError>;

/// The two queues of a device. Work on one overlaps with the other's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stream {
    /// Kernels, and copies that belong to a step.
    Compute,
    /// Copies of KV between the pool and host memory.
    Copy,
}

/// What a device is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    pub ordinal: usize,
    pub name: String,
    /// Major and minor compute capability.
    pub capability: (u32, u32),
    pub multiprocessors: usize,
    /// Shared memory that a block may ask for, in bytes.
    pub shared_memory: usize,
    pub driver: String,
}

/// Blocks of a grid, threads of a block, bytes of dynamic shared memory.
#[derive(Clone, Copy, Debug)]
pub struct Dims {
    pub grid: (u32, u32, u32),
    pub threads: u32,
    pub shared: usize,
}

/// One kernel's launch. Arguments are the bytes of each parameter, aligned as the parameter's type.
#[derive(Clone, Copy, Debug)]
pub struct Launch<'a> {
    pub kernel: &'a str,
    pub dims: Dims,
    pub arguments: &'a [&'a [u8]],
}

/// What becomes of a product's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductOutput {
    /// Stored as bf16.
    Bf16,
    /// Stored as f32.
    F32,
    /// Added to f32.
    AddF32,
}

/// `y[m, n] = x[m, k] · w[n, k]ᵀ`, everything row-major, `x` and `w` bf16; addresses on the device.
#[derive(Clone, Copy, Debug)]
pub struct Product {
    pub x: u64,
    pub w: u64,
    pub y: u64,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub output: ProductOutput,
}

/// A captured sequence of launches.
pub trait CapturedGraph: Send + Debug {
    /// Starts all of it on the compute stream.
    fn replay(&self) -> Result<()>;
}

/// A place in the compute stream.
pub trait Mark: Debug {
    /// Waits until everything before it is done.
    fn wait(&self) -> Result<()>;
}

/// A CUDA device, or what stands in for one. Callers may be on any thread.
pub trait Backend: Send + Sync + Debug {
    fn info(&self) -> &DeviceInfo;

    /// True where device memory is the processor's own.
    fn is_emulated(&self) -> bool {
        false
    }

    /// Makes the device current on the calling thread, for libraries that ask the driver for the thread's device. Ours
    /// do not: every call here does it by itself.
    fn bind_thread(&self) -> Result<()>;

    /// Whether another process could map this allocation (legacy IPC).
    ///
    /// # Safety
    /// `address` is from [`Self::alloc`].
    unsafe fn check_export(&self, address: u64) -> Result<()>;

    /// Free and all bytes of device memory.
    fn memory(&self) -> Result<(usize, usize)>;

    /// Uninitialised device memory that other processes can map; aligned to 256 bytes.
    fn alloc(&self, bytes: usize) -> Result<u64>;

    /// # Safety
    /// `address` is from [`Self::alloc`] and used by nothing that still runs.
    unsafe fn free(&self, address: u64);

    /// Host memory that copies reach without staging.
    fn alloc_pinned(&self, bytes: usize) -> Result<*mut u8>;

    /// # Safety
    /// `pointer` is from [`Self::alloc_pinned`] with the same size, and no copy uses it.
    unsafe fn free_pinned(&self, pointer: *mut u8, bytes: usize);

    /// # Safety
    /// The ranges are valid; `from` stays as it is until the stream is synchronised.
    unsafe fn upload(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()>;

    /// # Safety
    /// The ranges are valid; `to` is not looked at until the stream is synchronised.
    unsafe fn download(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()>;

    /// # Safety
    /// The range is device memory.
    unsafe fn zero(&self, stream: Stream, to: u64, bytes: usize) -> Result<()>;

    /// # Safety
    /// The arguments are what the kernel takes, and its addresses are valid for what it reads and writes.
    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()>;

    /// Computes a product with the vendor's library on the compute stream. `false` where there is none.
    ///
    /// # Safety
    /// The addresses are valid for the sizes.
    unsafe fn product(&self, product: &Product) -> Result<bool>;

    /// Whether [`Self::product`] has a library to compute with.
    fn has_products(&self) -> bool {
        false
    }

    /// Waits until the stream has nothing left to do.
    fn synchronize(&self, stream: Stream) -> Result<()>;

    /// Marks the end of what is in the compute stream now.
    fn mark(&self) -> Result<Box<dyn Mark>>;

    /// From here on the compute stream's work is recorded, not done.
    fn begin_capture(&self) -> Result<()>;

    fn end_capture(&self) -> Result<Box<dyn CapturedGraph>>;
}
