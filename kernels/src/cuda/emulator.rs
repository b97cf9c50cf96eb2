//! The CUDA kernels on the CPU: the same sources, compiled by g++ with `kernels/cu/emu` in place of CUDA's headers.
//!
//! Slow and exact about what a GPU leaves undefined: for tests of kernels and of everything that launches them, on machines
//! without a GPU. A stream does nothing until somebody waits for it, as late as a GPU may be: a host that looks before it has
//! waited, writes to memory that an upload still reads, or relies on the other stream sees old bytes. A captured graph records
//! launches and does nothing else until it is replayed, so that a host value which should have been read on the device shows;
//! replaying it when memory that it names was freed is an error, whatever lies there now.

mod build;

use std::alloc::Layout;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ffi::{CString, c_char, c_int, c_uint, c_void};
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};

use libloading::Library;

use super::backend::{Backend, CapturedGraph, DeviceInfo, Dims, Launch, Mark, Product, Stream};
use super::error::CudaError;

pub use build::{Build, Mutation};

type Result<T> = std::result::Result<T, CudaError>;

type LaunchFunction = unsafe extern "C" fn(
    *const c_char,
    *const c_uint,
    *const c_uint,
    usize,
    *mut *mut c_void,
    *const usize,
    usize,
    c_uint,
    *mut c_char,
    usize,
) -> c_int;

/// Alignment of device memory, as cuMemAlloc gives it.
const ALIGNMENT: usize = 256;

/// Bytes that the emulated device says it has.
const MEMORY: usize = 1 << 30;

/// Devices of an emulated machine. They share nothing.
const DEVICES: usize = 2;

#[derive(Debug)]
pub struct Emulator {
    info: DeviceInfo,
    shared: Arc<Shared>,
}

/// What an emulated device does wrong, for tests of those who use it: `KVFERRY_EMULATOR_FAULT`.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// `capture`: no graph is captured.
    Capture,
    /// `launches=N`: after so many launches every one fails, as after an error that breaks a context.
    Launches(u64),
}

impl Fault {
    fn from_environment() -> Option<Self> {
        let text = std::env::var("KVFERRY_EMULATOR_FAULT").ok()?;
        match text.strip_prefix("launches=") {
            Some(count) => count.parse().ok().map(Fault::Launches),
            None => (text == "capture").then_some(Fault::Capture),
        }
    }
}

/// What captured graphs need too.
#[derive(Debug)]
struct Shared {
    library: Library,
    schedule: u32,
    fault: Option<Fault>,
    state: Mutex<State>,
    /// Held while a stream's work is done, so that two who wait for one stream do it in order.
    working: [Mutex<()>; 2],
}

#[derive(Debug, Default)]
struct State {
    /// What is allocated, by address.
    allocated: BTreeMap<u64, Allocation>,
    /// How much was ever allocated.
    allocations: u64,
    /// How much was ever launched; counted where there is to be a fault.
    launches: u64,
    /// The capture under way.
    capture: Option<Capture>,
    /// What each stream has yet to do.
    queues: [VecDeque<Recorded>; 2],
    /// How much was ever queued, and done, in the compute stream.
    queued: u64,
    done: u64,
}

/// Work that is recorded instead of queued.
#[derive(Debug)]
struct Capture {
    /// Who captures: only this thread's calls are watched, so that transports may go on (`CU_STREAM_CAPTURE_MODE_THREAD_LOCAL`).
    thread: ThreadId,
    recorded: Vec<Recorded>,
    /// Allocations that the work names.
    named: BTreeSet<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Allocation {
    bytes: usize,
    /// Not that of any other: an address may be given out again.
    number: u64,
}

impl State {
    /// The numbers of the allocations that work names. Of a kernel's arguments, every eight bytes that are an address in device
    /// memory are taken for one.
    fn named(&self, work: &Recorded) -> Vec<u64> {
        let words = match work {
            Recorded::Launch { arguments, .. } => arguments.concat(),
            Recorded::Zero { to, .. } => vec![*to],
            Recorded::Copy { to, from, .. } => vec![*to, *from],
        };
        let containing = |word: u64| {
            let (start, allocation) = self.allocated.range(..=word).next_back()?;
            (word - start < allocation.bytes as u64).then_some(allocation.number)
        };
        words.into_iter().filter_map(containing).collect()
    }

    /// Adds to a stream, or to the capture under way.
    fn queue(&mut self, stream: Stream, work: Recorded) {
        let named = self.capture.is_some().then(|| self.named(&work));
        match (&mut self.capture, stream) {
            (Some(capture), Stream::Compute) => {
                capture.named.extend(named.unwrap_or_default());
                return capture.recorded.push(work);
            }
            (_, Stream::Compute) => self.queued += 1,
            (_, Stream::Copy) => {}
        }
        self.queues[stream as usize].push_back(work);
    }

    /// Refuses what CUDA refuses during a capture: everything but launches on the stream that is captured, and on the thread that
    /// captures, too.
    fn not_while_capturing(&self, what: &'static str, stream: Option<Stream>) -> Result<()> {
        match &self.capture {
            Some(capture) if stream == Some(Stream::Compute) || capture.thread == thread::current().id() => {
                Err(CudaError::Call { what, code: "not allowed while a graph is captured".into() })
            }
            _ => Ok(()),
        }
    }
}

#[derive(Clone, Debug)]
enum Recorded {
    Launch { kernel: String, dims: Dims, arguments: Vec<Vec<u64>>, sizes: Vec<usize> },
    Zero { to: u64, bytes: usize },
    Copy { to: u64, from: u64, bytes: usize },
}

impl Emulator {
    /// Device `ordinal` of [`DEVICES`], from a library that [`Build`] made.
    pub fn load(path: &Path, schedule: u32, ordinal: usize) -> Result<Self> {
        if ordinal >= DEVICES {
            return Err(CudaError::NoDevice { ordinal, count: DEVICES });
        }
        let failed = |error: libloading::Error| CudaError::Emulator {
            path: path.display().to_string(),
            reason: error.to_string(),
        };
        // SAFETY: the library's constructors only register kernels.
        let library = unsafe { Library::new(path) }.map_err(failed)?;
        // SAFETY: the type is not relied on here.
        unsafe { library.get::<LaunchFunction>(b"kvferry_emu_launch") }.map_err(failed)?;
        let info = DeviceInfo {
            ordinal,
            name: "emulated GPU".into(),
            capability: (9, 0),
            multiprocessors: 1,
            // The least of the architectures that we compile for (sm_120).
            shared_memory: 99 << 10,
            driver: "emulator".into(),
        };
        Ok(Self {
            info,
            shared: Arc::new(Shared {
                library,
                schedule,
                fault: Fault::from_environment(),
                state: Mutex::default(),
                working: Default::default(),
            }),
        })
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self, stream: Stream, work: Recorded) {
        self.state().queue(stream, work);
    }

    /// Does what is in the stream, or of the compute stream's work what was queued first, up to `until` of it.
    fn work(&self, stream: Stream, until: u64) -> Result<()> {
        let _working = self.working[stream as usize].lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let mut state = self.state();
            if stream == Stream::Compute && state.done >= until {
                return Ok(());
            }
            let Some(work) = state.queues[stream as usize].pop_front() else { return Ok(()) };
            state.done += u64::from(stream == Stream::Compute);
            drop(state);
            // SAFETY: who queued it promised that addresses are valid until the stream was waited for.
            if let Err(error) = unsafe { self.perform(&work) } {
                // As on a GPU: nothing that follows is done.
                let mut state = self.state();
                state.done = state.queued;
                state.queues[stream as usize].clear();
                return Err(error);
            }
        }
    }

    /// # Safety
    /// Its addresses are valid.
    unsafe fn perform(&self, work: &Recorded) -> Result<()> {
        match work {
            Recorded::Launch { kernel, dims, arguments, sizes } => {
                let pointers: Vec<*const u8> = arguments.iter().map(|words| words.as_ptr().cast()).collect();
                // SAFETY: passed on from the caller.
                unsafe { self.start(kernel, *dims, &pointers, sizes) }
            }
            Recorded::Zero { to, bytes } => {
                // SAFETY: passed on from the caller; device memory is ordinary memory here.
                unsafe { std::ptr::write_bytes(*to as *mut u8, 0, *bytes) };
                Ok(())
            }
            Recorded::Copy { to, from, bytes } => {
                // SAFETY: as above.
                unsafe { std::ptr::copy_nonoverlapping(*from as *const u8, *to as *mut u8, *bytes) };
                Ok(())
            }
        }
    }

    /// # Safety
    /// As [`Backend::launch`].
    unsafe fn start(&self, kernel: &str, dims: Dims, arguments: &[*const u8], sizes: &[usize]) -> Result<()> {
        let name = CString::new(kernel).map_err(|_| CudaError::Kernel(format!("{kernel:?} is no name")))?;
        let (grid, block) = ([dims.grid.0, dims.grid.1, dims.grid.2], [dims.threads, 1, 1]);
        let mut error = [0u8; 400];
        // SAFETY: the symbol was found in `load`; its type is that of kernels/cu/emu/machine.cpp.
        let function = unsafe { self.library.get::<LaunchFunction>(b"kvferry_emu_launch") };
        let function = function.expect("the symbol was there when the library was loaded. This is a bug.");
        let mut pointers: Vec<*mut c_void> =
            arguments.iter().map(|argument| argument.cast_mut().cast()).collect();
        // SAFETY: arrays of the lengths said; the arguments are the caller's promise, their sizes are checked there.
        let code = unsafe {
            function(
                name.as_ptr(),
                grid.as_ptr(),
                block.as_ptr(),
                dims.shared,
                pointers.as_mut_ptr(),
                sizes.as_ptr(),
                sizes.len(),
                self.schedule,
                error.as_mut_ptr().cast(),
                error.len(),
            )
        };
        match code {
            0 => Ok(()),
            _ => {
                let text = error.split(|byte| *byte == 0).next().unwrap_or_default();
                Err(CudaError::Kernel(String::from_utf8_lossy(text).into_owned()))
            }
        }
    }
}

impl Backend for Emulator {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn is_emulated(&self) -> bool {
        true
    }

    fn bind_thread(&self) -> Result<()> {
        Ok(())
    }

    unsafe fn check_export(&self, _address: u64) -> Result<()> {
        Err(CudaError::Call {
            what: "cuIpcGetMemHandle",
            code: "an emulated device's memory is the process's own".into(),
        })
    }

    fn memory(&self) -> Result<(usize, usize)> {
        let used: usize = self.shared.state().allocated.values().map(|allocation| allocation.bytes).sum();
        Ok((MEMORY.saturating_sub(used), MEMORY))
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        let (free, total) = self.memory()?;
        let mut state = self.shared.state();
        state.not_while_capturing("cuMemAlloc", None)?;
        let layout = Layout::from_size_align(bytes, ALIGNMENT).ok().filter(|_| bytes <= free && bytes > 0);
        let layout = layout.ok_or(CudaError::OutOfMemory { bytes, free, total })?;
        // SAFETY: the size is not zero.
        let pointer = unsafe { std::alloc::alloc(layout) };
        if pointer.is_null() {
            return Err(CudaError::OutOfMemory { bytes, free, total });
        }
        // Device memory comes with whatever was in it: NaNs show what is read before it is written.
        // SAFETY: just allocated.
        unsafe { std::ptr::write_bytes(pointer, 0xff, bytes) };
        state.allocations += 1;
        let number = state.allocations;
        state.allocated.insert(pointer as u64, Allocation { bytes, number });
        Ok(pointer as u64)
    }

    unsafe fn free(&self, address: u64) {
        let allocation = self.shared.state().allocated.remove(&address);
        let Allocation { bytes, .. } = allocation.expect("freed memory was allocated here. This is a bug.");
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("it was allocated so. This is a bug.");
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(address as *mut u8, layout) };
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<*mut u8> {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).ok().filter(|_| bytes > 0);
        let layout = layout.ok_or(CudaError::OutOfMemory { bytes, free: 0, total: 0 })?;
        // SAFETY: the size is not zero.
        Ok(unsafe { std::alloc::alloc(layout) })
    }

    unsafe fn free_pinned(&self, pointer: *mut u8, bytes: usize) {
        let layout = Layout::from_size_align(bytes, ALIGNMENT).expect("it was allocated so. This is a bug.");
        // SAFETY: allocated with this layout.
        unsafe { std::alloc::dealloc(pointer, layout) };
    }

    unsafe fn upload(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.shared.state().not_while_capturing("cuMemcpyHtoDAsync", Some(stream))?;
        self.shared.queue(stream, Recorded::Copy { to, from: from as u64, bytes });
        Ok(())
    }

    unsafe fn download(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.shared.state().not_while_capturing("cuMemcpyDtoHAsync", Some(stream))?;
        self.shared.queue(stream, Recorded::Copy { to: to as u64, from, bytes });
        Ok(())
    }

    unsafe fn zero(&self, stream: Stream, to: u64, bytes: usize) -> Result<()> {
        self.shared.queue(stream, Recorded::Zero { to, bytes });
        Ok(())
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        if let Some(Fault::Launches(count)) = self.shared.fault {
            let mut state = self.shared.state();
            state.launches += 1;
            if state.launches > count {
                let code = "CUDA_ERROR_ILLEGAL_ADDRESS".into();
                return Err(CudaError::Call { what: "cuLaunchKernel", code });
            }
        }
        let words = |argument: &&[u8]| {
            let mut words = vec![0u64; argument.len().div_ceil(8)];
            bytemuck::cast_slice_mut::<u64, u8>(&mut words)[..argument.len()].copy_from_slice(argument);
            words
        };
        let sizes = launch.arguments.iter().map(|argument| argument.len()).collect();
        let (kernel, dims) = (launch.kernel.to_owned(), launch.dims);
        let arguments = launch.arguments.iter().map(words).collect();
        self.shared.queue(Stream::Compute, Recorded::Launch { kernel, dims, arguments, sizes });
        Ok(())
    }

    unsafe fn product(&self, _product: &Product) -> Result<bool> {
        Ok(false)
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.shared.state().not_while_capturing("cuStreamSynchronize", Some(stream))?;
        self.shared.work(stream, u64::MAX)
    }

    fn mark(&self) -> Result<Box<dyn Mark>> {
        let state = self.shared.state();
        state.not_while_capturing("cuEventRecord", Some(Stream::Compute))?;
        Ok(Box::new(Until { queued: state.queued, shared: self.shared.clone() }))
    }

    fn begin_capture(&self) -> Result<()> {
        let mut state = self.shared.state();
        state.not_while_capturing("cuStreamBeginCapture", Some(Stream::Compute))?;
        if self.shared.fault == Some(Fault::Capture) {
            let code = "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED".into();
            return Err(CudaError::Call { what: "cuStreamBeginCapture", code });
        }
        state.capture =
            Some(Capture { thread: thread::current().id(), recorded: Vec::new(), named: BTreeSet::new() });
        Ok(())
    }

    fn end_capture(&self) -> Result<Box<dyn CapturedGraph>> {
        let capture = self.shared.state().capture.take();
        let capture =
            capture.ok_or(CudaError::Call { what: "cuStreamEndCapture", code: "no capture".into() })?;
        let Capture { recorded, named, .. } = capture;
        Ok(Box::new(Recording { recorded, named, shared: self.shared.clone() }))
    }
}

/// What was in the compute stream.
#[derive(Debug)]
struct Until {
    queued: u64,
    shared: Arc<Shared>,
}

impl Mark for Until {
    fn wait(&self) -> Result<()> {
        self.shared.work(Stream::Compute, self.queued)
    }
}

#[derive(Debug)]
struct Recording {
    recorded: Vec<Recorded>,
    /// Allocations that must still be there.
    named: BTreeSet<u64>,
    shared: Arc<Shared>,
}

impl CapturedGraph for Recording {
    fn replay(&self) -> Result<()> {
        let there: BTreeSet<u64> =
            self.shared.state().allocated.values().map(|allocation| allocation.number).collect();
        if !self.named.is_subset(&there) {
            return Err(CudaError::Kernel("a graph is replayed whose memory was freed".into()));
        }
        self.recorded.iter().for_each(|work| self.shared.queue(Stream::Compute, work.clone()));
        Ok(())
    }
}
