//! UCX: its settings and its log, which NIXL's backends share.

pub(crate) mod environment;
pub(crate) mod log;
mod tables;
mod tls;

pub use environment::{Setting, UcxLanes};
