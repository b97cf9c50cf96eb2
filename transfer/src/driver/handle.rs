//! The driver as others see it.

use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Instant;

use super::{Command, Post, TransportInfo};
use crate::error::TransferError;
use crate::probe::{Introduction, ProbeReport};
use crate::transport::{Direction, PeerId, Span};

/// Sends commands to a driver's thread. The thread ends, and with it the transport, at [`DriverHandle::stop`] or
/// when the last clone is dropped.
#[derive(Clone)]
pub struct DriverHandle {
    commands: SyncSender<Command>,
    thread: Arc<Mutex<Option<JoinHandle<()>>>>,
    info: Arc<TransportInfo>,
    metadata: Arc<[u8]>,
}

impl DriverHandle {
    pub(super) fn new(
        commands: SyncSender<Command>,
        thread: JoinHandle<()>,
        info: TransportInfo,
        introduction: &Introduction,
    ) -> Self {
        let metadata = rmp_serde::to_vec_named(introduction).expect("plain struct serializes");
        Self {
            commands,
            thread: Arc::new(Mutex::new(Some(thread))),
            info: Arc::new(info),
            metadata: metadata.into(),
        }
    }

    /// What a peer's driver needs for [`DriverHandle::add_peer`].
    pub fn metadata(&self) -> &[u8] {
        &self.metadata
    }

    pub fn transport(&self) -> &TransportInfo {
        &self.info
    }

    /// Makes a peer known from its driver's [`DriverHandle::metadata`]. Waits for the thread, and so up to a connection
    /// attempt.
    pub fn add_peer(&self, peer: PeerId, metadata: Vec<u8>) -> Result<(), TransferError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::AddPeer { peer, metadata, reply })?;
        answer.recv().map_err(|_| TransferError::Stopped)?
    }

    /// See [`crate::Transport::remove_peer`]. Returns before it happened.
    pub fn remove_peer(&self, peer: PeerId) -> Result<(), TransferError> {
        self.send(Command::RemovePeer(peer))
    }

    /// Starts a write; how it went comes as [`super::DriverEvent::Settled`] with `tag`, whatever happens, unless this
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

    /// As [`DriverHandle::post_write`] or [`DriverHandle::post_read`].
    pub fn post(
        &self,
        direction: Direction,
        peer: PeerId,
        spans: Vec<Span>,
        notification: Vec<u8>,
        tag: u64,
    ) -> Result<(), TransferError> {
        let queued = Instant::now();
        self.send(Command::Post(Post { direction, peer, spans, notification, tag, queued }))
    }

    /// Measures the way to a peer whose driver knows us, too; see [`crate::probe`]. Blocks for some 100 ms, at most for
    /// the five seconds after which the self-test has failed.
    ///
    /// Errors: the peer is not known or has no scratch blocks, a transfer failed, no answer.
    pub fn probe(&self, peer: PeerId) -> Result<ProbeReport, TransferError> {
        let (reply, answer) = sync_channel(1);
        self.send(Command::Probe { peer, reply })?;
        answer.recv().map_err(|_| TransferError::Stopped)?
    }

    /// How many tickets are open that peers write for or read for: while there are any the thread polls often, and for a
    /// moment after each call very often.
    pub fn expect_traffic(&self, tickets: usize) -> Result<(), TransferError> {
        self.send(Command::ExpectTraffic(tickets))
    }

    /// Stops the thread and drops the transport. Transfers under way end without an event. Must not be called from
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
