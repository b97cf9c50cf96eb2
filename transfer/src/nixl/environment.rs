//! UCX's settings, which it takes from the environment only.

use std::env;
use std::sync::Mutex;

/// Which lanes UCX may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UcxLanes {
    /// TCP alone: works between any two hosts.
    Tcp,
    /// Copies between the two processes' memory (cross-memory attach). UCX's shared-memory lanes lack active
    /// messages with peer-failure handling, which NIXL needs, so TCP stands beside it for those.
    Shm,
}

/// The UCX settings for `lanes` that the user has not made, which `lookup` tells by name.
///
/// `same_host` keeps UCX on the loopback device: only right when every peer is on this host.
pub fn ucx_environment(
    lanes: UcxLanes,
    same_host: bool,
    lookup: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let tls = match lanes {
        UcxLanes::Tcp => "tcp",
        UcxLanes::Shm => "tcp,cma",
    };
    let mut settings = vec![
        ("UCX_TLS", tls),
        // The default segments (8 KiB out) cost a system call each: 0.8 GB/s against 5 GB/s with these on loopback.
        ("UCX_TCP_TX_SEG_SIZE", "1m"),
        ("UCX_TCP_RX_SEG_SIZE", "1m"),
        // A peer's death reaches us as a status; UCX would also print it on our standard output.
        ("UCX_LOG_LEVEL", "fatal"),
        ("UCX_WARN_UNUSED_ENV_VARS", "n"),
        ("NIXL_LOG_LEVEL", "FATAL"),
    ];
    if same_host {
        settings.push(("UCX_NET_DEVICES", "lo"));
    }
    settings.retain(|(name, _)| lookup(name).is_none());
    settings.into_iter().map(|(name, value)| (name, value.to_owned())).collect()
}

/// Names that this process set itself, so that a second agent's settings are not taken for the user's.
static OURS: Mutex<Vec<&'static str>> = Mutex::new(Vec::new());

/// Sets what [`ucx_environment`] names.
///
/// # Safety
/// No other thread may read or write the environment by way of the C library at the same time. `std::env`
/// readers are excluded by its own lock. In `serve` this runs at start, before the engine's and HTTP's threads.
pub unsafe fn apply(lanes: UcxLanes, same_host: bool) {
    let mut ours = OURS.lock().unwrap_or_else(|e| e.into_inner());
    let lookup = |name: &str| env::var(name).ok().filter(|_| !ours.contains(&name));
    let settings = ucx_environment(lanes, same_host, lookup);
    for (name, value) in &settings {
        // SAFETY: the caller excludes other threads' access to the environment.
        unsafe { env::set_var(name, value) };
        if !ours.contains(name) {
            ours.push(name);
        }
    }
    let shown: Vec<_> = settings.iter().map(|(name, value)| format!("{name}={value}")).collect();
    tracing::info!(settings = shown.join(" "), "UCX and NIXL settings made for this transport");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value<'a>(settings: &'a [(&'static str, String)], name: &str) -> Option<&'a str> {
        settings.iter().find(|(n, _)| *n == name).map(|(_, v)| v.as_str())
    }

    #[test]
    fn tcp_uses_only_tcp_and_the_loopback_device_on_one_host() {
        let settings = ucx_environment(UcxLanes::Tcp, true, |_| None);
        assert_eq!(value(&settings, "UCX_TLS"), Some("tcp"));
        assert_eq!(value(&settings, "UCX_NET_DEVICES"), Some("lo"));
        assert_eq!(value(&settings, "UCX_TCP_TX_SEG_SIZE"), Some("1m"));
        assert_eq!(value(&settings, "UCX_TCP_RX_SEG_SIZE"), Some("1m"));
        assert_eq!(value(&ucx_environment(UcxLanes::Tcp, false, |_| None), "UCX_NET_DEVICES"), None);
    }

    #[test]
    fn shm_has_tcp_beside_it_for_active_messages() {
        assert_eq!(value(&ucx_environment(UcxLanes::Shm, true, |_| None), "UCX_TLS"), Some("tcp,cma"));
    }

    #[test]
    fn what_the_user_set_stays() {
        let user = |name: &str| (name == "UCX_TLS").then(|| "tcp,cuda_copy".to_owned());
        assert_eq!(value(&ucx_environment(UcxLanes::Tcp, true, user), "UCX_TLS"), None);
    }
}
