//! One engine alone under random load: who waits how long, and who owns which block (`Core::check`).

use std::cell::Cell;
use std::collections::BTreeMap;

use rand::Rng;

use super::super::*;
use super::choices::{Choices, for_random_choices};
use super::world::*;

/// A request that is not over.
struct Unfinished {
    /// Requests before it that were not over when it came.
    older: u64,
    submitted_at: u64,
}

struct Load {
    worker: Worker,
    unfinished: BTreeMap<RequestId, Unfinished>,
    next_id: u64,
    steps: u64,
    /// The longest wait in parts of its bound.
    worst: f64,
}

impl Load {
    fn new(num_blocks: usize) -> Self {
        let worker = Worker::new(num_blocks, 0);
        Self { worker, unfinished: BTreeMap::new(), next_id: 0, steps: 0, worst: 0.0 }
    }

    fn submit(&mut self, prompt: &[TokenId], max_tokens: usize) {
        let wait = Unfinished { older: self.unfinished.len() as u64, submitted_at: self.steps };
        self.unfinished.insert(RequestId(self.next_id), wait);
        self.worker.submit(self.next_id, prompt, max_tokens);
        self.next_id += 1;
        self.take_outputs();
    }

    fn abort(&mut self, id: RequestId) {
        self.worker.apply(Input::Abort(id));
        self.unfinished.remove(&id);
        self.take_outputs();
    }

    /// Tokens that the oldest request has computed, if it runs.
    fn oldest_progress(&self) -> Option<(RequestId, usize)> {
        let (id, _) = self.unfinished.first_key_value()?;
        let request = &self.worker.core.requests[id];
        (request.state == State::Running).then_some((*id, request.num_computed))
    }

    /// One step, in which the oldest request must get on if it runs.
    fn step(&mut self) {
        let oldest = self.oldest_progress();
        let stepped = self.worker.step();
        self.steps += u64::from(stepped);
        self.take_outputs();
        assert!(stepped || self.unfinished.is_empty(), "nothing runs, {} wait", self.unfinished.len());
        if let Some((id, before)) = oldest
            && let Some(request) = self.worker.core.requests.get(&id)
        {
            let progress = (request.state, request.num_computed);
            assert!(
                request.state == State::Running && request.num_computed > before,
                "{id:?} is the oldest and had {before} computed tokens, now {progress:?}"
            );
        }
    }

    fn take_outputs(&mut self) {
        for effect in self.worker.core.take_effects() {
            if let Effect::Output(id, Output::Finished { .. }) = effect {
                let waited = self.unfinished.remove(&id).expect("ends once");
                let config = &self.worker.core.config;
                let each = (config.max_seqs as u64 + 1) * config.max_model_len as u64;
                let (steps, bound) = (self.steps - waited.submitted_at, (waited.older + 1) * each);
                assert!(steps <= bound, "{id:?} took {steps} steps, the bound is {bound}");
                self.worst = self.worst.max(steps as f64 / bound as f64);
            }
        }
    }
}

fn random_prompt(rng: &mut Choices, longest: usize) -> Vec<TokenId> {
    let family = rng.random_range(0..4);
    let shared = rng.random_range(0..longest);
    let own = rng.random_range(1..=longest - shared);
    let tail = rng.random_range(40..70);
    (0..shared as u32).map(|i| 100 + family * 50 + i).chain((0..own as u32).map(|i| tail + i % 5)).collect()
}

fn run(rng: &mut Choices, num_blocks: usize) -> (Counters, f64) {
    let mut load = Load::new(num_blocks);
    let longest = (num_blocks * BLOCK).min(58);
    for _ in 0..rng.random_range(5..150) {
        match rng.random_range(0..20) {
            0..5 => {
                let (longest, max_tokens) = (rng.random_range(1..=longest), rng.random_range(1..30));
                load.submit(&random_prompt(rng, longest), max_tokens);
            }
            // A flood of short prompts, which may overtake.
            5 => {
                for _ in 0..rng.random_range(1..12) {
                    load.submit(&random_prompt(rng, 3), rng.random_range(1..40));
                }
            }
            6 if load.next_id > 0 => load.abort(RequestId(rng.random_range(0..load.next_id))),
            7 => load.worker.apply(Input::ResetPrefixCache),
            _ => load.step(),
        }
    }
    while !load.unfinished.is_empty() {
        load.step();
    }
    let account = load.worker.core.account();
    assert_eq!(account.free + account.cached, num_blocks, "{account:?}");
    (load.worker.core.counters(), load.worst)
}

#[test]
fn no_request_starves_whatever_arrives_after_it() {
    let (preemptions, hits, worst) = (Cell::new(0), Cell::new(0), Cell::new(0.0f64));
    for_random_choices(10_000, |rng| {
        let num_blocks = rng.random_range(10..40);
        let (counters, waited) = run(rng, num_blocks);
        preemptions.set(preemptions.get() + counters.preemptions);
        hits.set(hits.get() + counters.prefix_hits);
        worst.set(worst.get().max(waited));
    });
    println!("longest wait: {:.1} % of the bound", worst.get() * 100.0);
    assert!(preemptions.get() > 1000, "blocks were short: {} preemptions", preemptions.get());
    assert!(hits.get() > 10_000, "prompts shared prefixes: {} tokens", hits.get());
}

/// The one that was preempted came back behind those admitted meanwhile, though it had arrived before them, and was the
/// next victim again.
#[test]
fn a_preempted_request_keeps_its_place() {
    let mut load = Load::new(12);
    let prompt = |family: u32| -> Vec<TokenId> { (0..12).map(|i| 100 + family * 50 + i).collect() };
    for family in 0..6 {
        load.submit(&prompt(family), 30);
    }
    while !load.unfinished.is_empty() {
        load.step();
        let core = &load.worker.core;
        assert!(core.running.is_sorted(), "running: {:?}", core.running);
        assert!(core.waiting.iter().is_sorted(), "waiting: {:?}", core.waiting);
    }
    assert!(load.worker.core.counters().preemptions > 0, "the pool was short");
}
