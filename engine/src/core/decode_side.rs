//! The decode worker's part of a ticket: ask a prefill worker, grant blocks, count what arrives.

use std::time::Duration;

use transfer::{Direction, PeerId};

use super::quarantine::Writer;
use super::{Core, Effect, KvFailure, Settling, Stale};
use crate::api::{KvFault, Output, PrefillBy, RequestError};
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, Totals, WriteNote};
use crate::pool::{BlockId, Holder};
use crate::request::State;
use crate::sampler::Sampled;
use crate::ticket::{Arrived, Completed, Remote, Source};

impl Core {
    /// Sends a new request's prompt to the least loaded prefill worker that can take it. False if it is better, or only
    /// possible, here: no prefill worker is up or none takes prompts so long, or all but the last block is cached here.
    /// A worker that was named and is not linked is a fault.
    pub(super) fn try_remote(&mut self, id: RequestId, by: PrefillBy, now: Duration) -> bool {
        let request = &self.requests[&id];
        let (prompt_len, local_only) = (request.prompt_len, request.local_only);
        let asked = |peer: &PeerId| match by {
            PrefillBy::Anyone => true,
            PrefillBy::Here | PrefillBy::Unlinked => false,
            PrefillBy::Peer(named) => *peer == named,
        };
        let linked = self.prefill_peers.iter().filter(|(id, _)| asked(id));
        let prompt_peers = || linked.clone().filter(|(_, peer)| !peer.link.on_demand);
        let longest = prompt_peers().map(|(_, peer)| peer.link.max_prompt).max();
        let fitting = prompt_peers().filter(|(_, peer)| prompt_len <= peer.link.max_prompt);
        let best = fitting.min_by_key(|(_, peer)| peer.load).map(|(id, peer)| (*id, peer.link.direction));
        let cached = self.cached_prefix(id).len() * self.config.block_size;
        if local_only || (cached > 0 && prompt_len - cached <= self.config.block_size) {
            return false;
        }
        let Some(longest) = longest else {
            let named = matches!(by, PrefillBy::Peer(_) | PrefillBy::Unlinked);
            if named {
                let reason = "the prefill worker that was named is not linked";
                self.prefill_failed(id, KvFault::NotLinked, reason);
            }
            return named;
        };
        let Some((peer, direction)) = best else {
            self.counters.prompts_too_long_for_prefill += 1;
            if self.config.kv_failure == KvFailure::Recompute {
                return false;
            }
            let reason =
                format!("the prompt has {prompt_len} tokens, the prefill workers take {longest} at most");
            self.fail(id, RequestError::RemotePrefill(reason));
            return true;
        };
        let ticket = self.open_ticket(id, peer, Source::Prefill(direction), now);
        self.counters.prompt_tokens_offered += (prompt_len - cached) as u64;
        let checksum = self.config.kv_checksum;
        let request = self.request(id);
        let open = ToPrefill::Open {
            ticket,
            request_id: request.request_id.clone(),
            tokens: request.tokens.clone(),
            sampling: request.sampling.clone(),
            seed: request.seed,
            cache_salt: request.cache_salt.clone(),
            deadline_ms: request.deadline.saturating_sub(now).as_millis() as u64,
            direction,
            checksum,
        };
        self.effects.push(Effect::Send(peer, PeerMessage::ToPrefill(open)));
        true
    }

    /// A new ticket with `peer` for a request, which waits for it from now on.
    pub(super) fn open_ticket(
        &mut self,
        id: RequestId,
        peer: PeerId,
        source: Source,
        now: Duration,
    ) -> TicketId {
        let ticket = TicketId(self.next_ticket);
        self.next_ticket = self.next_ticket.wrapping_add(1);
        self.counters.tickets_opened += 1;
        self.tickets.insert(ticket, id);
        let link = self.prefill_peers.get_mut(&peer).expect("looked up by the caller. This is a bug.");
        link.load += 1;
        let lease = link.link.lease;
        let request = self.request(id);
        request.state = State::Remote;
        request.timeline.ticket_opened = Some(now.saturating_sub(request.arrival));
        request.remote = Some(Remote { lease, ..Remote::new(peer, ticket, source, now) });
        ticket
    }

    pub(super) fn prefill_says(&mut self, peer: PeerId, message: ToDecode, now: Duration) {
        let ticket = match &message {
            ToDecode::Renewed { seq, unknown } => return self.renewed(peer, *seq, unknown),
            ToDecode::Ask { ticket }
            | ToDecode::Offer { ticket, .. }
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
            ToDecode::Ask { .. } if self.awaits_grant(id) => self.stale(Stale::Duplicate),
            ToDecode::Ask { .. } => self.ungranted.push_back(id),
            ToDecode::Offer { first_block, blocks, checksums, .. } => {
                self.offered(id, first_block as usize, blocks, checksums);
            }
            ToDecode::FirstToken { token, cached_tokens, logprobs, timing, .. } => {
                let request = self.request(id);
                if request.num_generated() > 0
                    || request.remote.as_ref().is_some_and(|r| r.source == Source::Kept)
                {
                    return self.stale(Stale::Duplicate);
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
            ToDecode::Failed { reason, clean, .. } => {
                self.remote_failed(id, KvFault::Refused, &reason, clean)
            }
            // We did not abort, and a request that its first token ended is closed already.
            ToDecode::Ended { .. } => {
                self.remote_failed(id, KvFault::Refused, "the prefill worker ended the ticket", true)
            }
            ToDecode::Renewed { .. } => unreachable!("handled above. This is a bug."),
        }
    }

    /// The request of a ticket of ours that this peer works on.
    fn ours(&self, peer: PeerId, ticket: TicketId) -> Option<RequestId> {
        let id = *self.tickets.get(&ticket)?;
        self.requests[&id].remote.as_ref().is_some_and(|remote| remote.peer == peer).then_some(id)
    }

    /// Whether a ticket has asked already, or has its blocks.
    pub(super) fn awaits_grant(&self, id: RequestId) -> bool {
        let granted = |remote: &Remote| remote.granted_from.is_some();
        self.requests[&id].remote.as_ref().is_some_and(granted) || self.ungranted.contains(&id)
    }

    /// Grants blocks to tickets that asked or were made an offer, in order, as far as there are blocks.
    pub(super) fn grant_waiting(&mut self, now: Duration) {
        while let Some(&id) = self.ungranted.front() {
            let Some(cached_blocks) = self.take_blocks_for_prompt(id) else { break };
            self.ungranted.pop_front();
            self.count_lookup(self.requests[&id].prompt_len, cached_blocks * self.config.block_size);
            self.counters.prompt_tokens_cached += (cached_blocks * self.config.block_size) as u64;
            let (wanted, layers) = (self.wanted_blocks(id), self.config.num_layers);
            let request = self.request(id);
            request.timeline.granted = Some(now.saturating_sub(request.arrival));
            let remote = request.remote.as_mut().expect("only tickets ask. This is a bug.");
            remote.granted_from = Some(cached_blocks);
            remote.arrived = Arrived::new(wanted.saturating_sub(cached_blocks), layers);
            match remote.source.direction() {
                Direction::Read => {
                    self.read_offered(id);
                    self.receive_if_complete(id, now);
                }
                Direction::Write => {
                    let grant = ToPrefill::Grant {
                        ticket: remote.ticket,
                        first_block: cached_blocks as u32,
                        blocks: request.block_table[cached_blocks..wanted]
                            .iter()
                            .map(|block| block.0)
                            .collect(),
                    };
                    let peer = remote.peer;
                    self.effects.push(Effect::Send(peer, PeerMessage::ToPrefill(grant)));
                }
            }
        }
    }

    /// Prompt blocks that must be here before the request can go on. A request that makes its first token itself computes
    /// the last prompt token for it, so that one's KV is not needed.
    pub(super) fn wanted_blocks(&self, id: RequestId) -> usize {
        let request = &self.requests[&id];
        match request.remote.as_ref().is_some_and(|remote| remote.source == Source::Kept) {
            true => self.blocks_for(request.prompt_len - 1),
            false => self.blocks_for(request.prompt_len),
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

    /// A notification on the data path: one write's bytes are all here. `intact`: their checksums, if any, are right.
    pub(super) fn notified(&mut self, bytes: &[u8], intact: bool, now: Duration) {
        let Some(note) = WriteNote::decode(bytes) else { return self.stale(Stale::Unknown) };
        let Some(&id) = self.tickets.get(&note.ticket) else { return self.stale(self.age(note.ticket)) };
        if !intact {
            let reason = format!(
                "the checksums of {} blocks from block {} on are not those of the bytes here",
                note.blocks, note.first_block
            );
            self.counters.checksum_mismatches += 1;
            return self.remote_failed(id, KvFault::Checksum, &reason, false);
        }
        let remote = self.request(id).remote.as_mut().expect("listed as a ticket. This is a bug.");
        let first = (note.first_block as usize).checked_sub(remote.granted_from.unwrap_or(usize::MAX));
        let (first_layer, layers) = (note.first_layer as usize, note.layers as usize);
        let writes = remote.source.direction() == Direction::Write;
        match first.is_some_and(|first| {
            writes && remote.arrived.mark(first, note.blocks as usize, first_layer, layers)
        }) {
            true => self.receive_if_complete(id, now),
            false => {
                let reason = format!(
                    "a write of layers {first_layer}..{} of {} blocks from block {} on does not fit the grant",
                    first_layer + layers,
                    note.blocks,
                    note.first_block
                );
                self.remote_failed(id, KvFault::Miscounted, &reason, false);
            }
        }
    }

    /// Where the bytes of a note are in our pool, block by block, as `(offset, length)`; `None` if it does not fit its
    /// ticket's grant.
    pub fn note_spans(&self, note: &WriteNote) -> Option<Vec<(u64, u64)>> {
        let request = &self.requests[self.tickets.get(&note.ticket)?];
        let from = request.remote.as_ref()?.granted_from?;
        let first = note.first_block as usize;
        let table = request.block_table.get(first..first.checked_add(note.blocks as usize)?)?;
        let layer_bytes = self.config.layer_bytes();
        let (skip, len) = (u64::from(note.first_layer) * layer_bytes, u64::from(note.layers) * layer_bytes);
        let fits = first >= from && skip + len <= self.config.block_bytes;
        let span = |block: &BlockId| (u64::from(block.0) * self.config.block_bytes + skip, len);
        fits.then(|| table.iter().map(span).collect())
    }

    /// Everything is written, says the prefill worker. Fails the ticket if that is not what was granted.
    fn completed(&mut self, id: RequestId, completed: Completed) {
        let totals = completed.totals;
        let block_bytes = self.config.block_bytes;
        let request = self.request(id);
        let generated = request.num_generated();
        let remote = request.remote.as_mut().expect("listed as a ticket. This is a bug.");
        if remote.source.direction() == Direction::Read {
            let reason = "the prefill worker completed a ticket whose blocks are not read yet";
            return self.remote_failed(id, KvFault::Miscounted, reason, true);
        }
        remote.complete = Some(completed);
        let granted = remote.arrived.blocks() as u64;
        if (u64::from(totals.blocks), totals.bytes) != (granted, granted * block_bytes) || generated == 0 {
            let reason = format!(
                "the prefill worker says it wrote {} blocks ({} bytes) and {} the first token; granted were {granted} \
                 blocks ({} bytes)",
                totals.blocks,
                totals.bytes,
                if generated == 0 { "never sent" } else { "sent" },
                granted * block_bytes,
            );
            self.remote_failed(id, KvFault::Miscounted, &reason, true);
        }
    }

    /// All KV and, unless it is made here, the first token are here: seal the KV, and run on like any request.
    pub(super) fn receive_if_complete(&mut self, id: RequestId, now: Duration) {
        let block_size = self.config.block_size;
        let Some(request) = self.requests.get_mut(&id) else { return };
        let generated = request.num_generated();
        let complete = |remote: &mut Remote| {
            let started = generated > 0 || remote.source == Source::Kept;
            started && remote.granted_from.is_some() && remote.arrived.is_complete()
        };
        let Some(remote) = request.remote.take_if(complete) else { return };
        let from = remote.granted_from.expect("complete has a grant. This is a bug.");
        let since = now.saturating_sub(request.arrival);
        let reads = remote.source.direction() == Direction::Read;
        let settling = Settling {
            id,
            peer: remote.peer,
            request_id: request.request_id.clone(),
            blocks: remote.arrived.blocks() as u32,
            exposed: since.saturating_sub(request.timeline.first_token.unwrap_or(since)),
            read: reads.then_some((remote.totals, remote.post, remote.wire)),
        };
        // Without a first token the last prompt token is computed for it.
        request.num_computed = request.prompt_len - usize::from(generated == 0);
        request.transferred_tokens = request.num_computed.saturating_sub(from * block_size);
        if remote.source == Source::Kept {
            request.cached_tokens = Some((from * block_size).max(request.cached_elsewhere));
        }
        request.timeline.kv_received = Some(since);
        request.state = State::Ready;
        let transferred = request.transferred_tokens as u64;
        let granted: Vec<BlockId> = request.block_table[from..].to_vec();
        granted.into_iter().for_each(|block| self.pool.reassign(block, Holder::Running));
        self.counters.prompt_tokens_transferred += transferred;
        self.seal_blocks(id, from);
        self.dequeued(id);
        self.ready.push_back(id);
        self.ticket_over(&remote);
        if reads {
            let done = ToPrefill::Done { ticket: remote.ticket, totals: remote.totals };
            self.effects.push(Effect::Send(remote.peer, PeerMessage::ToPrefill(done)));
        }
        match remote.complete {
            Some(completed) => self.received(settling, completed.totals, completed.timing),
            None => drop(self.settling.insert(remote.ticket, settling)),
        }
    }

    /// Gives up tickets whose notifications did not follow `Complete`: one was lost.
    pub(super) fn expire_notifications(&mut self, now: Duration) {
        let lost = |id: &RequestId| {
            let remote = self.requests[id].remote.as_ref()?;
            Some(now >= remote.complete.as_ref()?.at + self.config.notification_time)
        };
        let lost: Vec<_> = self.tickets.values().filter(|id| lost(id) == Some(true)).copied().collect();
        for id in lost {
            let reason = "a notification was lost on the data path";
            self.remote_failed(id, KvFault::NotificationLost, reason, true);
        }
    }

    /// A ticket of ours ended well.
    fn received(&mut self, settling: Settling, totals: Totals, timing: PrefillTiming) {
        let micros = |duration: Duration| duration.as_micros() as u64;
        let mut timing = PrefillTiming { exposed_us: micros(settling.exposed), ..timing };
        let totals = match settling.read {
            Some((read, post, wire)) => {
                (timing.post_us, timing.wire_us) = (micros(post), micros(wire));
                read
            }
            None => totals,
        };
        if totals.blocks != settling.blocks {
            self.stale(Stale::Duplicate);
        }
        if let Some(request) = self.requests.get_mut(&settling.id) {
            request.timeline.prefill = Some(timing);
            request.timeline.transfer = Some(totals);
        }
        self.effects.push(Effect::Received { request_id: settling.request_id, totals, timing });
    }

    /// No KV will come from the prefill worker. Computes the prompt here, or fails the request. `clean`: the prefill worker
    /// has said that the ticket is over there.
    pub(super) fn remote_failed(&mut self, id: RequestId, fault: KvFault, reason: &str, clean: bool) {
        self.counters.tickets_failed += 1;
        self.drop_remote(id, !clean);
        self.prefill_failed(id, fault, reason);
    }

    /// Computes the prompt of a request without a ticket here, or fails it.
    fn prefill_failed(&mut self, id: RequestId, fault: KvFault, reason: &str) {
        let recompute = self.config.kv_failure == KvFailure::Recompute;
        let request_id = self.requests[&id].request_id.clone();
        self.effects.push(Effect::TicketFailed { request_id, fault, reason: reason.to_owned(), recompute });
        match recompute {
            false => {
                let error = RequestError::RemotePrefill(reason.to_owned());
                self.effects.push(Effect::Output(id, Output::Failed(error)));
                self.close(id);
            }
            true => self.recompute(id, fault),
        }
    }

    fn recompute(&mut self, id: RequestId, fault: KvFault) {
        self.counters.recomputed += 1;
        let request = self.request(id);
        request.state = State::Waiting;
        request.local_only = true;
        request.timeline.recomputed = Some(fault);
        self.enqueue(id);
    }

    /// Cuts a request loose from its ticket and its blocks. While the ticket is `open` on the prefill worker, that is told
    /// to stop. Granted blocks that somebody may still write wait in quarantine. Leaves the request without blocks if it
    /// had a ticket.
    pub(super) fn drop_remote(&mut self, id: RequestId, open: bool) {
        let request = self.request(id);
        let Some(remote) = request.remote.take() else { return };
        // Once the prefill worker has said `Complete` it writes no more, even if notifications are still on their way.
        let open = open && remote.complete.is_none();
        let mut table = std::mem::take(&mut request.block_table);
        let was_remote = request.state == State::Remote;
        if was_remote {
            self.ungranted.retain(|other| *other != id);
        }
        self.ticket_over(&remote);
        if let Some(from) = remote.granted_from {
            let granted = table.split_off(from);
            let writer = match remote.source.direction() {
                Direction::Write => open.then_some(Writer::Peer(remote.peer)),
                Direction::Read => (remote.reads > 0).then_some(Writer::Reads(remote.reads)),
            };
            match writer {
                Some(writer) => self.quarantine(remote.ticket, writer, granted),
                None => self.pool.release_chain(&granted),
            }
        }
        if open && self.prefill_peers.contains_key(&remote.peer) {
            let abort = PeerMessage::ToPrefill(ToPrefill::Abort { ticket: remote.ticket });
            self.effects.push(Effect::Send(remote.peer, abort));
        }
        self.pool.release_chain(&table);
    }

    fn ticket_over(&mut self, remote: &Remote) {
        self.tickets.remove(&remote.ticket);
        if let Some(peer) = self.prefill_peers.get_mut(&remote.peer) {
            peer.load = peer.load.saturating_sub(1);
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
            _ => false,
        };
        if !(settled && self.end_quarantine_of(ticket, peer)) {
            self.stale(self.age(ticket));
        }
    }

    /// Whether a ticket that is not open any more was one of ours.
    pub(super) fn age(&self, ticket: TicketId) -> Stale {
        let number = ticket.0.wrapping_sub(self.config.first_ticket);
        match number < self.next_ticket.wrapping_sub(self.config.first_ticket) {
            true => Stale::Late,
            false => Stale::Unknown,
        }
    }

    /// The link to a peer is lost. Requests that it computes for us start again here; what we compute for it ends.
    pub(super) fn peer_down(&mut self, peer: PeerId) {
        self.prefill_peers.remove(&peer);
        self.renewals.remove(&peer);
        self.settling.retain(|_, settling| settling.peer != peer);
        let lost: Vec<_> = self.tickets.values().copied().filter(|id| self.works_for(*id, peer)).collect();
        for id in lost {
            self.remote_failed(id, KvFault::LinkLost, "the link to the prefill worker was lost", false);
        }
        self.lose_pushes(peer);
    }

    fn works_for(&self, id: RequestId, peer: PeerId) -> bool {
        self.requests[&id].remote.as_ref().is_some_and(|remote| remote.peer == peer)
    }

    /// Nothing of this peer can write any more.
    pub(super) fn peer_gone(&mut self, peer: PeerId) {
        self.peer_down(peer);
        self.end_quarantines_of(peer);
    }
}
