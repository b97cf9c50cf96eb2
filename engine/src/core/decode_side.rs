//! The decode worker's part of a ticket: ask a prefill worker, grant blocks, count what arrives.

use std::time::Duration;

use transfer::PeerId;

use super::{Core, Effect, KvFailure, Settling};
use crate::api::{Output, RequestError};
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, Totals, WriteNote};
use crate::pool::{BlockId, Holder};
use crate::request::{Completed, Remote, State};
use crate::sampler::Sampled;

/// How long notifications may follow `Complete`. They are on their way already when it is sent, and their thread never
/// computes; seconds are for a machine that swaps.
const NOTIFICATION_TIME: Duration = Duration::from_secs(5);

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
        self.counters.prompt_tokens_offered += (self.requests[&id].prompt_len - cached) as u64;
        self.tickets.insert(ticket, id);
        let request = self.request(id);
        request.state = State::Remote;
        request.timeline.ticket_opened = Some(now.saturating_sub(request.arrival));
        request.remote =
            Some(Remote { peer, ticket, granted_from: None, complete: None, arrived: Vec::new() });
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
            self.last_message(peer, ticket, &message);
            return;
        };
        match message {
            ToDecode::Ask { .. } => self.ungranted.push_back(id),
            ToDecode::FirstToken { token, cached_tokens, logprobs, timing, .. } => {
                let request = self.request(id);
                if request.num_generated() > 0 {
                    self.counters.stale_messages += 1;
                    return;
                }
                request.cached_tokens = Some(cached_tokens as usize);
                request.timeline.prefill = Some(timing);
                self.dequeued(id);
                self.emit(id, Sampled { token, logprobs }, now);
                self.receive_if_complete(id, now);
            }
            // Notifications may be behind on the data path. What cannot become right fails at once.
            ToDecode::Complete { totals, timing, .. } => {
                self.completed(id, Completed { at: now, totals, timing })
            }
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
            self.counters.prompt_tokens_cached += (cached_blocks * self.config.block_size) as u64;
            let prompt_blocks = self.blocks_for(self.requests[&id].prompt_len);
            let request = self.request(id);
            request.timeline.granted = Some(now.saturating_sub(request.arrival));
            let remote = request.remote.as_mut().expect("only tickets ask. This is a bug.");
            remote.granted_from = Some(cached_blocks);
            remote.arrived = vec![false; prompt_blocks - cached_blocks];
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
        let remote = self.request(id).remote.as_mut().expect("listed as a ticket. This is a bug.");
        let first = (note.first_block as usize).checked_sub(remote.granted_from.unwrap_or(usize::MAX));
        let blocks = first.and_then(|first| remote.arrived.get_mut(first..first + note.blocks as usize));
        match blocks {
            Some(blocks) if blocks.iter().all(|arrived| !arrived) => {
                blocks.fill(true);
                self.receive_if_complete(id, now);
            }
            _ => {
                let reason = format!(
                    "a write of {} blocks from block {} on does not fit the grant",
                    note.blocks, note.first_block
                );
                self.remote_failed(id, &reason, false);
            }
        }
    }

    /// Everything is written, says the prefill worker. Fails the ticket if that is not what was granted.
    fn completed(&mut self, id: RequestId, completed: Completed) {
        let totals = completed.totals;
        let block_bytes = self.config.block_bytes;
        let request = self.request(id);
        let generated = request.num_generated();
        let remote = request.remote.as_mut().expect("listed as a ticket. This is a bug.");
        remote.complete = Some(completed);
        let granted = remote.arrived.len() as u64;
        if (u64::from(totals.blocks), totals.bytes) != (granted, granted * block_bytes) || generated == 0 {
            let reason = format!(
                "the prefill worker says it wrote {} blocks ({} bytes) and {} the first token; granted were {granted} \
                 blocks ({} bytes)",
                totals.blocks,
                totals.bytes,
                if generated == 0 { "never sent" } else { "sent" },
                granted * block_bytes,
            );
            self.remote_failed(id, &reason, true);
        }
    }

    /// All granted blocks and the first token are here: seal the KV, and run on like any request.
    fn receive_if_complete(&mut self, id: RequestId, now: Duration) {
        let block_size = self.config.block_size;
        let Some(request) = self.requests.get_mut(&id) else { return };
        let generated = request.num_generated();
        let complete = |remote: &mut Remote| {
            generated > 0 && remote.granted_from.is_some() && remote.arrived.iter().all(|arrived| *arrived)
        };
        let Some(remote) = request.remote.take_if(complete) else { return };
        let from = remote.granted_from.expect("complete has a grant. This is a bug.");
        let since = now.saturating_sub(request.arrival);
        let settling = Settling {
            peer: remote.peer,
            request_id: request.request_id.clone(),
            blocks: remote.arrived.len() as u32,
            exposed: since.saturating_sub(request.timeline.first_token.unwrap_or(since)),
        };
        request.num_computed = request.prompt_len;
        request.transferred_tokens = request.prompt_len - (from * block_size).min(request.prompt_len);
        request.timeline.kv_received = Some(since);
        request.state = State::Ready;
        let transferred = request.transferred_tokens as u64;
        let granted: Vec<BlockId> = request.block_table[from..].to_vec();
        granted.into_iter().for_each(|block| self.pool.reassign(block, Holder::Running));
        self.counters.prompt_tokens_transferred += transferred;
        self.seal_blocks(id, from);
        self.ready.push_back(id);
        self.ticket_over(&remote);
        match remote.complete {
            Some(completed) => self.received(settling, completed.totals, completed.timing),
            None => drop(self.settling.insert(remote.ticket, settling)),
        }
    }

    /// Gives up tickets whose notifications did not follow `Complete`: one was lost.
    pub(super) fn expire_notifications(&mut self, now: Duration) {
        let lost = |id: &RequestId| {
            let remote = self.requests[id].remote.as_ref()?;
            Some(now >= remote.complete.as_ref()?.at + NOTIFICATION_TIME)
        };
        let lost: Vec<_> = self.tickets.values().filter(|id| lost(id) == Some(true)).copied().collect();
        for id in lost {
            self.remote_failed(id, "a notification was lost on the data path", true);
        }
    }

    /// A ticket of ours ended well.
    fn received(&mut self, settling: Settling, totals: Totals, timing: PrefillTiming) {
        let timing = PrefillTiming { exposed_us: settling.exposed.as_micros() as u64, ..timing };
        self.counters.stale_messages += u64::from(totals.blocks != settling.blocks);
        self.effects.push(Effect::Received { request_id: settling.request_id, totals, timing });
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
        self.enqueue(id);
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

    /// A message about a ticket that no request waits for any more: its last one ends what is left of it.
    fn last_message(&mut self, peer: PeerId, ticket: TicketId, message: &ToDecode) {
        if let ToDecode::Complete { totals, timing, .. } = message
            && let Some(settling) = self.settling.remove(&ticket).filter(|settling| settling.peer == peer)
        {
            self.received(settling, *totals, *timing);
            return;
        }
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
        self.settling.retain(|_, settling| settling.peer != peer);
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
