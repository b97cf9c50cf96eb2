//! How this worker's pool is reached by others.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::Arc;
use std::sync::mpsc::Sender;

use anyhow::Context;
use engine::event::Event;
use engine::service;
use kernels::{KvLayout, KvPool};
use transfer::driver::{Driver, DriverHandle};
use transfer::faulty::Faulty;
use transfer::{Hello, Identity, LayoutFingerprint, Scratch, TransportConfig};

use crate::config::Config;
use crate::link::transfers::Transfers;

/// Changes with the byte order within a block.
const LAYOUT_VERSION: u32 = 1;

/// What peers must agree on, for `model` named by its fingerprint.
pub fn layout_fingerprint(model: &str, layout: &KvLayout) -> LayoutFingerprint {
    LayoutFingerprint {
        version: LAYOUT_VERSION,
        model: model.to_owned(),
        dtype: layout.dtype.as_str().to_owned(),
        num_layers: layout.num_layers as u32,
        num_kv_heads: layout.num_kv_heads as u32,
        head_dim: layout.head_dim as u32,
        block_size: layout.block_size as u32,
    }
}

/// Opens the transport with the pool registered and starts its thread; completes what we say of ourselves.
pub fn open(
    config: &Config,
    pool: &Arc<KvPool>,
    mut hello: Hello,
    events: Sender<Event>,
    transfers: Arc<Transfers>,
) -> anyhow::Result<(DriverHandle, Hello)> {
    let transport = transfer::open(&settings(config, hello.incarnation), service::region(pool))
        .context("the KV transport cannot be opened")?;
    let transport = match config.kv_faults {
        Some(faults) => Box::new(Faulty::new(transport, faults)),
        None => transport,
    };
    hello.transport = transport.name().to_owned();
    let block_bytes = pool.layout().block_bytes() as u64;
    let scratch = (pool.spare_blocks() > 0).then(|| Scratch::after(pool.num_blocks() as u64, block_bytes));
    let identity = Identity { incarnation: hello.incarnation, scratch };
    let counted = transfers.clone();
    let on_event = move |event| {
        counted.observe(&event);
        drop(events.send(Event::Transfer(event)));
    };
    let driver = Driver::spawn(transport, identity, Box::new(on_event));
    transfers.opened(driver.transport().clone());
    hello.metadata = driver.metadata().to_vec();
    Ok((driver, hello))
}

fn settings(config: &Config, incarnation: u64) -> TransportConfig {
    TransportConfig {
        name: config.kv_transport.clone(),
        same_host: same_host(config),
        bind_host: config.listen.ip().to_string(),
        advertise_host: Some(own_host(config)),
        nixl_dir: config.nixl_dir.clone(),
        incarnation,
    }
}

/// A pool in host memory, with `spare` blocks for self-tests, in memory that the transport can use.
///
/// Errors: as [`KvPool::new`].
pub fn host_pool(config: &Config, layout: KvLayout, blocks: usize, spare: usize) -> std::io::Result<KvPool> {
    // Nobody asks for a transport without peers.
    if spare > 0 && transfer::registry::maps_pools(&settings(config, 0)) {
        match KvPool::shared(layout, blocks, spare) {
            Err(error) if config.kv_transport == transfer::registry::AUTO => {
                tracing::warn!(%error, "the KV pool cannot be shared with other processes");
            }
            outcome => return outcome,
        }
    }
    KvPool::with_spare(layout, blocks, spare)
}

/// True if all workers of this deployment are on this machine, as far as this one can tell.
pub fn same_host(config: &Config) -> bool {
    let loopback = |address: SocketAddr| address.ip().is_loopback();
    let is_local = |host: &str, port: u16| {
        (host, port).to_socket_addrs().is_ok_and(|mut addresses| addresses.all(loopback))
    };
    loopback(config.listen) && config.prefill.iter().all(|peer| is_local(&peer.host, peer.port))
}

/// The address that packets to other networks leave from, if there is a route. No packet is sent: 192.0.2.1 is nobody's
/// (RFC 5737).
fn outward() -> Option<String> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    socket.connect("192.0.2.1:9").ok()?;
    Some(socket.local_addr().ok()?.ip().to_string())
}

/// The address under which prefill workers reach this one: the one listened on or, listening on all, the one that
/// the route to the first prefill worker leaves from. No packet is sent.
pub fn own_host(config: &Config) -> String {
    let listen = config.listen.ip();
    if !listen.is_unspecified() {
        return listen.to_string();
    }
    let route = || {
        let peer = config.prefill.first()?;
        let to = (peer.host.as_str(), peer.port).to_socket_addrs().ok()?.next()?;
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    route().or_else(outward).unwrap_or_else(|| listen.to_string())
}
