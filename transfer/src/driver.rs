//! The thread that owns a transport: commands in, events out.
//!
//! It polls hot only while transfers run or traffic is expected, and even then gives the core away between polls:
//! a peer that shares the core must run for anything to arrive.

use std::collections::HashMap;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use crate::error::TransferError;
use crate::transport::{Direction, Event, PeerId, Span, Transport, XferId};

/// Commands that wait for the thread. It takes them between two polls, so they are few; a caller that gets
/// ahead waits.
const QUEUE: usize = 1024;

/// Sleep while nothing is under way: how late an unexpected notification may be. 500 polls a second cost less
/// than 1 % of a core.
const IDLE: Duration = Duration::from_millis(2);

/// Polls that only yield after the last sign of progress, before the thread starts to sleep between polls.
const YIELDS: u32 = 16;

/// Sleep between fruitless polls while traffic is expected: far below a transfer's milliseconds, long enough to
/// leave the core to whoever produces the traffic.
const NAP: Duration = Duration::from_micros(30);

/// What a driver reports, from its own thread.
#[derive(Debug)]
pub enum DriverEvent {
    /// The transfer posted with `tag` is over: see [`Event::Settled`]. Also when it could not be posted.
    Settled { tag: u64, peer: PeerId, result: Result<crate::XferStats, TransferError> },
    /// See [`Event::Notified`].
    Notified { payload: Vec<u8> },
    /// See [`Event::PeerLost`]. The peer should be removed, then may be added again.
    PeerLost { peer: PeerId, error: TransferError },
}

/// Receives a driver's events. Must not block: it runs between two polls.
pub type OnEvent = Box<dyn FnMut(DriverEvent) + Send>;

enum Command {
    AddPeer { peer: PeerId, metadata: Vec<u8>, reply: SyncSender<Result<(), TransferError>> },
    RemovePeer(PeerId),
    Post { direction: Direction, peer: PeerId, spans: Vec<Span>, notification: Vec<u8>, tag: u64 },
    ExpectTraffic(usize),
    Stop,
}

/// Sends commands to a driver's thread. The thread ends, and with it the transport, at [`DriverHandle::stop`] or
/// when the last clone is dropped.
#[derive(Clone)]
pub struct DriverHandle {
    commands: SyncSender<Command>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
}

/// Starts drivers.
pub struct Driver {
    transport: Box<dyn Transport>,
    on_event: OnEvent,
    tags: HashMap<XferId, u64>,
    expected: usize,
    events: Vec<Event>,
    failing: bool,
}

impl Driver {
    /// Starts the thread.
    ///
    /// Panics when the system gives no thread.
    pub fn spawn(transport: Box<dyn Transport>, on_event: OnEvent) -> DriverHandle {
        let (commands, queue) = sync_channel(QUEUE);
        let driver = Self {
            transport,
            on_event,
            tags: HashMap::new(),
            expected: 0,
            events: Vec::new(),
            failing: false,
        };
        let thread = thread::Builder::new()
            .name("kv-transfer".into())
            .spawn(move || driver.run(&queue))
            .expect("the system gives a thread at start");
        DriverHandle { commands, thread: Arc::new(Mutex::new(Some(thread))) }
    }

    fn run(mut self, queue: &Receiver<Command>) {
        let mut fruitless = 0;
        loop {
            let hot = self.expected > 0 || !self.tags.is_empty();
            let command = if hot {
                queue.try_recv().map_err(|e| matches!(e, TryRecvError::Disconnected))
            } else {
                queue.recv_timeout(IDLE).map_err(|e| matches!(e, RecvTimeoutError::Disconnected))
            };
            let commanded = match command {
                Ok(Command::Stop) | Err(true) => return,
                Ok(command) => {
                    self.obey(command);
                    true
                }
                Err(false) => false,
            };
            fruitless = if self.poll() || commanded { 0 } else { fruitless + 1 };
            if hot && fruitless > 0 {
                rest(fruitless);
            }
        }
    }

    fn obey(&mut self, command: Command) {
        match command {
            Command::AddPeer { peer, metadata, reply } => {
                // A caller that no longer waits does not want the answer.
                let _ = reply.send(self.transport.add_peer(peer, &metadata));
            }
            Command::RemovePeer(peer) => self.transport.remove_peer(peer),
            Command::Post { direction, peer, spans, notification, tag } => {
                match self.transport.post(direction, peer, &spans, &notification) {
                    Ok(xfer) => drop(self.tags.insert(xfer, tag)),
                    Err(error) => (self.on_event)(DriverEvent::Settled { tag, peer, result: Err(error) }),
                }
            }
            Command::ExpectTraffic(tickets) => self.expected = tickets,
            Command::Stop => unreachable!("handled by run. This is a bug."),
        }
    }

    /// True when something happened.
    fn poll(&mut self) -> bool {
        let outcome = self.transport.poll(&mut self.events);
        if let (Err(error), false) = (&outcome, self.failing) {
            tracing::error!(%error, transport = self.transport.name(), "polling the KV transport fails");
        }
        self.failing = outcome.is_err();
        let happened = !self.events.is_empty();
        for event in self.events.drain(..) {
            let event = match event {
                Event::Settled { xfer, peer, result } => {
                    let tag = self.tags.remove(&xfer).expect("each transfer settles once. This is a bug.");
                    DriverEvent::Settled { tag, peer, result }
                }
                Event::Notified { payload } => DriverEvent::Notified { payload },
                Event::PeerLost { peer, error } => DriverEvent::PeerLost { peer, error },
            };
            (self.on_event)(event);
        }
        happened
    }
}

fn rest(fruitless: u32) {
    if fruitless <= YIELDS {
        thread::yield_now();
    } else {
        thread::sleep(NAP);
    }
}

impl DriverHandle {
    /// Makes a peer known. Waits for the thread, and so up to a connection attempt.
    pub fn add_peer(&self, peer: PeerId, metadata: Vec<u8>) -> Result<(), TransferError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::AddPeer { peer, metadata, reply })?;
        answer.recv().map_err(|_| TransferError::Stopped)?
    }

    /// See [`Transport::remove_peer`]. Returns before it happened.
    pub fn remove_peer(&self, peer: PeerId) -> Result<(), TransferError> {
        self.send(Command::RemovePeer(peer))
    }

    /// Starts a write; how it went comes as [`DriverEvent::Settled`] with `tag`, whatever happens, unless this
    /// fails: then the thread has stopped.
    pub fn post_write(
        &self,
        peer: PeerId,
        spans: Vec<Span>,
        notification: Vec<u8>,
        tag: u64,
    ) -> Result<(), TransferError> {
        self.post(Direction::Write, peer, spans, notification, tag)
    }

    /// Starts a read; else as [`DriverHandle::post_write`]. The peer gets `notification` when all bytes are here.
    pub fn post_read(
        &self,
        peer: PeerId,
        spans: Vec<Span>,
        notification: Vec<u8>,
        tag: u64,
    ) -> Result<(), TransferError> {
        self.post(Direction::Read, peer, spans, notification, tag)
    }

    fn post(
        &self,
        direction: Direction,
        peer: PeerId,
        spans: Vec<Span>,
        notification: Vec<u8>,
        tag: u64,
    ) -> Result<(), TransferError> {
        self.send(Command::Post { direction, peer, spans, notification, tag })
    }

    /// How many tickets are open that peers write for or read for: while there are any the thread polls often.
    pub fn expect_traffic(&self, tickets: usize) -> Result<(), TransferError> {
        self.send(Command::ExpectTraffic(tickets))
    }

    /// Stops the thread and drops the transport. Writes under way end without an event. Must not be called from
    /// the event callback.
    pub fn stop(&self) {
        // Fails when the thread has ended already.
        let _ = self.send(Command::Stop);
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread
            && let Err(panic) = thread.join()
        {
            std::panic::resume_unwind(panic);
        }
    }

    fn send(&self, command: Command) -> Result<(), TransferError> {
        self.commands.send(command).map_err(|_| TransferError::Stopped)
    }
}
