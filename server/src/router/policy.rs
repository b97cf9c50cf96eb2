//! The seam between the router and its modes.

use std::fmt::Debug;

use serde::Serialize;

use super::view::{ClusterView, WorkerView};
use super::worker::WorkerId;

/// Name of a block in events and in the index: the low 64 bits of its [`engine::hash::BlockHash`]. Among 10 million
/// blocks two share a name with probability 3e-6, and all that would follow is one overestimated overlap: workers
/// compare token ids before they reuse a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockKey(pub u64);

/// A request as policies see it.
#[derive(Clone, Copy, Debug)]
pub struct RequestBlocks<'a> {
    /// Names of the prompt's full blocks, first to last.
    pub keys: &'a [BlockKey],
    /// Length of the prompt in tokens.
    pub num_tokens: usize,
    /// Tokens in a block, at least 1.
    pub block_size: usize,
}

impl RequestBlocks<'_> {
    /// Blocks that the prompt fills, a partly filled one included.
    pub fn num_blocks(&self) -> usize {
        self.num_tokens.div_ceil(self.block_size.max(1))
    }

    /// Blocks to compute on a worker where `waiting` prompt tokens wait, with this prompt.
    pub fn prefill_blocks(&self, waiting: u64) -> f64 {
        (waiting as f64 + self.num_tokens as f64) / self.block_size.max(1) as f64
    }

    /// Blocks that running requests would hold on the worker with this one admitted.
    pub fn decode_blocks(&self, worker: &WorkerView) -> f64 {
        let new = (self.num_blocks() as u64).saturating_sub(u64::from(worker.active_blocks));
        (worker.load.decode_blocks + new) as f64
    }
}

/// Chance and order, passed in so that policies stay functions.
#[derive(Clone, Copy, Debug)]
pub struct Draw {
    /// Counts decisions up from 1.
    pub turn: u64,
    /// A random number for this decision.
    pub seed: u64,
}

impl Draw {
    /// Uniform draws from the seed (SplitMix64, Steele et al. 2014).
    pub fn numbers(&self) -> impl Iterator<Item = u64> + use<> {
        let mut state = self.seed;
        std::iter::repeat_with(move || {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        })
    }
}

/// Which leg of the request a score is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Leg {
    /// The worker that answers the client.
    Serve,
    /// The worker that computes the prompt for it.
    Prefill,
}

/// How one candidate was judged; the numbers of `POST /route/explain`. All are finite.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Score {
    pub worker: WorkerId,
    pub leg: Leg,
    pub overlap_blocks: u32,
    /// Prompt blocks left to compute there, other requests' included, after the credit for overlap.
    pub prefill_blocks: f64,
    /// Cached blocks that would have to make room for this prompt; 0 in modes that do not look at caches.
    pub evicted_blocks: f64,
    /// Blocks that running requests would hold with this one admitted.
    pub decode_blocks: f64,
    pub active_requests: u64,
    /// Lower is better. In the unit of the policy: blocks for `kv`.
    pub cost: f64,
}

/// What decided between the candidates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// There was one candidate.
    Only,
    /// Its turn.
    Turn,
    /// Drawn at random, by temperature or by mode.
    Drawn,
    /// The lowest cost alone.
    LowestCost,
    /// Several had the lowest cost: the one with less load, less in its cache, or longer without a request.
    Tie,
}

impl Reason {
    /// Stable label for metrics.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Turn => "turn",
            Self::Drawn => "drawn",
            Self::LowestCost => "lowest-cost",
            Self::Tie => "tie",
        }
    }
}

/// Where a request goes.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Choice {
    /// Answers the client.
    pub serve: WorkerId,
    pub reason: Reason,
    /// Computes the prompt, if another worker is to.
    pub prefill: Option<WorkerId>,
    pub prefill_reason: Option<Reason>,
    /// Each candidate, in the cluster's order.
    pub scores: Vec<Score>,
}

/// No worker may take the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoWorker {
    /// Nothing that serves clients is known at all.
    #[error("no worker is registered")]
    Unknown,
    /// There are workers, and each is above its limit.
    #[error("all {workers} workers are overloaded")]
    Overloaded { workers: usize },
    /// There are workers, and none takes requests now.
    #[error(
        "none of {workers} workers takes requests: {draining} draining, {failed} failed, {refused} refused, {overloaded} overloaded"
    )]
    Unavailable { workers: usize, draining: usize, failed: usize, refused: usize, overloaded: usize },
}

/// A mode of the router: a pure function.
pub trait RoutePolicy: Debug + Send + Sync {
    /// The value of `--router-mode`.
    fn name(&self) -> &'static str;

    /// False if the mode does not look at overlap, so that nobody needs to hash the prompt or keep an index.
    fn uses_overlap(&self) -> bool;

    /// Picks among the workers that take requests ([`super::WorkerView::is_candidate`]).
    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker>;
}
