//! UCX's settings, which it takes from the environment only, once, when it is loaded.

use std::env;
use std::sync::Mutex;

use super::log;
use super::tls;
use crate::error::TransferError;
use crate::transport::Memory;

/// Which lanes UCX may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UcxLanes {
    /// TCP alone: works between any two hosts.
    Tcp,
    /// Copies between the two processes' memory (cross-memory attach). UCX's shared-memory lanes lack active
    /// messages with peer-failure handling, which both users of UCX here need, so TCP stands beside it for those.
    Shm,
    /// GPU memory of the peer, mapped. It carries no active messages, so UCX does not start on it alone: TCP stands
    /// beside it, and `cuda_copy` for whatever must be staged through host memory.
    CudaIpc,
    /// InfiniBand and RoCE; TCP stands beside it for connecting.
    Rdma,
}

impl UcxLanes {
    /// The value of `UCX_TLS` for a pool in this memory. Without `cuda_copy` UCX would read a device's memory as if it were
    /// the processor's.
    pub fn tls(self, memory: Memory) -> &'static str {
        match (self, memory) {
            (Self::Tcp, Memory::Host) => "tcp",
            (Self::Tcp, Memory::Cuda(_)) => "tcp,cuda_copy",
            (Self::Shm, Memory::Host) => "tcp,cma",
            (Self::Shm, Memory::Cuda(_)) => "tcp,cma,cuda_copy",
            (Self::CudaIpc, _) => "cuda_ipc,cuda_copy,tcp",
            (Self::Rdma, Memory::Host) => "rc,tcp",
            (Self::Rdma, Memory::Cuda(_)) => "rc,cuda_copy,tcp",
        }
    }

    /// The name in `KV_TRANSPORT`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Tcp => "tcp",
            Self::Shm => "shm",
            Self::CudaIpc => "cuda_ipc",
            Self::Rdma => "rdma",
        }
    }

    /// Whether bytes on the UCX transport `transport` (such as `cma` or `rc_mlx5`) go where they were asked to go.
    pub fn carried_by(self, transport: &str) -> bool {
        match self {
            Self::Tcp => transport == "tcp",
            Self::Shm => ["cma", "posix", "sysv", "xpmem", "knem"].contains(&transport),
            Self::CudaIpc => transport == "cuda_ipc",
            Self::Rdma => ["rc", "dc", "ud", "gga"].iter().any(|prefix| transport.starts_with(prefix)),
        }
    }
}

/// One variable that UCX or NIXL reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    pub name: &'static str,
    pub value: String,
    /// Set by the user, and therefore left alone.
    pub by_user: bool,
}

/// The settings for `lanes` and a pool in `memory`: the user's, which `lookup` tells by name, where there are any.
///
/// `same_host` keeps UCX on the loopback device: only right when every peer is on this host.
pub fn settings(
    lanes: UcxLanes,
    memory: Memory,
    same_host: bool,
    lookup: impl Fn(&str) -> Option<String>,
) -> Vec<Setting> {
    let mut wanted = vec![
        ("UCX_TLS", lanes.tls(memory)),
        // The default segments (8 KiB out) cost a system call each: 0.8 GB/s against 5 GB/s with these on loopback.
        ("UCX_TCP_TX_SEG_SIZE", "1m"),
        ("UCX_TCP_RX_SEG_SIZE", "1m"),
        // Else UCX serves one-sided operations by rendezvous messages, in software. NIXL sets it by itself.
        ("UCX_RNDV_THRESH", "inf"),
        // UCX names the lanes that it chooses. Where it writes them, and its warnings, is `log`'s affair.
        ("UCX_PROTO_INFO", "y"),
        ("UCX_LOG_LEVEL", "warn"),
        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
        ("NIXL_LOG_LEVEL", "FATAL"),
    ];
    if same_host && lanes != UcxLanes::Rdma {
        wanted.push(("UCX_NET_DEVICES", "lo"));
    }
    let setting = |(name, ours): (&'static str, &str)| {
        // An empty UCX_TLS means nothing to UCX; whoever set it so wants the default.
        let users = lookup(name).filter(|value| !value.trim().is_empty());
        Setting { name, by_user: users.is_some(), value: users.unwrap_or_else(|| ours.to_owned()) }
    };
    wanted.into_iter().map(setting).collect()
}

/// Names that this process set itself, so that a second agent's settings are not taken for the user's.
static OURS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Sets what [`settings`] names and the user has not set, and sends UCX's log to [`log::UcxLog`].
///
/// Errors: the user's `UCX_TLS` cannot work.
///
/// # Safety
/// No other thread may read or write the environment by way of the C library at the same time. `std::env`
/// readers are excluded by its own lock. In `serve` this runs at start, before the engine's and HTTP's threads.
pub unsafe fn apply(lanes: UcxLanes, memory: Memory, same_host: bool) -> Result<Vec<Setting>, TransferError> {
    let mut ours = OURS.lock().unwrap_or_else(|e| e.into_inner());
    let lookup = |name: &str| env::var(name).ok().filter(|_| !ours.contains(&name));
    let mut settings = settings(lanes, memory, same_host, lookup);
    if let Some(list) = settings.iter().find(|s| s.name == "UCX_TLS" && s.by_user) {
        tls::check(&list.value)
            .map_err(|why| TransferError::Unavailable { name: lanes.name().into(), why })?;
        if !tls::allows(&list.value, lanes) {
            let (asked, wanted) = (lanes.name(), lanes.tls(memory));
            tracing::warn!(
                asked,
                UCX_TLS = list.value,
                wanted,
                "UCX_TLS is yours and leaves out what was asked for"
            );
        }
    }
    let users_log = lookup("UCX_LOG_FILE");
    settings.push(Setting {
        name: "UCX_LOG_FILE",
        by_user: users_log.is_some(),
        value: users_log.or_else(log::file).unwrap_or_default(),
    });
    for setting in settings.iter().filter(|setting| !setting.by_user && !setting.value.is_empty()) {
        // SAFETY: the caller excludes other threads' access to the environment.
        unsafe { env::set_var(setting.name, &setting.value) };
        if !ours.contains(&setting.name) {
            ours.push(setting.name);
        }
    }
    let shown = |by_user| -> String {
        let these = settings.iter().filter(|s| s.by_user == by_user);
        these.map(|s| format!("{}={}", s.name, s.value)).collect::<Vec<_>>().join(" ")
    };
    tracing::info!(set = shown(false), yours = shown(true), "UCX and NIXL settings of this transport");
    Ok(settings)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(settings: &[Setting], name: &str) -> Option<(String, bool)> {
        settings.iter().find(|s| s.name == name).map(|s| (s.value.clone(), s.by_user))
    }

    fn ours(text: &str) -> Option<(String, bool)> {
        Some((text.to_owned(), false))
    }

    #[test]
    fn tcp_uses_only_tcp_large_segments_and_on_one_host_the_loopback_device() {
        let here = settings(UcxLanes::Tcp, Memory::Host, true, |_| None);
        assert_eq!(value(&here, "UCX_TLS"), ours("tcp"));
        assert_eq!(value(&here, "UCX_NET_DEVICES"), ours("lo"));
        assert_eq!(value(&here, "UCX_TCP_TX_SEG_SIZE"), ours("1m"));
        assert_eq!(value(&here, "UCX_TCP_RX_SEG_SIZE"), ours("1m"));
        let net =
            |lanes, same_host| value(&settings(lanes, Memory::Host, same_host, |_| None), "UCX_NET_DEVICES");
        assert_eq!((net(UcxLanes::Tcp, false), net(UcxLanes::Rdma, true)), (None, None));
    }

    #[test]
    fn lanes_without_active_messages_have_tcp_beside_them() {
        for lanes in [UcxLanes::Shm, UcxLanes::CudaIpc, UcxLanes::Rdma] {
            for memory in [Memory::Host, Memory::Cuda(1)] {
                let tls = lanes.tls(memory);
                assert!(tls.split(',').any(|name| name == "tcp"), "{lanes:?}");
                assert_eq!(tls::check(tls), Ok(()));
                assert!(tls::allows(tls, lanes));
            }
        }
    }

    #[test]
    fn a_devices_memory_is_staged_by_whatever_lanes_there_are() {
        for lanes in [UcxLanes::Tcp, UcxLanes::Shm, UcxLanes::CudaIpc, UcxLanes::Rdma] {
            let tls = lanes.tls(Memory::Cuda(0));
            assert!(tls.split(',').any(|name| name == "cuda_copy"), "{lanes:?}: {tls}");
        }
        assert_eq!(UcxLanes::CudaIpc.tls(Memory::Cuda(0)), "cuda_ipc,cuda_copy,tcp");
        assert_eq!(UcxLanes::Tcp.tls(Memory::Host), "tcp");
    }

    #[test]
    fn what_the_user_set_stays_and_an_empty_list_is_not_set() {
        let user = |name: &str| (name == "UCX_TLS").then(|| "tcp,cuda_copy".to_owned());
        let settings_ = settings(UcxLanes::Tcp, Memory::Host, true, user);
        assert_eq!(value(&settings_, "UCX_TLS"), Some(("tcp,cuda_copy".into(), true)));
        let empty = |name: &str| (name == "UCX_TLS").then(String::new);
        assert_eq!(value(&settings(UcxLanes::Shm, Memory::Host, true, empty), "UCX_TLS"), ours("tcp,cma"));
    }
}
