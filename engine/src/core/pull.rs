//! The decode worker's part of a pulled ticket: claim what is kept, read what is offered.

use std::time::Duration;

use transfer::{PeerId, coalesce};

use super::{Core, Effect, ReadFault, Stale, Written};
use crate::api::KvFault;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, TicketId, ToPrefill};
use crate::ticket::{Offered, Source};

/// KV that a prefill worker keeps, as the client named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fetch {
    /// The link to the worker that keeps it; `None` if there is none, which is for the engine to deal with as with a link
    /// that is lost.
    pub peer: Option<PeerId>,
    /// Under which name.
    pub kept: String,
    /// Prompt tokens that worker found in its cache: for the usage.
    pub cached_tokens: usize,
}

/// Blocks that a read brings, by position in the prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadRange {
    pub ticket: TicketId,
    pub first_block: usize,
    pub blocks: usize,
}

impl Core {
    /// Asks the prefill worker that keeps a new request's KV for it.
    pub(super) fn claim(&mut self, id: RequestId, fetch: Fetch, now: Duration) {
        let Some(peer) = fetch.peer.filter(|peer| self.prefill_peers.contains_key(peer)) else {
            let reason = "there is no link to the worker that keeps the KV";
            return self.remote_failed(id, KvFault::LinkLost, reason, true);
        };
        let ticket = self.open_ticket(id, peer, Source::Kept, now);
        let checksum = self.config.kv_checksum;
        let request = self.request(id);
        request.cached_elsewhere = fetch.cached_tokens.min(request.prompt_len);
        let claim = ToPrefill::Claim {
            ticket,
            request_id: request.request_id.clone(),
            kept: fetch.kept,
            tokens: request.tokens.clone(),
            cache_salt: request.cache_salt.clone(),
            deadline_ms: request.deadline.saturating_sub(now).as_millis() as u64,
            checksum,
        };
        let offered = request.prompt_len as u64;
        self.counters.prompt_tokens_offered += offered;
        self.effects.push(Effect::Send(peer, PeerMessage::ToPrefill(claim)));
    }

    /// A prefill worker says which of its blocks hold the next part of the prompt.
    pub(super) fn offered(
        &mut self,
        id: RequestId,
        first_block: usize,
        blocks: Vec<u32>,
        checksums: Vec<u64>,
    ) {
        let prompt_blocks = self.blocks_for(self.requests[&id].prompt_len);
        let sums = if self.config.kv_checksum { blocks.len() } else { 0 };
        let remote = self.request(id).remote.as_mut().expect("listed as a ticket. This is a bug.");
        let fits = first_block == remote.offered && first_block + blocks.len() <= prompt_blocks;
        if remote.source == Source::Prefill(transfer::Direction::Write) || !fits || checksums.len() != sums {
            let reason = format!(
                "an offer of {} blocks from block {first_block} on with {} checksums does not fit the ticket",
                blocks.len(),
                checksums.len()
            );
            return self.remote_failed(id, KvFault::Miscounted, &reason, false);
        }
        remote.offered += blocks.len();
        remote.offers.push(Offered { first_block, blocks, checksums });
        match self.awaits_grant(id) {
            true => self.read_offered(id),
            false => self.ungranted.push_back(id),
        }
    }

    /// Reads what is offered and lacking, if there are blocks for it.
    pub(super) fn read_offered(&mut self, id: RequestId) {
        let (wanted, block_bytes) = (self.wanted_blocks(id), self.config.block_bytes);
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        let table = &request.block_table;
        let remote = request.remote.as_mut().expect("looked up by the caller. This is a bug.");
        let Some(from) = remote.granted_from else { return };
        for offer in std::mem::take(&mut remote.offers) {
            let first_block = offer.first_block.max(from);
            let end = (offer.first_block + offer.blocks.len()).min(wanted);
            if first_block >= end {
                continue;
            }
            let lacking = first_block - offer.first_block..end - offer.first_block;
            let ours = table[first_block..end].iter().map(|block| block.0);
            let spans = coalesce(ours.zip(offer.blocks[lacking.clone()].iter().copied()), block_bytes);
            let blocks = lacking.len();
            remote.reads += 1;
            remote.totals.writes += 1;
            remote.totals.blocks += blocks as u32;
            remote.totals.bytes += blocks as u64 * block_bytes;
            remote.totals.descriptors += spans.len() as u32;
            self.effects.push(Effect::Read {
                range: ReadRange { ticket: remote.ticket, first_block, blocks },
                peer: remote.peer,
                spans,
                checksums: offer.checksums.get(lacking).unwrap_or_default().to_vec(),
            });
        }
    }

    /// A read is over.
    pub(super) fn read_settled(
        &mut self,
        range: ReadRange,
        result: Result<Written, ReadFault>,
        now: Duration,
    ) {
        let Some(&id) = self.tickets.get(&range.ticket) else {
            if !self.read_left(range.ticket) {
                self.stale(Stale::Unknown);
            }
            return;
        };
        let remote = self.request(id).remote.as_mut().expect("listed as a ticket. This is a bug.");
        remote.reads -= 1;
        let in_time = now < remote.renewed_at + remote.lease;
        match result {
            Err(ReadFault::Failed(reason)) => {
                let reason = format!("a KV read failed: {reason}");
                self.remote_failed(id, KvFault::ReadFailed, &reason, false);
            }
            Err(ReadFault::Corrupt) => {
                self.counters.checksum_mismatches += 1;
                let reason = "the checksums of blocks that were read are not those of the bytes here";
                self.remote_failed(id, KvFault::Checksum, reason, false);
            }
            // The blocks may have been used for something else meanwhile.
            Ok(_) if !in_time => {
                let reason = "the lease on the prefill worker's blocks ran out before they were read";
                self.remote_failed(id, KvFault::LeaseExpired, reason, false);
            }
            Ok(read) => {
                remote.post += read.post;
                // Reads follow the chunks that are computed, and seldom overlap.
                remote.wire += read.wire;
                let first = range.first_block - remote.granted_from.unwrap_or_default();
                let (blocks, layers) = (range.blocks, self.config.num_layers);
                let remote = self.request(id).remote.as_mut().expect("seen above. This is a bug.");
                let fits = remote.arrived.mark(first, blocks, 0, layers);
                assert!(fits, "{range:?} was read twice. This is a bug.");
                self.receive_if_complete(id, now);
            }
        }
    }
}
