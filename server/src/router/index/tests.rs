//! Random operations against models that are too simple to be wrong.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::router::policy::BlockKey;
use crate::router::worker::WorkerId;

/// Prompts are paths in a tree in which each block has two successors: many share their beginning.
fn prompt(path: u32, len: usize) -> Vec<BlockKey> {
    let mut name = 0x5eed_u64;
    (0..len)
        .map(|depth| {
            let turn = u64::from(path >> (depth % 32) & 1);
            name = (name ^ turn).wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(23) ^ 0x77;
            BlockKey(name)
        })
        .collect()
}

const ENOUGH: usize = 1 << 30;

#[derive(Clone, Debug)]
enum Step {
    Store {
        worker: u64,
        path: u32,
        from: usize,
        len: usize,
    },
    Remove {
        worker: u64,
        path: u32,
        from: usize,
        len: usize,
    },
    /// A request finds as much of a path as the worker holds.
    Reuse {
        worker: u64,
        path: u32,
        len: usize,
    },
    Clear(u64),
    Leave(u64),
}

fn steps(workers: u64) -> impl Strategy<Value = Vec<Step>> {
    let chain = (0..workers, 0_u32..32, 0_usize..12, 1_usize..12);
    let step = prop_oneof![
        8 => chain.clone().prop_map(|(worker, path, from, len)| Step::Store { worker, path, from, len }),
        4 => chain.clone().prop_map(|(worker, path, from, len)| Step::Remove { worker, path, from, len }),
        4 => chain.prop_map(|(worker, path, _, len)| Step::Reuse { worker, path, len }),
        1 => (0..workers).prop_map(Step::Clear),
        1 => (0..workers).prop_map(Step::Leave),
    ];
    prop::collection::vec(step, 1..200)
}

type Model = BTreeMap<u64, BTreeSet<BlockKey>>;

fn overlap(model: &Model, worker: u64, keys: &[BlockKey]) -> u32 {
    let held = model.get(&worker);
    keys.iter().take_while(|key| held.is_some_and(|held| held.contains(key))).count() as u32
}

fn check_exact(steps: Vec<Step>, workers: u64) -> Result<(), TestCaseError> {
    let (mut index, mut model, mut reused) = (ExactIndex::new(ENOUGH), Model::new(), Model::new());
    for step in steps {
        match step {
            Step::Store { worker, path, from, len } => {
                let keys = prompt(path, from + len);
                let held = model.entry(worker).or_default();
                let parent = from.checked_sub(1).map(|at| keys[at]);
                let orphan = parent.is_some_and(|parent| !held.contains(&parent));
                let new = keys[from..].iter().filter(|key| held.insert(**key)).count();
                let stored = index.store(WorkerId(worker), parent, &keys[from..]);
                prop_assert_eq!((stored.new, stored.orphan), (new, orphan));
            }
            Step::Remove { worker, path, from, len } => {
                let keys = &prompt(path, from + len)[from..];
                let held = model.entry(worker).or_default();
                let removed = keys.iter().filter(|key| held.remove(key)).count();
                prop_assert_eq!(index.remove(WorkerId(worker), keys), removed);
                reused.entry(worker).or_default().retain(|key| !keys.contains(key));
            }
            Step::Reuse { worker, path, len } => {
                let keys = prompt(path, len);
                let found = &keys[..overlap(&model, worker, &keys) as usize];
                index.reuse(WorkerId(worker), found);
                let known = reused.entry(worker).or_default();
                let _ = found.iter().rev().take_while(|key| known.insert(**key)).count();
            }
            Step::Clear(worker) => {
                index.clear(WorkerId(worker));
                model.remove(&worker);
                reused.remove(&worker);
            }
            Step::Leave(worker) => {
                index.remove_worker(WorkerId(worker));
                model.remove(&worker);
                reused.remove(&worker);
            }
        }
        prop_assert_eq!(index.len(), model.values().map(BTreeSet::len).sum::<usize>());
    }
    let distinct: BTreeSet<_> = model.values().flatten().collect();
    prop_assert_eq!(index.num_blocks(), distinct.len());
    for worker in 0..workers {
        let mut keys = index.keys_of(WorkerId(worker)).to_vec();
        keys.sort_unstable();
        let held: Vec<_> = model.get(&worker).into_iter().flatten().copied().collect();
        prop_assert_eq!(keys, held);
        prop_assert_eq!(index.reused_of(WorkerId(worker)), reused.get(&worker).map_or(0, BTreeSet::len));
    }
    for path in 0..32 {
        let keys = prompt(path, 30);
        let overlaps = index.matches(&keys);
        for worker in 0..workers {
            prop_assert_eq!(overlaps.get(WorkerId(worker)), overlap(&model, worker, &keys));
        }
    }
    Ok(())
}

proptest! {
    #[test]
    fn exact_is_what_was_stored_and_not_removed(steps in steps(5)) {
        check_exact(steps, 5)?;
    }

    /// More workers than a mask has bits.
    #[test]
    fn exact_tells_many_workers_apart(steps in steps(150)) {
        check_exact(steps, 150)?;
    }

    #[test]
    fn recent_is_what_was_touched_lately(touches in prop::collection::vec((0_u64..4, 0_u32..16, 1_usize..20, 0_u64..30), 1..150)) {
        let ttl = Duration::from_millis(100);
        let mut index = RecentIndex::new(ttl, ENOUGH);
        let mut model: HashMap<(u64, BlockKey), Duration> = HashMap::new();
        let mut now = Duration::ZERO;
        for (worker, path, len, wait) in touches {
            now += Duration::from_millis(wait);
            let keys = prompt(path, len);
            model.retain(|_, used| now - *used < ttl);
            let known = keys.iter().take_while(|key| model.contains_key(&(worker, **key))).count();
            prop_assert_eq!(index.touch(WorkerId(worker), &keys, now).known, known);
            model.extend(keys.iter().map(|key| ((worker, *key), now)));
            prop_assert_eq!(index.len(), model.len());
        }
        for path in 0..16 {
            let keys = prompt(path, 20);
            let overlaps = index.matches(&keys, now);
            for worker in 0..4 {
                let held = keys.iter().take_while(|key| model.contains_key(&(worker, **key))).count();
                prop_assert_eq!(overlaps.get(WorkerId(worker)), held as u32);
            }
        }
        index.expire(now + ttl);
        prop_assert!(index.is_empty());
    }

    /// Whatever is dropped, for room or for age: if a block is there, so is everything before it.
    #[test]
    fn recent_never_forgets_a_head_before_its_tail(
        touches in prop::collection::vec((0_u64..3, 0_u32..16, 1_usize..20, 0_u64..30, any::<bool>()), 1..150),
        max_blocks in 5_usize..60,
        capacity in 5_u64..40,
    ) {
        let mut index = RecentIndex::new(Duration::from_millis(200), max_blocks * 65);
        index.set_capacity(WorkerId(0), Some(capacity));
        let mut now = Duration::ZERO;
        for (worker, path, len, wait, fails) in touches {
            now += Duration::from_millis(wait);
            let keys = prompt(path, len);
            let used = index.touch(WorkerId(worker), &keys, now);
            if fails {
                index.untouch(WorkerId(worker), &keys, used);
            }
            prop_assert!(index.len() <= max_blocks);
            prop_assert!(index.blocks_of(WorkerId(0)) <= capacity as usize);
            let mut reachable = BTreeSet::new();
            for path in 0..32 {
                let keys = prompt(path, 20);
                for (worker, blocks) in index.matches(&keys, now).iter() {
                    reachable.extend(keys[..blocks as usize].iter().map(|key| (worker, *key)));
                }
            }
            prop_assert_eq!(reachable.len(), index.len());
        }
    }

    /// sch-08: a full index gives up ends of chains, and stays within its limit whatever workers say.
    #[test]
    fn exact_gives_up_the_deepest_blocks(chains in prop::collection::vec((0_u64..4, 0_u32..4096, 1_usize..30), 1..100), max in 2000_usize..20_000) {
        let (mut index, mut stored) = (ExactIndex::new(max), Vec::new());
        for (worker, path, len) in chains {
            index.store(WorkerId(worker), None, &prompt(path, len));
            stored.push((WorkerId(worker), prompt(path, len)));
            prop_assert!(index.len() * 35 <= max, "{} blocks in {max} bytes", index.len());
            for (worker, keys) in &stored {
                let held = |key: &&BlockKey| index.contains(*worker, **key);
                let prefix = keys.iter().take_while(held).count();
                prop_assert_eq!(keys.iter().filter(held).count(), prefix, "a head went before its tail");
            }
        }
    }
}

/// Removing a worker leaves nothing of it, and its number goes to another without its blocks.
#[test]
fn a_new_worker_does_not_inherit_blocks() {
    let mut index = ExactIndex::new(ENOUGH);
    let keys = prompt(1, 20);
    index.store(WorkerId(1), None, &keys);
    index.store(WorkerId(2), None, &keys);
    index.remove_worker(WorkerId(1));
    index.store(WorkerId(3), None, &keys[..5]);
    let overlaps = index.matches(&keys);
    assert_eq!([1, 2, 3].map(|id| overlaps.get(WorkerId(id))), [0, 20, 5]);
    index.remove_worker(WorkerId(2));
    index.remove_worker(WorkerId(3));
    assert!(index.is_empty() && index.bytes() < 1 << 20);
}

/// rt-04: blocks whose parent is unknown are kept, said to be orphans, and found once the parent is known.
#[test]
fn orphans_are_found_when_their_parent_comes() {
    let mut index = ExactIndex::new(ENOUGH);
    let keys = prompt(1, 20);
    assert!(index.store(WorkerId(1), Some(keys[9]), &keys[10..]).orphan);
    assert_eq!(index.matches(&keys).get(WorkerId(1)), 0);
    assert!(!index.store(WorkerId(1), None, &keys[..10]).orphan);
    assert_eq!(index.matches(&keys).get(WorkerId(1)), 20);
}

/// A delivery that failed leaves no trace, and takes nothing that another request uses.
#[test]
fn an_undone_use_takes_back_what_it_added() {
    let mut index = RecentIndex::new(Duration::from_secs(120), ENOUGH);
    let (worker, keys) = (WorkerId(1), prompt(1, 20));
    let now = Duration::from_secs(1);
    index.touch(worker, &keys[..5], now);
    let used = index.touch(worker, &keys, now + Duration::from_secs(1));
    index.touch(worker, &keys[..8], now + Duration::from_secs(2));
    index.untouch(worker, &keys, used);
    assert_eq!(index.matches(&keys, now + Duration::from_secs(2)).get(worker), 8);
}
