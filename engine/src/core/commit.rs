//! Taking a step's results: KV is there, tokens were sampled.

use std::time::Duration;

use super::{Core, Effect, Plan};
use crate::api::{FinishReason, Output, RequestError};
use crate::handle::RequestId;
use crate::request::{Origin, State};
use crate::sampler::Sampled;

impl Core {
    /// Takes the results of `plan`: one sampled token for each of its `samples`, in order.
    ///
    /// Panics if the counts differ, which is a bug of the runner.
    pub fn commit(&mut self, plan: &Plan, sampled: Vec<Result<Sampled, String>>, now: Duration) {
        assert_eq!(plan.samples.len(), sampled.len(), "a token for each sampled row. This is a bug.");
        self.counters.steps += 1;
        self.counters.step_tokens += plan.tokens.len() as u64;
        let mut sampled = sampled.into_iter();
        for item in &plan.items {
            self.computed(item.id, item.len);
            if !item.samples {
                self.push_computed(item.id, now);
                continue;
            }
            match sampled.next().expect("counted above. This is a bug.") {
                Ok(token) if self.requests[&item.id].push().is_some() => {
                    self.first_token_for(item.id, token, now)
                }
                Ok(token) => self.emit(item.id, token, now),
                Err(error) => self.fail(item.id, RequestError::Internal(error)),
            }
        }
        self.check();
    }

    /// The step failed as a whole: its requests fail, the others go on.
    pub fn abandon(&mut self, plan: &Plan, error: &str) {
        for item in &plan.items {
            self.fail(item.id, RequestError::Internal(error.to_owned()));
        }
        self.check();
    }

    /// `len` more tokens of a request have their KV; blocks that became full go into the prefix cache.
    fn computed(&mut self, id: RequestId, len: usize) {
        let block_size = self.config.block_size;
        let request = self.requests.get_mut(&id).expect("nothing ends during a step. This is a bug.");
        let from = request.num_computed;
        request.num_computed += len;
        let of_prompt = request.num_computed.min(request.prompt_len) - from.min(request.prompt_len);
        self.counters.prompt_tokens_computed += of_prompt as u64;
        self.seal_blocks(id, from / block_size);
    }

    /// Puts a request's full computed blocks from index `first` on into the prefix cache.
    pub(super) fn seal_blocks(&mut self, id: RequestId, first: usize) {
        let block_size = self.config.block_size;
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        for index in first..request.num_computed / block_size {
            let (parent, hash) = request.block_hash(index, block_size);
            let tokens = &request.tokens[index * block_size..(index + 1) * block_size];
            if self.pool.seal(request.block_table[index], parent, hash, tokens) {
                self.pool.log.stored(parent, hash, tokens, index == 0, request.cache_salt.as_deref());
            }
        }
    }

    /// One more token of a client's request.
    pub(super) fn emit(&mut self, id: RequestId, sampled: Sampled, now: Duration) {
        self.counters.generated_tokens += 1;
        let max_model_len = self.config.max_model_len;
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        request.tokens.push(sampled.token);
        let since = now.saturating_sub(request.arrival);
        request.timeline.first_token.get_or_insert(since);
        request.timeline.last_token = Some(since);
        let finish = request.finish(&self.config.eos, max_model_len);
        if finish != Some(FinishReason::Stop) {
            let cached_tokens = request.cached_tokens.unwrap_or(0);
            self.effects.push(Effect::Output(
                id,
                Output::Token { id: sampled.token, cached_tokens, logprobs: sampled.logprobs },
            ));
        }
        if let Some(reason) = finish {
            self.finish(id, reason, now);
        }
    }

    /// Ends a client's request as it should end.
    pub(super) fn finish(&mut self, id: RequestId, reason: FinishReason, now: Duration) {
        let request = &self.requests[&id];
        debug_assert!(matches!(request.origin, Origin::Client) && request.state != State::Pushing);
        let last = request.tokens[request.tokens.len() - 1];
        let stop_token =
            (reason == FinishReason::Stop && request.sampling.stop_token_ids.contains(&last)).then_some(last);
        let mut timeline = request.timeline;
        timeline.last_token.get_or_insert(now.saturating_sub(request.arrival));
        let usage = self.usage(request);
        let kept = request.keep.then(|| Box::new(self.keep(id, now)));
        self.effects.push(Effect::Output(id, Output::Finished { reason, stop_token, usage, timeline, kept }));
        self.close(id);
    }
}
