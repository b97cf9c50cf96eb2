//! One transfer over UCX: puts or gets, a flush, then the notification.

use std::ffi::c_void;
use std::ptr::null;
use std::sync::Arc;

use super::endpoint::Endpoint;
use super::library::Library;
use super::sys::*;
use crate::one_sided::Progress;
use crate::transport::Direction;

/// Where a transfer stands. In this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Puts or gets are under way. A get is over when its bytes are here, a put when ours may be reused.
    Moving,
    /// Every put is in the peer's memory after this.
    Flushing,
    Notifying,
    Over,
}

/// A posted transfer. Must be driven to its end: UCX may use the memory until then.
pub struct Request {
    library: Library,
    endpoint: Arc<Endpoint>,
    direction: Direction,
    /// Kept until it was sent.
    notification: Vec<u8>,
    /// UCX's requests of this stage.
    pending: Vec<*mut c_void>,
    stage: Stage,
    failure: Option<String>,
}

// SAFETY: UCX's requests are not tied to a thread (the worker is made for use by one thread at a time).
unsafe impl Send for Request {}

impl Request {
    pub fn new(library: Library, endpoint: Arc<Endpoint>, direction: Direction, notification: &[u8]) -> Self {
        let (notification, pending) = (notification.to_vec(), Vec::new());
        Self { library, endpoint, direction, notification, pending, stage: Stage::Moving, failure: None }
    }

    /// Takes what a call that starts something returned: nothing, an error, or a request. False after an error.
    pub fn started(&mut self, result: *mut c_void) -> bool {
        /// The least error; addresses are far from these.
        const LAST_ERROR: isize = -100;
        match result as isize {
            0 => true,
            error @ LAST_ERROR..0 => {
                self.fail(self.library.describe(error as ucs_status_t));
                false
            }
            _ => {
                self.pending.push(result);
                true
            }
        }
    }

    fn fail(&mut self, why: String) {
        self.failure.get_or_insert(why);
    }

    /// Looks at UCX's requests and goes on to the next stage when they are over. Makes no progress itself.
    pub fn advance(&mut self) -> Progress {
        loop {
            self.collect();
            if !self.pending.is_empty() {
                return Progress::Running;
            }
            if let Some(why) = &self.failure {
                return Progress::Failed(format!("UCX transfer: {why}"));
            }
            self.stage = match (self.stage, self.direction) {
                (Stage::Over, _) => return Progress::Done,
                (Stage::Moving, Direction::Write) => Stage::Flushing,
                (Stage::Moving, Direction::Read) | (Stage::Flushing, _) => Stage::Notifying,
                (Stage::Notifying, _) => Stage::Over,
            };
            self.begin_stage();
        }
    }

    /// Frees what is over.
    fn collect(&mut self) {
        let (library, mut failure) = (self.library, None);
        self.pending.retain(|&request| {
            // SAFETY: a request that UCX gave us and that was not freed yet.
            let status = unsafe { library.api().ucp_request_check_status(request) };
            if status == UCS_INPROGRESS {
                return true;
            }
            if status != UCS_OK {
                failure = Some(library.describe(status));
            }
            // SAFETY: over, and forgotten with this.
            unsafe { library.api().ucp_request_free(request) };
            false
        });
        if let Some(why) = failure {
            self.fail(why);
        }
    }

    fn begin_stage(&mut self) {
        let Some(endpoint) = self.endpoint.usable() else { return self.fail(self.endpoint.why()) };
        let api = self.library.api();
        let result = match self.stage {
            Stage::Flushing => {
                let params = parameters();
                // SAFETY: the endpoint is open; the parameters are read during the call.
                unsafe { api.ucp_ep_flush_nbx(endpoint, &params) }
            }
            Stage::Notifying => {
                let mut params = parameters();
                params.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
                // The receiver gets it whole in its callback, whatever its length.
                params.flags = UCP_AM_SEND_FLAG_EAGER;
                let (data, len) = (self.notification.as_ptr().cast::<c_void>(), self.notification.len());
                // SAFETY: the endpoint is open; the notification lives until the request is over.
                unsafe { api.ucp_am_send_nbx(endpoint, NOTIFICATION, null(), 0, data, len, &params) }
            }
            Stage::Moving | Stage::Over => return,
        };
        self.started(result);
    }
}

/// The active message that carries a notification.
pub const NOTIFICATION: u32 = 1;

/// Parameters that ask for nothing.
pub fn parameters() -> ucp_request_param_t {
    // SAFETY: plain C data; with an empty mask UCX reads none of it.
    unsafe { std::mem::zeroed() }
}
