//! OpenAI's HTTP API, with vLLM's statuses and additions.
//!
//! Invariants: a field that would change the answer is obeyed or refused, never ignored; joined pieces of a stream
//! are the text of the same request without `stream`; a stream that ends with `[DONE]` is whole.
//!
//! Of our own: `return_timeline: true` adds `timeline` to the answer; see [`timeline`]. Which log-probabilities are told
//! for which tokens: see [`logprobs`].
//!
//! Not here: structured output, prompts in the answer (`echo`, `prompt_logprobs`), parsing of tool calls.

mod body;
pub mod chat;
mod choice;
pub mod completions;
mod fields;
mod generate;
mod kv_transfer;
mod logprobs;
mod message;
pub mod models;
mod options;
mod prompt;
mod response;
mod sampling;
mod sse;
mod timeline;
pub mod tokenize;
mod unsupported;

pub use body::MAX_BODY_BYTES;
pub use prompt::Prompt;
