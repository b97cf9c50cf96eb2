//! Modes that do not look at what workers have cached.

use crate::router::policies::select::{Candidates, lowest};
use crate::router::policy::{Choice, Draw, Leg, NoWorker, Reason, RequestBlocks, RoutePolicy, Score};
use crate::router::view::{ClusterView, WorkerView};

/// Each worker in turn.
#[derive(Debug)]
pub struct RoundRobin;

/// Any worker, each as likely.
#[derive(Debug)]
pub struct Random;

/// The worker with the fewest requests of ours.
#[derive(Debug)]
pub struct LeastLoaded;

/// The one with fewer requests of two drawn at random (Mitzenmacher 2001).
#[derive(Debug)]
pub struct PowerOfTwo;

impl RoutePolicy for RoundRobin {
    fn name(&self) -> &'static str {
        "round-robin"
    }

    fn uses_overlap(&self) -> bool {
        false
    }

    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker> {
        let turn = |_: Leg, workers: &[&WorkerView]| match workers.len() {
            1 => (0, Reason::Only),
            count => ((draw.turn % count as u64) as usize, Reason::Turn),
        };
        Ok(Candidates::of(cluster)?.choose(turn, |leg, worker| score(request, leg, worker, 0.0)))
    }
}

impl RoutePolicy for Random {
    fn name(&self) -> &'static str {
        "random"
    }

    fn uses_overlap(&self) -> bool {
        false
    }

    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker> {
        let mut numbers = draw.numbers();
        let pick = |_: Leg, workers: &[&WorkerView]| match workers.len() {
            1 => (0, Reason::Only),
            count => (below(numbers.next(), count), Reason::Drawn),
        };
        Ok(Candidates::of(cluster)?.choose(pick, |leg, worker| score(request, leg, worker, 0.0)))
    }
}

impl RoutePolicy for LeastLoaded {
    fn name(&self) -> &'static str {
        "least-loaded"
    }

    fn uses_overlap(&self) -> bool {
        false
    }

    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker> {
        let pick = |_: Leg, workers: &[&WorkerView]| {
            let costs: Vec<_> = workers.iter().map(|worker| requests(worker)).collect();
            lowest(workers, &costs, draw)
        };
        Ok(Candidates::of(cluster)?.choose(pick, |leg, worker| score(request, leg, worker, requests(worker))))
    }
}

impl RoutePolicy for PowerOfTwo {
    fn name(&self) -> &'static str {
        "power-of-two"
    }

    fn uses_overlap(&self) -> bool {
        false
    }

    fn choose(
        &self,
        request: &RequestBlocks<'_>,
        cluster: &ClusterView,
        draw: Draw,
    ) -> Result<Choice, NoWorker> {
        let mut numbers = draw.numbers();
        let pick = |_: Leg, workers: &[&WorkerView]| {
            if workers.len() == 1 {
                return (0, Reason::Only);
            }
            let first = below(numbers.next(), workers.len());
            // One of the others: those behind the first move up by one.
            let second = (first + 1 + below(numbers.next(), workers.len() - 1)) % workers.len();
            let two = [workers[first], workers[second]];
            let (index, _) = lowest(&two, &two.map(requests), draw);
            ([first, second][index], Reason::Drawn)
        };
        Ok(Candidates::of(cluster)?.choose(pick, |leg, worker| score(request, leg, worker, requests(worker))))
    }
}

fn requests(worker: &WorkerView) -> f64 {
    worker.load.active_requests as f64
}

fn below(number: Option<u64>, count: usize) -> usize {
    ((u128::from(number.unwrap_or_default()) * count as u128) >> 64) as usize
}

fn score(request: &RequestBlocks<'_>, leg: Leg, worker: &WorkerView, cost: f64) -> Score {
    Score {
        worker: worker.id,
        leg,
        overlap_blocks: worker.overlap_blocks,
        prefill_blocks: request.prefill_blocks(worker.load.prefill_tokens),
        evicted_blocks: 0.0,
        decode_blocks: request.decode_blocks(worker),
        active_requests: worker.load.active_requests,
        cost,
    }
}
