//! What the router says of itself and of its workers.

use std::sync::Arc;

use serde::Serialize;

use crate::discovery::WorkerRecord;
use crate::router::disagg::Estimate;
use crate::router::policy::{BlockKey, Choice};
use crate::router::source::SourceCode;
use crate::router::view::{ClusterView, IndexSource, Load};
use crate::router::worker::{Condition, WorkerId};

/// What happened to the blocks of a worker, in the names of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexChange {
    Store { parent: Option<BlockKey>, keys: Vec<BlockKey> },
    Remove(Vec<BlockKey>),
    Clear,
}

/// What the changes of one batch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub stored: usize,
    pub removed: usize,
    /// Blocks whose parent the worker is not known to hold: something was missed.
    pub orphans: usize,
    /// The worker would hold more blocks than its pool has: removals were missed.
    pub overfull: bool,
}

/// An alarm of one worker's index that must be shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alarm {
    pub worker: WorkerId,
    pub worker_id: String,
    pub url: String,
    pub code: SourceCode,
}

/// One worker, for `/health`, the status page and metrics.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerStatus {
    pub record: Arc<WorkerRecord>,
    pub condition: Condition,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub misfit: Option<String>,
    pub index: IndexSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm: Option<SourceCode>,
    pub load: Load,
    /// Blocks that the index in use knows of it.
    pub cached_blocks: u64,
    pub orphan_blocks: u64,
    pub requests: u64,
}

/// A dry run: what a request would see.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub mode: &'static str,
    pub num_tokens: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub cluster: ClusterView,
    pub choice: Option<Choice>,
    /// Who computes the prompt, where there is a prefill worker for it.
    pub disagg: Option<Estimate>,
    pub error: Option<String>,
}

/// Sizes of the router's state, for gauges: all bounded, and bookings 0 when nothing runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    pub exact_blocks: usize,
    pub exact_bytes: usize,
    pub recent_blocks: usize,
    pub recent_bytes: usize,
    pub open_bookings: usize,
    pub expired_bookings: u64,
    /// Times that events were missed.
    pub event_gaps: u64,
}
