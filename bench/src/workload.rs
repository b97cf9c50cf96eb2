//! Requests that begin with one of a few shared prefixes, spread over workers at random.

use std::collections::HashSet;

use rand::rngs::StdRng;
use rand::seq::{IndexedRandom, SliceRandom};
use rand::{Rng, SeedableRng};

use crate::sample::Prompt;

/// What decides a workload.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub kinds: usize,
    /// Requests for each prefix.
    pub repeats: usize,
    pub workers: usize,
    pub prefix_tokens: usize,
    pub suffix_tokens: usize,
    pub seed: u64,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Its prefix.
    pub kind: usize,
    pub worker: usize,
    /// Its worker sees this prefix for the first time, so that it must miss.
    pub first_touch: bool,
}

/// All requests, in the order in which they are sent.
#[derive(Debug)]
pub struct Workload {
    pub requests: Vec<Request>,
    /// By worker; a prompt's number is the index of its request.
    pub prompts: Vec<Vec<Prompt>>,
}

impl Workload {
    /// The same shape and alphabet make the same workload. Every prefix comes equally often, in random order; every
    /// suffix is new.
    pub fn new(shape: Shape, alphabet: &[u32]) -> Self {
        let mut rng = StdRng::seed_from_u64(shape.seed ^ ((shape.kinds as u64) << 32));
        let prefixes: Vec<_> =
            (0..shape.kinds).map(|_| tokens(&mut rng, alphabet, shape.prefix_tokens)).collect();
        let mut kinds: Vec<usize> = (0..shape.kinds * shape.repeats).map(|i| i % shape.kinds).collect();
        kinds.shuffle(&mut rng);
        let mut seen = HashSet::new();
        let mut workload = Self { requests: Vec::new(), prompts: vec![Vec::new(); shape.workers] };
        for (number, kind) in kinds.into_iter().enumerate() {
            let worker = rng.random_range(0..shape.workers);
            let suffix = tokens(&mut rng, alphabet, shape.suffix_tokens);
            let first_touch = seen.insert((worker, kind));
            workload.requests.push(Request { kind, worker, first_touch });
            let tokens = [&prefixes[kind][..], &suffix].concat();
            workload.prompts[worker].push(Prompt { number, tokens });
        }
        workload
    }
}

fn tokens(rng: &mut StdRng, alphabet: &[u32], count: usize) -> Vec<u32> {
    let token = |_| *alphabet.choose(rng).expect("the caller checked that there are some. This is a bug.");
    (0..count).map(token).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_prefix_comes_equally_often_and_every_suffix_once() {
        let shape = Shape { kinds: 5, repeats: 8, workers: 3, prefix_tokens: 20, suffix_tokens: 10, seed: 1 };
        let alphabet: Vec<u32> = (100..200).collect();
        let workload = Workload::new(shape, &alphabet);
        let prompts: Vec<_> = workload.prompts.concat();
        assert_eq!((workload.requests.len(), prompts.len()), (40, 40));
        for kind in 0..5 {
            let of_kind = workload.requests.iter().filter(|request| request.kind == kind);
            assert_eq!(of_kind.clone().count(), 8);
            let workers: HashSet<_> = of_kind.clone().map(|request| request.worker).collect();
            assert_eq!(of_kind.filter(|request| request.first_touch).count(), workers.len());
        }
        let parts = |cut: std::ops::Range<usize>| -> HashSet<_> {
            prompts.iter().map(|prompt| prompt.tokens[cut.clone()].to_vec()).collect()
        };
        assert_eq!((parts(0..20).len(), parts(20..30).len()), (5, 40));
        let again = Workload::new(shape, &alphabet);
        assert_eq!(again.requests, workload.requests);
        assert_ne!(Workload::new(Shape { seed: 2, ..shape }, &alphabet).requests, workload.requests);
    }

    #[test]
    fn a_worker_gets_its_requests_in_order() {
        let shape = Shape { kinds: 3, repeats: 9, workers: 2, prefix_tokens: 4, suffix_tokens: 4, seed: 0 };
        let workload = Workload::new(shape, &[1, 2, 3]);
        for (worker, prompts) in workload.prompts.iter().enumerate() {
            assert!(prompts.is_sorted_by_key(|prompt| prompt.number));
            assert!(prompts.iter().all(|prompt| workload.requests[prompt.number].worker == worker));
        }
    }
}
