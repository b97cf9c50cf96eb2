//! The `serve` binary: configuration, OpenAI's HTTP API in front of an engine, and the life of the process.
//!
//! Invariants: the port answers from the start, and says 503 until a request would be served; a client that goes
//! away frees what its request held; a shutdown cuts nobody off within its grace period, and nobody is kept
//! waiting after it.
//!
//! Not here: scheduling, sampling and KV (`engine`), text handling itself (`models`).
#![forbid(unsafe_code)]

pub mod answer_text;
pub mod app;
pub mod args;
pub mod config;
pub mod discovery;
pub mod error;
pub mod events;
pub mod frontend;
pub mod http;
mod lanes;
pub mod layers;
pub mod link;
pub mod openai;
mod ops;
pub mod readiness;
pub mod router;
pub mod routes;
pub mod shutdown;
pub mod size;
pub mod state;
pub mod text;
pub mod worker;
