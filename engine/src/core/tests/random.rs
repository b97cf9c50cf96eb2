//! Random requests, faults and orders of events.

use std::collections::{HashMap, HashSet};

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use super::super::*;
use super::world::*;
use crate::hash;
use crate::kv_events::KvEvent;

/// Prompts that share prefixes of many lengths.
fn prompt(rng: &mut StdRng) -> Vec<TokenId> {
    let family = rng.random_range(0..3);
    let shared = rng.random_range(0..30);
    let own = rng.random_range(1..12);
    let tail = rng.random_range(50..60);
    (0..shared).map(|i| 100 + family * 50 + i).chain((0..own).map(|i| tail + i % 3)).collect()
}

fn run(seed: u64, faults: bool, d_blocks: usize, p_blocks: usize) -> Counters {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new(d_blocks, p_blocks);
    let mut wanted: HashMap<RequestId, (Vec<TokenId>, usize)> = HashMap::new();
    let mut aborted = Vec::new();
    for id in 0..rng.random_range(1..12u64) {
        let (prompt, max_tokens) = (prompt(&mut rng), rng.random_range(1..12));
        world.d.submit(id, &prompt, max_tokens);
        world.carry_out();
        wanted.insert(RequestId(id), (prompt, max_tokens));
        for _ in 0..rng.random_range(0..60) {
            world.happen(&mut rng, faults);
            if rng.random_range(0..200) == 0 {
                world.d.apply(Input::ResetPrefixCache);
                world.carry_out();
            }
            if rng.random_range(0..150) == 0 {
                let victim = RequestId(rng.random_range(0..=id));
                world.d.apply(Input::Abort(victim));
                world.carry_out();
                aborted.push(victim);
            }
        }
    }
    let mut events = 0;
    while !world.is_quiet() {
        world.happen(&mut rng, faults && events < 200);
        world.reconnect();
        events += 1;
        assert!(events < 40_000, "seed {seed}: no progress; {:#?}", world.d.core);
    }
    for (id, (prompt, max_tokens)) in &wanted {
        assert_eq!(
            world.dequeued.get(id),
            Some(&1),
            "seed {seed}: {id:?} left the queue more or less than once"
        );
        let Some(_) = world.outputs.get(id) else {
            assert!(aborted.contains(id), "seed {seed}: {id:?} has no answer");
            continue;
        };
        let (tokens, last) = world.answer(*id);
        let (expected, expected_reason) = reference(prompt, *max_tokens);
        match last {
            Some(Output::Finished { reason, .. }) => {
                assert_eq!((&tokens, reason), (&expected, &expected_reason), "seed {seed}: {id:?}");
            }
            _ => {
                assert!(aborted.contains(id), "seed {seed}: {id:?} ended with {last:?}");
                assert!(expected.starts_with(&tokens), "seed {seed}: {id:?}");
            }
        }
    }
    assert!(
        world.d.core.tickets.is_empty() && world.p.core.pushes.is_empty(),
        "seed {seed}: tickets are left"
    );
    for worker in [&world.d, &world.p] {
        let account = worker.core.account();
        assert_eq!(account.free + account.cached, worker.core.config.num_blocks, "seed {seed}: {account:?}");
    }
    check_kv_events(&mut world.d.core, seed);
    check_kv_events(&mut world.p.core, seed);
    world.d.core.counters()
}

/// Whoever hears all events knows what is in the prefix cache, and can name each block from its tokens.
fn check_kv_events(core: &mut Core, seed: u64) {
    let mut heard = HashSet::new();
    for event in core.take_kv_events() {
        match event {
            KvEvent::Stored { parent, hashes, tokens, cache_salt } => {
                assert_eq!((tokens.len(), cache_salt), (hashes.len() * BLOCK, None), "seed {seed}");
                let mut last = parent.unwrap_or(hash::root(None));
                for (hash, block) in hashes.iter().zip(tokens.chunks(BLOCK)) {
                    last = hash::chain(last, block);
                    assert_eq!(last, *hash, "seed {seed}: the name does not follow from parent and tokens");
                    assert!(heard.insert(last), "seed {seed}: stored twice");
                }
            }
            KvEvent::Removed(hashes) => {
                hashes.iter().for_each(|hash| assert!(heard.remove(hash), "seed {seed}: removed, never stored"));
            }
            KvEvent::Cleared => heard.clear(),
        }
    }
    let held: HashSet<_> = core.kv_chains().into_iter().flat_map(|(_, chain)| chain).collect();
    assert_eq!(heard, held, "seed {seed}");
}

#[test]
fn random_handoffs_give_the_right_tokens_and_every_block_back() {
    let mut transferred = 0;
    for seed in 0..3000 {
        let counters = run(seed, false, 40, 40);
        transferred += counters.prompt_tokens_transferred;
        assert_eq!(counters.recomputed, 0, "seed {seed}: nothing failed, nothing is computed twice");
    }
    assert!(transferred > 10_000, "most prompts came from the prefill worker: {transferred}");
}

#[test]
fn random_faults_give_the_right_tokens_and_every_block_back() {
    let recomputed: u64 = (0..5000).map(|seed| run(seed, true, 40, 40).recomputed).sum();
    assert!(recomputed > 1000, "faults were met: {recomputed}");
}

#[test]
fn small_pools_preempt_and_wait_but_never_deadlock() {
    let preempted: u64 = (0..4000).map(|seed| run(seed, seed % 2 == 1, 15, 15).preemptions).sum();
    assert!(preempted > 100, "the pools were short: {preempted}");
}
