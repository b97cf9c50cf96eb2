//! The prefill worker's part of a ticket: compute the prompt, write its blocks where the grant says.

use std::time::Duration;

use transfer::{PeerId, coalesce};

use super::{Core, Effect, Written};
use crate::api::TokenId;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, PrefillTiming, TicketId, ToDecode, ToPrefill, Totals, WriteNote};
use crate::request::{Ending, Grant, NewRequest, Origin, Push, Request, State};
use crate::sampler::Sampled;

/// Ids of ticket requests have this bit, so that they cannot meet those of clients.
const PUSH_IDS: u64 = 1 << 63;

impl Core {
    pub(super) fn decode_says(&mut self, peer: PeerId, message: ToPrefill, now: Duration) {
        match message {
            ToPrefill::Open { ticket, .. } if self.pushes.contains_key(&(peer, ticket)) => {
                self.counters.stale_messages += 1;
            }
            ToPrefill::Open { .. } => self.open(peer, message, now),
            ToPrefill::Grant { ticket, first_block, blocks } => {
                self.granted(peer, ticket, first_block, blocks, now)
            }
            ToPrefill::Abort { ticket } => match self.pushes.get(&(peer, ticket)) {
                Some(&id) => self.end_push(id, Ending::Ended),
                // It ended before the abort arrived, and its last message is on the way.
                None => self.counters.stale_messages += 1,
            },
        }
    }

    fn open(&mut self, peer: PeerId, message: ToPrefill, now: Duration) {
        let ToPrefill::Open { ticket, request_id, tokens, sampling, seed, cache_salt, deadline_ms } = message
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
        let push = Push {
            peer,
            ticket,
            grant: None,
            pushed: 0,
            in_flight: 0,
            totals: Totals::default(),
            post: Duration::ZERO,
            wire: Duration::ZERO,
            ending: None,
            unclean: false,
            first_token_at: None,
            posted_at: Duration::ZERO,
            settled_at: Duration::ZERO,
        };
        let request = Request::new(NewRequest {
            id,
            request_id,
            origin: Origin::Ticket(Box::new(push)),
            tokens,
            sampling,
            cache_salt,
            seed,
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
        if let Some(push) = self.requests[&id].push() {
            let ask = PeerMessage::ToDecode(ToDecode::Ask { ticket: push.ticket });
            self.effects.push(Effect::Send(push.peer, ask));
        }
    }

    fn granted(&mut self, peer: PeerId, ticket: TicketId, first_block: u32, blocks: Vec<u32>, now: Duration) {
        let Some(&id) = self.pushes.get(&(peer, ticket)) else {
            self.counters.stale_messages += 1;
            return;
        };
        let total = self.blocks_for(self.requests[&id].prompt_len);
        let first_block = first_block as usize;
        let push = self.request(id).push_mut().expect("listed as a push. This is a bug.");
        if push.grant.is_some() {
            self.counters.stale_messages += 1;
            return;
        }
        if first_block + blocks.len() != total {
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

    /// Writes what is computed and not yet written, if there is a grant. Whole blocks while the prompt is computed; the
    /// last, partly filled one with the end.
    pub(super) fn push_computed(&mut self, id: RequestId, now: Duration) {
        let (block_size, block_bytes) = (self.config.block_size, self.config.block_bytes);
        let request = self.request(id);
        let (computed, prompt_len) = (request.num_computed, request.prompt_len);
        let done =
            if computed >= prompt_len { prompt_len.div_ceil(block_size) } else { computed / block_size };
        let table = request.block_table.clone();
        let Some(push) = request.push_mut() else { return };
        let Some(grant) = &push.grant else { return };
        if push.ending.is_none() && done > push.pushed {
            let blocks = push.pushed..done;
            let targets = &grant.blocks[push.pushed - grant.first_block..];
            let pairs = blocks.clone().zip(targets).map(|(index, &target)| (table[index].0, target));
            let spans = coalesce(pairs, block_bytes);
            let (first_block, count) = (blocks.start as u32, blocks.len() as u32);
            let note = WriteNote { ticket: push.ticket, first_block, blocks: count }.encode();
            push.totals.writes += 1;
            push.totals.blocks += blocks.len() as u32;
            push.totals.bytes += blocks.len() as u64 * block_bytes;
            push.totals.descriptors += spans.len() as u32;
            push.pushed = done;
            push.in_flight += 1;
            push.posted_at = now;
            let peer = push.peer;
            self.effects.push(Effect::Post { id, peer, spans, note });
        }
        self.settle_push(id);
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
        let Some(request) = self.requests.get_mut(&id) else {
            self.counters.stale_messages += 1;
            return;
        };
        let push = request.push_mut().expect("only tickets write. This is a bug.");
        push.in_flight -= 1;
        let peer = push.peer;
        match result {
            Ok(written) => {
                push.post += written.post;
                push.wire += written.wire;
                // Not the time of this event, which may have waited for a step.
                push.settled_at = push.settled_at.max(push.posted_at + written.wire);
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
    fn settle_push(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        let push = request.push().expect("called for tickets only. This is a bug.");
        let written =
            push.grant.as_ref().is_some_and(|grant| push.pushed == grant.first_block + grant.blocks.len());
        if push.in_flight > 0 || request.state != State::Pushing || (push.ending.is_none() && !written) {
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
        let request = self.requests.remove(&id).expect("looked up above. This is a bug.");
        self.pool.release_chain(&request.block_table);
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
