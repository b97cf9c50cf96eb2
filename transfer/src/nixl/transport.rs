//! The transport over a NIXL agent.

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::agent::{Agent, Progress, Remote, Request};
use super::library::{Library, search_path};
use super::status::describe;
use crate::error::TransferError;
use crate::lane::Lane;
use crate::registry::{Backend, TransportConfig, unusable_ucx};
use crate::transport::{
    Direction, Event, Memory, PeerId, Region, Span, Transport, XferId, XferStats, check_spans,
};
use crate::ucx::{Setting, UcxLanes, environment, log};

/// How long Drop lets running requests end. A live peer needs milliseconds, a dead one is noticed within 0.4 s.
const DRAIN: Duration = Duration::from_secs(1);

/// What [`NixlTransport::new`] needs to know.
#[derive(Clone, Debug)]
pub struct NixlConfig {
    pub lanes: UcxLanes,
    /// Every peer is on this host.
    pub same_host: bool,
    /// A directory to look for the library in before any other.
    pub directory: Option<PathBuf>,
    /// This process's incarnation: makes the agent's name unique.
    pub incarnation: u64,
}

/// NIXL over UCX with these lanes, as the registry lists it.
pub const fn backend(lanes: UcxLanes, name: &'static str, what: &'static str) -> Backend {
    Backend {
        name,
        what,
        family: "nixl",
        lanes: Some(lanes),
        device_memory: true,
        unusable: |lanes, config| unusable_ucx(lanes, config, &search_path(config.nixl_dir.as_deref())),
        open: |lanes, config, pool| {
            let lanes = lanes.expect("NIXL backends have lanes. This is a bug.");
            Ok(Box::new(NixlTransport::new(&NixlConfig::of(lanes, config), pool)?))
        },
    }
}

impl NixlConfig {
    fn of(lanes: UcxLanes, config: &TransportConfig) -> Self {
        Self {
            lanes,
            same_host: config.same_host,
            directory: config.nixl_dir.clone(),
            incarnation: config.incarnation,
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    agent: String,
    base: u64,
    len: u64,
    /// The CUDA device that the pool lies on.
    #[serde(default)]
    cuda: Option<u32>,
    #[serde(with = "serde_bytes")]
    nixl: Vec<u8>,
}

struct Peer {
    remote: Remote,
    pool: u64,
    /// Set by `remove_peer` while requests still run, or when the wire failed: no new posts; the remote is
    /// forgotten once nothing runs.
    leaving: Option<Leaving>,
    running: usize,
}

enum Leaving {
    Removed,
    Lost(TransferError),
}

struct InFlight {
    id: XferId,
    peer: Slot,
    request: Request,
    stats: XferStats,
    posted: Instant,
}

/// Peers by their own number here: a `PeerId` may be added again while its old connection still drains.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Slot(u64, PeerId);

/// NIXL over UCX.
pub struct NixlTransport {
    /// Dropped by hand: an agent with requests that will not end is leaked, with the pool it holds.
    agent: ManuallyDrop<Agent>,
    lanes: UcxLanes,
    settings: Vec<Setting>,
    pool: Region,
    metadata: Vec<u8>,
    peers: HashMap<Slot, Peer>,
    current: HashMap<PeerId, Slot>,
    in_flight: Vec<InFlight>,
    ready: VecDeque<Event>,
    received: Vec<Vec<u8>>,
    next: u64,
}

impl NixlTransport {
    /// Loads NIXL, makes the agent and registers the pool. Call it early: it sets UCX's environment variables.
    ///
    /// Errors: the library is missing or not usable, UCX has none of the lanes here.
    pub fn new(config: &NixlConfig, pool: Region) -> Result<Self, TransferError> {
        // SAFETY: documented on this function and on `registry::open`: the process opens its transport at start,
        // before threads that call into the C library's environment exist.
        let settings = unsafe { environment::apply(config.lanes, config.same_host) }?;
        let (library, path) = Library::load(config.lanes.name(), config.directory.as_deref())?;
        let name = format!("kvferry-{:016x}-{:x}", config.incarnation, rand::random::<u32>());
        let agent = Agent::new(library, config.lanes.name(), &name, pool.clone())?;
        let metadata = Metadata {
            nixl: agent.local_metadata()?,
            agent: name,
            base: pool.base() as u64,
            len: pool.len() as u64,
            cuda: match pool.memory() {
                Memory::Host => None,
                Memory::Cuda(device) => Some(device),
            },
        };
        tracing::info!(library = path, agent = metadata.agent, pool_bytes = metadata.len, "NIXL agent ready");
        Ok(Self {
            agent: ManuallyDrop::new(agent),
            lanes: config.lanes,
            settings,
            pool,
            metadata: rmp_serde::to_vec(&metadata).expect("plain struct serializes"),
            peers: HashMap::new(),
            current: HashMap::new(),
            in_flight: Vec::new(),
            ready: VecDeque::new(),
            received: Vec::new(),
            next: 0,
        })
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Looks at every running request once.
    fn poll_requests(&mut self) {
        let mut index = 0;
        while index < self.in_flight.len() {
            match self.agent.progress(&self.in_flight[index].request) {
                Progress::Running => index += 1,
                settled => {
                    let flight = self.in_flight.remove(index);
                    self.settle(flight, settled);
                }
            }
        }
    }

    fn settle(&mut self, flight: InFlight, progress: Progress) {
        self.agent.release(flight.request);
        let Slot(_, peer_id) = flight.peer;
        let peer = self.peers.get_mut(&flight.peer).expect("a peer outlives its requests. This is a bug.");
        peer.running -= 1;
        let result = match (&peer.leaving, progress) {
            (Some(Leaving::Removed), _) => Err(TransferError::Aborted(peer_id)),
            (_, Progress::Failed(status)) => {
                let error = TransferError::Wire(format!("NIXL transfer: {}", describe(status)));
                peer.leaving.get_or_insert(Leaving::Lost(error.clone()));
                Err(error)
            }
            _ => Ok(XferStats { wire: flight.posted.elapsed(), ..flight.stats }),
        };
        self.ready.push_back(Event::Settled { xfer: flight.id, peer: peer_id, result });
        self.forget_if_drained(flight.peer);
    }

    /// A leaving peer's keys are destroyed only when no request uses them.
    fn forget_if_drained(&mut self, slot: Slot) {
        let Some(peer) = self.peers.get(&slot) else { return };
        if peer.running > 0 || peer.leaving.is_none() {
            return;
        }
        let peer = self.peers.remove(&slot).expect("looked up above");
        self.agent.forget_remote(&peer.remote);
        if self.current.get(&slot.1) == Some(&slot) {
            self.current.remove(&slot.1);
        }
        if let Some(Leaving::Lost(error)) = peer.leaving {
            self.ready.push_back(Event::PeerLost { peer: slot.1, error });
        }
    }
}

impl Transport for NixlTransport {
    fn name(&self) -> &'static str {
        self.lanes.name()
    }

    fn metadata(&self) -> Vec<u8> {
        self.metadata.clone()
    }

    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError> {
        let bad = |e: rmp_serde::decode::Error| TransferError::BadMetadata(e.to_string());
        let metadata: Metadata = rmp_serde::from_slice(metadata).map_err(bad)?;
        if metadata.base.checked_add(metadata.len).is_none() {
            return Err(TransferError::BadMetadata("the pool wraps around the address space".into()));
        }
        self.remove_peer(peer);
        let remote = self.agent.load_remote(
            &metadata.nixl,
            metadata.base,
            metadata.cuda.map_or(Memory::Host, Memory::Cuda),
        )?;
        let slot = Slot(self.number(), peer);
        self.peers.insert(slot, Peer { remote, pool: metadata.len, leaving: None, running: 0 });
        self.current.insert(peer, slot);
        Ok(())
    }

    /// Running requests cannot be called back safely (UCX does not cancel one that has begun): they are reported aborted
    /// when they have ended.
    fn remove_peer(&mut self, peer: PeerId) {
        let Some(slot) = self.current.remove(&peer) else { return };
        if let Some(peer) = self.peers.get_mut(&slot) {
            peer.leaving = Some(Leaving::Removed);
        }
        self.forget_if_drained(slot);
    }

    fn post(
        &mut self,
        direction: Direction,
        peer: PeerId,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<XferId, TransferError> {
        let slot = *self.current.get(&peer).ok_or(TransferError::UnknownPeer(peer))?;
        let target = self.peers.get_mut(&slot).ok_or(TransferError::UnknownPeer(peer))?;
        if target.leaving.is_some() {
            return Err(TransferError::UnknownPeer(peer));
        }
        let bytes = check_spans(spans, notification, &self.pool, target.pool)?;
        let posted = Instant::now();
        let outcome = self.agent.post(direction, &target.remote, spans, notification);
        let id = XferId(self.number());
        let target = self.peers.get_mut(&slot).expect("looked up above");
        match outcome {
            Ok((request, progress)) => {
                let post = posted.elapsed();
                let descriptors = spans.len() as u32;
                let stats =
                    XferStats { direction, bytes, descriptors, post, wire: post, ..Default::default() };
                target.running += 1;
                let flight = InFlight { id, peer: slot, request, stats, posted };
                if progress == Progress::Running {
                    self.in_flight.push(flight);
                } else {
                    self.settle(flight, progress);
                }
            }
            // The spans were checked, so what the library refuses is the connection.
            Err(error) => {
                target.leaving = Some(Leaving::Lost(error.clone()));
                self.ready.push_back(Event::Settled { xfer: id, peer, result: Err(error) });
                self.forget_if_drained(slot);
            }
        }
        Ok(id)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransferError> {
        self.poll_requests();
        let outcome = self.agent.notifications(&mut self.received);
        events.extend(self.ready.drain(..));
        events.extend(self.received.drain(..).map(|payload| Event::Notified { payload }));
        outcome
    }

    fn lane(&mut self, direction: Direction) -> Option<Lane> {
        log::lane(direction)
    }

    fn settings(&self) -> Vec<Setting> {
        self.settings.clone()
    }
}

impl Drop for NixlTransport {
    fn drop(&mut self) {
        let deadline = Instant::now() + DRAIN;
        while !self.in_flight.is_empty() && Instant::now() < deadline {
            self.poll_requests();
            std::thread::sleep(Duration::from_micros(50));
        }
        if !self.in_flight.is_empty() {
            tracing::warn!(
                requests = self.in_flight.len(),
                "NIXL requests still run at shutdown: agent and pool stay"
            );
            // The agent holds a clone of the pool, so neither goes while the library may use it.
            return;
        }
        for (_, peer) in self.peers.drain() {
            self.agent.forget_remote(&peer.remote);
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.agent) };
    }
}
