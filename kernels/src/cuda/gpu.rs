//! A device and its memory.

use std::marker::PhantomData;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytemuck::{AnyBitPattern, NoUninit};

use super::backend::{Backend, CapturedGraph, DeviceInfo, Launch, Mark, Product, Stream};
use super::emulator::Emulator;
use super::error::CudaError;

type Result<T> = std::result::Result<T, CudaError>;

/// A CUDA device. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gpu {
    backend: Arc<dyn Backend>,
    /// Bytes of all buffers.
    allocated: Arc<AtomicUsize>,
}

/// Device memory, freed with the last of its users.
#[derive(Debug)]
pub struct Buffer {
    gpu: Gpu,
    address: u64,
    bytes: usize,
}

/// A part of a [`Buffer`].
#[derive(Clone, Copy, Debug)]
pub struct View<'a> {
    address: u64,
    bytes: usize,
    buffer: PhantomData<&'a Buffer>,
}

/// Host memory that copies reach directly.
#[derive(Debug)]
pub struct Pinned {
    gpu: Gpu,
    pointer: *mut u8,
    bytes: usize,
}

// SAFETY: plain memory with one owner.
unsafe impl Send for Pinned {}

/// A step that was captured once and can be started again with one call.
#[derive(Debug)]
pub struct Graph(Box<dyn CapturedGraph>);

impl Gpu {
    /// The device `cuda:ordinal` of the NVIDIA driver.
    ///
    /// Errors: [`CudaError::NotBuilt`], [`CudaError::NoDriver`], [`CudaError::NoDevice`], or what the driver says.
    #[cfg(feature = "cuda")]
    pub fn open(ordinal: usize) -> Result<Self> {
        Ok(Self::new(super::driver::Driver::open(ordinal)?))
    }

    /// The device `cuda:ordinal` of the NVIDIA driver: not in this build.
    #[cfg(not(feature = "cuda"))]
    pub fn open(_ordinal: usize) -> Result<Self> {
        Err(CudaError::NotBuilt)
    }

    /// The kernels of an emulator library on the CPU, for tests; threads run in the order of `schedule`.
    pub fn emulated(library: &Path, schedule: u32) -> Result<Self> {
        Self::emulated_device(library, schedule, 0)
    }

    /// The same on a machine with several GPUs.
    ///
    /// Errors: [`CudaError::NoDevice`], or what is wrong with the library.
    pub fn emulated_device(library: &Path, schedule: u32, ordinal: usize) -> Result<Self> {
        Ok(Self::new(Emulator::load(library, schedule, ordinal)?))
    }

    fn new(backend: impl Backend + 'static) -> Self {
        Self { backend: Arc::new(backend), allocated: Arc::default() }
    }

    pub fn info(&self) -> &DeviceInfo {
        self.backend.info()
    }

    /// True where device memory is the processor's own.
    pub fn is_emulated(&self) -> bool {
        self.backend.is_emulated()
    }

    /// Whether cuBLASLt computes products of many rows; else our own kernels do.
    pub fn has_cublas(&self) -> bool {
        self.backend.has_products()
    }

    /// Free and all bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize)> {
        self.backend.memory()
    }

    /// Bytes of device memory that this value and its clones have allocated and not freed. What the driver takes for itself
    /// comes on top.
    pub fn allocated(&self) -> usize {
        self.allocated.load(Ordering::Relaxed)
    }

    /// Makes the device current on the calling thread, for libraries that use its memory by themselves.
    pub fn bind_thread(&self) -> Result<()> {
        self.backend.bind_thread()
    }

    /// Uninitialised memory of `bytes`, which other processes can map.
    pub fn alloc(&self, bytes: usize) -> Result<Buffer> {
        let address = self.backend.alloc(bytes.max(1))?;
        self.allocated.fetch_add(bytes, Ordering::Relaxed);
        Ok(Buffer { gpu: self.clone(), address, bytes })
    }

    /// The same, filled with zeros.
    pub fn zeroed(&self, bytes: usize) -> Result<Buffer> {
        let buffer = self.alloc(bytes)?;
        self.zero(buffer.view())?;
        self.synchronize()?;
        Ok(buffer)
    }

    /// A copy of `values` on the device.
    pub fn buffer_of<T: NoUninit>(&self, values: &[T]) -> Result<Buffer> {
        let buffer = self.alloc(size_of_val(values))?;
        buffer.write(0, bytemuck::cast_slice(values))?;
        Ok(buffer)
    }

    pub fn pinned(&self, bytes: usize) -> Result<Pinned> {
        let pointer = self.backend.alloc_pinned(bytes.max(1))?;
        // SAFETY: as long as it was asked for, and nobody else's.
        unsafe { std::ptr::write_bytes(pointer, 0, bytes) };
        Ok(Pinned { gpu: self.clone(), pointer, bytes })
    }

    /// Fills with zeros, on the compute stream.
    pub fn zero(&self, to: View<'_>) -> Result<()> {
        // SAFETY: a view is valid device memory.
        unsafe { self.backend.zero(Stream::Compute, to.address, to.bytes) }
    }

    /// Waits for the compute stream.
    pub fn synchronize(&self) -> Result<()> {
        self.backend.synchronize(Stream::Compute)
    }

    /// Copies the start of pinned memory to the device, on the compute stream.
    ///
    /// # Safety
    /// The pinned memory must not be written until the stream is synchronised.
    pub unsafe fn upload(&self, to: View<'_>, from: &Pinned) -> Result<()> {
        assert!(
            to.bytes <= from.bytes,
            "an upload of {} from {} bytes. This is a bug.",
            to.bytes,
            from.bytes
        );
        // SAFETY: both ranges are valid; the rest is the caller's.
        unsafe { self.backend.upload(Stream::Compute, to.address, from.pointer, to.bytes) }
    }

    /// Copies to the start of pinned memory and waits: the one place where a step waits for the device.
    pub fn download(&self, to: &mut Pinned, from: View<'_>) -> Result<()> {
        assert!(from.bytes <= to.bytes, "a download of {} to {} bytes. This is a bug.", from.bytes, to.bytes);
        // SAFETY: both ranges are valid, and the stream is synchronised before anybody looks.
        unsafe { self.backend.download(Stream::Compute, to.pointer, from.address, from.bytes)? };
        self.synchronize()
    }

    /// Marks the end of what is in the compute stream now.
    pub fn mark(&self) -> Result<Box<dyn Mark>> {
        self.backend.mark()
    }

    /// Captures what `record` launches.
    pub fn capture(&self, record: impl FnOnce() -> Result<()>) -> Result<Graph> {
        self.backend.begin_capture()?;
        let recorded = record();
        // The capture ends whatever happened, or the stream stays unusable.
        let graph = self.backend.end_capture();
        recorded?;
        Ok(Graph(graph?))
    }

    /// Errors where a block of this device has less shared memory.
    pub(super) fn check_shared(&self, shared: usize) -> Result<()> {
        match shared <= self.info().shared_memory {
            true => Ok(()),
            false => Err(CudaError::Unsupported {
                what: "a block's shared memory of",
                value: shared,
                expected: "no more than this device has",
            }),
        }
    }

    /// # Safety
    /// As [`Backend::launch`].
    pub(super) unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.check_shared(launch.dims.shared)?;
        // SAFETY: passed on from the caller.
        unsafe { self.backend.launch(launch) }
    }

    /// # Safety
    /// As [`Backend::product`].
    pub(super) unsafe fn product(&self, product: &Product) -> Result<bool> {
        // SAFETY: passed on from the caller.
        unsafe { self.backend.product(product) }
    }
}

impl Graph {
    /// Starts it on the compute stream. Its buffers must still be there.
    ///
    /// # Safety
    /// Every buffer that was named in the capture is alive.
    pub unsafe fn replay(&self) -> Result<()> {
        self.0.replay()
    }
}

impl Buffer {
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn view(&self) -> View<'_> {
        View { address: self.address, bytes: self.bytes, buffer: PhantomData }
    }

    /// Whether other processes can map it.
    ///
    /// Errors: what the driver says to that.
    pub fn check_export(&self) -> Result<()> {
        // SAFETY: this buffer's own allocation.
        unsafe { self.gpu.backend.check_export(self.address) }
    }

    /// Copies `from` to byte `at` and waits, beside what computes.
    ///
    /// Panics if it does not fit, which is a bug of the caller.
    pub fn write(&self, at: usize, from: &[u8]) -> Result<()> {
        let to = self.view().part(at, from.len());
        // SAFETY: both ranges are valid, and the stream is synchronised before `from` can change.
        unsafe { self.gpu.backend.upload(Stream::Copy, to.address, from.as_ptr(), from.len())? };
        self.gpu.backend.synchronize(Stream::Copy)
    }

    /// Copies from byte `at` to all of `to` and waits, beside what computes.
    ///
    /// Panics if it is beyond the end, which is a bug of the caller.
    pub fn read(&self, at: usize, to: &mut [u8]) -> Result<()> {
        let from = self.view().part(at, to.len());
        // SAFETY: both ranges are valid, and the stream is synchronised before `to` is looked at.
        unsafe { self.gpu.backend.download(Stream::Copy, to.as_mut_ptr(), from.address, to.len())? };
        self.gpu.backend.synchronize(Stream::Copy)
    }

    /// All of it as values, after what computes is done.
    pub fn to_vec<T: AnyBitPattern + NoUninit>(&self) -> Result<Vec<T>> {
        self.gpu.synchronize()?;
        let mut values = vec![T::zeroed(); self.bytes / size_of::<T>()];
        self.read(0, bytemuck::cast_slice_mut(&mut values))?;
        Ok(values)
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // Nothing that still runs may use it.
        let idle = self.gpu.synchronize();
        if let Err(error) = idle {
            tracing::error!(%error, "a device buffer is freed on a broken device");
        }
        // SAFETY: this buffer's own, and the stream is idle.
        unsafe { self.gpu.backend.free(self.address) };
        self.gpu.allocated.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl<'a> View<'a> {
    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// `bytes` from byte `at`. Panics if they are not inside, which is a bug of the caller.
    pub fn part(self, at: usize, bytes: usize) -> View<'a> {
        assert!(
            at.checked_add(bytes).is_some_and(|end| end <= self.bytes),
            "{bytes} bytes at {at} of {}. This is a bug.",
            self.bytes
        );
        View { address: self.address + at as u64, bytes, buffer: PhantomData }
    }

    /// The address, if the view has at least `count` elements of `T`. Panics otherwise, which is a bug of the caller.
    pub(super) fn elements<T>(&self, count: usize, what: &str) -> u64 {
        assert!(
            self.bytes >= count * size_of::<T>() && self.address.is_multiple_of(align_of::<T>() as u64),
            "{what}: {count} elements of {} bytes in {}. This is a bug.",
            size_of::<T>(),
            self.bytes
        );
        self.address
    }
}

impl Pinned {
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this many initialised bytes, ours.
        unsafe { std::slice::from_raw_parts(self.pointer, self.bytes) }
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.bytes) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: from `alloc_pinned` with this size; uploads from it were synchronised as `upload` asks.
        unsafe { self.gpu.backend.free_pinned(self.pointer, self.bytes.max(1)) };
    }
}
