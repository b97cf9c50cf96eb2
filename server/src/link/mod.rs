//! The control link between a decode and a prefill worker: one WebSocket, opened by the decode worker.
//!
//! First each side says [`transfer::Hello`] (who it is, what its KV looks like, how to reach its pool) and the prefill
//! worker refuses a peer that does not fit, naming both values. Then messages about tickets go both ways, in order, until
//! the connection ends. Both sides notice a silent peer: the decode worker pings, the prefill worker expects to hear it.
//!
//! A link that ends is `PeerDown` for the engine. `PeerGone`, the promise that the old peer writes no more, follows when
//! the peer's port refuses connections (the process is dead) or a new handshake succeeds: the prefill worker answers
//! one only after everything of the earlier links of that decode worker has ended, and a new incarnation is a new process.

pub mod client;
pub mod demand;
pub mod frame;
pub mod peers;
pub mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use engine::EngineHandle;
use transfer::probe::ProbeReport;
use transfer::{Direction, DriverHandle, PeerId, TransferError};

use self::frame::Greeting;
use crate::args::KvDirection;

/// The path of the link on a prefill worker's port.
pub const PATH: &str = "/kv/v1/link";

/// Pings of the decode worker in the time after which a silent peer is lost, so that one slow moment on a busy machine is
/// no loss.
pub(crate) const PINGS: u32 = 5;

/// Reads must be so much faster than writes for `auto` to pull: pushed KV overlaps with its computation layer by layer.
const CLEARLY_FASTER: f64 = 1.5;

/// How long either side waits for the other's part of the handshake.
pub(crate) const HANDSHAKE: Duration = Duration::from_secs(10);

/// Why two workers do not fit, in words that are true on both.
pub(crate) fn misfit(field: &str, prefill: &str, decode: &str) -> String {
    format!("{field} differs: the prefill worker has {prefill}, the decode worker has {decode}")
}

/// An incarnation as it is written in `kv_transfer_params`.
pub(crate) fn engine_id(incarnation: u64) -> String {
    format!("{incarnation:016x}")
}

/// What both ends of a link need.
#[derive(Clone)]
pub struct LinkContext {
    pub engine: EngineHandle,
    pub driver: DriverHandle,
    /// What this process says of itself.
    pub greeting: Arc<Greeting>,
    /// A peer that says nothing for this long is lost.
    pub silence: Duration,
    pub direction: KvDirection,
    next_peer: Arc<AtomicU64>,
}

impl LinkContext {
    pub fn new(
        engine: EngineHandle,
        driver: DriverHandle,
        greeting: Greeting,
        silence: Duration,
        direction: KvDirection,
    ) -> Self {
        let next_peer = Arc::new(AtomicU64::new(1));
        Self { engine, driver, greeting: Arc::new(greeting), silence, direction, next_peer }
    }

    /// Names this process to those that hold a reference to its KV.
    pub fn engine_id(&self) -> String {
        engine_id(self.greeting.hello.incarnation)
    }

    /// Who moves the KV of prompts that a linked prefill worker computes.
    pub(crate) fn direction(&self, probed: Option<&ProbeReport>) -> Direction {
        let rate = |direction| probed.and_then(|report| report.gb_per_s(direction)).unwrap_or(0.0);
        let reads_faster = rate(Direction::Read) > rate(Direction::Write) * CLEARLY_FASTER;
        match (self.direction, reads_faster) {
            (KvDirection::Push, _) | (KvDirection::Auto, false) => Direction::Write,
            (KvDirection::Pull, _) | (KvDirection::Auto, true) => Direction::Read,
        }
    }

    /// Measures the way to a peer that knows us. `None`, and a warning, if that fails: KV may move all the same.
    pub(crate) async fn probe(&self, peer: PeerId) -> Option<ProbeReport> {
        let driver = self.driver.clone();
        let probing = tokio::task::spawn_blocking(move || driver.probe(peer));
        match probing.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic())) {
            Ok(report) => {
                tracing::info!(?peer, %report, "KV transport probed");
                for complaint in report.complaints(self.driver.transport().name) {
                    tracing::warn!(?peer, complaint, "the KV transport does not do what was asked");
                }
                Some(report)
            }
            Err(error) => {
                tracing::warn!(?peer, %error, "the KV transport could not be probed");
                None
            }
        }
    }

    /// A number for a peer behind a new link.
    pub(crate) fn new_peer(&self) -> PeerId {
        PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed))
    }

    /// Makes the peer known to the transport, which may take a connection attempt.
    pub(crate) async fn add_peer(&self, peer: PeerId, metadata: Vec<u8>) -> Result<(), TransferError> {
        let driver = self.driver.clone();
        let adding = tokio::task::spawn_blocking(move || driver.add_peer(peer, metadata));
        adding.await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
    }
}
