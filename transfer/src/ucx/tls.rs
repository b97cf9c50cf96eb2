//! Reading a user's `UCX_TLS` before UCX does: UCX's own complaint about a list that cannot work names neither what is
//! missing nor what to add.

use super::environment::UcxLanes;

/// Names that bring a transport with active messages and peer-failure handling: what an endpoint cannot do without.
const CARRY_MESSAGES: &[&str] = &[
    "all", "tcp", "ib", "rc", "rc_v", "rc_x", "rc_verbs", "rc_mlx5", "ud", "ud_v", "ud_x", "ud_verbs",
    "ud_mlx5", "dc", "dc_x", "dc_mlx5", "srd", "efa",
];

/// Names of transports that only copy, or whose messages know no peer failure.
const ONLY_COPY: &[&str] = &[
    "cma",
    "knem",
    "xpmem",
    "sm",
    "shm",
    "mm",
    "posix",
    "sysv",
    "self",
    "loopback",
    "cuda",
    "cuda_ipc",
    "cuda_copy",
    "gdr_copy",
    "gga",
    "gga_mlx5",
    "rocm",
    "rocm_copy",
    "rocm_ipc",
    "ze",
    "ze_copy",
    "ze_ipc",
    "gaudi",
    "gaudi_gdr",
];

/// The names in the list, without the marks for strictness (`\rc`) and use (`ud:aux`).
fn names(list: &str) -> impl Iterator<Item = &str> {
    list.split(',')
        .map(|name| name.trim().trim_start_matches('\\'))
        .map(|name| name.split_once(':').map_or(name, |(name, _)| name))
        .filter(|name| !name.is_empty())
}

/// Why UCX cannot start with this list, and what to add; `Ok` where it can or where only UCX knows.
pub fn check(list: &str) -> Result<(), String> {
    // A list of exceptions leaves everything else.
    if list.trim_start().starts_with('^') {
        return Ok(());
    }
    let known = |name: &&str| CARRY_MESSAGES.contains(name) || ONLY_COPY.contains(name);
    if let Some(unknown) = names(list).find(|name| !known(name)) {
        if names(list).any(|name| CARRY_MESSAGES.contains(&name)) {
            tracing::warn!(UCX_TLS = list, unknown, "UCX_TLS names a transport that is not known here");
        } else {
            return Err(format!(
                "UCX_TLS={list} names {unknown:?}, which is no UCX transport, and none that carries active messages: add \
                 tcp (UCX_TLS={list},tcp) or leave UCX_TLS unset"
            ));
        }
    }
    if names(list).any(|name| CARRY_MESSAGES.contains(&name)) {
        return Ok(());
    }
    Err(format!(
        "UCX_TLS={list} has no transport that carries active messages with peer-failure handling, without which UCX makes \
         no endpoint: add tcp (UCX_TLS={list},tcp)"
    ))
}

/// Whether the list lets UCX use the lanes that were asked for.
pub fn allows(list: &str, lanes: UcxLanes) -> bool {
    let groups = |name: &str| match lanes {
        UcxLanes::Tcp => name == "tcp",
        UcxLanes::Shm => ["sm", "shm", "mm"].contains(&name),
        UcxLanes::CudaIpc => name == "cuda",
        UcxLanes::Rdma => name == "ib",
    };
    let named = |list: &str| names(list).any(|name| name == "all" || groups(name) || lanes.carried_by(name));
    match list.trim_start().strip_prefix('^') {
        Some(exceptions) => !named(exceptions),
        None => named(list),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_without_active_messages_are_refused_with_what_is_missing() {
        for list in ["cuda_ipc", "cuda_ipc,cuda_copy", "cma", "sm,self", "nonsense"] {
            let why = check(list).unwrap_err();
            assert!(why.contains("active messages") && why.contains(&format!("UCX_TLS={list},tcp")), "{why}");
        }
        assert!(check("nonsense").unwrap_err().contains("\"nonsense\""));
    }

    #[test]
    fn lists_that_can_work_are_left_to_ucx() {
        for list in
            ["cuda_ipc,cuda_copy,tcp", "tcp", "^cuda_ipc", "all", "\\rc_x,cma", "ud:aux,rc", "tcp,nonsense"]
        {
            assert_eq!(check(list), Ok(()), "{list}");
        }
    }

    #[test]
    fn a_list_that_leaves_out_the_asked_lanes_is_noticed() {
        for (list, lanes, allowed) in [
            ("tcp", UcxLanes::Shm, false),
            ("tcp,sm", UcxLanes::Shm, true),
            ("^cma", UcxLanes::Shm, false),
            ("^cuda_ipc", UcxLanes::Tcp, true),
            ("^cuda_ipc", UcxLanes::CudaIpc, false),
            ("all", UcxLanes::Rdma, true),
            ("rc_mlx5,tcp", UcxLanes::Rdma, true),
            ("tcp,cuda", UcxLanes::CudaIpc, true),
        ] {
            assert_eq!(allows(list, lanes), allowed, "{list} for {lanes:?}");
        }
    }
}
