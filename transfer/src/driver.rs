//! The thread that owns a transport: commands in, events out.
//!
//! It polls hot only while transfers run or traffic is expected, and even then gives the core away between polls:
//! a peer that shares the core must run for anything to arrive.

mod handle;
mod probing;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

pub use self::handle::DriverHandle;
use self::probing::{Known, Probe};
use crate::error::TransferError;
use crate::lane::Lane;
use crate::probe::{Introduction, Note, ProbeReport, Scratch};
use crate::socket::mapped;
use crate::transport::{Direction, Event, PeerId, Span, Transport, XferId, XferStats};
use crate::ucx::Setting;

/// Commands that wait for the thread. It takes them between two polls, so they are few; a caller that gets
/// ahead waits.
const QUEUE: usize = 1024;

/// Sleep while nothing is under way: how late an unexpected notification may be.
const IDLE: Duration = Duration::from_millis(2);

/// The longest sleep, after long quiet. On cores that compute, a poll finds all caches cold and takes 40 to 90 us, and the
/// kernel that it interrupts takes some more to catch up: 500 a second on both sides made a prompt 5 % slower.
const LONG_IDLE: Duration = Duration::from_millis(10);

/// Polls that only yield after the last sign of progress, before the thread starts to sleep between polls.
const YIELDS: u32 = 16;

/// The shortest sleep between fruitless polls: far below a transfer's milliseconds, long enough to leave the core to whoever
/// produces the traffic.
const NAP: Duration = Duration::from_micros(30);

/// While a transfer of ours is under way, a nap is this share of the time that nothing has happened for, and at most
/// [`IDLE`]: one that takes 40 ms because its cores compute is not asked for a thousand times.
const AWAITED_SHARE: u32 = 16;

/// While peers compute what they will write, a nap is this share of the time that nothing has come for, and at most
/// [`LONG_IDLE`]: what comes is seen later by a sixteenth of its own time at most, and a prompt of seconds, on cores that both
/// sides share, is left alone.
const NAP_SHARE: u32 = 16;

/// Processor time of a poll above which it moved bytes, though nothing was completed by it: well above that of a poll that
/// only finds its caches cold, which would otherwise keep the thread awake for nothing; that of some 600 KB.
const WORKED: Duration = Duration::from_micros(120);

/// How long traffic is about to come after the owner has said so.
const EXPECTED: Duration = Duration::from_millis(20);

/// How long traffic counts as expected after something came from a peer: it rarely comes alone, and a peer that reads
/// from here may need our polls.
const WARM: Duration = Duration::from_millis(2);

/// The same after a peer's ping: its self-test lasts some 100 ms.
const PROBED: Duration = Duration::from_millis(400);

/// What a driver reports, from its own thread.
#[derive(Debug)]
pub enum DriverEvent {
    /// The transfer posted with `tag` is over: see [`Event::Settled`]. Also when it could not be posted. The lane is
    /// what carried it, where that is known.
    Settled { tag: u64, peer: PeerId, result: Result<XferStats, TransferError>, lane: Option<Arc<Lane>> },
    /// See [`Event::Notified`].
    Notified { payload: Vec<u8> },
    /// See [`Event::PeerLost`]. The peer should be removed, then may be added again.
    PeerLost { peer: PeerId, error: TransferError },
}

/// Receives a driver's events. Must not block: it runs between two polls.
pub type OnEvent = Box<dyn FnMut(DriverEvent) + Send>;

/// What peers are told of this process beside the transport's metadata.
#[derive(Clone, Copy, Debug, Default)]
pub struct Identity {
    pub incarnation: u64,
    /// Blocks that self-tests may use; without them there are none.
    pub scratch: Option<Scratch>,
}

/// What a driver's transport is.
#[derive(Clone, Debug)]
pub struct TransportInfo {
    pub name: &'static str,
    pub settings: Vec<Setting>,
}

enum Command {
    AddPeer { peer: PeerId, metadata: Vec<u8>, reply: SyncSender<Result<(), TransferError>> },
    RemovePeer(PeerId),
    Post(Post),
    Probe { peer: PeerId, reply: SyncSender<Result<ProbeReport, TransferError>> },
    ExpectTraffic(usize),
    Stop,
}

struct Post {
    direction: Direction,
    peer: PeerId,
    spans: Vec<Span>,
    notification: Vec<u8>,
    tag: u64,
    queued: Instant,
}

/// Whose a transfer under way is.
enum Owner {
    Caller {
        tag: u64,
        queue: Duration,
    },
    /// The self-test with this nonce.
    Probe(u64),
    /// The answer to a ping.
    Pong,
}

/// Starts drivers.
pub struct Driver {
    transport: Box<dyn Transport>,
    on_event: OnEvent,
    identity: Identity,
    owners: HashMap<XferId, Owner>,
    /// What peers said of themselves, by number; the newest of an incarnation is the live one.
    known: HashMap<PeerId, Known>,
    probes: Vec<Probe>,
    next_nonce: u64,
    expected: usize,
    warm_until: Option<Instant>,
    /// By direction; asked for again whenever there is a new peer.
    lanes: [Option<Arc<Lane>>; 2],
    events: Vec<Event>,
    failing: bool,
}

impl Driver {
    /// Starts the thread.
    ///
    /// Panics when the system gives no thread.
    pub fn spawn(transport: Box<dyn Transport>, identity: Identity, on_event: OnEvent) -> DriverHandle {
        let (commands, queue) = sync_channel(QUEUE);
        let info = TransportInfo { name: transport.name(), settings: transport.settings() };
        let introduction = Introduction {
            incarnation: identity.incarnation,
            scratch: identity.scratch,
            metadata: transport.metadata(),
        };
        let driver = Self {
            transport,
            on_event,
            identity,
            owners: HashMap::new(),
            known: HashMap::new(),
            probes: Vec::new(),
            next_nonce: rand::random(),
            expected: 0,
            warm_until: None,
            lanes: [None, None],
            events: Vec::new(),
            failing: false,
        };
        let thread = thread::Builder::new()
            .name("kv-transfer".into())
            .spawn(move || driver.run(&queue))
            .expect("the system gives a thread at start");
        DriverHandle::new(commands, thread, info, &introduction)
    }

    fn run(mut self, queue: &Receiver<Command>) {
        precise_naps();
        if let Err(error) = self.transport.enter_thread() {
            // Its transfers will fail, and say so to whoever asked for them.
            tracing::error!(%error, transport = self.transport.name(), "the KV transport's thread cannot reach the pool");
        }
        let mut fruitless = 0;
        let mut last_sign = Instant::now();
        loop {
            let quiet = last_sign.elapsed();
            let nap = if self.is_hot() { self.nap(fruitless, quiet) } else { Some(share_of(quiet, IDLE)) };
            let command = match nap {
                Some(nap) => queue.recv_timeout(nap).map_err(|e| matches!(e, RecvTimeoutError::Disconnected)),
                None => queue.try_recv().map_err(|e| matches!(e, TryRecvError::Disconnected)),
            };
            let commanded = match command {
                Ok(Command::Stop) | Err(true) => return,
                Ok(command) => {
                    self.obey(command);
                    true
                }
                Err(false) => false,
            };
            let before = thread_time();
            let happened = self.poll();
            if happened || commanded || thread_time() - before > WORKED {
                (fruitless, last_sign) = (0, Instant::now());
            } else {
                fruitless += 1;
            }
        }
    }

    fn is_hot(&mut self) -> bool {
        if self.warm_until.is_some_and(|until| Instant::now() >= until) {
            self.warm_until = None;
        }
        self.expected > 0 || !self.owners.is_empty() || !self.probes.is_empty() || self.warm_until.is_some()
    }

    fn stay_warm(&mut self, time: Duration) {
        let until = Instant::now() + time;
        self.warm_until = Some(self.warm_until.map_or(until, |known| known.max(until)));
    }

    /// How long to leave the core to others before the next poll, unless there is a command; `None`: not at all. So many
    /// polls have brought nothing, for so long.
    fn nap(&self, fruitless: u32, quiet: Duration) -> Option<Duration> {
        let awaited = !self.owners.is_empty() || !self.probes.is_empty() || self.warm_until.is_some();
        if fruitless <= YIELDS {
            if fruitless > 0 {
                thread::yield_now();
            }
            return None;
        }
        Some(if awaited { (quiet / AWAITED_SHARE).clamp(NAP, IDLE) } else { share_of(quiet, NAP) })
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::AddPeer { peer, metadata, reply } => {
                // A caller that no longer waits does not want the answer.
                let _ = reply.send(self.add_peer(peer, &metadata));
            }
            Command::RemovePeer(peer) => {
                self.known.remove(&peer);
                self.fail_probes(Some(peer), &TransferError::Aborted(peer));
                self.transport.remove_peer(peer);
            }
            Command::Post(post) => self.post(&post),
            Command::Probe { peer, reply } => self.begin_probe(peer, reply),
            Command::ExpectTraffic(tickets) => {
                self.expected = tickets;
                if tickets > 0 {
                    self.stay_warm(EXPECTED);
                }
            }
            Command::Stop => unreachable!("handled by run. This is a bug."),
        }
    }

    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError> {
        let bad = |e: rmp_serde::decode::Error| TransferError::BadMetadata(e.to_string());
        let introduction: Introduction = rmp_serde::from_slice(metadata).map_err(bad)?;
        self.transport.add_peer(peer, &introduction.metadata)?;
        self.lanes = [None, None];
        let Introduction { incarnation, scratch, .. } = introduction;
        self.known.insert(peer, Known { incarnation, scratch });
        Ok(())
    }

    fn post(&mut self, post: &Post) {
        let &Post { direction, peer, ref spans, ref notification, tag, queued } = post;
        let queue = queued.elapsed();
        match self.transport.post(direction, peer, spans, notification) {
            Ok(xfer) => drop(self.owners.insert(xfer, Owner::Caller { tag, queue })),
            Err(error) => (self.on_event)(DriverEvent::Settled { tag, peer, result: Err(error), lane: None }),
        }
    }

    /// True when something happened.
    fn poll(&mut self) -> bool {
        let outcome = self.transport.poll(&mut self.events);
        if let (Err(error), false) = (&outcome, self.failing) {
            tracing::error!(%error, transport = self.transport.name(), "polling the KV transport fails");
        }
        self.failing = outcome.is_err();
        let mut events = std::mem::take(&mut self.events);
        let happened = !events.is_empty();
        for event in events.drain(..) {
            self.take(event);
        }
        self.events = events;
        self.drop_overdue_probes();
        happened
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Settled { xfer, peer, result } => {
                match self.owners.remove(&xfer).expect("each transfer settles once. This is a bug.") {
                    Owner::Caller { tag, queue } => {
                        let result = result.map(|stats| XferStats { queue, ..stats });
                        let lane = result.as_ref().ok().and_then(|stats| self.lane(peer, stats.direction));
                        (self.on_event)(DriverEvent::Settled { tag, peer, result, lane });
                    }
                    Owner::Probe(nonce) => self.probe_settled(nonce, result),
                    Owner::Pong => {}
                }
            }
            Event::Notified { payload } => match Note::decode(&payload) {
                Some(note) => self.noted(note),
                None => {
                    self.stay_warm(WARM);
                    (self.on_event)(DriverEvent::Notified { payload });
                }
            },
            Event::PeerLost { peer, error } => {
                self.fail_probes(Some(peer), &error);
                (self.on_event)(DriverEvent::PeerLost { peer, error });
            }
        }
    }

    /// What carries our transfers with the peer.
    fn lane(&mut self, peer: PeerId, direction: Direction) -> Option<Arc<Lane>> {
        if let Some(is_mapped) = self.transport.has_mapped(peer) {
            return Some(Arc::new(mapped::lane(is_mapped)));
        }
        let known = &mut self.lanes[direction as usize];
        if known.is_none() {
            *known = self.transport.lane(direction).map(Arc::new);
        }
        known.clone()
    }
}

/// How long to sleep after so much quiet, at least `least`.
fn share_of(quiet: Duration, least: Duration) -> Duration {
    (quiet / NAP_SHARE).clamp(least, LONG_IDLE)
}

/// Processor time of the calling thread.
fn thread_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes to `time` only. The clock exists on every Linux; without it, all polls seem to take no time.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The kernel rounds sleeps up by 50 us for most threads, more than a nap is long.
fn precise_naps() {
    // SAFETY: sets a number of the calling thread; a failure leaves naps longer.
    unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1_000 as libc::c_ulong) };
}
