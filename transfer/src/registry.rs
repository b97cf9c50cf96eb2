//! From a `KV_TRANSPORT` name to a transport. A new backend is one file and one line in [`BACKENDS`]; docs/transports.md
//! says what it must do.

use std::path::{Path, PathBuf};

use crate::error::TransferError;
use crate::lane::Lane;
use crate::transport::{Memory, Region, Transport};
use crate::ucx::UcxLanes;
use crate::{inproc, nixl, socket, ucx};

/// A way to move KV, before it is opened.
pub struct Backend {
    /// The name in `KV_TRANSPORT`.
    pub name: &'static str,
    /// A line for the help.
    pub what: &'static str,
    /// Backends of one family reach one another.
    pub family: &'static str,
    /// For those over UCX.
    pub lanes: Option<UcxLanes>,
    /// Whether it can move a GPU's memory.
    pub device_memory: bool,
    /// Why this machine cannot use it, without loading anything; `None` where it seems usable.
    pub unusable: fn(Option<UcxLanes>, &TransportConfig) -> Option<String>,
    pub open: Open,
}

type Open = fn(Option<UcxLanes>, &TransportConfig, Region) -> Result<Box<dyn Transport>, TransferError>;

/// Every backend there is.
const BACKENDS: &[Backend] = &[
    nixl::backend(UcxLanes::Tcp, "tcp", "NIXL over TCP"),
    nixl::backend(UcxLanes::Shm, "shm", "NIXL over shared memory, one copy between processes of one machine"),
    nixl::backend(UcxLanes::CudaIpc, "cuda_ipc", "NIXL over CUDA IPC, between GPUs of one machine"),
    nixl::backend(UcxLanes::Rdma, "rdma", "NIXL over InfiniBand or RoCE"),
    ucx::backend(UcxLanes::Tcp, "ucx:tcp", "UCX without NIXL, over TCP"),
    ucx::backend(UcxLanes::Shm, "ucx:shm", "UCX without NIXL, over shared memory"),
    ucx::backend(UcxLanes::CudaIpc, "ucx:cuda_ipc", "UCX without NIXL, over CUDA IPC"),
    ucx::backend(UcxLanes::Rdma, "ucx:rdma", "UCX without NIXL, over InfiniBand or RoCE"),
    socket::mapped::BACKEND,
    socket::BACKEND,
    inproc::BACKEND,
];

/// Chosen by [`open`], not a backend of its own.
pub const AUTO: &str = "auto";
const UCX: &str = "ucx";
/// Within one process: for tests.
const INPROC: &str = inproc::BACKEND.name;
/// What `auto` takes on one machine where there is no NIXL.
pub const MMAP: &str = socket::mapped::BACKEND.name;

/// What [`open`] needs to know.
#[derive(Clone, Debug)]
pub struct TransportConfig {
    /// The name asked for: `auto` or a backend's.
    pub name: String,
    /// Every peer is on this host: lets `auto` choose `shm` and keeps UCX on the loopback device.
    pub same_host: bool,
    /// Address that `socket` listens on.
    pub bind_host: String,
    /// Host that peers connect to for `socket`, where it is not the one bound.
    pub advertise_host: Option<String>,
    /// A directory to look for NIXL and UCX in before any other (`KVFERRY_NIXL_DIR`).
    pub nixl_dir: Option<PathBuf>,
    /// This process's incarnation.
    pub incarnation: u64,
}

impl Default for TransportConfig {
    /// `auto` among processes of this host.
    fn default() -> Self {
        Self {
            name: AUTO.into(),
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
/// Call it early: the transports over UCX set environment variables, which must not happen while another thread reads
/// the environment through the C library.
///
/// Errors: an unknown name (with the valid ones, and why those unusable here are so), a transport that this
/// machine or build cannot use. Only `auto` falls back, to `mmap` where the pool is made for it, else to
/// `socket`, and warns.
pub fn open(config: &TransportConfig, pool: Region) -> Result<Box<dyn Transport>, TransferError> {
    let transport = match config.name.as_str() {
        AUTO => open_auto(config, pool)?,
        // The lanes that fit where the peers are.
        UCX if config.same_host => open_backend(find("ucx:shm", config)?, config, pool)?,
        UCX => open_backend(find("ucx:tcp", config)?, config, pool)?,
        name => open_backend(find(name, config)?, config, pool)?,
    };
    tracing::info!(asked = config.name, transport = transport.name(), "KV transport open");
    Ok(transport)
}

/// Fails, as [`open`] would, for a name that names nothing.
pub fn check_name(config: &TransportConfig) -> Result<(), TransferError> {
    match config.name.as_str() {
        AUTO | UCX => Ok(()),
        // It moves nothing between processes, and those are what asks for names.
        INPROC => Err(unknown(INPROC, config)),
        name => find(name, config).map(|_| ()),
    }
}

/// Every name that may be asked for, with a line about each.
pub fn names() -> impl Iterator<Item = (&'static str, &'static str)> {
    let auto = (AUTO, "NIXL where it is installed, with the fastest lane that fits, else mmap or socket");
    let ucx = (UCX, "UCX without NIXL: ucx:shm among processes of one machine, else ucx:tcp");
    let others = BACKENDS.iter().filter(|backend| backend.name != INPROC);
    [auto, ucx].into_iter().chain(others.map(|backend| (backend.name, backend.what)))
}

/// Which transports reach each other: those of one family, by the name of either.
pub fn family(name: &str) -> Option<&'static str> {
    BACKENDS.iter().find(|backend| backend.name == name).map(|backend| backend.family)
}

/// The lanes that a transport of this name was asked to use.
pub fn lanes(name: &str) -> Option<UcxLanes> {
    BACKENDS.iter().find(|backend| backend.name == name).and_then(|backend| backend.lanes)
}

/// Whether `lane` is what a transport of this name promises.
pub fn is_as_asked(name: &str, lane: &Lane) -> bool {
    lane.transports().all(|carrier| match lanes(name) {
        Some(lanes) => lanes.carried_by(carrier),
        None => name != MMAP || carrier == MMAP,
    })
}

/// Whether the transport that `config` names maps peers' pools where it can, which must then lie in a file
/// ([`Region::in_file`]): `mmap`, and `auto` where it would find no NIXL.
pub fn maps_pools(config: &TransportConfig) -> bool {
    let shm = BACKENDS.iter().find(|backend| backend.lanes == Some(UcxLanes::Shm));
    let no_nixl = || shm.is_none_or(|shm| (shm.unusable)(shm.lanes, config).is_some());
    config.name == MMAP || (config.name == AUTO && config.same_host && no_nixl())
}

/// Every backend between processes with the reason why it cannot be used here, where it cannot.
pub fn usable(config: &TransportConfig) -> Vec<(&'static str, Option<String>)> {
    let others = BACKENDS.iter().filter(|backend| backend.name != INPROC);
    others.map(|backend| (backend.name, (backend.unusable)(backend.lanes, config))).collect()
}

fn find(name: &str, config: &TransportConfig) -> Result<&'static Backend, TransferError> {
    BACKENDS.iter().find(|backend| backend.name == name).ok_or_else(|| unknown(name, config))
}

fn unknown(name: &str, config: &TransportConfig) -> TransferError {
    let one = |(name, why): (&str, Option<String>)| match why {
        Some(why) => format!("{name} (not usable here: {why})"),
        None => name.to_owned(),
    };
    let all: Vec<String> = usable(config).into_iter().map(one).collect();
    TransferError::UnknownTransport {
        name: name.to_owned(),
        valid: format!("{AUTO}, {UCX}, {}", all.join(", ")),
    }
}

fn open_backend(
    backend: &Backend,
    config: &TransportConfig,
    pool: Region,
) -> Result<Box<dyn Transport>, TransferError> {
    if let (Memory::Cuda(device), false) = (pool.memory(), backend.device_memory || pool.can_copy()) {
        return Err(TransferError::DeviceMemory { device });
    }
    if let Some(why) = (backend.unusable)(backend.lanes, config)
        // A library that is missing is an error of its own, with every place that was searched.
        && why != NO_LIBRARY
    {
        return Err(TransferError::Unavailable { name: backend.name.to_owned(), why });
    }
    if backend.lanes == Some(UcxLanes::CudaIpc)
        && let Some(why) = pool.unexportable()
    {
        // UCX would move the bytes some other way without a word.
        return Err(TransferError::Unavailable { name: backend.name.to_owned(), why });
    }
    // Libraries look at the pool when it is registered, from this thread.
    pool.bind_thread()?;
    (backend.open)(backend.lanes, config, pool)
}

/// NIXL where it loads, over what fits where the pool and the peers are, else `mmap` or `socket`.
fn open_auto(config: &TransportConfig, pool: Region) -> Result<Box<dyn Transport>, TransferError> {
    let on_gpu = pool.memory() != Memory::Host;
    let order: &[&str] = match (on_gpu, config.same_host) {
        (true, true) => &["cuda_ipc", "rdma", "tcp"],
        (false, true) => &["shm", "tcp"],
        (_, false) => &["rdma", "tcp"],
    };
    let mut reasons = Vec::new();
    for name in order {
        let opened = find(name, config).and_then(|backend| open_backend(backend, config, pool.clone()));
        match opened {
            Ok(transport) => return Ok(transport),
            Err(error) => reasons.push(error.to_string()),
        }
    }
    let reason = reasons.pop().unwrap_or_default();
    let instead = if config.same_host && pool.file().is_some() { MMAP } else { "socket" };
    tracing::warn!(reason, instead, "NIXL is not usable: KV moves another way");
    find(instead, config).and_then(|backend| open_backend(backend, config, pool))
}

const NO_LIBRARY: &str = "NIXL was not found, run scripts/nixl-setup";

/// Why lanes of UCX cannot be used here, whatever runs on them: `libraries` are the files that would be loaded.
pub(crate) fn unusable_ucx(lanes: Option<UcxLanes>, libraries: &[PathBuf]) -> Option<String> {
    let missing = || (!libraries.iter().any(|file| file.is_file())).then(|| NO_LIBRARY.to_owned());
    lanes.and_then(missing_device).or_else(missing)
}

/// What the machine lacks for these lanes.
fn missing_device(lanes: UcxLanes) -> Option<String> {
    match lanes {
        UcxLanes::Tcp => None,
        UcxLanes::Shm => ptrace_scope().filter(|&scope| scope >= 2).map(|scope| {
            format!("kernel.yama.ptrace_scope is {scope}, copies between processes need 0 or 1")
        }),
        UcxLanes::CudaIpc if !Path::new("/dev/nvidiactl").exists() => {
            Some("no NVIDIA driver: /dev/nvidiactl does not exist".into())
        }
        UcxLanes::CudaIpc => None,
        UcxLanes::Rdma => {
            let devices = std::fs::read_dir("/sys/class/infiniband").map_or(0, Iterator::count);
            (devices == 0).then(|| "no InfiniBand or RoCE device in /sys/class/infiniband".into())
        }
    }
}

fn ptrace_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::DeviceMemory;
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
        let message = error("smoke").to_string();
        for (name, _) in names() {
            assert!(message.contains(name), "{name:?} is missing in {message:?}");
        }
        assert!(message.contains("\"smoke\""), "{message}");
        for (name, why) in usable(&TransportConfig::default()) {
            if let Some(why) = why {
                assert!(message.contains(&format!("{name} (not usable here: {why})")), "{message}");
            }
        }
    }

    #[test]
    fn what_the_machine_lacks_is_said() {
        for (name, device) in [("cuda_ipc", "/dev/nvidiactl"), ("rdma", "/sys/class/infiniband")] {
            let lacking = std::fs::read_dir(device).map_or(true, |mut entries| entries.next().is_none());
            if lacking && !std::path::Path::new("/dev/nvidiactl").exists() {
                let message = error(name).to_string();
                assert!(message.contains(name) && message.contains(device), "{message}");
            }
        }
    }

    #[test]
    fn memory_of_a_gpu_is_refused_by_what_cannot_reach_it() {
        let config = TransportConfig { name: "socket".into(), ..Default::default() };
        let error = open(&config, pool().in_memory(Memory::Cuda(3))).err().unwrap();
        assert_eq!(error, TransferError::DeviceMemory { device: 3 });
    }

    /// Says that it was bound, and exports nothing.
    struct Device(std::sync::atomic::AtomicUsize);

    impl DeviceMemory for Device {
        fn read(&self, _: usize, _: &mut [u8]) -> Result<(), String> {
            unreachable!()
        }

        fn write(&self, _: usize, _: &[u8]) -> Result<(), String> {
            unreachable!()
        }

        fn bind_thread(&self) -> Result<(), String> {
            self.0.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(())
        }

        fn check_export(&self) -> Result<(), String> {
            Err("cuIpcGetMemHandle failed".into())
        }

        fn staging(&self, _: usize) -> Result<Box<dyn crate::HostMemory>, String> {
            unreachable!()
        }
    }

    #[test]
    fn memory_that_cannot_be_exported_is_refused_by_name() {
        assert_eq!(pool().unexportable().unwrap(), "the KV pool lies in host memory");
        let device = Arc::new(Device(0.into()));
        let pool = || pool().on_device(Memory::Cuda(1), device.clone());
        let why = "CUDA device 1 does not export the KV pool: cuIpcGetMemHandle failed";
        assert_eq!(pool().unexportable().unwrap(), why);
        // What refuses without a look at the machine: a backend that is usable everywhere, with these lanes.
        let backend = Backend { lanes: Some(UcxLanes::CudaIpc), name: "cuda_ipc", ..socket::BACKEND };
        let error = open_backend(&backend, &TransportConfig::default(), pool()).err().unwrap();
        assert_eq!(error, TransferError::Unavailable { name: "cuda_ipc".into(), why: why.into() });
        // Where it opens, the opening thread has the device.
        open_backend(&socket::BACKEND, &TransportConfig::default(), pool()).unwrap();
        assert_eq!(device.0.load(std::sync::atomic::Ordering::Relaxed), 1);
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
            let error = open(&config(name), pool()).err().unwrap();
            assert_eq!(error.label(), "unavailable");
            for part in [name, dir.path().to_str().unwrap(), "scripts/nixl-setup"] {
                assert!(error.to_string().contains(part), "{part:?} is missing in {error}");
            }
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
