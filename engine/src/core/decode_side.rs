//! The decode worker's part of a ticket: ask a prefill worker, grant blocks, count what arrives.

use std::time::Duration;

use transfer::PeerId;

use super::{Core, Effect, KvFailure};
use crate::api::{Output, RequestError};
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, Totals, WriteNote};
use crate::pool::{BlockId, Holder};
use crate::request::{Remote, State};
use crate::sampler::Sampled;

impl Core {
    /// Sends a new request's prompt to the least loaded prefill worker. False if it is better, or only possible, here:
    /// no prefill worker is up, or all but the last block is cached here already.
    pub(super) fn try_remote(&mut self, id: RequestId, now: Duration) -> bool {
        if self.prefill_peers.is_empty() || self.requests[&id].local_only {
            return false;
        }
        let cached = self.cached_prefix(id).len() * self.config.block_size;
        if cached > 0 && self.requests[&id].prompt_len - cached <= self.config.block_size {
            return false;
        }
        let (&peer, load) =
            self.prefill_peers.iter_mut().min_by_key(|(_, load)| **load).expect("not empty, seen above");
        *load += 1;
        let ticket = TicketId(self.next_ticket);
        self.next_ticket = self.next_ticket.wrapping_add(1);
        self.counters.tickets_opened += 1;
        self.tickets.insert(ticket, id);
        let request = self.request(id);
        request.state = State::Remote;
        request.timeline.ticket_opened = Some(now.saturating_sub(request.arrival));
        request.remote = Some(Remote {
            peer,
            ticket,
            granted_from: None,
            complete: None,
            notified: 0,
            notified_blocks: 0,
        });
        let open = ToPrefill::Open {
            ticket,
            request_id: request.request_id.clone(),
            tokens: request.tokens.clone(),
            sampling: request.sampling.clone(),
            seed: request.seed,
            cache_salt: request.cache_salt.clone(),
            deadline_ms: request.deadline.saturating_sub(now).as_millis() as u64,
        };
        self.effects.push(Effect::Send(peer, PeerMessage::ToPrefill(open)));
        true
    }

    pub(super) fn prefill_says(&mut self, peer: PeerId, message: ToDecode, now: Duration) {
        let ticket = match &message {
            ToDecode::Ask { ticket }
            | ToDecode::FirstToken { ticket, .. }
            | ToDecode::Complete { ticket, .. }
            | ToDecode::Failed { ticket, .. }
            | ToDecode::Ended { ticket } => *ticket,
        };
        let Some(id) = self.ours(peer, ticket) else {
            self.last_message_of_quarantined(peer, ticket, &message);
            return;
        };
        match message {
            ToDecode::Ask { .. } => self.ungranted.push_back(id),
            ToDecode::FirstToken { token, cached_tokens, logprobs, .. } => {
                let request = self.request(id);
                if request.num_generated() > 0 {
                    self.counters.stale_messages += 1;
                    return;
                }
                request.cached_tokens = Some(cached_tokens as usize);
                self.counters.prompt_tokens_cached += u64::from(cached_tokens);
                self.dequeued(id);
                self.emit(id, Sampled { token, logprobs }, now);
            }
            ToDecode::Complete { totals, timing, .. } => self.complete(id, totals, timing, now),
            ToDecode::Failed { reason, clean, .. } => self.remote_failed(id, &reason, clean),
            // We did not abort, and a request that its first token ended is closed already.
            ToDecode::Ended { .. } => self.remote_failed(id, "the prefill worker ended the ticket", true),
        }
    }

    /// The request of a ticket of ours that this peer works on.
    fn ours(&self, peer: PeerId, ticket: TicketId) -> Option<RequestId> {
        let id = *self.tickets.get(&ticket)?;
        self.requests[&id].remote.as_ref().is_some_and(|remote| remote.peer == peer).then_some(id)
    }

    /// Grants blocks to tickets that asked, in order, as far as there are blocks.
    pub(super) fn grant_waiting(&mut self, now: Duration) {
        while let Some(&id) = self.ungranted.front() {
            let Some(cached_blocks) = self.take_blocks_for_prompt(id) else { break };
            self.ungranted.pop_front();
            self.count_lookup(self.requests[&id].prompt_len, cached_blocks * self.config.block_size);
            let prompt_blocks = self.blocks_for(self.requests[&id].prompt_len);
            let request = self.request(id);
            request.timeline.granted = Some(now.saturating_sub(request.arrival));
            let remote = request.remote.as_mut().expect("only tickets ask. This is a bug.");
            remote.granted_from = Some(cached_blocks);
            let grant = ToPrefill::Grant {
                ticket: remote.ticket,
                first_block: cached_blocks as u32,
                blocks: request.block_table[cached_blocks..prompt_blocks]
                    .iter()
                    .map(|block| block.0)
                    .collect(),
            };
            let peer = remote.peer;
            self.effects.push(Effect::Send(peer, PeerMessage::ToPrefill(grant)));
        }
    }

    /// Blocks for the prompt; not for a first token that is here already, which takes one like any decoded token.
    fn take_blocks_for_prompt(&mut self, id: RequestId) -> Option<usize> {
        let request = self.request(id);
        let generated = request.tokens.split_off(request.prompt_len);
        let taken = self.take_blocks(id, Holder::Ticketed);
        self.request(id).tokens.extend(generated);
        taken
    }

    /// A notification on the data path: one write's bytes are all here.
    pub(super) fn notified(&mut self, bytes: &[u8], now: Duration) {
        let note = WriteNote::decode(bytes).and_then(|note| Some((note, *self.tickets.get(&note.ticket)?)));
        let Some((note, id)) = note else {
            self.counters.stale_messages += 1;
            return;
        };
        let request = self.request(id);
        let remote = request.remote.as_mut().expect("listed as a ticket. This is a bug.");
        remote.notified += 1;
        remote.notified_blocks += note.blocks;
        if let Some((totals, timing)) = remote.complete.take() {
            self.complete(id, totals, timing, now);
        }
    }

    /// Everything is written, says the prefill worker. Believed once the data path says the same.
    fn complete(&mut self, id: RequestId, totals: Totals, timing: PrefillTiming, now: Duration) {
        let block_bytes = self.config.block_bytes;
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        let prompt_blocks = request.prompt_len.div_ceil(self.config.block_size);
        let generated = request.num_generated();
        let remote = request.remote.as_mut().expect("listed as a ticket. This is a bug.");
        let granted = remote.granted_from.map_or(0, |from| prompt_blocks - from);
        let expected = (granted as u32, granted as u64 * block_bytes);
        if (totals.blocks, totals.bytes) != expected || granted == 0 || generated == 0 {
            let reason = format!(
                "the prefill worker says it wrote {} blocks ({} bytes), granted were {granted} ({} bytes), first token {}",
                totals.blocks,
                totals.bytes,
                expected.1,
                if generated == 0 { "missing" } else { "here" },
            );
            return self.remote_failed(id, &reason, true);
        }
        if remote.notified < totals.writes {
            // The last notifications are still on the data path.
            remote.complete = Some((totals, timing));
            return;
        }
        if (remote.notified, remote.notified_blocks) != (totals.writes, totals.blocks) {
            let reason = format!(
                "{} notifications for {} blocks arrived, the prefill worker says {} for {}",
                remote.notified, remote.notified_blocks, totals.writes, totals.blocks
            );
            return self.remote_failed(id, &reason, true);
        }
        self.receive(id, totals, timing, now);
    }

    /// The KV is here: seal it, and run on like any request.
    fn receive(&mut self, id: RequestId, totals: Totals, timing: PrefillTiming, now: Duration) {
        let block_size = self.config.block_size;
        let remote = self.request(id).remote.take().expect("looked up by the caller. This is a bug.");
        self.ticket_over(&remote);
        let from = remote.granted_from.expect("complete checked the grant. This is a bug.");
        let request = self.request(id);
        request.num_computed = request.prompt_len;
        request.transferred_tokens = request.prompt_len - (from * block_size).min(request.prompt_len);
        request.timeline.kv_received = Some(now.saturating_sub(request.arrival));
        request.timeline.prefill = Some(timing);
        request.timeline.transfer = Some(totals);
        request.state = State::Ready;
        let transferred = request.transferred_tokens as u64;
        let request_id = request.request_id.clone();
        let granted: Vec<BlockId> = request.block_table[from..].to_vec();
        granted.into_iter().for_each(|block| self.pool.reassign(block, Holder::Running));
        self.counters.prompt_tokens_transferred += transferred;
        self.seal_blocks(id, from);
        self.ready.push_back(id);
        self.effects.push(Effect::Received { request_id, totals, timing });
    }

    /// No KV will come from the prefill worker. Computes the prompt here, or fails the request.
    fn remote_failed(&mut self, id: RequestId, reason: &str, clean: bool) {
        self.counters.tickets_failed += 1;
        self.drop_remote(id, !clean);
        match self.config.kv_failure {
            KvFailure::Fail => {
                let error = RequestError::RemotePrefill(reason.to_owned());
                self.effects.push(Effect::Output(id, Output::Failed(error)));
                self.close(id);
            }
            KvFailure::Recompute => self.recompute(id),
        }
    }

    fn recompute(&mut self, id: RequestId) {
        self.counters.recomputed += 1;
        let request = self.request(id);
        request.state = State::Waiting;
        request.local_only = true;
        // It has waited for a prefill worker already.
        self.waiting.push_front(id);
    }

    /// Cuts a request loose from its ticket and its blocks. While the prefill worker may still write (`writing`), it is
    /// told to stop and the granted blocks wait in quarantine. Leaves the request without blocks if it had a ticket.
    pub(super) fn drop_remote(&mut self, id: RequestId, writing: bool) {
        let request = self.request(id);
        let Some(remote) = request.remote.take() else { return };
        // Once the prefill worker has said `Complete` it writes no more, even if notifications are still on their way.
        let writing = writing && remote.complete.is_none();
        let mut table = std::mem::take(&mut request.block_table);
        let was_remote = request.state == State::Remote;
        if was_remote {
            self.ungranted.retain(|other| *other != id);
        }
        self.ticket_over(&remote);
        if let Some(from) = remote.granted_from {
            let granted = table.split_off(from);
            if writing {
                granted.iter().for_each(|&block| self.pool.reassign(block, Holder::Quarantined));
                self.quarantine.insert(remote.ticket, (remote.peer, granted));
            } else {
                self.pool.release_chain(&granted);
            }
        }
        if writing && self.prefill_peers.contains_key(&remote.peer) {
            let abort = PeerMessage::ToPrefill(ToPrefill::Abort { ticket: remote.ticket });
            self.effects.push(Effect::Send(remote.peer, abort));
        }
        self.pool.release_chain(&table);
    }

    fn ticket_over(&mut self, remote: &Remote) {
        self.tickets.remove(&remote.ticket);
        if let Some(load) = self.prefill_peers.get_mut(&remote.peer) {
            *load = load.saturating_sub(1);
        }
    }

    /// A message about a ticket that has no request any more: its last one ends the quarantine.
    fn last_message_of_quarantined(&mut self, peer: PeerId, ticket: TicketId, message: &ToDecode) {
        let settled = match message {
            ToDecode::Complete { .. } | ToDecode::Ended { .. } => true,
            ToDecode::Failed { clean, .. } => *clean,
            ToDecode::Ask { .. } | ToDecode::FirstToken { .. } => false,
        };
        match self.quarantine.get(&ticket) {
            Some((writer, _)) if *writer == peer && settled => self.end_quarantine(ticket),
            _ => self.counters.stale_messages += 1,
        }
    }

    fn end_quarantine(&mut self, ticket: TicketId) {
        if let Some((_, blocks)) = self.quarantine.remove(&ticket) {
            self.pool.release_chain(&blocks);
        }
    }

    /// The link to a peer is lost. Requests that it computes for us start again here; what we compute for it ends.
    pub(super) fn peer_down(&mut self, peer: PeerId) {
        self.prefill_peers.remove(&peer);
        let lost: Vec<_> = self.tickets.values().copied().filter(|id| self.works_for(*id, peer)).collect();
        for id in lost {
            self.remote_failed(id, "the link to the prefill worker was lost", false);
        }
        self.lose_pushes(peer);
    }

    fn works_for(&self, id: RequestId, peer: PeerId) -> bool {
        self.requests[&id].remote.as_ref().is_some_and(|remote| remote.peer == peer)
    }

    /// Nothing of this peer can write any more.
    pub(super) fn peer_gone(&mut self, peer: PeerId) {
        self.peer_down(peer);
        let settled: Vec<_> =
            self.quarantine.iter().filter(|(_, (p, _))| *p == peer).map(|(t, _)| *t).collect();
        settled.into_iter().for_each(|ticket| self.end_quarantine(ticket));
    }
}
