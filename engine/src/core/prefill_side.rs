//! The prefill worker's part of a ticket: compute the prompt, write its blocks where the grant says.

use std::time::Duration;

use transfer::{Direction, PeerId, Span, coalesce};

use super::{Core, Effect, Stale, Written};
use crate::api::TokenId;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, WriteNote};
use crate::request::{NewRequest, Origin, Request, State};
use crate::sampler::Sampled;
use crate::ticket::{Ending, Grant, Push};

/// Ids of ticket requests have this bit, so that they cannot meet those of clients.
pub(super) const PUSH_IDS: u64 = 1 << 63;

/// Ended tickets that are remembered, to tell late messages from made-up ones. For metrics only.
const REMEMBERED: usize = 256;

/// Blocks that one write brings at most: their checksums must fit into its notification.
const MAX_WRITE_BLOCKS: usize = 4096;

impl Core {
    pub(super) fn decode_says(&mut self, peer: PeerId, message: ToPrefill, now: Duration) {
        match message {
            ToPrefill::Open { ticket, .. } | ToPrefill::Claim { ticket, .. }
                if !self.is_newest(peer, ticket) =>
            {
                self.stale(Stale::Duplicate);
            }
            ToPrefill::Open { .. } => self.open(peer, message, now),
            ToPrefill::Claim { .. } => self.claimed(peer, message, now),
            ToPrefill::Grant { ticket, first_block, blocks } => {
                self.granted(peer, ticket, first_block, blocks, now)
            }
            ToPrefill::Done { ticket, totals } => self.was_read(peer, ticket, totals),
            ToPrefill::Renew { seq, tickets } => self.renew_pushes(peer, seq, tickets, now),
            ToPrefill::Abort { ticket } => match self.pushes.get(&(peer, ticket)) {
                Some(&id) => self.end_push(id, Ending::Ended),
                // It ended before the abort arrived, and its last message is on the way.
                None => self.stale(self.push_age(peer, ticket)),
            },
        }
    }

    /// Whether the ticket comes after all that this decode worker has opened, which it then is the newest of. Tickets count
    /// up, so any other has been here before, even if nothing is left of it: a grant for it may be of that earlier life.
    fn is_newest(&mut self, peer: PeerId, ticket: TicketId) -> bool {
        let newest = self.newest_opened.entry(peer).or_insert(TicketId(ticket.0.wrapping_sub(1)));
        let newer = ticket.0.wrapping_sub(newest.0).cast_signed() > 0;
        if newer {
            *newest = ticket;
        }
        newer
    }

    fn open(&mut self, peer: PeerId, message: ToPrefill, now: Duration) {
        let ToPrefill::Open {
            ticket,
            request_id,
            tokens,
            sampling,
            seed,
            cache_salt,
            deadline_ms,
            direction,
            checksum,
        } = message
        else {
            unreachable!("called for Open only. This is a bug.");
        };
        if let Err(reason) = self.acceptable(&tokens) {
            let failed = ToDecode::Failed { ticket, reason, clean: true };
            self.effects.push(Effect::Send(peer, PeerMessage::ToDecode(failed)));
            return;
        }
        let id = RequestId(PUSH_IDS | self.next_push);
        self.next_push += 1;
        let push = Push::new(peer, ticket, direction, checksum, now + self.config.lease);
        let request = Request::new(NewRequest {
            id,
            request_id,
            origin: Origin::Ticket(Box::new(push)),
            tokens,
            sampling,
            cache_salt,
            seed,
            keep: false,
            arrival: now,
            deadline: now + Duration::from_millis(deadline_ms),
        });
        self.requests.insert(id, request);
        self.pushes.insert((peer, ticket), id);
        self.enqueue(id);
    }

    /// The peer checked these against its own sizes; ours may be smaller.
    fn acceptable(&self, tokens: &[TokenId]) -> Result<(), String> {
        let (prompt, capacity) = (tokens.len(), self.pool.capacity());
        if prompt == 0 {
            return Err("the ticket has no tokens".into());
        }
        if prompt >= self.config.max_model_len {
            return Err(format!(
                "the prompt has {prompt} tokens, the prefill worker takes {} at most",
                self.config.max_model_len - 1
            ));
        }
        let needed = self.blocks_for(prompt);
        if needed > capacity {
            return Err(format!("the prompt needs {needed} KV blocks, the prefill worker has {capacity}"));
        }
        Ok(())
    }

    /// Called when a request gets its blocks: a ticket asks where it may write.
    pub(super) fn started(&mut self, id: RequestId) {
        if let Some(push) = self.requests[&id].push().filter(|push| push.direction == Direction::Write) {
            let ask = PeerMessage::ToDecode(ToDecode::Ask { ticket: push.ticket });
            self.effects.push(Effect::Send(push.peer, ask));
        }
    }

    /// Whether a grant is the first of its ticket and covers its prompt to the end.
    pub(super) fn grant_fits(
        &self,
        peer: PeerId,
        ticket: TicketId,
        first_block: usize,
        blocks: usize,
    ) -> bool {
        let Some(id) = self.pushes.get(&(peer, ticket)) else { return false };
        let request = &self.requests[id];
        let awaits = |push: &Push| push.direction == Direction::Write && push.grant.is_none();
        request.push().is_some_and(awaits)
            && first_block.checked_add(blocks) == Some(self.blocks_for(request.prompt_len))
    }

    fn granted(&mut self, peer: PeerId, ticket: TicketId, first_block: u32, blocks: Vec<u32>, now: Duration) {
        let Some(&id) = self.pushes.get(&(peer, ticket)) else {
            return self.stale(self.push_age(peer, ticket));
        };
        let total = self.blocks_for(self.requests[&id].prompt_len);
        let first_block = first_block as usize;
        let fits = self.grant_fits(peer, ticket, first_block, blocks.len());
        let push = self.request(id).push_mut().expect("listed as a push. This is a bug.");
        if push.grant.is_some() {
            return self.stale(Stale::Duplicate);
        }
        if !fits {
            let reason = format!(
                "granted {} blocks from block {first_block} on, the prompt has {total}",
                blocks.len()
            );
            self.end_push(id, Ending::Failed(reason));
            return;
        }
        push.grant = Some(Grant { first_block, blocks });
        push.pushed = first_block;
        self.push_computed(id, now);
    }

    /// Prompt blocks that need no more layers once `computed` tokens are: whole blocks, and with the prompt's end the last,
    /// partly filled one.
    pub(super) fn complete_blocks(&self, id: RequestId, computed: usize) -> usize {
        match computed >= self.requests[&id].prompt_len {
            true => self.blocks_for(self.requests[&id].prompt_len),
            false => computed / self.config.block_size,
        }
    }

    /// Writes (or offers) what is computed and not yet written, if there is a grant.
    pub(super) fn push_computed(&mut self, id: RequestId, now: Duration) {
        let Some(push) = self.requests[&id].push() else { return };
        match push.direction {
            Direction::Read => self.offer_computed(id),
            Direction::Write => {
                let done = self.complete_blocks(id, self.requests[&id].num_computed);
                self.post_layers(id, done, self.config.num_layers, now);
            }
        }
        self.settle_push(id);
    }

    /// Posts layers `..layers` of prompt blocks `..done`, as far as they are not posted yet and there is a grant. Fewer than
    /// `push_layers` wait for the next ones.
    pub(super) fn post_layers(&mut self, id: RequestId, done: usize, layers: usize, now: Duration) {
        let (num_layers, step) = (self.config.num_layers, self.config.push_layers.max(1));
        let (block_bytes, layer_bytes) = (self.config.block_bytes, self.config.layer_bytes());
        let layers = if layers >= num_layers { num_layers } else { layers - layers % step };
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        let table = &request.block_table;
        let Origin::Ticket(push) = &mut request.origin else { return };
        let Some(grant) = &push.grant else { return };
        if push.ending.is_some() || done <= push.pushed || layers <= push.layers {
            return;
        }
        let posted = std::mem::replace(&mut push.layers, layers);
        let whole = posted == 0 && layers == num_layers;
        let indices: Vec<usize> = (push.pushed..done).collect();
        for part in indices.chunks(MAX_WRITE_BLOCKS) {
            let pairs = part.iter().map(|&index| (table[index].0, grant.blocks[index - grant.first_block]));
            let spans = match whole {
                true => coalesce(pairs, block_bytes),
                false => pairs
                    .map(|(from, to)| {
                        let start = |block: u32| u64::from(block) * block_bytes + posted as u64 * layer_bytes;
                        let len = (layers - posted) as u64 * layer_bytes;
                        Span { local: start(from), remote: start(to), len }
                    })
                    .collect(),
            };
            let note = WriteNote {
                ticket: push.ticket,
                first_block: part[0] as u32,
                blocks: part.len() as u32,
                first_layer: posted as u16,
                layers: (layers - posted) as u16,
                checksums: Vec::new(),
            };
            push.totals.writes += 1;
            push.totals.bytes += spans.iter().map(|span| span.len).sum::<u64>();
            push.totals.descriptors += spans.len() as u32;
            push.in_flight.push_back(now);
            let (peer, checksum) = (push.peer, push.checksum);
            self.effects.push(Effect::Post { id, peer, spans, note, checksum });
        }
        if layers == num_layers {
            push.totals.blocks += indices.len() as u32;
            push.pushed = done;
            push.layers = 0;
        }
    }

    /// The prompt is computed. The token goes ahead of the KV; if it ends the request no KV is needed.
    pub(super) fn first_token_for(&mut self, id: RequestId, sampled: Sampled, now: Duration) {
        self.running.retain(|other| *other != id);
        let eos = self.config.eos.clone();
        let request = self.request(id);
        request.state = State::Pushing;
        let cached_tokens = request.cached_tokens.unwrap_or(0) as u32;
        request.timeline.first_token = Some(now.saturating_sub(request.arrival));
        request.tokens.push(sampled.token);
        // The text may grow to the decode worker's length, which may be more than ours; `max_tokens` is cut to it.
        let ends = request.finish(&eos, usize::MAX).is_some();
        request.tokens.pop();
        let push = request.push_mut().expect("called for tickets only. This is a bug.");
        push.first_token_at = Some(now);
        // A decode worker that reads may be doing so: it aborts.
        let ends = ends && push.direction == Direction::Write;
        let request = &self.requests[&id];
        let push = request.push().expect("called for tickets only. This is a bug.");
        let timing = PrefillTiming { post_us: 0, wire_us: 0, exposed_us: 0, ..timing(request, push) };
        let first = ToDecode::FirstToken {
            timing,
            ticket: push.ticket,
            token: sampled.token,
            cached_tokens,
            logprobs: sampled.logprobs,
        };
        let peer = push.peer;
        self.effects.push(Effect::Send(peer, PeerMessage::ToDecode(first)));
        match ends {
            true => self.end_push(id, Ending::Ended),
            false => self.push_computed(id, now),
        }
    }

    /// A write is over.
    pub(super) fn settled(&mut self, id: RequestId, result: Result<Written, String>) {
        let Some(request) = self.requests.get_mut(&id) else { return self.stale(Stale::Unknown) };
        let push = request.push_mut().expect("only tickets write. This is a bug.");
        let posted_at = push.in_flight.pop_front().expect("as many settle as were posted. This is a bug.");
        let peer = push.peer;
        match result {
            Ok(written) => {
                push.post += written.post;
                // Not the time of this event, which may have waited for a step.
                let settled_at = posted_at + written.wire;
                push.wire += settled_at.saturating_sub(posted_at.max(push.settled_at));
                push.settled_at = push.settled_at.max(settled_at);
                self.settle_push(id);
            }
            Err(reason) => {
                if !std::mem::replace(&mut push.unclean, true) {
                    self.effects.push(Effect::DropPeer(peer));
                }
                self.end_push(id, Ending::Failed(format!("a KV write failed: {reason}")));
            }
        }
    }

    /// Lets a ticket end without `Complete`: no more writes, and the last message once those under way are over.
    pub(super) fn end_push(&mut self, id: RequestId, ending: Ending) {
        if matches!(self.requests[&id].state, State::Waiting | State::Running) {
            self.leave_queues(id);
            self.request(id).state = State::Pushing;
        }
        let push = self.request(id).push_mut().expect("called for tickets only. This is a bug.");
        // A lost peer overrides: there is nobody to tell why.
        if push.ending.is_none() || ending == Ending::PeerLost {
            push.ending = Some(ending);
        }
        self.settle_push(id);
    }

    /// Sends the ticket's last message if nothing of it is under way any more, and gives up its blocks.
    pub(super) fn settle_push(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        let push = request.push().expect("called for tickets only. This is a bug.");
        let over = push.ending.is_some() || push.is_written();
        if !push.in_flight.is_empty() || request.state != State::Pushing || !over {
            return;
        }
        let (ticket, peer) = (push.ticket, push.peer);
        let last = match &push.ending {
            None => {
                let timing = timing(request, push);
                self.effects.push(Effect::Pushed(push.totals, timing));
                Some(ToDecode::Complete { ticket, totals: push.totals, timing })
            }
            Some(Ending::Ended) => Some(ToDecode::Ended { ticket }),
            Some(Ending::Failed(reason)) => {
                Some(ToDecode::Failed { ticket, reason: reason.clone(), clean: !push.unclean })
            }
            Some(Ending::PeerLost) => None,
        };
        if matches!(last, Some(ToDecode::Failed { .. })) {
            self.counters.tickets_failed += 1;
        }
        self.effects.extend(last.map(|message| Effect::Send(peer, PeerMessage::ToDecode(message))));
        self.pushes.remove(&(peer, ticket));
        self.remember_push(peer, ticket);
        let request = self.requests.remove(&id).expect("looked up above. This is a bug.");
        let Origin::Ticket(push) = request.origin else { unreachable!("a push. This is a bug.") };
        self.let_go(&push, request.block_table);
    }

    /// Writes that are under way.
    pub fn writes_in_flight(&self) -> usize {
        self.pushes.values().filter_map(|id| self.requests[id].push()).map(|push| push.in_flight.len()).sum()
    }

    /// Whether a ticket that is not open any more was so lately.
    fn push_age(&self, peer: PeerId, ticket: TicketId) -> Stale {
        if self.ended_pushes.contains(&(peer, ticket)) { Stale::Late } else { Stale::Unknown }
    }

    fn remember_push(&mut self, peer: PeerId, ticket: TicketId) {
        self.ended_pushes.push_back((peer, ticket));
        if self.ended_pushes.len() > REMEMBERED {
            self.ended_pushes.pop_front();
        }
    }

    /// Gives up tickets that got no grant before their deadline: the decode worker is full.
    pub(super) fn expire_pushes(&mut self, now: Duration) {
        let late: Vec<_> = self
            .pushes
            .values()
            .filter(|id| self.requests[*id].state == State::Pushing && now >= self.requests[*id].deadline)
            .filter(|id| self.requests[*id].push().is_some_and(|push| push.ending.is_none()))
            .copied()
            .collect();
        for id in late {
            self.end_push(id, Ending::Failed("no blocks were granted before the deadline".into()));
        }
    }

    /// The decode worker is gone: its tickets end without a word.
    pub(super) fn lose_pushes(&mut self, peer: PeerId) {
        self.newest_opened.remove(&peer);
        let lost: Vec<_> = self.pushes.iter().filter(|((p, _), _)| *p == peer).map(|(_, id)| *id).collect();
        for id in lost {
            self.end_push(id, Ending::PeerLost);
        }
    }
}

fn timing(request: &Request, push: &Push) -> PrefillTiming {
    let queue = request.timeline.scheduled.unwrap_or_default();
    let compute = request.timeline.first_token.unwrap_or_default().saturating_sub(queue);
    let micros = |duration: Duration| duration.as_micros() as u64;
    PrefillTiming {
        queue_us: micros(queue),
        compute_us: micros(compute),
        post_us: micros(push.post),
        wire_us: micros(push.wire),
        exposed_us: micros(push.settled_at.saturating_sub(push.first_token_at.unwrap_or_default())),
    }
}
