//! Safe handles over NIXL's C API: the agent with its registered pool, requests, notifications.
//!
//! Everything here is called from one thread at a time (`&mut NixlAgent` for whatever makes progress); the agent
//! has no progress thread, so bytes move only inside these calls.

use std::ffi::{CStr, CString, c_void};
use std::ptr::{null, null_mut};

use super::arguments::{DescriptorList, Options, kind_of};
use super::library::Library;
use super::pieces::{Pieces, Places};
use super::status::{check, describe};
use super::sys::*;
use crate::error::TransferError;
use crate::one_sided::{Agent, PoolAt, Progress};
use crate::transport::{Direction, Region, Span};
use crate::ucx::log;

const BACKEND: &CStr = c"UCX";

fn progress_of(status: nixl_capi_status_t) -> Progress {
    match status {
        nixl_capi_status_t::NIXL_CAPI_SUCCESS => Progress::Done,
        nixl_capi_status_t::NIXL_CAPI_IN_PROG => Progress::Running,
        failed => Progress::Failed(format!("NIXL transfer: {}", describe(failed))),
    }
}

/// A remote agent whose metadata is loaded.
pub struct Remote {
    name: CString,
    pool: PoolAt,
    /// Where ours are prepared, too.
    pieces: Option<Pieces>,
}

/// A posted request. Must be given to [`Agent::release`] once it is no longer running; dropping it leaks the
/// library's handle, which is harmless and what we want while the library may still use it.
pub struct Request(nixl_capi_xfer_req_t);

// SAFETY: a handle that only the agent's methods use, on whichever thread has the agent.
unsafe impl Send for Request {}

/// An agent with a UCX backend and one registered pool.
pub struct NixlAgent {
    library: Library,
    raw: nixl_capi_agent_t,
    backend: nixl_capi_backend_t,
    registered: nixl_capi_reg_dlist_t,
    notifications: nixl_capi_notif_map_t,
    pool: Region,
    pieces: Option<Pieces>,
}

// SAFETY: NIXL's handles are not tied to the thread that made them (the agent is made with RW locking and UCX's
// workers allow one thread at a time), and `&mut self` keeps it to one thread at a time.
unsafe impl Send for NixlAgent {}

impl NixlAgent {
    /// Makes the agent, its UCX backend and registers `pool`. About half a second.
    pub fn new(library: Library, transport: &str, name: &str, pool: Region) -> Result<Self, TransferError> {
        let name =
            CString::new(name).map_err(|_| TransferError::BadMetadata("agent name holds a NUL".into()))?;
        let config = nixl_capi_agent_config_t {
            // A progress thread is slower on few cores and starves its peers on a shared one: we poll.
            enable_prog_thread: false,
            enable_listen_thread: false,
            listen_port: 0,
            thread_sync: nixl_capi_thread_sync_t::NIXL_CAPI_THREAD_SYNC_RW,
            num_workers: 1,
            pthr_delay_us: 0,
            lthr_delay_us: 100_000,
            capture_telemetry: false,
        };
        let mut raw = null_mut();
        // SAFETY: name and config are valid for the call, which copies them; `raw` is an out parameter.
        let status =
            unsafe { library.api().nixl_capi_create_configured_agent(name.as_ptr(), &config, &mut raw) };
        check("create_configured_agent", status)?;
        // From here on Drop cleans up, whatever is still null it skips.
        let mut agent = Self {
            library,
            raw,
            backend: null_mut(),
            registered: null_mut(),
            notifications: null_mut(),
            pool: pool.clone(),
            pieces: None,
        };
        agent.create_backend(transport)?;
        agent.register_pool()?;
        agent.pieces = agent.prepare(c"", agent.pool_at())?;
        // SAFETY: `notifications` is an out parameter.
        let status = unsafe { agent.api().nixl_capi_create_notif_map(&mut agent.notifications) };
        check("create_notif_map", status)?;
        Ok(agent)
    }

    fn api(&self) -> &'static NixlCapi {
        self.library.api()
    }

    fn create_backend(&mut self, transport: &str) -> Result<(), TransferError> {
        let (mut mems, mut params) = (null_mut(), null_mut());
        // SAFETY: the agent is live, the name is NUL-terminated, the others are out parameters.
        let status = unsafe {
            self.api().nixl_capi_get_plugin_params(self.raw, BACKEND.as_ptr(), &mut mems, &mut params)
        };
        check("get_plugin_params", status)?;
        // SAFETY: `params` came from the call above and is copied; the backend belongs to the agent.
        let status = unsafe {
            self.api().nixl_capi_create_backend(self.raw, BACKEND.as_ptr(), params, &mut self.backend)
        };
        // SAFETY: both came from get_plugin_params and are not used again.
        unsafe {
            self.api().nixl_capi_destroy_params(params);
            self.api().nixl_capi_destroy_mem_list(mems);
        }
        check("create_backend", status).map_err(|error| {
            let tls = std::env::var("UCX_TLS").unwrap_or_else(|_| "unset".into());
            let said = log::last_warnings().map(|text| format!("; UCX says: {text}")).unwrap_or_default();
            let why = format!(
                "UCX does not start with UCX_TLS={tls}: it needs a transport that carries active messages, so add tcp \
                 ({error}{said})"
            );
            TransferError::Unavailable { name: transport.to_owned(), why }
        })
    }

    fn register_pool(&mut self) -> Result<(), TransferError> {
        let api = self.api();
        let (kind, device) = kind_of(self.pool.memory());
        // SAFETY: `registered` is an out parameter.
        check("create_reg_dlist", unsafe { api.nixl_capi_create_reg_dlist(kind, &mut self.registered) })?;
        let (base, len) = (self.pool.base() as usize, self.pool.len());
        // SAFETY: the list is live; the address is stored, not read; no metadata is attached.
        check("reg_dlist_add_desc", unsafe {
            api.nixl_capi_reg_dlist_add_desc(self.registered, base, len, device, null(), 0)
        })?;
        // SAFETY: `self.pool` keeps the bytes alive until after Drop has deregistered them.
        check("register_mem", unsafe { api.nixl_capi_register_mem(self.raw, self.registered, null_mut()) })
    }

    fn pool_at(&self) -> PoolAt {
        PoolAt { base: self.pool.base() as u64, len: self.pool.len() as u64, memory: self.pool.memory() }
    }

    /// Prepares the pieces of a pool of `owner`'s.
    fn prepare(&self, owner: &CStr, pool: PoolAt) -> Result<Option<Pieces>, TransferError> {
        let Some(piece) = self.pool.piece() else { return Ok(None) };
        Pieces::prepare(self.api(), self.raw, owner, pool, piece)
    }

    /// A request for `spans`: by the places of prepared pieces where it can be, else of descriptors of its own.
    fn request(
        &self,
        op: nixl_capi_xfer_op_t,
        remote: &Remote,
        spans: &[Span],
        options: &Options,
    ) -> Result<nixl_capi_xfer_req_t, TransferError> {
        if let (Some(ours), Some(theirs), Some(piece)) = (&self.pieces, &remote.pieces, self.pool.piece())
            && let Some(places) = Places::of(spans, piece)
        {
            return ours.request(op, theirs, &places, options.raw);
        }
        let (api, pool, distant) = (self.api(), self.pool_at(), remote.pool);
        let local =
            DescriptorList::new(api, pool.memory, spans.iter().map(|s| (pool.base + s.local, s.len)))?;
        let distant =
            DescriptorList::new(api, distant.memory, spans.iter().map(|s| (distant.base + s.remote, s.len)))?;
        let mut raw = null_mut();
        // SAFETY: agent, lists and options are live; the request copies the descriptors; the local ones lie in
        // the registered pool.
        check("create_xfer_req", unsafe {
            api.nixl_capi_create_xfer_req(
                self.raw,
                op,
                local.raw,
                distant.raw,
                remote.name.as_ptr(),
                &mut raw,
                options.raw,
            )
        })?;
        Ok(raw)
    }

    fn notifications_of(&self, agent: usize, out: &mut Vec<Vec<u8>>) -> Result<(), TransferError> {
        let (api, map) = (self.api(), self.notifications);
        let (mut name, mut count) = (null(), 0);
        // SAFETY: the map is live and holds more than `agent` agents; `name` points into it until it is cleared.
        unsafe {
            check("notif_map_get_agent_at", api.nixl_capi_notif_map_get_agent_at(map, agent, &mut name))?;
            check(
                "notif_map_get_notifs_size",
                api.nixl_capi_notif_map_get_notifs_size(map, name, &mut count),
            )?;
        }
        for index in 0..count {
            let (mut data, mut len): (*const c_void, usize) = (null(), 0);
            // SAFETY: as above; index is below the count just read.
            check("notif_map_get_notif", unsafe {
                api.nixl_capi_notif_map_get_notif(map, name, index, &mut data, &mut len)
            })?;
            // An empty std::string still has an address, but nothing promises it here.
            let payload = if len == 0 {
                Vec::new()
            } else {
                // SAFETY: on success `data` points to `len` bytes inside the map, which is not changed meanwhile.
                unsafe { std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec() }
            };
            out.push(payload);
        }
        Ok(())
    }
}

impl Agent for NixlAgent {
    type Remote = Remote;
    type Request = Request;

    /// What a remote agent loads to reach our pool.
    fn metadata(&self) -> Result<Vec<u8>, TransferError> {
        let (mut data, mut len) = (null_mut(), 0);
        // SAFETY: both are out parameters.
        check("get_local_md", unsafe { self.api().nixl_capi_get_local_md(self.raw, &mut data, &mut len) })?;
        // SAFETY: on success the library has allocated `len` bytes at `data` with malloc and left them to us.
        unsafe {
            let bytes = std::slice::from_raw_parts(data.cast::<u8>(), len).to_vec();
            libc::free(data);
            Ok(bytes)
        }
    }

    /// Makes a remote agent known and prepares its pool's pieces. Fails when the metadata is not a NIXL agent's or that agent is
    /// already known.
    fn load_remote(&mut self, metadata: &[u8], pool: PoolAt) -> Result<Remote, TransferError> {
        let mut name = null_mut();
        // SAFETY: pointer and length describe `metadata`, which the call copies; `name` is an out parameter.
        check("load_remote_md", unsafe {
            self.api().nixl_capi_load_remote_md(self.raw, metadata.as_ptr().cast(), metadata.len(), &mut name)
        })?;
        // SAFETY: on success `name` is a NUL-terminated string from strdup, left to us.
        let owned = unsafe {
            let owned = CStr::from_ptr(name).to_owned();
            libc::free(name.cast());
            owned
        };
        match self.prepare(&owned, pool) {
            Ok(pieces) => Ok(Remote { name: owned, pool, pieces }),
            Err(error) => {
                self.forget_remote(Remote { name: owned, pool, pieces: None });
                Err(error)
            }
        }
    }

    /// Drops a remote's connection and keys. The caller has no request to it running: UCX forbids destroying a
    /// remote key in use.
    fn forget_remote(&mut self, remote: Remote) {
        drop(remote.pieces);
        // SAFETY: the name is NUL-terminated; an agent that is not known gives an error status, which is fine:
        // NIXL forgets a remote by itself when it sees it disconnect.
        unsafe { self.api().nixl_capi_invalidate_remote_md(self.raw, remote.name.as_ptr()) };
    }

    /// Posts one WRITE or READ of all spans (checked by the caller against both pools) with a notification after it.
    fn post(
        &mut self,
        direction: Direction,
        remote: &Remote,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<(Request, Progress), TransferError> {
        let options = Options::new(self.api(), self.backend, notification)?;
        let op = match direction {
            Direction::Write => nixl_capi_xfer_op_t::NIXL_CAPI_XFER_OP_WRITE,
            Direction::Read => nixl_capi_xfer_op_t::NIXL_CAPI_XFER_OP_READ,
        };
        let raw = self.request(op, remote, spans, &options)?;
        // SAFETY: the request was just made by this agent and is not running.
        let status = unsafe { self.api().nixl_capi_post_xfer_req(self.raw, raw, options.raw) };
        Ok((Request(raw), progress_of(status)))
    }

    /// Makes progress and says how the request stands.
    fn progress(&mut self, request: &mut Request) -> Progress {
        // SAFETY: a `Request` is live until `release` consumes it.
        progress_of(unsafe { self.api().nixl_capi_get_xfer_status(self.raw, request.0) })
    }

    /// Gives back a request that is no longer running.
    fn release(&mut self, request: Request) {
        // SAFETY: the request is live and consumed here. When the library refuses to release it, the wrapper is
        // not destroyed either (destroy refuses too): a leak, never a use after free.
        unsafe {
            let status = self.api().nixl_capi_release_xfer_req(self.raw, request.0);
            if status == nixl_capi_status_t::NIXL_CAPI_SUCCESS {
                self.api().nixl_capi_destroy_xfer_req(request.0);
            } else {
                tracing::warn!(status = describe(status), "NIXL did not release a settled request");
            }
        }
    }

    /// Makes progress on both sides' transfers and appends the notifications that came.
    fn notifications(&mut self, out: &mut Vec<Vec<u8>>) -> Result<(), TransferError> {
        let (api, map) = (self.api(), self.notifications);
        // SAFETY: agent and map are live; no options.
        check("get_notifs", unsafe { api.nixl_capi_get_notifs(self.raw, map, null_mut()) })?;
        let mut agents = 0;
        // SAFETY: the map is live; the size is an out parameter.
        check("notif_map_size", unsafe { api.nixl_capi_notif_map_size(map, &mut agents) })?;
        if agents == 0 {
            return Ok(());
        }
        for agent in 0..agents {
            self.notifications_of(agent, out)?;
        }
        // SAFETY: the map is live and nothing borrowed from it is left.
        check("notif_map_clear", unsafe { api.nixl_capi_notif_map_clear(map) })
    }
}

impl Drop for NixlAgent {
    /// The caller has no request running (see `OneSided::drop`).
    fn drop(&mut self) {
        drop(self.pieces.take());
        // SAFETY: each handle came from this library, is destroyed once, and the null ones were never made. The
        // pool outlives this call because `self.pool` is dropped after it.
        unsafe {
            if !self.notifications.is_null() {
                self.api().nixl_capi_destroy_notif_map(self.notifications);
            }
            if !self.registered.is_null() {
                self.api().nixl_capi_deregister_mem(self.raw, self.registered, null_mut());
                self.api().nixl_capi_destroy_reg_dlist(self.registered);
            }
            if !self.backend.is_null() {
                self.api().nixl_capi_destroy_backend(self.backend);
            }
            self.api().nixl_capi_destroy_agent(self.raw);
        }
    }
}
