//! The prefill worker's part of a pulled ticket: keep a prompt's blocks for whoever claims them, offer them, let them go.

use std::time::Duration;

use transfer::{Direction, PeerId};

use super::lease::Pinned;
use super::prefill_side::PUSH_IDS;
use super::{Core, Effect, Stale};
use crate::api::{KeptKv, TokenId};
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, TicketId, ToDecode, ToPrefill, Totals};
use crate::pool::BlockId;
use crate::request::{NewRequest, Origin, Request, State};
use crate::ticket::{Ending, Push};

/// A computed prompt that waits for a decode worker to claim it.
#[derive(Debug)]
pub(super) struct Kept {
    tokens: Vec<TokenId>,
    cache_salt: Option<String>,
    pub(super) blocks: Vec<BlockId>,
    pub(super) until: Duration,
}

impl Core {
    /// Keeps the KV of a request's prompt beyond its end, under a name that is never used again.
    pub(super) fn keep(&mut self, id: RequestId, now: Duration) -> KeptKv {
        let until = now + self.config.lease;
        let number = self.next_ticket;
        self.next_ticket = self.next_ticket.wrapping_add(1);
        let prompt_blocks = self.blocks_for(self.requests[&id].prompt_len);
        let request = self.request(id);
        let rest = request.block_table.split_off(prompt_blocks);
        let blocks = std::mem::replace(&mut request.block_table, rest);
        let name = format!("{}-{number:016x}", request.request_id);
        let tokens = request.tokens[..request.prompt_len].to_vec();
        let kept = KeptKv {
            name: name.clone(),
            blocks: blocks.iter().map(|block| block.0).collect(),
            tokens: tokens.len(),
            cached_tokens: request.cached_tokens.unwrap_or(0),
            lease: self.config.lease,
        };
        let cache_salt = self.requests[&id].cache_salt.clone();
        self.kept.insert(name, Kept { tokens, cache_salt, blocks, until });
        self.counters.prompts_kept += 1;
        kept
    }

    /// A decode worker asks for what is kept.
    pub(super) fn claimed(&mut self, peer: PeerId, message: ToPrefill, now: Duration) {
        let ToPrefill::Claim { ticket, request_id, kept: name, tokens, cache_salt, deadline_ms, checksum } =
            message
        else {
            unreachable!("called for Claim only. This is a bug.");
        };
        let same = |kept: &Kept| kept.tokens == tokens && kept.cache_salt == cache_salt;
        let reason = match self.kept.get(&name) {
            None => format!("no KV is kept as {name:?}: it was fetched already, or its lease ran out"),
            Some(kept) if !same(kept) => format!("the KV kept as {name:?} is of another prompt"),
            Some(_) => return self.offer_kept(peer, ticket, request_id, &name, deadline_ms, checksum, now),
        };
        self.counters.notified_after_expiry += 1;
        let failed = ToDecode::Failed { ticket, reason, clean: true };
        self.effects.push(Effect::Send(peer, PeerMessage::ToDecode(failed)));
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one message")]
    fn offer_kept(
        &mut self,
        peer: PeerId,
        ticket: TicketId,
        request_id: String,
        name: &str,
        deadline_ms: u64,
        checksum: bool,
        now: Duration,
    ) {
        let kept = self.kept.remove(name).expect("looked up by the caller. This is a bug.");
        let id = RequestId(PUSH_IDS | self.next_push);
        self.next_push += 1;
        let lease_until = now + self.config.lease;
        let push = Push::new(peer, ticket, Direction::Read, checksum, lease_until);
        let mut request = Request::new(NewRequest {
            id,
            request_id,
            origin: Origin::Ticket(Box::new(push)),
            tokens: kept.tokens,
            sampling: Default::default(),
            cache_salt: kept.cache_salt,
            seed: 0,
            keep: false,
            arrival: now,
            deadline: now + Duration::from_millis(deadline_ms),
        });
        request.state = State::Pushing;
        request.num_computed = request.prompt_len;
        request.block_table = kept.blocks;
        self.requests.insert(id, request);
        self.pushes.insert((peer, ticket), id);
        self.offer_computed(id);
    }

    /// Tells the decode worker of blocks that are computed and that it may read.
    pub(super) fn offer_computed(&mut self, id: RequestId) {
        let done = self.complete_blocks(id, self.requests[&id].num_computed);
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        let last = request.num_computed >= request.prompt_len;
        let table = &request.block_table;
        let Origin::Ticket(push) = &mut request.origin else { return };
        if push.ending.is_some() || done <= push.pushed {
            return;
        }
        let first_block = push.pushed as u32;
        let blocks: Vec<u32> = table[push.pushed..done].iter().map(|block| block.0).collect();
        push.pushed = done;
        let (ticket, peer, checksum) = (push.ticket, push.peer, push.checksum);
        self.effects.push(Effect::Offer { peer, ticket, first_block, blocks, last, checksum });
    }

    /// The decode worker has read all it lacked of a ticket.
    pub(super) fn was_read(&mut self, peer: PeerId, ticket: TicketId, totals: Totals) {
        let Some(&id) = self.pushes.get(&(peer, ticket)) else {
            self.counters.notified_after_expiry += 1;
            return self.stale(Stale::Late);
        };
        let request = self.request(id);
        let computed = request.state == State::Pushing;
        let push = request.push_mut().expect("listed as a push. This is a bug.");
        if push.direction == Direction::Write || !computed {
            let reason = "the decode worker says it has read what was not offered".to_owned();
            return self.end_push(id, Ending::Failed(reason));
        }
        push.read = true;
        push.totals = totals;
        self.settle_push(id);
    }

    /// Blocks of a ticket that is over: reusable at once, unless the decode worker may still be reading them and would
    /// believe what it reads.
    pub(super) fn let_go(&mut self, push: &Push, blocks: Vec<BlockId>) {
        // A decode worker that aborted has given up its reads as well.
        let given_up = push.read || push.ending == Some(Ending::Ended);
        match push.direction == Direction::Read && push.pushed > 0 && !given_up {
            true => self.pinned.push(Pinned { until: push.lease_until, blocks }),
            false => self.pool.release_chain(&blocks),
        }
    }
}
