//! From a `KV_TRANSPORT` name to a transport.

use std::path::PathBuf;

use crate::error::TransferError;
use crate::inproc::{Hub, InProcTransport};
use crate::nixl::{HOW_TO_GET, NixlConfig, NixlTransport, UcxLanes, search_path};
use crate::socket::{SocketConfig, SocketTransport};
use crate::transport::{Region, Transport};

/// Names that a user may ask for. `inproc` opens too, for tests.
pub const NAMES: [&str; 5] = ["auto", "tcp", "shm", "cuda_ipc", "socket"];

const NO_CUDA: &str = "this build has no CUDA support";

/// What [`open`] needs to know.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// The name asked for: one of [`NAMES`].
    pub name: String,
    /// Every peer is on this host: lets `auto` choose `shm` and keeps UCX on the loopback device.
    pub same_host: bool,
    /// Address that `socket` listens on.
    pub bind_host: String,
    /// Host that peers connect to for `socket`, where it is not the one bound.
    pub advertise_host: Option<String>,
    /// A directory to look for NIXL in before any other (`KVFERRY_NIXL_DIR`).
    pub nixl_dir: Option<PathBuf>,
    /// This process's incarnation.
    pub incarnation: u64,
}

impl Default for TransportConfig {
    /// `auto` among processes of this host.
    fn default() -> Self {
        Self {
            name: "auto".into(),
            same_host: true,
            bind_host: "127.0.0.1".into(),
            advertise_host: None,
            nixl_dir: None,
            incarnation: rand::random(),
        }
    }
}

/// Opens the transport that `config` names, with `pool` registered.
///
/// Call it early: `tcp`, `shm` and `auto` set UCX's environment variables, which must not happen while another
/// thread reads the environment through the C library.
///
/// Errors: an unknown name (with the valid ones, and why those unusable here are so), a transport that this
/// machine or build cannot use. Only `auto` falls back, to `socket`, and warns.
pub fn open(config: &TransportConfig, pool: Region) -> Result<Box<dyn Transport>, TransferError> {
    let transport: Box<dyn Transport> = match config.name.as_str() {
        "tcp" => open_nixl(config, UcxLanes::Tcp, pool)?,
        "shm" => open_nixl(config, UcxLanes::Shm, pool)?,
        "socket" => open_socket(config, pool)?,
        "inproc" => Box::new(InProcTransport::new(Hub::of_process(), pool)),
        "auto" => open_auto(config, pool)?,
        "cuda_ipc" => {
            return Err(TransferError::Unavailable { name: "cuda_ipc".into(), why: NO_CUDA.into() });
        }
        _ => return Err(TransferError::UnknownTransport { name: config.name.clone(), valid: valid(config) }),
    };
    tracing::info!(asked = config.name, transport = transport.name(), "KV transport open");
    Ok(transport)
}

fn open_nixl(
    config: &TransportConfig,
    lanes: UcxLanes,
    pool: Region,
) -> Result<Box<dyn Transport>, TransferError> {
    let nixl = NixlConfig {
        lanes,
        same_host: config.same_host,
        directory: config.nixl_dir.clone(),
        incarnation: config.incarnation,
    };
    Ok(Box::new(NixlTransport::new(&nixl, pool)?))
}

fn open_socket(config: &TransportConfig, pool: Region) -> Result<Box<dyn Transport>, TransferError> {
    let socket =
        SocketConfig { bind_host: config.bind_host.clone(), advertise_host: config.advertise_host.clone() };
    Ok(Box::new(SocketTransport::new(&socket, pool)?))
}

/// NIXL where it loads, else `socket`.
fn open_auto(config: &TransportConfig, pool: Region) -> Result<Box<dyn Transport>, TransferError> {
    let lanes = if config.same_host { UcxLanes::Shm } else { UcxLanes::Tcp };
    open_nixl(config, lanes, pool.clone()).or_else(|error| {
        tracing::warn!(reason = %error, label = error.label(), "NIXL is not usable: KV moves over plain sockets");
        open_socket(config, pool)
    })
}

/// The names, with the reason beside each that cannot be used here.
fn valid(config: &TransportConfig) -> String {
    NAMES
        .map(|name| unusable(name, config).map_or(name.to_owned(), |why| format!("{name} ({why})")))
        .join(", ")
}

/// Why a known transport cannot be used here, without loading anything.
fn unusable(name: &str, config: &TransportConfig) -> Option<String> {
    match name {
        "tcp" | "shm" if !search_path(config.nixl_dir.as_deref()).iter().any(|file| file.is_file()) => {
            Some(format!("not usable here: NIXL was not found, {HOW_TO_GET}"))
        }
        "cuda_ipc" => Some(format!("not usable here: {NO_CUDA}")),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ptr::NonNull;
    use std::sync::Arc;

    fn pool() -> Region {
        let bytes = Arc::new(vec![0u64; 8]);
        // SAFETY: the vector is kept alive by the region, and nothing in these tests transfers.
        unsafe { Region::new(NonNull::new(bytes.as_ptr() as *mut u8).unwrap(), 64, bytes) }
    }

    fn error(name: &str) -> TransferError {
        open(&TransportConfig { name: name.into(), ..Default::default() }, pool()).err().unwrap()
    }

    #[test]
    fn an_unknown_name_lists_the_valid_ones_and_why_some_cannot_be_used() {
        let message = error("rdma").to_string();
        for part in
            ["KV_TRANSPORT=rdma", "auto", "tcp", "shm", "socket", "cuda_ipc (not usable here: this build"]
        {
            assert!(message.contains(part), "{part:?} is missing in {message:?}");
        }
    }

    #[test]
    fn cuda_ipc_is_known_and_cannot_be_used() {
        assert_eq!(error("cuda_ipc").label(), "unavailable");
    }

    #[test]
    fn sockets_and_inproc_open_without_any_library() {
        for name in ["socket", "inproc"] {
            let config = TransportConfig { name: name.into(), ..Default::default() };
            assert_eq!(open(&config, pool()).unwrap().name(), name);
        }
    }

    #[test]
    fn only_auto_falls_back_when_nixl_does_not_load() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("libnixl_capi.so"), "not a library").unwrap();
        let config = |name: &str| TransportConfig {
            name: name.into(),
            nixl_dir: Some(dir.path().into()),
            ..Default::default()
        };
        assert_eq!(open(&config("auto"), pool()).unwrap().name(), "socket");
        for name in ["tcp", "shm"] {
            assert_eq!(open(&config(name), pool()).err().unwrap().label(), "unavailable");
        }
    }

    #[test]
    fn listening_everywhere_needs_a_host_to_advertise() {
        let mut config =
            TransportConfig { name: "socket".into(), bind_host: "0.0.0.0".into(), ..Default::default() };
        let error = open(&config, pool()).err().unwrap().to_string();
        assert!(error.contains("advertise"), "{error}");
        config.advertise_host = Some("worker-0".into());
        assert!(open(&config, pool()).is_ok());
    }
}
