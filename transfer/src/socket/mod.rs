//! Plain TCP: needs no library, works between any hosts, and is the reference that the others are compared with.
//!
//! Each transport listens on one port; whoever posts a transfer opens one connection to that peer at the first one.
//! Threads do the reading and writing, so bytes move while nobody polls. A transfer settles when the receiver says
//! that every byte is where it belongs and the notification with it. A connection begins with the receiver's random token, so bytes meant for a process that
//! was there before are refused.
//!
//! With [`mapped`] pools the same frames go without the bytes: those are copied.

mod frame;
mod inbound;
pub mod mapped;
mod outbound;
#[cfg(test)]
mod tests;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{IpAddr, TcpStream};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use socket2::{SockRef, TcpKeepalive};

use crate::error::TransferError;
use crate::lane::Lane;
use crate::registry::{Backend, TransportConfig};
use crate::transport::{
    Direction, Event, Memory, PeerId, Region, Span, Transport, XferId, XferStats, check_spans,
};
use frame::{Greeting, Token};
use inbound::Inbound;
use mapped::{Copying, Export, Mapping};
use outbound::{Job, MAX_QUEUED, Outbound, Report, Target};

/// Bytes copied between pool and socket at a time: stays in the L2 cache between the two copies.
const CHUNK: usize = 256 << 10;

/// Reports and notifications that wait for `poll`; full queues make the connections wait, not us.
const QUEUE: usize = 4096;

/// A host that vanished without a word is given up after this long.
const SILENCE: Duration = Duration::from_secs(10);

/// Plain TCP, as the registry lists it.
pub const BACKEND: Backend = Backend {
    name: "socket",
    what: "plain TCP, no library needed",
    family: "socket",
    lanes: None,
    device_memory: false,
    unusable: |_, _| None,
    open: |_, config, pool| Ok(Box::new(SocketTransport::new(&config.into(), pool, false)?)),
};

/// What [`SocketTransport::new`] needs to know.
#[derive(Clone, Debug)]
pub struct SocketConfig {
    /// Address to listen on.
    pub bind_host: String,
    /// Host name or address that peers connect to, where it is not the one bound.
    pub advertise_host: Option<String>,
}

impl From<&TransportConfig> for SocketConfig {
    fn from(config: &TransportConfig) -> Self {
        Self { bind_host: config.bind_host.clone(), advertise_host: config.advertise_host.clone() }
    }
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    host: String,
    port: u16,
    token: [u64; 2],
    pool: u64,
    /// The pool's memory, where it can be mapped.
    export: Option<Export>,
}

struct Peer {
    connection: u64,
    pool: u64,
    /// Its pool, where it is mapped: bytes are copied.
    mapping: Option<Mapping>,
    /// Transfers whose bytes are yet to be copied, the first one perhaps in part.
    copying: VecDeque<Copying>,
    outbound: Outbound,
}

struct InFlight {
    id: XferId,
    stats: XferStats,
    posted: Instant,
}

/// The `socket` transport, and `mmap`.
pub struct SocketTransport {
    /// Peers' pools are mapped, where they can be.
    maps: bool,
    pool: Region,
    metadata: Vec<u8>,
    own: Token,
    peers: HashMap<PeerId, Peer>,
    /// Who each peer is, until it is removed: also of peers whose connection was lost.
    tokens: HashMap<PeerId, Token>,
    owners: HashMap<u64, PeerId>,
    in_flight: HashMap<PeerId, Vec<InFlight>>,
    ready: Vec<Event>,
    /// Closed connections whose threads have yet to be joined.
    closed: Vec<Outbound>,
    next: u64,
    report_sender: SyncSender<Report>,
    /// In an `Option` so that Drop can let go of the queues before it joins the threads that fill them.
    queues: Option<(Receiver<Report>, Receiver<Vec<u8>>)>,
    inbound: Option<Inbound>,
}

impl SocketTransport {
    /// Listens on a free port of `bind_host`. With `maps`, bytes are copied to and from the pools of peers that can be mapped.
    pub fn new(config: &SocketConfig, pool: Region, maps: bool) -> Result<Self, TransferError> {
        let own: Token = rand::random();
        let (report_sender, reports) = sync_channel(QUEUE);
        let (notification_sender, notifications) = sync_channel(QUEUE);
        let inbound = Inbound::new(&config.bind_host, own, pool.clone(), notification_sender)?;
        let unavailable = |why: String| TransferError::Unavailable { name: "socket".into(), why };
        let address = inbound.address().map_err(|e| unavailable(e.to_string()))?;
        let host = advertised(config, address.ip()).map_err(unavailable)?;
        let metadata = Metadata {
            host,
            port: address.port(),
            token: [(own >> 64) as u64, own as u64],
            pool: pool.len() as u64,
            export: Export::of(&pool),
        };
        tracing::info!(host = metadata.host, port = metadata.port, "socket transport listens");
        Ok(Self {
            maps,
            pool,
            metadata: rmp_serde::to_vec(&metadata).expect("plain struct serializes"),
            own,
            peers: HashMap::new(),
            tokens: HashMap::new(),
            owners: HashMap::new(),
            in_flight: HashMap::new(),
            ready: Vec::new(),
            closed: Vec::new(),
            next: 0,
            report_sender,
            queues: Some((reports, notifications)),
            inbound: Some(inbound),
        })
    }

    /// Inbound connections closed because of what came over them.
    pub fn refused(&self) -> u64 {
        self.inbound().refused()
    }

    fn inbound(&self) -> &Inbound {
        self.inbound.as_ref().expect("there until dropped. This is a bug.")
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Goes on with the transfers to mapped pools, one of each peer at a time.
    fn copy(&mut self) {
        let mut broken = None;
        for peer in self.peers.values_mut() {
            let (Some(mapping), Some(first)) = (&peer.mapping, peer.copying.front_mut()) else { continue };
            match first.go_on(mapping, &self.pool) {
                Ok(false) => {}
                Ok(true) => {
                    let done = peer.copying.pop_front().expect("looked at above. This is a bug.");
                    peer.outbound.commit(done.job);
                }
                Err(error) => broken = Some((peer.connection, error)),
            }
        }
        if let Some((connection, error)) = broken {
            self.lost(connection, error);
        }
    }

    /// The pool of the peer at `address`, or a warning why its bytes go over TCP.
    fn map(&self, address: &str, export: Option<Export>, len: u64) -> Option<Mapping> {
        let mapping = match export {
            _ if self.pool.memory() != Memory::Host => Err("our own lies on a device".into()),
            Some(export) => export.map(len).map_err(|error| error.to_string()),
            None => Err("its transport is not mmap".into()),
        };
        mapping
            .inspect_err(|why| {
                tracing::warn!(
                    peer = address,
                    why,
                    "a peer's KV pool is not mapped: its bytes go over TCP (mapping needs the transport mmap at both ends, \
                     the same user and the same process namespace)"
                );
            })
            .ok()
    }

    fn settled(&mut self, connection: u64, xfer: u64) {
        // A connection that was closed meanwhile has no owner: its transfers were reported already.
        let Some(&peer) = self.owners.get(&connection) else { return };
        let Some(flights) = self.in_flight.get_mut(&peer) else { return };
        let Some(index) = flights.iter().position(|f| f.id.0 == xfer) else { return };
        let flight = flights.remove(index);
        let result = Ok(XferStats { wire: flight.posted.elapsed(), ..flight.stats });
        self.ready.push(Event::Settled { xfer: flight.id, peer, result });
    }

    fn lost(&mut self, connection: u64, error: TransferError) {
        let Some(&peer) = self.owners.get(&connection) else { return };
        self.disconnect(peer, &error);
        self.ready.push(Event::PeerLost { peer, error });
    }

    /// Closes the connection and fails what was under way on it.
    fn disconnect(&mut self, peer: PeerId, error: &TransferError) {
        let Some(Peer { connection, mut outbound, .. }) = self.peers.remove(&peer) else { return };
        outbound.close();
        self.closed.push(outbound);
        self.owners.remove(&connection);
        for flight in self.in_flight.remove(&peer).into_iter().flatten() {
            self.ready.push(Event::Settled { xfer: flight.id, peer, result: Err(error.clone()) });
        }
    }
}

/// The host to put into the metadata, or why there is none. An unspecified address means "every address of mine": a
/// peer that connected to it would reach itself.
fn advertised(config: &SocketConfig, bound: IpAddr) -> Result<String, String> {
    let host = config.advertise_host.clone().unwrap_or_else(|| bound.to_string());
    let bare = host.trim_matches(['[', ']']);
    match bare.parse::<IpAddr>() {
        Ok(address) if address.is_unspecified() => {
            Err(format!("peers cannot connect to {host}: give a host to advertise (--kv-advertise-host)"))
        }
        _ => Ok(bare.to_owned()),
    }
}

impl Transport for SocketTransport {
    fn name(&self) -> &'static str {
        if self.maps { mapped::BACKEND.name } else { BACKEND.name }
    }

    fn metadata(&self) -> Vec<u8> {
        self.metadata.clone()
    }

    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError> {
        let bad = |e: rmp_serde::decode::Error| TransferError::BadMetadata(e.to_string());
        let Metadata { host, port, token: [high, low], pool, export } =
            rmp_serde::from_slice(metadata).map_err(bad)?;
        self.remove_peer(peer);
        let address = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        let mapping = if self.maps { self.map(&address, export, pool) } else { None };
        let token = (Token::from(high) << 64) | Token::from(low);
        let connection = self.number();
        let target = Target { connection, address, greeting: Greeting { to: token, from: self.own } };
        let outbound = Outbound::new(target, self.pool.clone(), self.report_sender.clone())
            .map_err(|e| TransferError::Wire(format!("starting a thread: {e}")))?;
        self.inbound().unfence(token);
        self.owners.insert(connection, peer);
        self.tokens.insert(peer, token);
        self.peers.insert(peer, Peer { connection, pool, mapping, copying: VecDeque::new(), outbound });
        Ok(())
    }

    fn remove_peer(&mut self, peer: PeerId) {
        self.disconnect(peer, &TransferError::Aborted(peer));
        if let Some(token) = self.tokens.remove(&peer) {
            self.inbound().fence(token);
        }
    }

    fn post(
        &mut self,
        direction: Direction,
        peer: PeerId,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<XferId, TransferError> {
        let posted = Instant::now();
        let id = XferId(self.number());
        let target = self.peers.get_mut(&peer).ok_or(TransferError::UnknownPeer(peer))?;
        let bytes = check_spans(spans, notification, &self.pool, target.pool)?;
        let flights = self.in_flight.entry(peer).or_default();
        if flights.len() >= MAX_QUEUED {
            return Err(TransferError::Backlogged { peer, queued: flights.len() });
        }
        let (spans, notification) = (spans.to_vec(), notification.to_vec());
        let descriptors = spans.len() as u32;
        let job = Job { xfer: id.0, direction, spans, notification };
        match target.mapping {
            Some(_) => target.copying.push_back(Copying::new(job)),
            None => target.outbound.push(job),
        }
        let post = posted.elapsed();
        let stats = XferStats { direction, bytes, descriptors, post, wire: post, ..Default::default() };
        flights.push(InFlight { id, stats, posted });
        Ok(id)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransferError> {
        self.copy();
        while let Some(report) = self.queues.as_ref().and_then(|(reports, _)| reports.try_recv().ok()) {
            match report {
                Report::Settled { connection, xfer } => self.settled(connection, xfer),
                Report::Lost { connection, error } => self.lost(connection, error),
            }
        }
        events.append(&mut self.ready);
        if let Some((_, notifications)) = &self.queues {
            events.extend(notifications.try_iter().map(|payload| Event::Notified { payload }));
        }
        self.closed.retain(|outbound| !outbound.is_finished());
        Ok(())
    }

    /// The lane as asked for; [`Transport::has_mapped`] tells of each peer.
    fn lane(&mut self, _: Direction) -> Option<Lane> {
        Some(mapped::lane(self.maps))
    }

    fn has_mapped(&self, peer: PeerId) -> Option<bool> {
        self.maps.then(|| self.peers.get(&peer).is_some_and(|peer| peer.mapping.is_some()))
    }
}

impl Drop for SocketTransport {
    fn drop(&mut self) {
        self.queues = None;
        self.inbound = None;
        self.peers.clear();
        self.closed.clear();
    }
}

/// Small frames leave at once, and a peer that vanished is noticed.
fn tune(stream: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(stream);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(SILENCE))?;
    let probes = TcpKeepalive::new().with_time(SILENCE).with_interval(Duration::from_secs(1)).with_retries(3);
    socket.set_tcp_keepalive(&probes)
}

/// A lock whose holder panicked still guards consistent data: each section below is a few assignments.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|e| e.into_inner())
}
