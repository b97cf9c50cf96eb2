//! Which tokens are computed in a step.

use std::time::Duration;

use kernels::BatchMeta;

use super::Core;
use crate::api::{FinishReason, SamplingParams, TokenId};
use crate::handle::RequestId;
use crate::pool::{BlockId, Holder};
use crate::request::{Origin, Request, State};

/// One step: which tokens of which requests, packed.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    pub items: Vec<PlanItem>,
    pub tokens: Vec<TokenId>,
    pub meta: BatchMeta,
    /// Rows whose next token is sampled, ascending by row.
    pub samples: Vec<SampleRow>,
}

/// One request's share of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanItem {
    pub id: RequestId,
    pub len: usize,
    /// The step computes its last known token, so a new one is sampled.
    pub samples: bool,
}

/// A packed row whose logits become a token.
#[derive(Clone, Debug)]
pub struct SampleRow {
    pub row: u32,
    pub params: SamplingParams,
    pub seed: u64,
    /// Index of the token in the answer.
    pub index: u64,
    /// Prompt and answer so far, where penalties need them; empty otherwise.
    pub history: Vec<TokenId>,
    /// Tokens of `history` that are the prompt.
    pub prompt_len: usize,
    /// Tokens that must not be sampled now: those that would end the answer below its least length.
    pub suppressed: Vec<TokenId>,
}

impl SampleRow {
    fn new(row: u32, request: &Request, eos: &[TokenId]) -> Self {
        let params = request.sampling.clone();
        let too_short = request.num_generated() < params.min_tokens;
        Self {
            row,
            seed: request.seed,
            index: request.num_generated() as u64,
            history: if params.has_penalties() { request.tokens.clone() } else { Vec::new() },
            prompt_len: request.prompt_len,
            suppressed: match too_short {
                true => eos.iter().chain(&params.stop_token_ids).copied().collect(),
                false => Vec::new(),
            },
            params,
        }
    }
}

/// How far into the queue short prompts are looked for: each look costs the hashing of a prompt, once.
const LOOK_AHEAD: usize = 16;

impl Core {
    /// Picks the next step; `None` if nothing can be computed now.
    ///
    /// Running decodes come first, so that a stream never waits longer than one step. Then up to a quarter of what is
    /// left goes to prompts so short that it computes them whole, so that they do not wait behind a long one. The rest
    /// goes to prompts in the order of their arrival, then to the queue.
    ///
    /// No request starves: the oldest one is never preempted, gets at least one token in every step once it runs, and
    /// while it waits nobody is admitted that would keep it waiting. So a request with `k` older ones unfinished ends within
    /// `(k + 1) * (max_seqs + 1) * max_model_len` steps, whatever arrives after it, as long as
    /// `max_batched_tokens >= max_seqs` (the queue drains the running set in `max_seqs * max_model_len` steps at most, then
    /// runs in `max_model_len`). The random tests assert it.
    pub fn plan(&mut self, now: Duration) -> Option<Plan> {
        self.expire(now);
        self.grant_waiting(now);
        let mut plan = Plan::default();
        plan.items.reserve(self.running.len());
        plan.samples.reserve(self.running.len());
        let mut budget = self.config.max_batched_tokens;
        self.start_ready();
        let mut prefills = self.plan_decodes(&mut plan, &mut budget, now);
        self.plan_short(&mut plan, &mut budget, &mut prefills, now);
        self.plan_prefills(&mut plan, &mut budget, &prefills);
        self.admit_waiting(&mut plan, &mut budget, now);
        self.check();
        (!plan.items.is_empty()).then_some(plan)
    }

    fn start_ready(&mut self) {
        while self.running.len() < self.config.max_seqs {
            let Some(id) = self.ready.pop_front() else { break };
            self.request(id).state = State::Running;
            self.start_running(id);
        }
    }

    /// Takes a running slot, in order of arrival.
    fn start_running(&mut self, id: RequestId) {
        let at = self.running.partition_point(|&other| self.rank(other) < self.rank(id));
        self.running.insert(at, id);
    }

    /// Joins the queue, in order of arrival: behind everybody for a new request, ahead of later ones for a request that
    /// was preempted or that a prefill worker gave back.
    pub(super) fn enqueue(&mut self, id: RequestId) {
        let at = self.waiting.partition_point(|&other| self.rank(other) < self.rank(id));
        self.waiting.insert(at, id);
    }

    fn rank(&self, id: RequestId) -> (Duration, RequestId) {
        (self.requests[&id].arrival, id)
    }

    /// Plans a token of each running request that has one left to compute; returns the others, prompts in the midst of
    /// their computation, with what they have left.
    fn plan_decodes(
        &mut self,
        plan: &mut Plan,
        budget: &mut usize,
        now: Duration,
    ) -> Vec<(RequestId, usize)> {
        let mut prefills = Vec::new();
        for id in self.running.clone() {
            // Preempted meanwhile to make room for one before it.
            let Some(request) = self.requests.get(&id).filter(|request| request.state == State::Running)
            else {
                continue;
            };
            match request.remaining() {
                1 if *budget == 0 => {}
                1 => {
                    if self.grow(id, now) {
                        self.add(plan, budget, id, 1);
                    }
                }
                remaining => prefills.push((id, remaining)),
            }
        }
        // One that was preempted after it was looked at is no longer running.
        prefills.retain(|(id, _)| self.requests[id].state == State::Running);
        prefills
    }

    /// While a long prompt is being computed: whole short ones, running or from the first few of the queue. Takes those
    /// that it plans out of `prefills`.
    fn plan_short(
        &mut self,
        plan: &mut Plan,
        budget: &mut usize,
        prefills: &mut Vec<(RequestId, usize)>,
        now: Duration,
    ) {
        let mut share = *budget / 4;
        if prefills.iter().all(|(_, remaining)| *remaining <= share) {
            return;
        }
        prefills.retain(|&(id, remaining)| {
            let short = remaining <= share;
            if short {
                share -= remaining;
                self.add(plan, budget, id, remaining);
            }
            !short
        });
        let candidates: Vec<_> = self.waiting.iter().take(LOOK_AHEAD).copied().collect();
        for id in candidates {
            let tokens = self.requests[&id].tokens.len();
            let cached = self.cached_prefix(id).len() * self.config.block_size;
            let full = self.running.len() >= self.config.max_seqs;
            if full || tokens - cached > share || !self.leaves_room_for_the_first(id) {
                continue;
            }
            let Some(cached_blocks) = self.take_blocks(id, Holder::Running) else { return };
            self.waiting.retain(|other| *other != id);
            share -= tokens - cached;
            self.admit(plan, budget, id, cached_blocks, now);
        }
    }

    /// Whether the first in the queue would still get its blocks if `id` got its own before it.
    fn leaves_room_for_the_first(&self, id: RequestId) -> bool {
        let blocks = |id: RequestId| self.blocks_for(self.requests[&id].tokens.len());
        let first = self.waiting.front().filter(|first| **first != id);
        first.is_none_or(|first| self.pool.reusable() > blocks(id) + blocks(*first) + self.running.len())
    }

    fn plan_prefills(&mut self, plan: &mut Plan, budget: &mut usize, prefills: &[(RequestId, usize)]) {
        for &(id, remaining) in prefills {
            if *budget == 0 {
                return;
            }
            self.add(plan, budget, id, remaining.min(*budget));
        }
    }

    fn admit_waiting(&mut self, plan: &mut Plan, budget: &mut usize, now: Duration) {
        while *budget > 0 && self.running.len() < self.config.max_seqs {
            let Some(&id) = self.waiting.front() else { break };
            let Some(cached_blocks) = self.take_blocks(id, Holder::Running) else { break };
            self.waiting.pop_front();
            self.admit(plan, budget, id, cached_blocks, now);
        }
    }

    /// Starts a request that has its blocks and was taken out of the queue.
    fn admit(
        &mut self,
        plan: &mut Plan,
        budget: &mut usize,
        id: RequestId,
        cached_blocks: usize,
        now: Duration,
    ) {
        self.start_running(id);
        let cached = cached_blocks * self.config.block_size;
        self.count_lookup(self.requests[&id].tokens.len(), cached);
        let request = self.request(id);
        request.state = State::Running;
        request.num_computed = cached;
        let cached_prompt = cached.min(request.prompt_len);
        let first = request.cached_tokens.is_none();
        request.cached_tokens.get_or_insert(cached_prompt);
        request.timeline.scheduled.get_or_insert(now.saturating_sub(request.arrival));
        let remaining = request.remaining();
        if first {
            self.counters.prompt_tokens_cached += cached_prompt as u64;
        }
        self.dequeued(id);
        self.started(id);
        self.add(plan, budget, id, remaining.min(*budget));
    }

    /// Makes sure that a decoding request has a block for its next token. False if it cannot run in this step.
    fn grow(&mut self, id: RequestId, now: Duration) -> bool {
        let needed = self.blocks_for(self.requests[&id].tokens.len());
        if needed > self.pool.capacity() {
            // Even alone it could not go on: the pool is the limit of its length.
            self.finish(id, FinishReason::Length, now);
            return false;
        }
        while self.requests[&id].block_table.len() < needed {
            if let Some(blocks) = self.pool.allocate(1, Holder::Running) {
                self.request(id).block_table.extend(blocks);
                continue;
            }
            let Some(victim) = self.newest_preemptible() else { return false };
            self.preempt(victim);
            if victim == id {
                return false;
            }
        }
        true
    }

    /// The last arrived request that may lose its blocks. Those that compute for a ticket may not: writes from their
    /// blocks can be under way.
    fn newest_preemptible(&self) -> Option<RequestId> {
        let preemptible = |id: &&RequestId| matches!(self.requests[id].origin, Origin::Client);
        self.running.iter().rev().find(preemptible).copied()
    }

    /// Takes a request's blocks; it starts again from its tokens.
    fn preempt(&mut self, id: RequestId) {
        self.counters.preemptions += 1;
        self.running.retain(|other| *other != id);
        let request = self.request(id);
        request.state = State::Waiting;
        request.num_computed = 0;
        request.timeline.preemptions += 1;
        let table: Vec<BlockId> = std::mem::take(&mut request.block_table);
        self.pool.release_chain(&table);
        self.enqueue(id);
    }

    fn add(&mut self, plan: &mut Plan, budget: &mut usize, id: RequestId, len: usize) {
        let block_size = self.config.block_size;
        let request = &self.requests[&id];
        let (start, end) = (request.num_computed, request.num_computed + len);
        let table = request.block_table.iter().map(|block| block.0);
        plan.tokens.extend_from_slice(&request.tokens[start..end]);
        plan.meta.push_blocks(table, start, len, block_size);
        let samples = end == request.tokens.len();
        if samples {
            let row = plan.tokens.len() as u32 - 1;
            plan.samples.push(SampleRow::new(row, request, &self.config.eos));
        }
        plan.items.push(PlanItem { id, len, samples });
        *budget -= len;
    }
}
