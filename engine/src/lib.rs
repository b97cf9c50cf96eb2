//! The engine: which token of which request is computed when, and where its KV is.
//!
//! * [`api`], [`handle`]: what callers see.
//! * [`core`]: the pure state machine. Events in, plans and effects out; no clock, RNG, IO or lock.
//! * [`pool`], [`hash`]: blocks, their owners and the prefix cache.
//! * [`kv_events`]: what happens in the prefix cache, for indexes elsewhere.
//! * [`handoff`]: the ticket protocol between prefill and decode workers, as messages.
//! * [`service`]: the one thread that owns a core, a [`runner`] and the transfer driver.
//!
//! Invariants: `free + cached + running + ticketed + quarantined = capacity` after every step; a block that a peer may
//! still write is never given to anybody; a request sends outputs until exactly one `Finished` or `Failed`.
//!
//! Not here: text (models, server), how bytes travel (transfer), sockets and HTTP (server).

pub mod api;
pub mod core;
pub mod event;
pub mod handle;
pub mod handoff;
pub mod hash;
pub mod kv_events;
pub mod metrics;
pub mod pool;
pub mod request;
pub mod runner;
pub mod sampler;
pub mod service;
pub mod sim;
pub mod ticket;

pub use api::{
    FinishReason, GenerateRequest, Output, RequestError, SamplingParams, Timeline, TokenId, Usage,
};
pub use handle::{EngineHandle, EngineInfo, OutputStream, RequestId};
