//! One sequence inside the engine.

use std::time::Duration;

use transfer::PeerId;

use crate::api::{FinishReason, SamplingParams, Timeline, TokenId};
use crate::handle::RequestId;
use crate::handoff::{PrefillTiming, TicketId, Totals};
use crate::hash::{self, BlockHash};
use crate::pool::BlockId;

/// Where a request stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// In the queue; holds no block.
    Waiting,
    /// A prefill worker computes the prompt; holds no running slot, and blocks only once granted.
    Remote,
    /// All KV is here, no running slot yet.
    Ready,
    Running,
    /// (Prefill worker) computed; its blocks are pinned until the writes settle.
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

/// (Prefill worker) the state of a ticket.
#[derive(Debug)]
pub struct Push {
    pub peer: PeerId,
    pub ticket: TicketId,
    pub grant: Option<Grant>,
    /// Prompt blocks `..pushed` need no further write.
    pub pushed: usize,
    /// Writes posted and not settled.
    pub in_flight: usize,
    pub totals: Totals,
    pub post: Duration,
    pub wire: Duration,
    /// Why the ticket ends without `Complete`, once that is so.
    pub ending: Option<Ending>,
    /// True after a write failed: the bytes may still be on their way.
    pub unclean: bool,
    pub first_token_at: Option<Duration>,
    /// When the last write was handed over.
    pub posted_at: Duration,
    /// When the last of the writes so far had settled, by the transport's clock.
    pub settled_at: Duration,
}

/// Where the decode worker wants the prompt's blocks from `first_block` on.
#[derive(Debug)]
pub struct Grant {
    pub first_block: usize,
    pub blocks: Vec<u32>,
}

/// How a ticket ends other than by completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The decode worker, or the first token, ended the request.
    Ended,
    Failed(String),
    /// The peer is gone: nobody to tell.
    PeerLost,
}

/// (Decode worker) the prompt's KV is made by a prefill worker.
#[derive(Debug)]
pub struct Remote {
    pub peer: PeerId,
    pub ticket: TicketId,
    /// Index in the block table of the first granted block; earlier ones were cached here. `None`: no grant yet.
    pub granted_from: Option<usize>,
    /// What `Complete` said, if it came before the last notification: then nothing more is written.
    pub complete: Option<Completed>,
    /// For each granted block, whether a notification has named it.
    pub arrived: Vec<bool>,
}

/// A prefill worker's word that a ticket's KV is written.
#[derive(Clone, Copy, Debug)]
pub struct Completed {
    pub at: Duration,
    pub totals: Totals,
    pub timing: PrefillTiming,
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
    /// Set once remote prefill was given up: the prompt is computed here.
    pub local_only: bool,
    /// It left the queue once; coming back after preemption does not count.
    pub dequeued: bool,
    /// Prompt tokens found in a cache by the first schedule (here, or on the prefill worker).
    pub cached_tokens: Option<usize>,
    pub transferred_tokens: usize,
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
            local_only: false,
            dequeued: false,
            cached_tokens: None,
            transferred_tokens: 0,
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
