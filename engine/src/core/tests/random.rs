//! Random requests, faults and orders of events.

use std::collections::HashMap;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use transfer::Direction;

use super::super::*;
use super::world::*;

/// Prompts that share prefixes of many lengths.
fn prompt(rng: &mut StdRng) -> Vec<TokenId> {
    let family = rng.random_range(0..3);
    let shared = rng.random_range(0..30);
    let own = rng.random_range(1..12);
    let tail = rng.random_range(50..60);
    (0..shared).map(|i| 100 + family * 50 + i).chain((0..own).map(|i| tail + i % 3)).collect()
}

/// Prompts computed for a proxy have ids from here on.
const PROXIED: u64 = 1000;

/// As a proxy does it: the prefill worker computes the prompt and keeps its KV, then the decode worker fetches that. What
/// is fetched is sometimes not there, or of another prompt.
fn submit_kept(world: &mut World, rng: &mut StdRng, id: u64, prompt: &[TokenId], max_tokens: usize) {
    let other: Vec<TokenId> = prompt.iter().map(|token| token + 1).collect();
    let (kept, there) = match rng.random_range(0..8) {
        0 => (&other[..], true),
        1 => (prompt, false),
        _ => (prompt, true),
    };
    world.p.submit_with(PROXIED + id, kept, 1, true, None);
    for _ in 0..2000 {
        world.happen(rng, false);
        if world.kept.contains_key(&RequestId(PROXIED + id)) {
            break;
        }
    }
    world.reconnect();
    let kept = world.kept.get(&RequestId(PROXIED + id)).filter(|_| there).map(|kept| kept.name.clone());
    let fetch = Fetch { peer: Some(world.peer), kept: kept.unwrap_or("none".into()), cached_tokens: 0 };
    world.d.submit_with(id, prompt, max_tokens, false, Some(fetch));
}

fn run(seed: u64, faults: bool, d_blocks: usize, p_blocks: usize) -> Counters {
    // Half of all runs are pulled.
    let direction = if seed.is_multiple_of(2) { Direction::Write } else { Direction::Read };
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::of(d_blocks, p_blocks, direction);
    let mut wanted: HashMap<RequestId, (Vec<TokenId>, usize)> = HashMap::new();
    let mut aborted = Vec::new();
    for id in 0..rng.random_range(1..12u64) {
        let (prompt, max_tokens) = (prompt(&mut rng), rng.random_range(1..12));
        match rng.random_range(0..4) {
            0 => submit_kept(&mut world, &mut rng, id, &prompt, max_tokens),
            _ => world.d.submit(id, &prompt, max_tokens),
        }
        world.carry_out();
        wanted.insert(RequestId(id), (prompt, max_tokens));
        for _ in 0..rng.random_range(0..60) {
            world.happen(&mut rng, faults);
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
        // Kept and pinned blocks come back with the clock alone.
        world.p.now += Duration::from_millis(1);
        world.d.now += Duration::from_millis(1);
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
    world.d.core.counters()
}

#[test]
fn random_handoffs_give_the_right_tokens_and_every_block_back() {
    let (mut transferred, mut wrong_claims) = (0, 0);
    for seed in 0..3000 {
        let counters = run(seed, false, 40, 40);
        transferred += counters.prompt_tokens_transferred;
        wrong_claims += counters.recomputed;
    }
    assert!(wrong_claims < 3000, "only claims of what is not there are computed here: {wrong_claims}");
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
