//! Random choices that proptest can shrink.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rand::rngs::StdRng;
use rand::{RngCore, SeedableRng};

/// A source of randomness whose first values are given one by one, so that a failing run can be cut down to the few that
/// matter; a seeded generator goes on after them.
#[derive(Debug)]
pub(super) struct Choices {
    given: std::vec::IntoIter<u32>,
    rest: StdRng,
}

impl RngCore for Choices {
    fn next_u32(&mut self) -> u32 {
        self.given.next().unwrap_or_else(|| self.rest.next_u32())
    }

    fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) << 32 | u64::from(self.next_u32())
    }

    fn fill_bytes(&mut self, bytes: &mut [u8]) {
        self.rest.fill_bytes(bytes);
    }
}

/// Runs `run` on `cases` random sequences; a failing one is shrunk and printed.
pub(super) fn for_random_choices(cases: u32, run: impl Fn(&mut Choices)) {
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 20_000, ..Config::default() };
    let strategy = (vec(any::<u32>(), 0..300), any::<u64>());
    let result = TestRunner::new(config).run(&strategy, |(given, seed)| {
        run(&mut Choices { given: given.into_iter(), rest: StdRng::seed_from_u64(seed) });
        Ok(())
    });
    if let Err(error) = result {
        panic!("{error}");
    }
}
