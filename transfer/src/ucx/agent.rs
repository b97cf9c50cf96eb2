//! A UCX worker with one registered pool.

use std::cell::RefCell;
use std::ffi::c_void;
use std::mem::zeroed;
use std::ptr::{null, null_mut};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::endpoint::Endpoint;
use super::library::Library;
use super::log;
use super::request::{NOTIFICATION, Request, parameters};
use super::sys::*;
use crate::error::TransferError;
use crate::one_sided::{Agent, PoolAt, Progress};
use crate::transport::{Direction, Memory, Region, Span};

/// Calls of UCX's progress in one poll while they find something to do. Each may move a segment; more would keep the
/// driver from its commands.
const PROGRESS: usize = 64;

/// How long Drop waits for endpoints to close.
const CLOSE: Duration = Duration::from_millis(500);

/// What came; only the callback inside `ucp_worker_progress` writes it.
type Inbox = RefCell<Vec<Vec<u8>>>;

/// A peer's worker.
pub struct Remote {
    endpoint: Arc<Endpoint>,
    base: u64,
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    #[serde(with = "serde_bytes")]
    address: Vec<u8>,
    #[serde(with = "serde_bytes")]
    key: Vec<u8>,
}

/// UCX's context, its worker and the pool's registration.
pub struct UcxAgent {
    library: Library,
    context: ucp_context_h,
    worker: ucp_worker_h,
    memory: ucp_mem_h,
    pool: Region,
    inbox: Box<Inbox>,
    /// Endpoints whose closing is under way.
    closing: Vec<(*mut c_void, Arc<Endpoint>)>,
}

// SAFETY: the worker is made for use by one thread at a time (UCS_THREAD_MODE_SERIALIZED), and `&mut self` keeps it so.
unsafe impl Send for UcxAgent {}

impl UcxAgent {
    /// Starts UCX and registers `pool`.
    pub fn new(library: Library, transport: &str, pool: Region) -> Result<Self, TransferError> {
        // From here on Drop cleans up; what is still null it skips.
        let mut agent = Self {
            library,
            context: null_mut(),
            worker: null_mut(),
            memory: null_mut(),
            pool,
            inbox: Box::default(),
            closing: Vec::new(),
        };
        agent.start().map_err(|error| {
            let said = log::last_warnings().map(|text| format!("; UCX says: {text}")).unwrap_or_default();
            TransferError::Unavailable { name: transport.to_owned(), why: format!("{error}{said}") }
        })?;
        Ok(agent)
    }

    fn start(&mut self) -> Result<(), TransferError> {
        let (library, api) = (self.library, self.library.api());
        // SAFETY: (here and below) plain C data, of which UCX reads what the mask names.
        let mut params: ucp_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(UCP_PARAM_FIELD_FEATURES);
        params.features = u64::from(UCP_FEATURE_RMA | UCP_FEATURE_AM);
        // SAFETY: the parameters are read during the call; the context is an out parameter; no configuration means the
        // environment's.
        let status =
            unsafe { api.ucp_init_version(UCP_API_MAJOR, UCP_API_MINOR, &params, null(), &mut self.context) };
        library.check("ucp_init", status)?;
        // SAFETY: as above.
        let mut params: ucp_worker_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = UCS_THREAD_MODE_SERIALIZED;
        // SAFETY: the context is live; the worker is an out parameter.
        let status = unsafe { api.ucp_worker_create(self.context, &params, &mut self.worker) };
        library.check("ucp_worker_create", status)?;
        self.take_notifications()?;
        self.register()
    }

    fn take_notifications(&mut self) -> Result<(), TransferError> {
        // SAFETY: plain C data.
        let mut params: ucp_am_handler_param_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            UCP_AM_HANDLER_PARAM_FIELD_ID
                | UCP_AM_HANDLER_PARAM_FIELD_FLAGS
                | UCP_AM_HANDLER_PARAM_FIELD_CB
                | UCP_AM_HANDLER_PARAM_FIELD_ARG,
        );
        params.id = NOTIFICATION;
        params.flags = UCP_AM_FLAG_WHOLE_MSG;
        params.cb = Some(on_notification);
        params.arg = (&raw const *self.inbox).cast_mut().cast::<c_void>();
        // SAFETY: the worker is live; the inbox is boxed and outlives it.
        let status = unsafe { self.library.api().ucp_worker_set_am_recv_handler(self.worker, &params) };
        self.library.check("ucp_worker_set_am_recv_handler", status)
    }

    fn register(&mut self) -> Result<(), TransferError> {
        // SAFETY: plain C data.
        let mut params: ucp_mem_map_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        );
        params.address = self.pool.base().cast::<c_void>();
        params.length = self.pool.len();
        params.memory_type = match self.pool.memory() {
            Memory::Host => UCS_MEMORY_TYPE_HOST,
            Memory::Cuda(_) => UCS_MEMORY_TYPE_CUDA,
        };
        // SAFETY: the context is live; `self.pool` keeps the bytes until after Drop has unmapped them.
        let status = unsafe { self.library.api().ucp_mem_map(self.context, &params, &mut self.memory) };
        self.library.check("ucp_mem_map", status)
    }

    /// Progress as long as there is some, but not for ever.
    fn drive(&mut self) {
        for _ in 0..PROGRESS {
            // SAFETY: the worker is live and this thread has it alone; callbacks only touch the inbox and endpoints.
            if unsafe { self.library.api().ucp_worker_progress(self.worker) } == 0 {
                break;
            }
        }
        let library = self.library;
        self.closing.retain(|(request, _)| {
            // SAFETY: a request that UCX gave us and that was not freed yet.
            let over = unsafe { library.api().ucp_request_check_status(*request) } != UCS_INPROGRESS;
            if over {
                // SAFETY: over, and forgotten with this.
                unsafe { library.api().ucp_request_free(*request) };
            }
            !over
        });
    }

    fn close(&mut self, endpoint: &Arc<Endpoint>) {
        let request = endpoint.close();
        // Null: over at once. A small negative number: an error, and nothing to wait for.
        if request as isize > 0 || (request as isize) < -100 {
            self.closing.push((request, endpoint.clone()));
        }
    }

    fn address(&self) -> Result<Vec<u8>, TransferError> {
        let (mut address, mut len) = (null_mut(), 0);
        let api = self.library.api();
        // SAFETY: the worker is live, the others are out parameters.
        let status = unsafe { api.ucp_worker_get_address(self.worker, &mut address, &mut len) };
        self.library.check("ucp_worker_get_address", status)?;
        // SAFETY: on success `len` bytes at `address`, until it is released.
        unsafe {
            let bytes = std::slice::from_raw_parts(address.cast::<u8>(), len).to_vec();
            api.ucp_worker_release_address(self.worker, address);
            Ok(bytes)
        }
    }

    fn packed_key(&self) -> Result<Vec<u8>, TransferError> {
        let (mut key, mut len) = (null_mut(), 0);
        let api = self.library.api();
        // SAFETY: context and registration are live, the others are out parameters.
        let status = unsafe { api.ucp_rkey_pack(self.context, self.memory, &mut key, &mut len) };
        self.library.check("ucp_rkey_pack", status)?;
        // SAFETY: on success `len` bytes at `key`, until it is released.
        unsafe {
            let bytes = std::slice::from_raw_parts(key.cast::<u8>(), len).to_vec();
            api.ucp_rkey_buffer_release(key);
            Ok(bytes)
        }
    }
}

impl Agent for UcxAgent {
    type Remote = Remote;
    type Request = Request;

    fn metadata(&self) -> Result<Vec<u8>, TransferError> {
        let metadata = Metadata { address: self.address()?, key: self.packed_key()? };
        Ok(rmp_serde::to_vec(&metadata).expect("plain struct serializes"))
    }

    fn load_remote(&mut self, metadata: &[u8], pool: PoolAt) -> Result<Remote, TransferError> {
        let Metadata { address, key } =
            rmp_serde::from_slice(metadata).map_err(|e| TransferError::BadMetadata(e.to_string()))?;
        let endpoint = Endpoint::new(self.library, self.worker, &address)?;
        if let Err(error) = endpoint.unpack(&key) {
            self.close(&endpoint);
            return Err(error);
        }
        Ok(Remote { endpoint, base: pool.base })
    }

    fn cancel(&mut self, remote: &Remote) {
        self.close(&remote.endpoint);
    }

    fn forget_remote(&mut self, remote: Remote) {
        remote.endpoint.destroy_key();
        self.close(&remote.endpoint);
    }

    fn post(
        &mut self,
        direction: Direction,
        remote: &Remote,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<(Request, Progress), TransferError> {
        let (api, endpoint) = (self.library.api(), &remote.endpoint);
        let raw = endpoint.usable().ok_or_else(|| TransferError::Wire(endpoint.why()))?;
        let mut params = parameters();
        params.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_MULTI_SEND;
        params.memh = self.memory;
        let base = self.pool.base();
        let mut request = Request::new(self.library, endpoint.clone(), direction, notification);
        for span in spans {
            let (address, len) = (remote.base + span.remote, span.len as usize);
            // SAFETY: the caller checked the span against both pools; ours lives longer than the agent, and the request is
            // driven to its end before its bytes are touched otherwise. The endpoint is open, the key is its own.
            let started = unsafe {
                let local = base.add(span.local as usize).cast::<c_void>();
                match direction {
                    Direction::Write => api.ucp_put_nbx(raw, local, len, address, endpoint.key(), &params),
                    Direction::Read => api.ucp_get_nbx(raw, local, len, address, endpoint.key(), &params),
                }
            };
            if !request.started(started) {
                break;
            }
        }
        let progress = request.advance();
        Ok((request, progress))
    }

    fn progress(&mut self, request: &mut Request) -> Progress {
        request.advance()
    }

    /// Nothing is left of a request that is over.
    fn release(&mut self, _: Request) {}

    fn notifications(&mut self, out: &mut Vec<Vec<u8>>) -> Result<(), TransferError> {
        self.drive();
        out.append(&mut self.inbox.borrow_mut());
        Ok(())
    }
}

impl Drop for UcxAgent {
    /// The caller has no request running (see `OneSided::drop`).
    fn drop(&mut self) {
        let deadline = Instant::now() + CLOSE;
        while !self.closing.is_empty() && Instant::now() < deadline {
            self.drive();
        }
        let api = self.library.api();
        // SAFETY: each handle came from this library, is destroyed once, and the null ones were never made. The pool
        // outlives this call because `self.pool` is dropped after it, and so do inbox and endpoints.
        unsafe {
            if !self.memory.is_null() {
                api.ucp_mem_unmap(self.context, self.memory);
            }
            if !self.worker.is_null() {
                api.ucp_worker_destroy(self.worker);
            }
            if !self.context.is_null() {
                api.ucp_cleanup(self.context);
            }
        }
    }
}

/// A notification came, whole and eagerly, as its sender asked.
unsafe extern "C" fn on_notification(
    arg: *mut c_void,
    _header: *const c_void,
    _header_len: usize,
    data: *mut c_void,
    len: usize,
    param: *const ucp_am_recv_param_t,
) -> ucs_status_t {
    // SAFETY: UCX passes valid parameters for the time of the call.
    if unsafe { (*param).recv_attr } & u64::from(UCP_AM_RECV_ATTR_FLAG_RNDV) != 0 {
        tracing::warn!(len, "a UCX peer announced a notification in place of sending it: dropped");
        return UCS_OK;
    }
    let payload = if len == 0 {
        Vec::new()
    } else {
        // SAFETY: an eager message: `len` bytes at `data` for the time of the call.
        unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec() }
    };
    // SAFETY: the inbox given at registration outlives the worker; only this thread uses it, not during progress.
    unsafe { &*arg.cast::<Inbox>() }.borrow_mut().push(payload);
    UCS_OK
}
