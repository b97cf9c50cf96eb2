//! NIXL over UCX: the library's bindings (`sys`), loading it, safe handles (`agent`, `arguments`, `pieces`). The transport itself
//! is [`crate::one_sided`].

mod agent;
mod arguments;
mod library;
mod pieces;
mod status;
mod sys;

use crate::error::TransferError;
use crate::one_sided::OneSided;
use crate::registry::{Backend, TransportConfig, unusable_ucx};
use crate::transport::{Region, Transport};
use crate::ucx::{UcxLanes, environment};
use agent::NixlAgent;
use library::Library;
pub use library::{HOW_TO_GET, search_path};

/// NIXL over UCX with these lanes, as the registry lists it.
pub const fn backend(lanes: UcxLanes, name: &'static str, what: &'static str) -> Backend {
    Backend {
        name,
        what,
        family: "nixl",
        lanes: Some(lanes),
        device_memory: true,
        unusable: |lanes, config| unusable_ucx(lanes, &search_path(config.nixl_dir.as_deref())),
        open: |lanes, config, pool| {
            open(lanes.expect("NIXL backends have lanes. This is a bug."), config, pool)
        },
    }
}

/// Loads NIXL, makes the agent and registers the pool. Call it early: it sets UCX's environment variables.
///
/// Errors: the library is missing or not usable, UCX has none of the lanes here.
fn open(
    lanes: UcxLanes,
    config: &TransportConfig,
    pool: Region,
) -> Result<Box<dyn Transport>, TransferError> {
    // SAFETY: documented on `registry::open`: the process opens its transport at start, before threads that call into
    // the C library's environment exist.
    let settings = unsafe { environment::apply(lanes, pool.memory(), config.same_host) }?;
    let (library, path) = Library::load(lanes.name(), config.nixl_dir.as_deref())?;
    // The incarnation and the random part make the name unique among all agents that ever meet.
    let name = format!("kvferry-{:016x}-{:x}", config.incarnation, rand::random::<u32>());
    let agent = NixlAgent::new(library, lanes.name(), &name, pool.clone())?;
    tracing::info!(library = path, agent = name, pool_bytes = pool.len(), "NIXL agent ready");
    Ok(Box::new(OneSided::new(agent, lanes.name(), settings, pool)?))
}
