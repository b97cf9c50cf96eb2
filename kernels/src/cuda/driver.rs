//! A device behind the NVIDIA driver API. libcuda is opened when the first device is asked for.

use std::collections::HashMap;
use std::ffi::{CString, c_int, c_void};
use std::sync::{Mutex, PoisonError};

use cudarc::driver::{DriverError, result, sys};

use super::backend::{Backend, CapturedGraph, DeviceInfo, Launch, Mark, Product, Stream};
use super::cublas::Cublas;
use super::error::CudaError;

type Result<T> = std::result::Result<T, CudaError>;

/// Our kernels for sm_80, sm_90 and sm_120, and as PTX for what came after sm_80.
static KERNELS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kernels.fatbin"));

/// Shared memory that a kernel may use without being asked for more.
const PLAIN_SHARED: usize = 48 << 10;

#[derive(Debug)]
pub struct Driver {
    info: DeviceInfo,
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    compute: sys::CUstream,
    copy: sys::CUstream,
    /// Kernels by name, with the shared memory that each was allowed so far.
    functions: Mutex<HashMap<String, (Function, usize)>>,
    cublas: Option<Mutex<Cublas>>,
}

#[derive(Clone, Copy, Debug)]
struct Function(sys::CUfunction);

// SAFETY: a handle that the driver accepts on every thread.
unsafe impl Send for Function {}
// SAFETY: the driver's handles may be used from any thread that made the context current, which `bind` does; what we
// change of our own is behind locks.
unsafe impl Send for Driver {}
// SAFETY: as above.
unsafe impl Sync for Driver {}

/// Turns a driver's refusal into ours.
fn call<T>(what: &'static str, result: std::result::Result<T, DriverError>) -> Result<T> {
    result.map_err(|error| CudaError::Call { what, code: describe(error) })
}

fn describe(error: DriverError) -> String {
    match (error.error_name(), error.error_string()) {
        (Ok(name), Ok(text)) => format!("{} ({})", name.to_string_lossy(), text.to_string_lossy()),
        _ => format!("{:?}", error.0),
    }
}

impl Driver {
    /// Opens `cuda:ordinal` with its primary context, so that UCX sees the same memory.
    pub fn open(ordinal: usize) -> Result<Self> {
        // SAFETY: looks for the library and nothing else. Without it, everything below would panic.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        call("cuInit", result::init())?;
        let count = call("cuDeviceGetCount", result::device::get_count())? as usize;
        if ordinal >= count {
            return Err(CudaError::NoDevice { ordinal, count });
        }
        let device = call("cuDeviceGet", result::device::get(ordinal as c_int))?;
        // SAFETY: the device exists; the context is released when this is dropped.
        let context = call("cuDevicePrimaryCtxRetain", unsafe { result::primary_ctx::retain(device) })?;
        // SAFETY: retained just now.
        call("cuCtxSetCurrent", unsafe { result::ctx::set_current(context) })?;
        let info = device_info(ordinal, device)?;
        // SAFETY: a fat binary that nvcc made, alive for ever.
        let module = unsafe { result::module::load_data(KERNELS.as_ptr().cast()) };
        let module = call("cuModuleLoadData of the kernels", module).map_err(|error| {
            let driver = &info.driver;
            CudaError::Kernel(format!(
                "{error}. The driver is for {driver}; ours are built with CUDA 13.0 (580 series)"
            ))
        })?;
        let stream = || {
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking);
            call("cuStreamCreate", stream)
        };
        let (compute, copy) = (stream()?, stream()?);
        let cublas = Cublas::open();
        if cublas.is_none() {
            tracing::warn!("libcublasLt was not found: products of many rows run on our own, slower kernels");
        }
        let functions = Mutex::default();
        Ok(Self { info, device, context, module, compute, copy, functions, cublas: cublas.map(Mutex::new) })
    }

    /// Makes the context current on this thread: driver calls go to it.
    fn bind(&self) -> Result<()> {
        // SAFETY: retained in `open`, released in `drop`.
        call("cuCtxSetCurrent", unsafe { result::ctx::set_current(self.context) })
    }

    fn stream(&self, stream: Stream) -> sys::CUstream {
        match stream {
            Stream::Compute => self.compute,
            Stream::Copy => self.copy,
        }
    }

    /// The kernel, allowed to use `shared` bytes of shared memory.
    fn function(&self, name: &str, shared: usize) -> Result<sys::CUfunction> {
        let mut functions = self.functions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((function, allowed)) = functions.get(name)
            && shared <= *allowed
        {
            return Ok(function.0);
        }
        let symbol = CString::new(name).map_err(|_| CudaError::Kernel(format!("{name:?} is no name")))?;
        // SAFETY: the module is loaded as long as this lives.
        let function = unsafe { result::module::get_function(self.module, symbol) };
        let function = call("cuModuleGetFunction", function).map_err(|error| match error {
            CudaError::Call { what, code } => {
                CudaError::Kernel(format!("kernel {name}: {what} failed: {code}"))
            }
            other => other,
        })?;
        if shared > PLAIN_SHARED {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a function of our module.
            let set =
                unsafe { result::function::set_function_attribute(function, attribute, shared as c_int) };
            call("cuFuncSetAttribute", set)?;
        }
        functions.insert(name.to_owned(), (Function(function), shared.max(PLAIN_SHARED)));
        Ok(function)
    }
}

fn device_info(ordinal: usize, device: sys::CUdevice) -> Result<DeviceInfo> {
    use sys::CUdevice_attribute_enum as Attribute;
    let attribute = |attribute| {
        // SAFETY: the device exists.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        call("cuDeviceGetAttribute", value).map(|value| value as usize)
    };
    let mut version: c_int = 0;
    // SAFETY: writes one integer.
    call("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&mut version) }.result())?;
    let capability = (
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? as u32,
        attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)? as u32,
    );
    if capability < (8, 0) {
        let value = (capability.0 * 10 + capability.1) as usize;
        return Err(CudaError::Unsupported {
            what: "compute capability",
            value,
            expected: "80 (Ampere) or later",
        });
    }
    Ok(DeviceInfo {
        ordinal,
        name: call("cuDeviceGetName", result::device::get_name(device))?,
        capability,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        shared_memory: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?,
        driver: format!("CUDA {}.{}", version / 1000, version % 1000 / 10),
    })
}

impl Backend for Driver {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn bind_thread(&self) -> Result<()> {
        self.bind()
    }

    unsafe fn check_export(&self, address: u64) -> Result<()> {
        self.bind()?;
        let mut handle = sys::CUipcMemHandle_st { reserved: [0; 64] };
        // SAFETY: the address is a whole allocation's, by the caller's promise; the handle is an out parameter.
        call("cuIpcGetMemHandle", unsafe { sys::cuIpcGetMemHandle(&mut handle, address) }.result())
    }

    fn memory(&self) -> Result<(usize, usize)> {
        self.bind()?;
        call("cuMemGetInfo", result::mem_get_info())
    }

    fn alloc(&self, bytes: usize) -> Result<u64> {
        self.bind()?;
        // SAFETY: its content is not read before it is written: a buffer's users see to that.
        match unsafe { result::malloc_sync(bytes) } {
            Err(DriverError(sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY)) => {
                let (free, total) = self.memory()?;
                Err(CudaError::OutOfMemory { bytes, free, total })
            }
            other => call("cuMemAlloc", other),
        }
    }

    unsafe fn free(&self, address: u64) {
        let freed = self.bind().and_then(|()| {
            // SAFETY: passed on from the caller.
            call("cuMemFree", unsafe { result::free_sync(address) })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "device memory was not freed");
        }
    }

    fn alloc_pinned(&self, bytes: usize) -> Result<*mut u8> {
        self.bind()?;
        // SAFETY: its content is written before it is read: `Gpu::pinned` fills it.
        call("cuMemHostAlloc", unsafe { result::malloc_host(bytes, 0) }).map(|pointer| pointer.cast())
    }

    unsafe fn free_pinned(&self, pointer: *mut u8, _bytes: usize) {
        let freed = self.bind().and_then(|()| {
            // SAFETY: passed on from the caller.
            call("cuMemFreeHost", unsafe { result::free_host(pointer.cast::<c_void>()) })
        });
        if let Err(error) = freed {
            tracing::error!(%error, "pinned memory was not freed");
        }
    }

    unsafe fn upload(&self, stream: Stream, to: u64, from: *const u8, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: passed on from the caller.
        let copied = unsafe {
            let from = std::slice::from_raw_parts(from, bytes);
            result::memcpy_htod_async(to, from, self.stream(stream))
        };
        call("cuMemcpyHtoDAsync", copied)
    }

    unsafe fn download(&self, stream: Stream, to: *mut u8, from: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: passed on from the caller.
        let copied = unsafe {
            let to = std::slice::from_raw_parts_mut(to, bytes);
            result::memcpy_dtoh_async(to, from, self.stream(stream))
        };
        call("cuMemcpyDtoHAsync", copied)
    }

    unsafe fn zero(&self, stream: Stream, to: u64, bytes: usize) -> Result<()> {
        self.bind()?;
        // SAFETY: passed on from the caller.
        call("cuMemsetD8Async", unsafe { result::memset_d8_async(to, 0, bytes, self.stream(stream)) })
    }

    unsafe fn launch(&self, launch: &Launch<'_>) -> Result<()> {
        self.bind()?;
        let function = self.function(launch.kernel, launch.dims.shared)?;
        // The driver copies the parameters before the call returns.
        let mut parameters: Vec<*mut c_void> =
            launch.arguments.iter().map(|argument| argument.as_ptr().cast_mut().cast()).collect();
        let (grid, block) = (launch.dims.grid, (launch.dims.threads, 1, 1));
        let shared = launch.dims.shared as u32;
        // SAFETY: passed on from the caller.
        let launched =
            unsafe { result::launch_kernel(function, grid, block, shared, self.compute, &mut parameters) };
        call("cuLaunchKernel", launched).map_err(|error| match error {
            CudaError::Call { what, code } => CudaError::Kernel(format!(
                "kernel {} {:?}: {what} failed: {code}",
                launch.kernel, launch.dims
            )),
            other => other,
        })
    }

    fn has_products(&self) -> bool {
        self.cublas.is_some()
    }

    unsafe fn product(&self, product: &Product) -> Result<bool> {
        let Some(cublas) = &self.cublas else { return Ok(false) };
        self.bind()?;
        let mut cublas = cublas.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: passed on from the caller; the context is current.
        unsafe { cublas.multiply(product, self.compute, || self.alloc(super::cublas::WORKSPACE))? };
        Ok(true)
    }

    fn synchronize(&self, stream: Stream) -> Result<()> {
        self.bind()?;
        // SAFETY: a stream of ours.
        call("cuStreamSynchronize", unsafe { result::stream::synchronize(self.stream(stream)) })
    }

    fn mark(&self) -> Result<Box<dyn Mark>> {
        self.bind()?;
        let event = result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING);
        let event = CudaEvent { event: call("cuEventCreate", event)?, context: self.context };
        // SAFETY: an event and a stream of ours.
        call("cuEventRecord", unsafe { result::event::record(event.event, self.compute) })?;
        Ok(Box::new(event))
    }

    fn begin_capture(&self) -> Result<()> {
        self.bind()?;
        // Only this thread's calls are watched: a transport's threads may go on allocating.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: a stream of ours.
        call("cuStreamBeginCapture", unsafe { result::stream::begin_capture(self.compute, mode) })
    }

    fn end_capture(&self) -> Result<Box<dyn CapturedGraph>> {
        self.bind()?;
        // SAFETY: a stream of ours that is captured.
        let graph = call("cuStreamEndCapture", unsafe { result::stream::end_capture(self.compute) })?;
        if graph.is_null() {
            return Err(CudaError::Call {
                what: "cuStreamEndCapture",
                code: "the capture was broken".into(),
            });
        }
        // SAFETY: `graph` is valid; the executable one does not need it afterwards.
        let executable = unsafe {
            let executable = result::graph::instantiate(graph, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(graph);
            call("cuGraphInstantiate", executable)?
        };
        Ok(Box::new(CudaGraph { executable, context: self.context, stream: self.compute }))
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The process may be ending with the driver gone already: nothing here can be done about a refusal.
        // SAFETY: ours, and nobody holds this any more.
        unsafe {
            let _ = result::ctx::set_current(self.context);
            drop(self.cublas.take());
            let _ = result::stream::destroy(self.compute);
            let _ = result::stream::destroy(self.copy);
            let _ = result::module::unload(self.module);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

#[derive(Debug)]
struct CudaEvent {
    event: sys::CUevent,
    context: sys::CUcontext,
}

impl Mark for CudaEvent {
    fn wait(&self) -> Result<()> {
        // SAFETY: ours, recorded when it was made.
        unsafe {
            call("cuCtxSetCurrent", result::ctx::set_current(self.context))?;
            call("cuEventSynchronize", result::event::synchronize(self.event))
        }
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: ours. A refusal changes nothing that is still used.
        let _ = unsafe { result::event::destroy(self.event) };
    }
}

#[derive(Debug)]
struct CudaGraph {
    executable: sys::CUgraphExec,
    context: sys::CUcontext,
    stream: sys::CUstream,
}

// SAFETY: handles that the driver accepts on every thread.
unsafe impl Send for CudaGraph {}

impl CapturedGraph for CudaGraph {
    fn replay(&self) -> Result<()> {
        // SAFETY: who replays promises that the buffers are alive; so is the device that they belong to.
        unsafe {
            call("cuCtxSetCurrent", result::ctx::set_current(self.context))?;
            call("cuGraphLaunch", result::graph::launch(self.executable, self.stream))
        }
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        // SAFETY: ours. A refusal changes nothing that is still used.
        let _ = unsafe { result::graph::exec_destroy(self.executable) };
    }
}
