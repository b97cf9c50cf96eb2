//! `kv`: where the prompt costs least, given what is cached where and what each worker has to do.
//!
//! The costs are those of Dynamo's router (its documentation, "KV cache routing") and one more, in blocks:
//!
//! ```text
//! serve, both:    prefill cost + decode blocks
//! serve, decode:  max(0, decode blocks - credit) + weight * requests, plus the cheapest prefill worker's cost
//! prefill:        prefill cost
//! prefill cost  = scale * max(0, prompt blocks waiting and this prompt's - credit) + eviction * evicted blocks + weight * requests
//! credit        = overlap credit * overlap blocks / (1 + decay * excess prompt blocks / this prompt's blocks)
//! evicted       = max(0, this prompt's blocks that are not cached there - blocks that are free there)
//!               + max(0, the same - blocks there that nobody would miss)
//! ```
//!
//! The excess is over the least loaded candidate. Decode blocks are those after admission; shared ones count once.
//!
//! Evicted blocks are what Dynamo's cost lacks: a prompt that leaves the worker that has it, because others run there for
//! a moment, pushes another prompt out of the cache where it goes, which then has to go elsewhere in turn. Where caches
//! are nearly as large as what is in use, that goes on for ever. Blocks that some request has found since they were stored
//! count twice: so a prompt that has lost its place goes where fewest others have theirs, and not to the one that has most
//! of them but happens to be idle. Nothing is evicted where there is room.

use crate::router::policies::select::{Candidates, lowest};
use crate::router::policy::{Choice, Draw, Leg, NoWorker, Reason, RequestBlocks, RoutePolicy, Score};
use crate::router::view::{ClusterView, WorkerView};
use crate::router::worker::WorkerRole;

/// The terms of the cost. All finite and not negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KvWeights {
    /// `--router-kv-overlap-score-credit`
    pub overlap_score_credit: f64,
    /// `--router-kv-overlap-score-credit-decay`
    pub overlap_score_credit_decay: f64,
    /// `--router-prefill-load-scale`
    pub prefill_load_scale: f64,
    /// `--router-eviction-weight`: of a block that has to make room; 0 is Dynamo's cost.
    pub eviction_weight: f64,
    /// `--router-decode-active-request-weight`
    pub decode_active_request_weight: f64,
    /// `--router-temperature`; 0 takes the lowest cost.
    pub temperature: f64,
}

impl Default for KvWeights {
    fn default() -> Self {
        Self {
            overlap_score_credit: 1.0,
            overlap_score_credit_decay: 0.0,
            prefill_load_scale: 1.0,
            eviction_weight: 0.0,
            decode_active_request_weight: 0.0,
            temperature: 0.0,
        }
    }
}

/// The mode `kv`.
#[derive(Debug, Default)]
pub struct KvPolicy {
    pub weights: KvWeights,
}

impl RoutePolicy for KvPolicy {
    fn name(&self) -> &'static str {
        "kv"
    }

    fn uses_overlap(&self) -> bool {
        true
    }

    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker> {
        let candidates = Candidates::of(cluster)?;
        let prefill = self.scores(request, Leg::Prefill, &candidates.prefill, None);
        let cheapest_prefill = prefill.iter().map(|score| score.cost).min_by(f64::total_cmp);
        let serve = self.scores(request, Leg::Serve, &candidates.serve, cheapest_prefill);
        let mut numbers = draw.numbers();
        let mut pick = |workers: &[&WorkerView], scores: &[Score]| {
            let costs: Vec<_> = scores.iter().map(|score| score.cost).collect();
            let temperature = self.weights.temperature;
            match temperature > 0.0 && costs.len() > 1 {
                true => (sample(&costs, temperature, numbers.next().unwrap_or_default()), Reason::Drawn),
                false => lowest(workers, &costs, draw),
            }
        };
        let (index, reason) = pick(&candidates.serve, &serve);
        let chosen = candidates.serve[index];
        let pool = candidates.prefill_for(chosen);
        let picked = (!pool.is_empty()).then(|| pick(pool, &prefill));
        let mut scores = serve;
        if picked.is_some() {
            scores.extend(prefill);
        }
        Ok(Choice {
            serve: chosen.id,
            reason,
            prefill: picked.map(|(index, _)| pool[index].id),
            prefill_reason: picked.map(|(_, reason)| reason),
            scores,
        })
    }
}

impl KvPolicy {
    fn scores(
        &self,
        request: &RequestBlocks<'_>,
        leg: Leg,
        workers: &[&WorkerView],
        cheapest_prefill: Option<f64>,
    ) -> Vec<Score> {
        let least = workers.iter().map(|worker| worker.load.prefill_tokens).min().unwrap_or_default();
        let score = |worker: &&WorkerView| {
            let weights = &self.weights;
            // The last token is always computed, so a block that ends with the prompt is not saved.
            let usable = request.num_tokens.saturating_sub(1) / request.block_size.max(1);
            let overlap = worker.overlap_blocks.min(usable as u32);
            let excess =
                request.prefill_blocks(worker.load.prefill_tokens - least) - request.prefill_blocks(0);
            let decay =
                1.0 + weights.overlap_score_credit_decay * excess / (request.num_blocks().max(1) as f64);
            let credit = weights.overlap_score_credit * f64::from(overlap) / decay;
            let prefill_blocks = (request.prefill_blocks(worker.load.prefill_tokens) - credit).max(0.0);
            let decode_blocks = request.decode_blocks(worker);
            let requests = weights.decode_active_request_weight * worker.load.active_requests as f64;
            let evicted_blocks = evicted_blocks(request, worker, overlap);
            let computing =
                weights.prefill_load_scale * prefill_blocks + weights.eviction_weight * evicted_blocks;
            let cost = match (leg, worker.role, cheapest_prefill) {
                (Leg::Prefill, ..) => computing + requests,
                (Leg::Serve, WorkerRole::Decode, Some(prefill)) => {
                    (decode_blocks - credit).max(0.0) + requests + prefill
                }
                (Leg::Serve, ..) => computing + decode_blocks + requests,
            };
            Score {
                worker: worker.id,
                leg,
                overlap_blocks: overlap,
                prefill_blocks,
                evicted_blocks,
                decode_blocks,
                active_requests: worker.load.active_requests,
                cost: finite(cost),
            }
        };
        workers.iter().map(score).collect()
    }
}

/// Cached blocks that the prompt would push out, those that would be missed twice. Prompts that are being computed take the
/// room first.
fn evicted_blocks(request: &RequestBlocks<'_>, worker: &WorkerView, overlap: u32) -> f64 {
    let Some(capacity) = worker.capacity_blocks else { return 0.0 };
    let coming = worker.load.prefill_tokens.div_ceil(request.block_size.max(1) as u64);
    let new = (request.num_blocks() as u64).saturating_sub(u64::from(overlap));
    let beside = |kept: u64| new.saturating_sub(capacity.saturating_sub(kept).saturating_sub(coming)) as f64;
    beside(worker.cached_blocks) + beside(worker.reused_blocks)
}

/// Weights are checked, but their product with a load can still overflow.
fn finite(cost: f64) -> f64 {
    if cost.is_finite() { cost } else { f64::MAX }
}

/// Draws by softmax of the negative costs, which are scaled to 0..1 first, so that the temperature does not depend on
/// their size. Equal costs: each as likely.
fn sample(costs: &[f64], temperature: f64, number: u64) -> usize {
    let least = costs.iter().copied().fold(f64::INFINITY, f64::min);
    let range = costs.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least;
    let weight = |cost: &f64| match range > 0.0 && range.is_finite() {
        true => (-((cost - least) / range) / temperature).exp(),
        false => 1.0,
    };
    let weights: Vec<_> = costs.iter().map(weight).collect();
    // The top 53 bits fill a double between 0 and 1; the sum is at least 1, the cheapest one's weight.
    let mut left = (number >> 11) as f64 / (1_u64 << 53) as f64 * weights.iter().sum::<f64>();
    for (index, weight) in weights.iter().enumerate() {
        left -= weight;
        if left < 0.0 {
            return index;
        }
    }
    weights.len() - 1
}
