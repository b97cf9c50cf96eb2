//! The transport over a library that writes and reads a peer's memory itself: what NIXL and UCX have in common.
//!
//! An [`Agent`] knows remotes and posts requests; [`OneSided`] keeps the peers' numbers, sees requests to their end and
//! keeps the promises of [`Transport`].

use std::collections::{HashMap, VecDeque};
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::error::TransferError;
use crate::lane::Lane;
use crate::transport::{
    Direction, Event, Memory, PeerId, Region, Span, Transport, XferId, XferStats, check_spans,
};
use crate::ucx::{Setting, log};

/// How long Drop lets running requests end. A live peer needs milliseconds, a dead one is noticed within 0.4 s.
const DRAIN: Duration = Duration::from_secs(1);

/// How a posted request stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    Running,
    Done,
    Failed(String),
}

/// Where a pool lies.
#[derive(Clone, Copy, Debug)]
pub struct PoolAt {
    /// Address of the first byte, in its own process.
    pub base: u64,
    /// Bytes; `base + len` does not wrap.
    pub len: u64,
    pub memory: Memory,
}

/// The library's handles, used by one thread at a time.
pub trait Agent: Send {
    type Remote: Send;
    type Request: Send;

    /// What a remote agent loads to reach our pool.
    fn metadata(&self) -> Result<Vec<u8>, TransferError>;

    /// Makes a remote agent known whose pool is `pool`.
    fn load_remote(&mut self, metadata: &[u8], pool: PoolAt) -> Result<Self::Remote, TransferError>;

    /// Ends what runs towards the remote, as far as the library can; each request is still seen to its end.
    fn cancel(&mut self, _remote: &Self::Remote) {}

    /// Drops a remote. The caller has no request to it running.
    fn forget_remote(&mut self, remote: Self::Remote);

    /// Posts a transfer of all spans (checked by the caller against both pools) with a notification after it.
    fn post(
        &mut self,
        direction: Direction,
        remote: &Self::Remote,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<(Self::Request, Progress), TransferError>;

    /// Says how the request stands.
    fn progress(&mut self, request: &mut Self::Request) -> Progress;

    /// Gives back a request that is no longer running.
    fn release(&mut self, request: Self::Request);

    /// Makes progress on both sides' transfers and appends the notifications that came.
    fn notifications(&mut self, out: &mut Vec<Vec<u8>>) -> Result<(), TransferError>;
}

#[derive(Serialize, Deserialize)]
struct Metadata {
    base: u64,
    len: u64,
    /// The CUDA device that the pool lies on.
    cuda: Option<u32>,
    #[serde(with = "serde_bytes")]
    library: Vec<u8>,
}

struct Peer<R> {
    remote: R,
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

struct InFlight<Q> {
    id: XferId,
    peer: Slot,
    request: Q,
    stats: XferStats,
    posted: Instant,
}

/// Peers by their own number here: a `PeerId` may be added again while its old connection still drains.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Slot(u64, PeerId);

/// A [`Transport`] over an [`Agent`].
pub struct OneSided<A: Agent> {
    /// Dropped by hand: an agent with requests that will not end is leaked, with the pool it holds.
    agent: ManuallyDrop<A>,
    name: &'static str,
    settings: Vec<Setting>,
    pool: Region,
    metadata: Vec<u8>,
    peers: HashMap<Slot, Peer<A::Remote>>,
    current: HashMap<PeerId, Slot>,
    in_flight: Vec<InFlight<A::Request>>,
    ready: VecDeque<Event>,
    received: Vec<Vec<u8>>,
    next: u64,
}

impl<A: Agent> OneSided<A> {
    /// `agent` has `pool` registered.
    pub fn new(
        agent: A,
        name: &'static str,
        settings: Vec<Setting>,
        pool: Region,
    ) -> Result<Self, TransferError> {
        let metadata = Metadata {
            base: pool.base() as u64,
            len: pool.len() as u64,
            cuda: match pool.memory() {
                Memory::Host => None,
                Memory::Cuda(device) => Some(device),
            },
            library: agent.metadata()?,
        };
        Ok(Self {
            agent: ManuallyDrop::new(agent),
            name,
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
            match self.agent.progress(&mut self.in_flight[index].request) {
                Progress::Running => index += 1,
                settled => {
                    let flight = self.in_flight.remove(index);
                    self.settle(flight, settled);
                }
            }
        }
    }

    fn settle(&mut self, flight: InFlight<A::Request>, progress: Progress) {
        self.agent.release(flight.request);
        let Slot(_, peer_id) = flight.peer;
        let peer = self.peers.get_mut(&flight.peer).expect("a peer outlives its requests. This is a bug.");
        peer.running -= 1;
        let result = match (&peer.leaving, progress) {
            (Some(Leaving::Removed), _) => Err(TransferError::Aborted(peer_id)),
            (_, Progress::Failed(status)) => {
                let error = TransferError::Wire(status);
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
        self.agent.forget_remote(peer.remote);
        if self.current.get(&slot.1) == Some(&slot) {
            self.current.remove(&slot.1);
        }
        if let Some(Leaving::Lost(error)) = peer.leaving {
            self.ready.push_back(Event::PeerLost { peer: slot.1, error });
        }
    }
}

impl<A: Agent> Transport for OneSided<A> {
    fn name(&self) -> &'static str {
        self.name
    }

    fn enter_thread(&mut self) -> Result<(), TransferError> {
        self.pool.bind_thread()
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
        let memory = metadata.cuda.map_or(Memory::Host, Memory::Cuda);
        let pool = PoolAt { base: metadata.base, len: metadata.len, memory };
        let remote = self.agent.load_remote(&metadata.library, pool)?;
        let slot = Slot(self.number(), peer);
        self.peers.insert(slot, Peer { remote, pool: metadata.len, leaving: None, running: 0 });
        self.current.insert(peer, slot);
        Ok(())
    }

    /// What the library cannot call back is reported aborted when it has ended.
    fn remove_peer(&mut self, peer: PeerId) {
        let Some(slot) = self.current.remove(&peer) else { return };
        if let Some(peer) = self.peers.get_mut(&slot) {
            peer.leaving = Some(Leaving::Removed);
            self.agent.cancel(&peer.remote);
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
                let (post, descriptors) = (posted.elapsed(), spans.len() as u32);
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
        let outcome = self.agent.notifications(&mut self.received);
        self.poll_requests();
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

impl<A: Agent> Drop for OneSided<A> {
    fn drop(&mut self) {
        let deadline = Instant::now() + DRAIN;
        while !self.in_flight.is_empty() && Instant::now() < deadline {
            // What comes now nobody waits for.
            let _ = self.agent.notifications(&mut self.received);
            self.poll_requests();
            std::thread::sleep(Duration::from_micros(50));
        }
        if !self.in_flight.is_empty() {
            tracing::warn!(
                requests = self.in_flight.len(),
                transport = self.name,
                "transfers still run at shutdown: the library and the pool stay"
            );
            // The agent holds a clone of the pool, so neither goes while the library may use it.
            return;
        }
        for (_, peer) in self.peers.drain() {
            self.agent.forget_remote(peer.remote);
        }
        // SAFETY: dropped once, here, and not used again.
        unsafe { ManuallyDrop::drop(&mut self.agent) };
    }
}

#[cfg(test)]
mod tests {
    use std::ptr::NonNull;
    use std::sync::Arc;
    use std::sync::mpsc::{Sender, channel};

    use super::*;
    use crate::driver::Driver;
    use crate::transport::{DeviceMemory, HostMemory};
    use crate::{DriverEvent, Identity};

    /// Says which threads polled.
    struct Library(Sender<String>);

    impl Agent for Library {
        type Remote = ();
        type Request = ();

        fn metadata(&self) -> Result<Vec<u8>, TransferError> {
            Ok(Vec::new())
        }

        fn load_remote(&mut self, _: &[u8], _: PoolAt) -> Result<(), TransferError> {
            Ok(())
        }

        fn forget_remote(&mut self, (): ()) {}

        fn post(
            &mut self,
            _: Direction,
            (): &(),
            _: &[Span],
            _: &[u8],
        ) -> Result<((), Progress), TransferError> {
            Ok(((), Progress::Done))
        }

        fn progress(&mut self, (): &mut ()) -> Progress {
            Progress::Done
        }

        fn release(&mut self, (): ()) {}

        fn notifications(&mut self, _: &mut Vec<Vec<u8>>) -> Result<(), TransferError> {
            drop(self.0.send(format!("poll on {}", thread_name())));
            Ok(())
        }
    }

    /// Says which threads it was made current on.
    struct Device(Sender<String>);

    impl DeviceMemory for Device {
        fn read(&self, _: usize, _: &mut [u8]) -> Result<(), String> {
            unreachable!("the library reaches the memory itself")
        }

        fn write(&self, _: usize, _: &[u8]) -> Result<(), String> {
            unreachable!("the library reaches the memory itself")
        }

        fn bind_thread(&self) -> Result<(), String> {
            drop(self.0.send(format!("bind on {}", thread_name())));
            Ok(())
        }

        fn check_export(&self) -> Result<(), String> {
            Ok(())
        }

        fn staging(&self, _: usize) -> Result<Box<dyn HostMemory>, String> {
            unreachable!("the library stages")
        }
    }

    fn thread_name() -> String {
        std::thread::current().name().unwrap_or_default().to_owned()
    }

    /// UCX asks the driver for the thread's device when it copies: a thread without one moves nothing.
    #[test]
    fn the_drivers_thread_has_the_pools_device_before_it_calls_the_library() {
        let (said, heard) = channel();
        // SAFETY: nothing touches the bytes.
        let pool = unsafe { Region::new(NonNull::dangling(), 64, Arc::new(())) };
        let pool = pool.on_device(Memory::Cuda(0), Arc::new(Device(said.clone())));
        let transport = OneSided::new(Library(said), "library", Vec::new(), pool).unwrap();
        let driver = Driver::spawn(Box::new(transport), Identity::default(), Box::new(|_: DriverEvent| ()));
        let next = || heard.recv_timeout(Duration::from_secs(10)).unwrap();
        assert_eq!([next(), next()], ["bind on kv-transfer", "poll on kv-transfer"]);
        driver.stop();
    }
}
