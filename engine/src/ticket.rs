//! The two halves of a ticket: what the prefill and what the decode worker know of it.

use std::collections::VecDeque;
use std::time::Duration;

use transfer::{Direction, PeerId};

use crate::handoff::{PrefillTiming, TicketId, Totals};

/// (Prefill worker) the state of a ticket.
#[derive(Debug)]
pub struct Push {
    pub peer: PeerId,
    pub ticket: TicketId,
    /// Who moves the KV: we write, or the decode worker reads.
    pub direction: Direction,
    pub checksum: bool,
    pub grant: Option<Grant>,
    /// Prompt blocks `..pushed` need no further write; read: they are offered.
    pub pushed: usize,
    /// Of the blocks from `pushed` on that the step under way completes, layers `..layers` are posted.
    pub layers: usize,
    /// When each write that has not settled was posted, in order.
    pub in_flight: VecDeque<Duration>,
    pub totals: Totals,
    pub post: Duration,
    /// Time during which a write was under way.
    pub wire: Duration,
    /// The decode worker has read all it lacked.
    pub read: bool,
    /// Why the ticket ends without `Complete`, once that is so.
    pub ending: Option<Ending>,
    /// True after a write failed: the bytes may still be on their way.
    pub unclean: bool,
    pub first_token_at: Option<Duration>,
    /// When the last of the writes so far had settled, by the transport's clock.
    pub settled_at: Duration,
    pub lease_until: Duration,
}

impl Push {
    pub fn new(
        peer: PeerId,
        ticket: TicketId,
        direction: Direction,
        checksum: bool,
        lease_until: Duration,
    ) -> Self {
        Self {
            peer,
            ticket,
            direction,
            checksum,
            grant: None,
            pushed: 0,
            layers: 0,
            in_flight: VecDeque::new(),
            totals: Totals::default(),
            post: Duration::ZERO,
            wire: Duration::ZERO,
            read: false,
            ending: None,
            unclean: false,
            first_token_at: None,
            settled_at: Duration::ZERO,
            lease_until,
        }
    }

    /// Everything is where the decode worker wants it.
    pub fn is_written(&self) -> bool {
        match self.direction {
            Direction::Read => self.read,
            Direction::Write => {
                self.grant.as_ref().is_some_and(|grant| self.pushed == grant.first_block + grant.blocks.len())
            }
        }
    }
}

/// Where the decode worker wants the prompt's blocks from `first_block` on.
#[derive(Debug)]
pub struct Grant {
    pub first_block: usize,
    pub blocks: Vec<u32>,
}

/// How a ticket ends other than by completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The decode worker, or the first token, ended the request.
    Ended,
    Failed(String),
    /// The peer is gone: nobody to tell.
    PeerLost,
}

/// Where a request's KV comes from, other than from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// A prefill worker computes the prompt and the first token.
    Prefill(Direction),
    /// A prefill worker keeps the prompt's KV from an earlier request; the first token is made here.
    Kept,
}

impl Source {
    /// Who moves the KV.
    pub fn direction(self) -> Direction {
        match self {
            Source::Prefill(direction) => direction,
            Source::Kept => Direction::Read,
        }
    }
}

/// (Decode worker) the prompt's KV is made by a prefill worker.
#[derive(Debug)]
pub struct Remote {
    pub peer: PeerId,
    pub ticket: TicketId,
    pub source: Source,
    /// Index in the block table of the first granted block; earlier ones were cached here. `None`: no grant yet.
    pub granted_from: Option<usize>,
    /// What `Complete` said, if it came before the last notification: then nothing more is written.
    pub complete: Option<Completed>,
    /// What has arrived of the granted blocks.
    pub arrived: Arrived,
    /// Blocks that may be read and are not yet.
    pub offers: Vec<Offered>,
    /// Prompt blocks `..offered` may be read.
    pub offered: usize,
    /// Reads posted and not settled.
    pub reads: usize,
    /// What was read.
    pub totals: Totals,
    pub post: Duration,
    pub wire: Duration,
    /// When we sent the last message that the prefill worker has answered: the lease runs from here at least.
    pub renewed_at: Duration,
    /// How long it runs, once an offer has said so.
    pub lease: Duration,
}

impl Remote {
    pub fn new(peer: PeerId, ticket: TicketId, source: Source, now: Duration) -> Self {
        Self {
            peer,
            ticket,
            source,
            granted_from: None,
            complete: None,
            arrived: Arrived::default(),
            offers: Vec::new(),
            offered: 0,
            reads: 0,
            totals: Totals::default(),
            post: Duration::ZERO,
            wire: Duration::ZERO,
            renewed_at: now,
            lease: Duration::ZERO,
        }
    }

    /// Whether the prefill worker may have seen the end of a ticket that wants prompt blocks `..wanted`: it has written them all,
    /// or they are all being read. Reads are believed only within the lease, which ends here first if it was given up instead.
    pub fn may_be_over(&self, wanted: usize) -> bool {
        self.complete.is_some() || self.reads > 0 && self.offers.is_empty() && self.offered >= wanted
    }
}

/// Blocks of a prefill worker that hold a part of the prompt's KV.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offered {
    /// Index in the prompt of the first of them.
    pub first_block: usize,
    pub blocks: Vec<u32>,
    pub checksums: Vec<u64>,
}

/// A prefill worker's word that a ticket's KV is written.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    pub at: Duration,
    pub totals: Totals,
    pub timing: PrefillTiming,
}

/// Which layers of which granted blocks have arrived.
#[derive(Debug, Default)]
pub struct Arrived {
    layers: usize,
    /// By block, then layer.
    seen: Vec<bool>,
    missing: usize,
}

impl Arrived {
    pub fn new(blocks: usize, layers: usize) -> Self {
        Self { layers, seen: vec![false; blocks * layers], missing: blocks * layers }
    }

    /// Granted blocks.
    pub fn blocks(&self) -> usize {
        self.seen.len().checked_div(self.layers).unwrap_or(0)
    }

    pub fn is_complete(&self) -> bool {
        self.missing == 0
    }

    /// Notes that layers `first_layer..first_layer + layers` of `blocks` granted blocks from `first` on are here. False, and
    /// nothing noted, if some of it is there already or was not granted.
    pub fn mark(&mut self, first: usize, blocks: usize, first_layer: usize, layers: usize) -> bool {
        let within = |first: usize, count: usize, end: usize| {
            count > 0 && first.checked_add(count).is_some_and(|last| last <= end)
        };
        if !within(first, blocks, self.blocks()) || !within(first_layer, layers, self.layers) {
            return false;
        }
        let ranges = (first..first + blocks).map(|block| {
            let start = block * self.layers + first_layer;
            start..start + layers
        });
        if ranges.clone().any(|range| self.seen[range].contains(&true)) {
            return false;
        }
        ranges.for_each(|range| self.seen[range].fill(true));
        self.missing -= blocks * layers;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_of_blocks_count_once_and_only_if_granted() {
        let mut arrived = Arrived::new(3, 4);
        assert_eq!(arrived.blocks(), 3);
        assert!(arrived.mark(1, 2, 0, 3));
        assert!(!arrived.mark(0, 2, 2, 1), "block 1, layer 2 is there");
        for (first, blocks, first_layer, layers) in
            [(0, 4, 0, 1), (3, 1, 0, 1), (0, 1, 3, 2), (0, 0, 0, 1), (0, 1, 0, 0), (usize::MAX, 2, 0, 1)]
        {
            assert!(
                !arrived.mark(first, blocks, first_layer, layers),
                "{first} {blocks} {first_layer} {layers}"
            );
        }
        assert!(arrived.mark(0, 1, 0, 4) && !arrived.is_complete());
        assert!(arrived.mark(1, 2, 3, 1) && arrived.is_complete());
        assert!(Arrived::new(0, 4).is_complete());
    }
}
