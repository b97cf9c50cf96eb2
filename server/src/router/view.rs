//! The snapshot of the cluster that a decision sees.

use serde::Serialize;

use super::worker::{Condition, WorkerId, WorkerRole};

/// Where a worker's part of the index comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum IndexSource {
    /// KV events: what the worker really holds.
    Events,
    /// The router's own decisions, with a time to live.
    Approximate,
    /// Nothing: no overlap is known.
    None,
}

impl IndexSource {
    /// The value of the `x-kv-index` header.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Events => "events",
            Self::Approximate => "approximate",
            Self::None => "none",
        }
    }
}

/// What our own bookings put on a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Load {
    /// Prompt tokens that wait for their first token, cached ones not counted.
    pub prefill_tokens: u64,
    /// Distinct blocks of running requests; a prefix that several share counts once.
    pub decode_blocks: u64,
    pub active_requests: u64,
}

/// One worker as a decision for one request sees it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct WorkerView {
    pub id: WorkerId,
    pub role: WorkerRole,
    pub condition: Condition,
    pub load: Load,
    /// Blocks of its KV pool, if it said.
    pub capacity_blocks: Option<u64>,
    /// Blocks that the index knows of it.
    pub cached_blocks: u64,
    /// Those of them that some request found there: what would be missed. All of them where nobody keeps count.
    pub reused_blocks: u64,
    /// Leading blocks of this request that it holds, by the index.
    pub overlap_blocks: u32,
    /// Leading blocks of this request that running requests hold there already.
    pub active_blocks: u32,
    /// Turn of the last request that went there; 0 for none.
    pub last_turn: u64,
    pub index: IndexSource,
}

impl WorkerView {
    /// True if it may get a new request.
    pub fn is_candidate(&self) -> bool {
        self.condition == Condition::Ready
    }
}

/// All workers, in a fixed order.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ClusterView {
    pub workers: Vec<WorkerView>,
}

impl ClusterView {
    pub fn get(&self, id: WorkerId) -> Option<&WorkerView> {
        self.workers.iter().find(|worker| worker.id == id)
    }
}
