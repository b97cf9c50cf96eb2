//! OpenAI's HTTP API, with vLLM's statuses and additions.
//!
//! Invariants: a field that would change the answer is obeyed or refused, never ignored; joined pieces of a stream
//! are the text of the same request without `stream`; a stream that ends with `[DONE]` is whole.
//!
//! Not here: log-probabilities, penalties, structured output, parsing of tool calls.

mod body;
pub mod chat;
mod choice;
pub mod completions;
mod fields;
mod generate;
mod message;
pub mod models;
mod options;
mod prompt;
mod response;
mod sse;
pub mod tokenize;
mod unsupported;

pub use body::MAX_BODY_BYTES;
pub use prompt::Prompt;
