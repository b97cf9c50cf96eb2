//! What the modes share: who may be chosen, and who wins among equals.

use std::cmp::Ordering;

use crate::router::policy::{Choice, Draw, Leg, NoWorker, Reason, Score};
use crate::router::view::{ClusterView, WorkerView};
use crate::router::worker::{Condition, WorkerRole};

/// The workers that may take each leg.
pub(super) struct Candidates<'a> {
    /// Never empty.
    pub serve: Vec<&'a WorkerView>,
    pub prefill: Vec<&'a WorkerView>,
}

impl<'a> Candidates<'a> {
    pub fn of(cluster: &'a ClusterView) -> Result<Self, NoWorker> {
        let takes = |leg: Leg| {
            let fits = move |worker: &&WorkerView| match leg {
                Leg::Serve => worker.role.serves(),
                Leg::Prefill => worker.role == WorkerRole::Prefill,
            };
            cluster.workers.iter().filter(fits).filter(|worker| worker.is_candidate()).collect::<Vec<_>>()
        };
        let serve = takes(Leg::Serve);
        match serve.is_empty() {
            true => Err(nobody(cluster)),
            false => Ok(Self { serve, prefill: takes(Leg::Prefill) }),
        }
    }

    /// The prefill workers for a request that `serve` answers.
    pub fn prefill_for(&self, serve: &WorkerView) -> &[&'a WorkerView] {
        match serve.role {
            WorkerRole::Decode => &self.prefill,
            WorkerRole::Both | WorkerRole::Prefill => &[],
        }
    }

    /// One choice for each leg, made by `pick` among its candidates.
    pub fn choose(
        &self,
        mut pick: impl FnMut(Leg, &[&'a WorkerView]) -> (usize, Reason),
        score: impl Fn(Leg, &WorkerView) -> Score,
    ) -> Choice {
        let (index, reason) = pick(Leg::Serve, &self.serve);
        let serve = self.serve[index];
        let mut scores: Vec<_> = self.serve.iter().map(|worker| score(Leg::Serve, worker)).collect();
        let prefill = self.prefill_for(serve);
        let picked = (!prefill.is_empty()).then(|| pick(Leg::Prefill, prefill));
        scores.extend(prefill.iter().map(|worker| score(Leg::Prefill, worker)));
        Choice {
            serve: serve.id,
            reason,
            prefill: picked.map(|(index, _)| prefill[index].id),
            prefill_reason: picked.map(|(_, reason)| reason),
            scores,
        }
    }
}

fn nobody(cluster: &ClusterView) -> NoWorker {
    let serving: Vec<_> = cluster.workers.iter().filter(|worker| worker.role.serves()).collect();
    let count = |condition| serving.iter().filter(|worker| worker.condition == condition).count();
    let (workers, overloaded) = (serving.len(), count(Condition::Overloaded));
    if workers == 0 {
        NoWorker::Unknown
    } else if overloaded == workers {
        NoWorker::Overloaded { workers }
    } else {
        NoWorker::Unavailable {
            workers,
            draining: count(Condition::Draining),
            failed: count(Condition::Quarantined),
            refused: count(Condition::Refused),
            overloaded,
        }
    }
}

/// Index of the candidate with the lowest cost. Equal ones: the less loaded, then the one with more room in its cache,
/// so that new prefixes spread over the cluster's memory, then the one that waited longest, then by chance.
pub(super) fn lowest(candidates: &[&WorkerView], costs: &[f64], draw: Draw) -> (usize, Reason) {
    if candidates.len() == 1 {
        return (0, Reason::Only);
    }
    let least = costs.iter().copied().min_by(f64::total_cmp).expect("there is a candidate. This is a bug.");
    let lowest: Vec<usize> = (0..costs.len()).filter(|&index| costs[index] == least).collect();
    if let [index] = lowest[..] {
        return (index, Reason::LowestCost);
    }
    // Counted round from a random one, so that `min_by`, which takes the first of equals, takes each as often.
    let turn = draw.numbers().next().unwrap_or_default() as usize % lowest.len();
    let rotated = lowest[turn..].iter().chain(&lowest[..turn]).copied();
    let index = rotated.min_by(|&a, &b| by_load(candidates[a], candidates[b]));
    (index.expect("not empty. This is a bug."), Reason::Tie)
}

fn by_load(a: &WorkerView, b: &WorkerView) -> Ordering {
    let load = |worker: &WorkerView| {
        (worker.load.active_requests, worker.load.prefill_tokens, worker.load.decode_blocks)
    };
    load(a).cmp(&load(b)).then_with(|| filled(a, b)).then(a.last_turn.cmp(&b.last_turn))
}

/// By the share of the cache that is filled, with what would be missed first, where both said how large it is; else by blocks.
fn filled(a: &WorkerView, b: &WorkerView) -> Ordering {
    let by = |blocks: fn(&WorkerView) -> u64| match (a.capacity_blocks, b.capacity_blocks) {
        (Some(of_a), Some(of_b)) => {
            (u128::from(blocks(a)) * u128::from(of_b)).cmp(&(u128::from(blocks(b)) * u128::from(of_a)))
        }
        _ => blocks(a).cmp(&blocks(b)),
    };
    by(|worker| worker.reused_blocks).then_with(|| by(|worker| worker.cached_blocks))
}
