//! One sequence inside the engine.

use std::time::Duration;

use crate::api::{FinishReason, SamplingParams, Timeline, TokenId};
use crate::handle::RequestId;
use crate::hash::{self, BlockHash};
use crate::pool::BlockId;
use crate::ticket::{Push, Remote};

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In the queue; holds no block.
    Waiting,
    /// A prefill worker computes the prompt, or has computed it; holds no running slot, and blocks only once granted.
    Remote,
    /// All KV is here, no running slot yet.
    Ready,
    Running,
    /// (Prefill worker) computed; its blocks are pinned until the writes settle, or the decode worker has read them.
    Pushing,
}

/// Who asked, and so where tokens and KV go.
#[derive(Debug)]
pub enum Origin {
    /// A client of this process.
    Client,
    /// A decode worker: this process computes the prompt for it.
    Ticket(Box<Push>),
}

/// One sequence: its tokens, its blocks and how far it is.
#[derive(Debug)]
pub struct Request {
    pub id: RequestId,
    pub request_id: String,
    pub origin: Origin,
    pub state: State,
    /// Prompt, then the answer so far.
    pub tokens: Vec<TokenId>,
    pub prompt_len: usize,
    /// Tokens whose KV is in the block table.
    pub num_computed: usize,
    pub block_table: Vec<BlockId>,
    /// Names of the full blocks so far, as far as they were needed.
    hashes: Vec<BlockHash>,
    root: BlockHash,
    pub sampling: SamplingParams,
    pub cache_salt: Option<String>,
    pub seed: u64,
    pub remote: Option<Remote>,
    /// (Prefill worker) keep the prompt's KV for a decode worker that will claim it.
    pub keep: bool,
    /// Set once remote prefill was given up: the prompt is computed here.
    pub local_only: bool,
    /// It left the queue once; coming back after preemption does not count.
    pub dequeued: bool,
    /// Prompt tokens found in a cache by the first schedule (here, or on the prefill worker).
    pub cached_tokens: Option<usize>,
    pub transferred_tokens: usize,
    /// Prompt tokens that the worker which keeps the KV found in its cache.
    pub cached_elsewhere: usize,
    pub arrival: Duration,
    pub deadline: Duration,
    pub timeline: Timeline,
}

/// What a new request is made of.
#[derive(Debug)]
pub struct NewRequest {
    pub id: RequestId,
    pub request_id: String,
    pub origin: Origin,
    pub tokens: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub cache_salt: Option<String>,
    pub seed: u64,
    pub keep: bool,
    pub arrival: Duration,
    pub deadline: Duration,
}

impl Request {
    pub fn new(new: NewRequest) -> Self {
        Self {
            id: new.id,
            request_id: new.request_id,
            origin: new.origin,
            state: State::Waiting,
            prompt_len: new.tokens.len(),
            tokens: new.tokens,
            num_computed: 0,
            block_table: Vec::new(),
            hashes: Vec::new(),
            root: hash::root(new.cache_salt.as_deref()),
            sampling: new.sampling,
            cache_salt: new.cache_salt,
            seed: new.seed,
            remote: None,
            keep: new.keep,
            local_only: false,
            dequeued: false,
            cached_tokens: None,
            transferred_tokens: 0,
            cached_elsewhere: 0,
            arrival: new.arrival,
            deadline: new.deadline,
            timeline: Timeline::default(),
        }
    }

    /// Tokens of the answer so far.
    pub fn num_generated(&self) -> usize {
        self.tokens.len() - self.prompt_len
    }

    /// Tokens left to compute before the next one can be sampled.
    pub fn remaining(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Name of full block `index` and of its parent; `index` at most one beyond the last asked for.
    pub fn block_hash(&mut self, index: usize, block_size: usize) -> (BlockHash, BlockHash) {
        while self.hashes.len() <= index {
            let at = self.hashes.len() * block_size;
            let parent = self.hashes.last().copied().unwrap_or(self.root);
            self.hashes.push(hash::chain(parent, &self.tokens[at..at + block_size]));
        }
        (if index == 0 { self.root } else { self.hashes[index - 1] }, self.hashes[index])
    }

    /// The ticket this request computes for, if it does.
    pub fn push(&self) -> Option<&Push> {
        match &self.origin {
            Origin::Ticket(push) => Some(push),
            Origin::Client => None,
        }
    }

    pub fn push_mut(&mut self) -> Option<&mut Push> {
        match &mut self.origin {
            Origin::Ticket(push) => Some(push),
            Origin::Client => None,
        }
    }

    /// Whether the last token ends the text, and why.
    pub fn finish(&self, eos: &[TokenId], max_model_len: usize) -> Option<FinishReason> {
        let last = *self.tokens.last().expect("a request has tokens. This is a bug.");
        if self.num_generated() == 0 {
            return None;
        }
        if self.sampling.stop_token_ids.contains(&last) || (!self.sampling.ignore_eos && eos.contains(&last))
        {
            return Some(FinishReason::Stop);
        }
        let full = self.num_generated() >= self.sampling.max_tokens || self.tokens.len() >= max_model_len;
        full.then_some(FinishReason::Length)
    }
}
