//! What goes into the core and what comes out of it.

use std::time::Duration;

use transfer::{PeerId, Span};

use super::{Fetch, ReadRange};
use crate::api::{KvFault, Output, SamplingParams, TokenId};
use crate::event::PeerRole;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, Totals, WriteNote};

/// Something that happened outside.
#[derive(Clone, Debug)]
pub enum Input {
    Submit(Submit),
    Abort(RequestId),
    /// The text has ended, as its reader knows: a stop string was found in it.
    Finish(RequestId),
    PeerUp(PeerId, PeerRole),
    PeerDown(PeerId),
    PeerGone(PeerId),
    FromDecode(PeerId, ToPrefill),
    FromPrefill(PeerId, ToDecode),
    /// A write posted for `id` is over.
    Settled {
        id: RequestId,
        result: Result<Written, String>,
    },
    /// A notification on the data path. `intact`: the bytes it names have the checksums it brought, if it did.
    Notified {
        bytes: Vec<u8>,
        intact: bool,
    },
    /// A read is over.
    ReadSettled {
        range: ReadRange,
        result: Result<Written, ReadFault>,
    },
    ResetPrefixCache,
}

/// Why bytes that were read cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReadFault {
    Failed(String),
    /// They do not have their checksums.
    Corrupt,
}

/// A client's request.
#[derive(Clone, Debug)]
pub struct Submit {
    pub id: RequestId,
    pub request_id: String,
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub cache_salt: Option<String>,
    pub seed: u64,
    /// Keep the prompt's KV beyond the answer's end.
    pub keep: bool,
    /// Where the prompt's KV is to be had.
    pub fetch: Option<Fetch>,
    pub arrival: Duration,
    pub deadline: Duration,
}

/// What one settled transfer cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Written {
    pub post: Duration,
    pub wire: Duration,
}

/// Something the outside must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    Output(RequestId, Output),
    /// The request left the queue (or never entered it): it no longer counts against the queue's limit.
    Dequeued(RequestId),
    Send(PeerId, PeerMessage),
    Post {
        id: RequestId,
        peer: PeerId,
        spans: Vec<Span>,
        note: WriteNote,
        /// The note is to bring checksums.
        checksum: bool,
    },
    /// Read into our pool, and compare the checksums if there are any.
    Read {
        range: ReadRange,
        peer: PeerId,
        spans: Vec<Span>,
        checksums: Vec<u64>,
    },
    /// Send [`ToDecode::Offer`], with checksums if they are wanted.
    Offer {
        peer: PeerId,
        ticket: TicketId,
        first_block: u32,
        blocks: Vec<u32>,
        last: bool,
        checksum: bool,
    },
    /// The peer failed us on the data path: close its link.
    DropPeer(PeerId),
    /// A ticket ended here with `Complete` (prefill side), for metrics and logs.
    Pushed(Totals, PrefillTiming),
    /// A ticket of ours ended well (decode side).
    Received {
        request_id: String,
        totals: Totals,
        timing: PrefillTiming,
    },
    /// A ticket of ours brought no KV; the prompt is computed here if `recompute`, else its request has failed.
    TicketFailed {
        request_id: String,
        fault: KvFault,
        reason: String,
        recompute: bool,
    },
}

/// Events counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub preemptions: u64,
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    /// Offered to a prefill worker, the part cached here apart.
    pub prompt_tokens_offered: u64,
    pub prompt_tokens_transferred: u64,
    pub generated_tokens: u64,
    pub steps: u64,
    pub step_tokens: u64,
    pub tickets_opened: u64,
    pub tickets_failed: u64,
    /// Requests computed here because a prefill worker failed.
    pub recomputed: u64,
    /// Prompts that no prefill worker takes, since they are too long for each.
    pub prompts_too_long_for_prefill: u64,
    /// Notifications and reads whose bytes did not have their checksums.
    pub checksum_mismatches: u64,
    /// (Prefill worker) prompts kept for a decode worker to claim.
    pub prompts_kept: u64,
    /// (Prefill worker) tickets and kept prompts that nobody asked for within their lease.
    pub kv_expired: u64,
    /// (Prefill worker) claims and last messages about what had expired or was over.
    pub notified_after_expiry: u64,
    /// Messages and notifications that came twice.
    pub stale_duplicate: u64,
    /// Those about tickets that are over.
    pub stale_late: u64,
    /// Those about tickets that never were, as far as is remembered.
    pub stale_unknown: u64,
}
