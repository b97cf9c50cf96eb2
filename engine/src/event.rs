//! What reaches the engine's thread.

use std::time::Duration;

use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use transfer::{Direction, DriverEvent, PeerId};

use crate::handle::{RequestId, Submission};
use crate::handoff::PeerMessage;
use crate::kv_events::KvSnapshot;

/// What a peer is to us.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerRole {
    /// It computes prompts for us.
    Prefill(PrefillLink),
    /// We compute prompts for it.
    Decode,
}

/// What a decode worker knows of a prefill worker it is linked to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefillLink {
    /// Who moves the KV of prompts computed there.
    pub direction: Direction,
    /// The longest prompt that it takes.
    pub max_prompt: usize,
    /// How long it keeps a ticket's blocks after the last renewal.
    pub lease: Duration,
    /// It was linked to for KV that it keeps; no prompts are sent there.
    pub on_demand: bool,
}

/// Everything that can happen, in the order in which the engine hears of it.
#[derive(Debug)]
pub enum Event {
    Submit(Submission),
    Abort(RequestId),
    /// The text has ended, as its reader knows.
    Finish(RequestId),
    /// A link stands and the transport knows the peer. Messages to it go into `outbox`, which is bounded by the
    /// protocol: a few messages a ticket.
    PeerUp {
        peer: PeerId,
        role: PeerRole,
        outbox: UnboundedSender<PeerMessage>,
    },
    /// The link is lost. The peer may still write into granted blocks.
    PeerDown(PeerId),
    /// Nothing of this peer can write any more: its process is dead, or it said so in a new handshake.
    PeerGone(PeerId),
    /// Answer when no ticket of this peer is left here.
    AwaitIdle {
        peer: PeerId,
        reply: oneshot::Sender<()>,
    },
    Message {
        peer: PeerId,
        message: PeerMessage,
    },
    Transfer(DriverEvent),
    ResetPrefixCache,
    /// Answer with what is in the prefix cache.
    KvSnapshot(oneshot::Sender<KvSnapshot>),
    /// End the thread; running requests fail.
    Stop,
}
