//! Blocks of requests that are over, while somebody may still write them.

use transfer::PeerId;

use super::Core;
use crate::handoff::TicketId;
use crate::pool::{BlockId, Holder};

/// Who may still write into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Writer {
    /// A prefill worker, until it has said that the ticket is over or is known dead.
    Peer(PeerId),
    /// Reads of our own, so many, until they have settled.
    Reads(usize),
}

/// What a ticket left behind.
#[derive(Debug)]
pub(super) struct Quarantined {
    writer: Writer,
    pub(super) blocks: Vec<BlockId>,
}

impl Core {
    pub(super) fn quarantine(&mut self, ticket: TicketId, writer: Writer, blocks: Vec<BlockId>) {
        blocks.iter().for_each(|&block| self.pool.reassign(block, Holder::Quarantined));
        self.quarantine.insert(ticket, Quarantined { writer, blocks });
    }

    /// `peer` has said that it writes no more for a ticket. False if nothing of it was in quarantine for that.
    pub(super) fn end_quarantine_of(&mut self, ticket: TicketId, peer: PeerId) -> bool {
        let awaited = self.quarantine.get(&ticket).is_some_and(|left| left.writer == Writer::Peer(peer));
        if awaited {
            self.end_quarantine(ticket);
        }
        awaited
    }

    /// `peer` writes nothing any more.
    pub(super) fn end_quarantines_of(&mut self, peer: PeerId) {
        let ended: Vec<_> = self
            .quarantine
            .iter()
            .filter(|(_, left)| left.writer == Writer::Peer(peer))
            .map(|(t, _)| *t)
            .collect();
        ended.into_iter().for_each(|ticket| self.end_quarantine(ticket));
    }

    /// One of our reads for a ticket that is over has settled. False if none was awaited.
    pub(super) fn read_left(&mut self, ticket: TicketId) -> bool {
        let Some(Quarantined { writer: Writer::Reads(left), .. }) = self.quarantine.get_mut(&ticket) else {
            return false;
        };
        *left -= 1;
        if *left == 0 {
            self.end_quarantine(ticket);
        }
        true
    }

    fn end_quarantine(&mut self, ticket: TicketId) {
        if let Some(left) = self.quarantine.remove(&ticket) {
            self.pool.release_chain(&left.blocks);
        }
    }
}
