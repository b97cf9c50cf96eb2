//! Support for the integration tests: real `serve` processes on free loopback ports, clients that talk to them as
//! any client would, and readers of what they publish (`/health`, `/metrics`, logs).
//!
//! Nothing here knows what the model answers: tests compare deployments with each other. Nothing waits for a fixed
//! time where a state can be polled; every wait has a limit, and says what it waited for when that is over.

pub mod ask;
pub mod client;
pub mod cluster;
pub mod faults;
pub mod golden;
pub mod metrics;
pub mod process;
pub mod prompts;
pub mod serve_binary;
pub mod wait;

pub use ask::{Answer, Ask, Failure, Usage};
pub use client::{Client, Stream};
pub use cluster::{Cluster, Deployment};
pub use metrics::{Account, Metrics};
pub use process::Worker;
