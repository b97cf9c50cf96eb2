//! KV events: what a worker says of its prefix cache, and a frontend's way to follow it.
//!
//! * [`wire`]: vLLM's format. Batches `[timestamp, events, rank]` in MessagePack over ZMQ PUB, `[topic, sequence, batch]`.
//! * [`options`]: `--kv-events` and vLLM's `--kv-events-config`.
//! * [`publisher`]: a worker's end, with the socket that repeats batches, and [`snapshot`], what it holds now.
//! * [`follower`]: a frontend's end as a pure state machine: order, gaps, restarts, foreign names.
//! * [`subscriber`]: the sockets around it.
//!
//! Invariants: the engine never waits for a reader; an index that may have missed something is repaired (replay, then
//! snapshot) or cleared, never believed.

pub mod follower;
pub mod ops;
pub mod options;
pub mod publisher;
pub mod snapshot;
pub mod subscriber;
pub mod wire;
