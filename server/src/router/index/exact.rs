//! What workers hold by their own word: blocks stored and not removed since.

use super::holdings::{Holdings, Overlaps, TOGETHER};
use super::slots::{Slot, Slots};
use crate::router::policy::BlockKey;
use crate::router::worker::WorkerId;

/// When the index is full, this share of the largest worker's blocks is given up at a time.
const GIVE_UP: usize = 8;

/// What a store did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stored {
    pub new: usize,
    /// The worker does not hold the block that these follow, as far as we know: we missed something.
    pub orphan: bool,
}

/// A worker's blocks, and what is known of each. The number that goes with a holder is the place in here.
#[derive(Debug, Default)]
struct Own {
    keys: Vec<BlockKey>,
    facts: Vec<Facts>,
    /// Blocks that some request found.
    reused: usize,
    /// Blocks given up to stay within the limit.
    given_up: u64,
}

/// How deep a block is in its chain, and whether some request has found it.
#[derive(Clone, Copy, Debug)]
struct Facts(u16);

impl Facts {
    const REUSED: u16 = 1 << 15;
    /// Also of blocks whose depth is not known: the first to be given up.
    const DEEPEST: u16 = Self::REUSED - 1;

    fn depth(self) -> u16 {
        self.0 & Self::DEEPEST
    }

    fn is_reused(self) -> bool {
        self.0 & Self::REUSED != 0
    }
}

/// Index of the workers that say what they hold.
#[derive(Debug)]
pub struct ExactIndex {
    holdings: Holdings,
    workers: Slots<Own>,
    /// Blocks of all workers together, one held by two counted twice.
    len: usize,
    max_bytes: usize,
}

impl ExactIndex {
    /// An index that stays within `max_bytes`, give or take the slack of growing vectors.
    pub fn new(max_bytes: usize) -> Self {
        Self { holdings: Holdings::default(), workers: Slots::default(), len: 0, max_bytes }
    }

    /// Blocks of all workers together.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Different blocks.
    pub fn num_blocks(&self) -> usize {
        self.holdings.num_blocks()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        let own = |own: &Own| own.keys.capacity() * 8 + own.facts.capacity() * size_of::<Facts>();
        self.holdings.bytes() + self.workers.iter().map(|(_, _, kept)| own(kept)).sum::<usize>()
    }

    /// Blocks of one worker.
    pub fn blocks_of(&self, worker: WorkerId) -> usize {
        self.workers.find(worker).map_or(0, |slot| self.workers.get(slot).keys.len())
    }

    /// Blocks of one worker that some request has found there since they were stored.
    pub fn reused_of(&self, worker: WorkerId) -> usize {
        self.workers.find(worker).map_or(0, |slot| self.workers.get(slot).reused)
    }

    /// A request finds the chain `keys`, which begins a prompt, on the worker. Of a chain that was found before only what
    /// is longer now is looked at.
    pub fn reuse(&mut self, worker: WorkerId, keys: &[BlockKey]) {
        let Some(slot) = self.workers.find(worker) else { return };
        for key in keys.iter().rev() {
            let Some(at) = self.holdings.get(*key, slot) else { continue };
            let own = self.workers.get_mut(slot);
            let facts = &mut own.facts[at as usize];
            if facts.is_reused() {
                return;
            }
            facts.0 |= Facts::REUSED;
            own.reused += 1;
        }
    }

    /// Names of a worker's blocks, in no order: for audits.
    pub fn keys_of(&self, worker: WorkerId) -> &[BlockKey] {
        self.workers.find(worker).map_or(&[], |slot| &self.workers.get(slot).keys)
    }

    /// Blocks of the worker that were given up because the index was full; its overlaps may be too low.
    pub fn given_up(&self, worker: WorkerId) -> u64 {
        self.workers.find(worker).map_or(0, |slot| self.workers.get(slot).given_up)
    }

    pub fn contains(&self, worker: WorkerId, key: BlockKey) -> bool {
        self.workers.find(worker).is_some_and(|slot| self.holdings.get(key, slot).is_some())
    }

    /// Leading blocks of `keys` that each worker holds.
    pub fn matches(&self, keys: &[BlockKey]) -> Overlaps {
        let found = self.holdings.matches(keys);
        let mut overlaps: Vec<_> =
            found.into_iter().map(|(slot, blocks)| (self.workers.worker(slot), blocks)).collect();
        overlaps.sort_unstable();
        Overlaps(overlaps)
    }

    /// The worker stored `keys`, a chain that follows `parent`, or begins a prompt. Orphans are kept, since their
    /// parent may be made known later. More workers than an index can tell apart are not kept at all.
    pub fn store(&mut self, worker: WorkerId, parent: Option<BlockKey>, keys: &[BlockKey]) -> Stored {
        let Some(slot) = self.workers.find_or_add(worker) else { return Stored::default() };
        let above = parent.map(|parent| self.holdings.get(parent, slot));
        let first_depth = match above {
            None => 0,
            Some(Some(at)) => self.workers.get(slot).facts[at as usize].depth() + 1,
            Some(None) => Facts::DEEPEST,
        };
        let mut new = 0;
        let own = self.workers.get_mut(slot);
        let mut depth = first_depth;
        for chunk in keys.chunks(TOGETHER) {
            self.holdings.prefetch(chunk);
            for key in chunk {
                if self.holdings.add(*key, slot, own.keys.len() as u32) {
                    own.keys.push(*key);
                    own.facts.push(Facts(depth.min(Facts::DEEPEST)));
                    new += 1;
                }
                depth = depth.saturating_add(1);
            }
        }
        self.len += new;
        self.stay_within_limit();
        Stored { new, orphan: above == Some(None) }
    }

    /// The worker removed `keys`; how many of them it was known to hold.
    pub fn remove(&mut self, worker: WorkerId, keys: &[BlockKey]) -> usize {
        let Some(slot) = self.workers.find(worker) else { return 0 };
        let mut removed = 0;
        for chunk in keys.chunks(TOGETHER) {
            self.holdings.prefetch(chunk);
            removed += chunk.iter().filter(|key| self.remove_one(slot, **key)).count();
        }
        removed
    }

    /// The worker holds nothing any more.
    pub fn clear(&mut self, worker: WorkerId) {
        if let Some(slot) = self.workers.find(worker) {
            let own = std::mem::take(self.workers.get_mut(slot));
            self.forget(slot, &own);
        }
    }

    /// The worker left.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        if let Some((slot, own)) = self.workers.remove(worker) {
            self.forget(slot, &own);
        }
    }

    fn forget(&mut self, slot: Slot, own: &Own) {
        for key in &own.keys {
            self.holdings.remove(*key, slot);
        }
        self.len -= own.keys.len();
    }

    fn remove_one(&mut self, slot: Slot, key: BlockKey) -> bool {
        let Some(at) = self.holdings.remove(key, slot) else { return false };
        let own = self.workers.get_mut(slot);
        own.keys.swap_remove(at as usize);
        own.reused -= usize::from(own.facts.swap_remove(at as usize).is_reused());
        if let Some(moved) = own.keys.get(at as usize) {
            self.holdings.insert(*moved, slot, at);
        }
        self.len -= 1;
        if own.keys.len() * 4 < own.keys.capacity() {
            own.keys.shrink_to(own.keys.len() * 2);
            own.facts.shrink_to(own.keys.len() * 2);
        }
        true
    }

    /// Bytes of what is in the index, by the upper estimates of its parts.
    fn used_bytes(&self) -> usize {
        self.holdings.used_bytes() + self.len * 15
    }

    /// Gives up the deepest blocks of the worker with the most: a chain's beginning, which more prompts share, is kept
    /// longer than its end.
    fn stay_within_limit(&mut self) {
        while self.used_bytes() > self.max_bytes {
            let largest = self.workers.iter().max_by_key(|(_, _, own)| own.keys.len());
            let Some((slot, _, own)) = largest.filter(|(_, _, own)| !own.keys.is_empty()) else { return };
            let count = own.keys.len().div_ceil(GIVE_UP);
            let mut order: Vec<u32> = (0..own.keys.len() as u32).collect();
            order.select_nth_unstable_by_key(count - 1, |at| {
                std::cmp::Reverse(own.facts[*at as usize].depth())
            });
            let deepest: Vec<_> = order[..count].iter().map(|at| own.keys[*at as usize]).collect();
            let removed = deepest.into_iter().filter(|key| self.remove_one(slot, *key)).count();
            self.workers.get_mut(slot).given_up += removed as u64;
        }
    }
}
