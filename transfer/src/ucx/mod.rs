//! UCX: its settings and its log, which NIXL's backends share, and the transport over UCX without NIXL.
//!
//! The library is the one in NIXL's wheel: its bindings (`sys`), loading it, safe handles (`agent`, `endpoint`,
//! `request`). The transport itself is [`crate::one_sided`].

mod agent;
mod endpoint;
pub(crate) mod environment;
mod library;
pub(crate) mod log;
mod request;
mod sys;
mod tables;
mod tls;

use crate::error::TransferError;
use crate::one_sided::OneSided;
use crate::registry::{Backend, TransportConfig, unusable_ucx};
use crate::transport::{Region, Transport};
use agent::UcxAgent;
pub use environment::{Setting, UcxLanes};
use library::{Library, search_path};

/// UCX with these lanes, as the registry lists it.
pub const fn backend(lanes: UcxLanes, name: &'static str, what: &'static str) -> Backend {
    Backend {
        name,
        what,
        family: "ucx",
        lanes: Some(lanes),
        device_memory: true,
        unusable: |lanes, config| unusable_ucx(lanes, &search_path(config.nixl_dir.as_deref())),
        open: |lanes, config, pool| {
            open(lanes.expect("UCX backends have lanes. This is a bug."), config, pool)
        },
    }
}

/// Loads UCX, starts it and registers the pool. Call it early: it sets UCX's environment variables.
///
/// Errors: the library is missing or not usable, UCX has none of the lanes here.
fn open(
    lanes: UcxLanes,
    config: &TransportConfig,
    pool: Region,
) -> Result<Box<dyn Transport>, TransferError> {
    let name = match lanes {
        UcxLanes::Tcp => "ucx:tcp",
        UcxLanes::Shm => "ucx:shm",
        UcxLanes::CudaIpc => "ucx:cuda_ipc",
        UcxLanes::Rdma => "ucx:rdma",
    };
    // SAFETY: documented on `registry::open`: the process opens its transport at start, before threads that call into
    // the C library's environment exist.
    let settings = unsafe { environment::apply(lanes, pool.memory(), config.same_host) }?;
    let (library, path) = Library::load(name, config.nixl_dir.as_deref())?;
    let agent = UcxAgent::new(library, name, pool.clone())?;
    tracing::info!(library = path, pool_bytes = pool.len(), "UCX worker ready");
    Ok(Box::new(OneSided::new(agent, name, settings, pool)?))
}
