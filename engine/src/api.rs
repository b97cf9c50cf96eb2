//! What callers hand to the engine and what they get back.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use transfer::PeerId;

use crate::core::Fetch;
use crate::handoff::{PrefillTiming, Totals};

/// A row of the vocabulary.
pub type TokenId = u32;

/// How to pick each token. Defaults are greedy.
///
/// Travels with a ticket, so that a prefill worker picks the first token as the decode worker would.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct SamplingParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep only the `top_k` likeliest tokens; `None` keeps all.
    pub top_k: Option<u32>,
    /// Keep the smallest set of tokens whose probabilities sum to at least this; 1 keeps all.
    pub top_p: f32,
    /// Drop tokens whose probability is below this share of the likeliest one's; 0 drops none.
    pub min_p: f32,
    /// Divides (or multiplies, if negative) the logits of tokens in prompt and answer so far; 1 changes nothing
    /// (Keskar et al. 2019).
    pub repetition_penalty: f32,
    /// Taken off the logits of tokens that are in the answer already.
    pub presence_penalty: f32,
    /// Taken off the logits of tokens in the answer, once for each time they are.
    pub frequency_penalty: f32,
    /// Added to single tokens' logits. Each id once.
    pub logit_bias: Vec<(TokenId, f32)>,
    /// End-of-sequence and stop tokens are not sampled before the answer has this many tokens.
    pub min_tokens: usize,
    /// Report each token's log-probability and those of this many likeliest tokens.
    pub logprobs: Option<u32>,
    /// Same seed, same text. `None`: the engine draws one when it takes the request.
    pub seed: Option<u64>,
    /// Tokens to generate at most.
    pub max_tokens: usize,
    /// Go on past end-of-sequence tokens.
    pub ignore_eos: bool,
    /// Further tokens that end the text, beside the model's own end-of-sequence tokens.
    pub stop_token_ids: Vec<TokenId>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        Self {
            temperature: 0.0,
            top_k: None,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
            min_tokens: 0,
            logprobs: None,
            seed: None,
            max_tokens: 16,
            ignore_eos: false,
            stop_token_ids: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Whether the tokens so far change the logits.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0 || self.presence_penalty != 0.0 || self.frequency_penalty != 0.0
    }
}

/// Who computes a prompt, on a worker that has prefill workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PrefillBy {
    /// The least loaded prefill worker, or this one.
    #[default]
    Anyone,
    /// This worker.
    Here,
    /// This prefill worker, as far as it can; else this one.
    Peer(PeerId),
    /// A prefill worker was to, and there is no link to it; this one.
    Unlinked,
}

/// One sequence to continue.
#[derive(Clone, Debug)]
pub struct GenerateRequest {
    /// For logs: the client's `X-Request-Id` or one made by the server. Need not be unique.
    pub request_id: String,
    /// Prompt; not empty, every id below the vocabulary size.
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    /// Requests with different salts never share cached blocks.
    pub cache_salt: Option<String>,
    /// Keep the prompt's KV beyond the answer's end, for a decode worker to claim.
    pub keep: bool,
    /// Where the prompt's KV is to be had: it is read from there instead of computed.
    pub fetch: Option<Fetch>,
    /// Who computes the prompt.
    pub prefill: PrefillBy,
    /// When the server took the request.
    pub arrival: Instant,
    /// The request ends with an error after this long.
    pub timeout: Duration,
}

/// How likely the model found a token: natural logarithms of the plain softmax, before temperature, penalties and bias.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Logprobs {
    pub logprob: f32,
    /// The likeliest tokens, likeliest first; as many as were asked for.
    pub top: Vec<(TokenId, f32)>,
}

/// Why a sequence ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum FinishReason {
    /// An end-of-sequence or stop token; that token is not part of the output's text.
    Stop,
    /// `max_tokens` or the model's length was reached.
    Length,
}

impl FinishReason {
    /// OpenAI's word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// Where the time of a request went. Durations since its arrival; `None` for what did not happen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// The first step with tokens of this request, here.
    pub scheduled: Option<Duration>,
    /// The prompt was offered to a prefill worker.
    pub ticket_opened: Option<Duration>,
    /// The prefill worker was told where to write.
    pub granted: Option<Duration>,
    pub first_token: Option<Duration>,
    /// The transferred KV was complete.
    pub kv_received: Option<Duration>,
    pub last_token: Option<Duration>,
    /// How often the request lost its blocks and started again.
    pub preemptions: u32,
    /// What the prefill worker said of its part.
    pub prefill: Option<PrefillTiming>,
    /// What was transferred.
    pub transfer: Option<Totals>,
    /// The prompt's KV was to come from a prefill worker and was computed here, for this reason.
    pub recomputed: Option<KvFault>,
}

/// Why no KV came from a prefill worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvFault {
    /// There was no link to the prefill worker that was named.
    NotLinked,
    LinkLost,
    /// The prefill worker said no, or that it failed.
    Refused,
    /// What was written or offered is not what was granted or asked for.
    Miscounted,
    NotificationLost,
    Checksum,
    ReadFailed,
    LeaseExpired,
}

impl KvFault {
    /// Stable label for metrics and answers.
    pub fn label(self) -> &'static str {
        match self {
            KvFault::NotLinked => "not_linked",
            KvFault::LinkLost => "link_lost",
            KvFault::Refused => "refused",
            KvFault::Miscounted => "miscounted",
            KvFault::NotificationLost => "notification_lost",
            KvFault::Checksum => "checksum",
            KvFault::ReadFailed => "read_failed",
            KvFault::LeaseExpired => "lease_expired",
        }
    }
}

/// A prompt's KV that a prefill worker keeps for a decode worker to claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptKv {
    /// Names it in the claim; never used twice.
    pub name: String,
    /// Blocks of the prefill worker, by position in the prompt.
    pub blocks: Vec<u32>,
    /// The prompt's length.
    pub tokens: usize,
    /// Of these, how many the prefill worker found in its cache.
    pub cached_tokens: usize,
    /// It is kept this long from now.
    pub lease: Duration,
}

/// The part of an answer known when the request is over.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    /// Prompt tokens whose KV was already here (or on the prefill worker) and was not computed.
    pub cached_tokens: usize,
    /// Prompt tokens whose KV came from a prefill worker.
    pub transferred_tokens: usize,
}

/// What a running request tells its caller, in order; `Finished` or `Failed` is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum Output {
    /// One more token. An end-of-sequence or stop token is not sent; it shows as `Finished { reason: Stop }`
    /// (it counts in `usage.completion_tokens`). `cached_tokens` is known with the first token.
    Token {
        id: TokenId,
        cached_tokens: usize,
        logprobs: Option<Box<Logprobs>>,
    },
    Finished {
        reason: FinishReason,
        /// The stop token that ended it, if one of `stop_token_ids` did.
        stop_token: Option<TokenId>,
        usage: Usage,
        timeline: Timeline,
        /// The prompt's KV, if it was to be kept.
        kept: Option<Box<KeptKv>>,
    },
    Failed(RequestError),
}

/// Why the engine would not take, or could not finish, a request.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum RequestError {
    #[error("the prompt is empty; at least one token is needed")]
    EmptyPrompt,
    #[error("token id {id} is out of range: the vocabulary has {vocab_size} rows")]
    TokenOutOfRange { id: TokenId, vocab_size: usize },
    #[error(
        "the prompt has {prompt} tokens, but the model's maximum length is {max_model_len} tokens and at least one is needed for the answer"
    )]
    PromptTooLong { prompt: usize, max_model_len: usize },
    #[error(
        "the prompt has {prompt} tokens and needs {needed} KV cache blocks, but this worker has {capacity} blocks of {block_size} tokens"
    )]
    PromptNeverFits { prompt: usize, needed: usize, capacity: usize, block_size: usize },
    #[error("{field} is {value}, expected {expected}")]
    BadParameter { field: &'static str, value: String, expected: &'static str },
    #[error("{queued} requests are waiting already, the limit is {limit}")]
    QueueFull { queued: usize, limit: usize },
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the request did not finish within {0:?}")]
    DeadlineExceeded(Duration),
    #[error("remote prefill failed: {0}")]
    RemotePrefill(String),
    #[error("the engine failed: {0}")]
    Internal(String),
}

impl RequestError {
    /// The HTTP status this error maps to.
    pub fn status(&self) -> u16 {
        match self {
            RequestError::EmptyPrompt
            | RequestError::TokenOutOfRange { .. }
            | RequestError::PromptTooLong { .. }
            | RequestError::PromptNeverFits { .. }
            | RequestError::BadParameter { .. } => 400,
            RequestError::QueueFull { .. } => 429,
            RequestError::ShuttingDown | RequestError::RemotePrefill(_) => 503,
            RequestError::DeadlineExceeded(_) => 504,
            RequestError::Internal(_) => 500,
        }
    }

    /// Stable label for metrics.
    pub fn label(&self) -> &'static str {
        match self {
            RequestError::EmptyPrompt => "empty_prompt",
            RequestError::TokenOutOfRange { .. } => "token_out_of_range",
            RequestError::PromptTooLong { .. } => "prompt_too_long",
            RequestError::PromptNeverFits { .. } => "prompt_never_fits",
            RequestError::BadParameter { .. } => "bad_parameter",
            RequestError::QueueFull { .. } => "queue_full",
            RequestError::ShuttingDown => "shutting_down",
            RequestError::DeadlineExceeded(_) => "deadline_exceeded",
            RequestError::RemotePrefill(_) => "remote_prefill",
            RequestError::Internal(_) => "internal",
        }
    }
}
