//! A connection to a peer, shared by the requests on it.

use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI8, AtomicPtr, Ordering};

use super::library::Library;
use super::request::parameters;
use super::sys::*;
use crate::error::TransferError;

/// An endpoint and the key to the peer's pool.
///
/// Its address is the argument of UCX's error callback: it must not move, and must live until it was closed.
pub struct Endpoint {
    library: Library,
    raw: AtomicPtr<ucp_ep>,
    key: AtomicPtr<ucp_rkey>,
    /// Set by UCX when the peer is lost; the status, 0 before.
    failed: AtomicI8,
    closed: AtomicBool,
}

impl Endpoint {
    /// Connects to the worker at `address`. UCX makes the connection in its own time.
    pub fn new(library: Library, worker: ucp_worker_h, address: &[u8]) -> Result<Arc<Self>, TransferError> {
        let endpoint = Arc::new(Self {
            library,
            raw: AtomicPtr::new(null_mut()),
            key: AtomicPtr::new(null_mut()),
            failed: AtomicI8::new(0),
            closed: AtomicBool::new(false),
        });
        // SAFETY: plain C data, of which UCX reads what the mask names.
        let mut params: ucp_ep_params_t = unsafe { std::mem::zeroed() };
        params.field_mask = u64::from(
            UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        params.address = address.as_ptr().cast();
        // Without it the death of a peer would hang every transfer to it.
        params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler =
            ucp_err_handler { cb: Some(on_failure), arg: Arc::as_ptr(&endpoint).cast_mut().cast::<c_void>() };
        let mut raw = null_mut();
        // SAFETY: worker and address are live; the address is copied. The callback's argument outlives the endpoint: see
        // `close`.
        library.check("ucp_ep_create", unsafe { library.api().ucp_ep_create(worker, &params, &mut raw) })?;
        endpoint.raw.store(raw, Ordering::Relaxed);
        Ok(endpoint)
    }

    /// Unpacks the key of the peer's pool. Once.
    pub fn unpack(&self, key: &[u8]) -> Result<(), TransferError> {
        let (raw, mut unpacked) = (self.raw.load(Ordering::Relaxed), null_mut());
        // SAFETY: the endpoint is open; the key's bytes are copied.
        let status = unsafe {
            self.library.api().ucp_ep_rkey_unpack(raw, key.as_ptr().cast::<c_void>(), &mut unpacked)
        };
        self.key.store(unpacked, Ordering::Relaxed);
        self.library.check("ucp_ep_rkey_unpack", status)
    }

    /// The handle, unless the endpoint was closed or UCX found the peer lost.
    pub fn usable(&self) -> Option<ucp_ep_h> {
        let usable = !self.closed.load(Ordering::Relaxed) && self.failed.load(Ordering::Relaxed) == 0;
        usable.then(|| self.raw.load(Ordering::Relaxed))
    }

    /// Why it is not usable.
    pub fn why(&self) -> String {
        match self.failed.load(Ordering::Relaxed) {
            0 => "the connection was closed".into(),
            status => self.library.describe(status),
        }
    }

    pub fn key(&self) -> ucp_rkey_h {
        self.key.load(Ordering::Relaxed)
    }

    /// Closes by force, which ends every request on it with an error. Returns UCX's request, which must be driven to its
    /// end before this value is dropped; null when it is over already.
    pub fn close(&self) -> *mut c_void {
        if self.closed.swap(true, Ordering::Relaxed) {
            return null_mut();
        }
        let mut params = parameters();
        params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = UCP_EP_CLOSE_FLAG_FORCE;
        // SAFETY: open until now, and never used again.
        unsafe { self.library.api().ucp_ep_close_nbx(self.raw.load(Ordering::Relaxed), &params) }
    }

    /// Gives the key back. No request uses it any more.
    pub fn destroy_key(&self) {
        let key = self.key.swap(null_mut(), Ordering::Relaxed);
        if !key.is_null() {
            // SAFETY: made by `new`, destroyed once.
            unsafe { self.library.api().ucp_rkey_destroy(key) };
        }
    }
}

/// UCX found the peer lost.
unsafe extern "C" fn on_failure(arg: *mut c_void, _: ucp_ep_h, status: ucs_status_t) {
    // SAFETY: `arg` is the `Endpoint` given at creation, which lives until its close is over; no more callbacks come then.
    let endpoint = unsafe { &*arg.cast::<Endpoint>() };
    endpoint.failed.store(if status == 0 { -1 } else { status }, Ordering::Relaxed);
}
