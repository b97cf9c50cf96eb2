//! Random requests, faults and orders of events.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rand::Rng;

use transfer::Direction;

use super::super::*;
use super::choices::{Choices, for_random_choices};
use super::world::*;
use crate::hash;
use crate::kv_events::KvEvent;

/// Prompts that share prefixes of many lengths.
fn prompt(rng: &mut Choices) -> Vec<TokenId> {
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
fn submit_kept(world: &mut World, rng: &mut Choices, id: u64, prompt: &[TokenId], max_tokens: usize) {
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

fn run(rng: &mut Choices, faults: bool, d_blocks: usize, p_blocks: usize) -> Counters {
    // Half of all runs are pulled.
    let direction = if rng.random_range(0..2) == 0 { Direction::Write } else { Direction::Read };
    let mut world = World::of(d_blocks, p_blocks, direction);
    let mut wanted: HashMap<RequestId, (Vec<TokenId>, usize)> = HashMap::new();
    let mut aborted = Vec::new();
    for id in 0..rng.random_range(1..12u64) {
        let (prompt, max_tokens) = (prompt(rng), rng.random_range(1..12));
        match rng.random_range(0..4) {
            0 => submit_kept(&mut world, rng, id, &prompt, max_tokens),
            _ => world.d.submit(id, &prompt, max_tokens),
        }
        world.carry_out();
        wanted.insert(RequestId(id), (prompt, max_tokens));
        for _ in 0..rng.random_range(0..60) {
            world.happen(rng, faults);
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
        // Kept and pinned blocks come back with the clock alone.
        world.p.now += Duration::from_millis(1);
        world.d.now += Duration::from_millis(1);
        world.happen(rng, faults && events < 200);
        world.reconnect();
        events += 1;
        assert!(events < 40_000, "no progress; {:#?}", world.d.core);
    }
    for (id, (prompt, max_tokens)) in &wanted {
        assert_eq!(world.dequeued.get(id), Some(&1), "{id:?} left the queue more or less than once");
        let Some(_) = world.outputs.get(id) else {
            assert!(aborted.contains(id), "{id:?} has no answer");
            continue;
        };
        let (tokens, last) = world.answer(*id);
        let (expected, expected_reason) = reference(prompt, *max_tokens);
        match last {
            Some(Output::Finished { reason, .. }) => {
                assert_eq!((&tokens, reason), (&expected, &expected_reason), "{id:?}");
            }
            _ => {
                assert!(aborted.contains(id), "{id:?} ended with {last:?}");
                assert!(expected.starts_with(&tokens), "{id:?}");
            }
        }
    }
    assert!(world.d.core.tickets.is_empty() && world.p.core.pushes.is_empty(), "tickets are left");
    for worker in [&world.d, &world.p] {
        let account = worker.core.account();
        assert_eq!(account.free + account.cached, worker.core.config.num_blocks, "{account:?}");
    }
    check_kv_events(&mut world.d.core);
    check_kv_events(&mut world.p.core);
    world.d.core.counters()
}

/// Whoever hears all events knows what is in the prefix cache, and can name each block from its tokens.
fn check_kv_events(core: &mut Core) {
    let mut heard = HashSet::new();
    for event in core.take_kv_events() {
        match event {
            KvEvent::Stored { parent, hashes, tokens, cache_salt } => {
                assert_eq!((tokens.len(), cache_salt), (hashes.len() * BLOCK, None));
                let mut last = parent.unwrap_or(hash::root(None));
                for (hash, block) in hashes.iter().zip(tokens.chunks(BLOCK)) {
                    last = hash::chain(last, block);
                    assert_eq!(last, *hash, "the name does not follow from parent and tokens");
                    assert!(heard.insert(last), "stored twice");
                }
            }
            KvEvent::Removed(hashes) => {
                hashes.iter().for_each(|hash| assert!(heard.remove(hash), "removed, never stored"));
            }
            KvEvent::Cleared => heard.clear(),
        }
    }
    let held: HashSet<_> = core.kv_chains().into_iter().flat_map(|(_, chain)| chain).collect();
    assert_eq!(heard, held);
}

#[test]
fn random_handoffs_give_the_right_tokens_and_every_block_back() {
    let (transferred, wrong_claims) = (Cell::new(0), Cell::new(0));
    for_random_choices(3000, |rng| {
        let counters = run(rng, false, 40, 40);
        transferred.set(transferred.get() + counters.prompt_tokens_transferred);
        wrong_claims.set(wrong_claims.get() + counters.recomputed);
    });
    let (transferred, wrong_claims) = (transferred.get(), wrong_claims.get());
    assert!(wrong_claims < 3000, "only claims of what is not there are computed here: {wrong_claims}");
    assert!(transferred > 10_000, "most prompts came from the prefill worker: {transferred}");
}

#[test]
fn random_faults_give_the_right_tokens_and_every_block_back() {
    let recomputed = Cell::new(0);
    for_random_choices(5000, |rng| recomputed.set(recomputed.get() + run(rng, true, 40, 40).recomputed));
    assert!(recomputed.get() > 1000, "faults were met: {}", recomputed.get());
}

#[test]
fn small_pools_preempt_and_wait_but_never_deadlock() {
    let preempted = Cell::new(0);
    for_random_choices(4000, |rng| {
        let faults = rng.random_range(0..2) == 1;
        preempted.set(preempted.get() + run(rng, faults, 15, 15).preemptions);
    });
    assert!(preempted.get() > 100, "the pools were short: {}", preempted.get());
}
