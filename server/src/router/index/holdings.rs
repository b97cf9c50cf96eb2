//! Which workers hold a block, with a number for each (where the worker's own list has the block).
//!
//! Most blocks have one holder, which fits into the table's word. Blocks with more have a set, in which the first 64
//! workers are a bit mask, so that a prefix that everybody holds is walked with one AND for each block.

use super::slots::Slot;
use super::table::Table;
use crate::router::policy::BlockKey;
use crate::router::worker::WorkerId;

/// In a word: an index into the sets follows, else a holder.
const SHARED: u64 = 1 << 63;

/// Look-ups that are under way together when a prompt is matched: enough for the memory to work on several at once, few
/// enough that little is wasted on a prompt that nobody has.
pub(super) const TOGETHER: usize = 16;

/// Leading blocks that each worker holds, workers without any left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlaps(pub(super) Vec<(WorkerId, u32)>);

impl Overlaps {
    pub fn get(&self, worker: WorkerId) -> u32 {
        self.0.binary_search_by_key(&worker, |(id, _)| *id).map_or(0, |at| self.0[at].1)
    }

    pub fn iter(&self) -> impl Iterator<Item = (WorkerId, u32)> {
        self.0.iter().copied()
    }
}

/// Workers that hold one block, and the number of each: slot in the upper half, number in the lower.
#[derive(Debug, Default)]
struct Set {
    low: u64,
    /// In order of the slots.
    holders: Vec<u64>,
}

/// Name -> workers.
#[derive(Debug, Default)]
pub(super) struct Holdings {
    table: Table,
    sets: Vec<Set>,
    free_sets: Vec<u32>,
}

fn holder(slot: Slot, number: u32) -> u64 {
    u64::from(slot.0) << 32 | u64::from(number)
}

fn slot_of(holder: u64) -> Slot {
    Slot((holder >> 32) as u16)
}

fn low_bit(slot: Slot) -> u64 {
    if slot.0 < 64 { 1 << slot.0 } else { 0 }
}

impl Holdings {
    /// Blocks with at least one holder.
    pub fn num_blocks(&self) -> usize {
        self.table.len()
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        let holders: usize = self.sets.iter().map(|set| set.holders.capacity() * 8).sum();
        self.table.bytes() + self.sets.capacity() * size_of::<Set>() + holders + self.free_sets.capacity() * 4
    }

    /// Upper estimate of the bytes per entry, holder and set in use: for limits, as it falls when something is removed.
    pub fn used_bytes(&self) -> usize {
        self.table.len() * 25 + (self.sets.len() - self.free_sets.len()) * (size_of::<Set>() + 40)
    }

    /// The number that goes with a holder.
    pub fn get(&self, key: BlockKey, slot: Slot) -> Option<u32> {
        let word = self.table.get(key)?;
        if word & SHARED == 0 {
            return (slot_of(word) == slot).then_some(word as u32);
        }
        let set = &self.sets[(word as u32) as usize];
        set.find(slot).ok().map(|at| set.holders[at] as u32)
    }

    /// To be called before a few names are asked for, one after the other.
    pub fn prefetch(&self, keys: &[BlockKey]) {
        self.table.prefetch(keys);
    }

    /// Adds a holder that is not one yet; false, and no change, if it is.
    pub fn add(&mut self, key: BlockKey, slot: Slot, number: u32) -> bool {
        match self.table.get_or_add(key, holder(slot, number)) {
            None => true,
            Some(word) if word & SHARED == 0 && slot_of(word) == slot => false,
            Some(word) if word & SHARED != 0 => {
                let set = &mut self.sets[(word as u32) as usize];
                let known = set.find(slot).is_ok();
                if !known {
                    set.insert(slot, number);
                }
                !known
            }
            Some(_) => {
                self.insert(key, slot, number);
                true
            }
        }
    }

    /// Adds a holder, or changes its number; returns the number it had.
    pub fn insert(&mut self, key: BlockKey, slot: Slot, number: u32) -> Option<u32> {
        let Some(word) = self.table.get(key) else {
            self.table.set(key, holder(slot, number));
            return None;
        };
        if word & SHARED != 0 {
            return self.sets[(word as u32) as usize].insert(slot, number);
        }
        if slot_of(word) == slot {
            self.table.set(key, holder(slot, number));
            return Some(word as u32);
        }
        let mut set = Set::default();
        set.insert(slot_of(word), word as u32);
        set.insert(slot, number);
        let at = match self.free_sets.pop() {
            Some(at) => {
                self.sets[at as usize] = set;
                at
            }
            None => {
                self.sets.push(set);
                self.sets.len() as u32 - 1
            }
        };
        self.table.set(key, SHARED | u64::from(at));
        None
    }

    /// Removes a holder; returns its number.
    pub fn remove(&mut self, key: BlockKey, slot: Slot) -> Option<u32> {
        let word = self.table.get(key)?;
        if word & SHARED == 0 {
            if slot_of(word) != slot {
                return None;
            }
            return self.table.remove(key).map(|word| word as u32);
        }
        let at = word as u32;
        let set = &mut self.sets[at as usize];
        let number = set.remove(slot)?;
        if let [last] = set.holders[..] {
            self.sets[at as usize] = Set::default();
            self.free_sets.push(at);
            self.table.set(key, last);
        }
        Some(number)
    }

    /// How many of `keys`, from the first on, each worker holds: `(slot, blocks)`, in no order.
    pub fn matches(&self, keys: &[BlockKey]) -> Vec<(Slot, u32)> {
        let mut walk = Walk::default();
        for (index, chunk) in keys.chunks(TOGETHER).enumerate() {
            self.table.prefetch(chunk);
            let mut words = [None; TOGETHER];
            for (word, key) in words.iter_mut().zip(chunk) {
                *word = self.table.get(*key);
            }
            for (offset, word) in words[..chunk.len()].iter().enumerate() {
                let depth = (index * TOGETHER + offset) as u32;
                match word {
                    None => walk.keep(depth, 0, &[]),
                    Some(word) if word & SHARED == 0 => walk.keep(depth, low_bit(slot_of(*word)), &[*word]),
                    Some(word) => {
                        let set = &self.sets[(*word as u32) as usize];
                        walk.keep(depth, set.low, &set.holders);
                    }
                }
                if walk.is_over() {
                    return walk.done;
                }
            }
        }
        walk.finish(keys.len() as u32)
    }
}

impl Set {
    fn find(&self, slot: Slot) -> Result<usize, usize> {
        self.holders.binary_search_by_key(&slot, |holder| slot_of(*holder))
    }

    fn insert(&mut self, slot: Slot, number: u32) -> Option<u32> {
        match self.find(slot) {
            Ok(at) => Some(std::mem::replace(&mut self.holders[at], holder(slot, number)) as u32),
            Err(at) => {
                self.holders.insert(at, holder(slot, number));
                self.low |= low_bit(slot);
                None
            }
        }
    }

    fn remove(&mut self, slot: Slot) -> Option<u32> {
        let at = self.find(slot).ok()?;
        self.low &= !low_bit(slot);
        Some(self.holders.remove(at) as u32)
    }
}

/// The workers that hold every block so far.
#[derive(Default)]
struct Walk {
    low: u64,
    /// Those whose slot has no bit.
    high: Vec<Slot>,
    /// Those that missed a block, with how many they held before it.
    done: Vec<(Slot, u32)>,
}

impl Walk {
    fn keep(&mut self, depth: u32, low: u64, holders: &[u64]) {
        let high = |holder: &u64| slot_of(*holder).0 >= 64;
        if depth == 0 {
            self.low = low;
            self.high = holders.iter().filter(|holder| high(holder)).map(|holder| slot_of(*holder)).collect();
            return;
        }
        let mut lost = self.low & !low;
        self.low &= low;
        while lost != 0 {
            self.done.push((Slot(lost.trailing_zeros() as u16), depth));
            lost &= lost - 1;
        }
        if !self.high.is_empty() {
            let held = |slot: &Slot| holders.binary_search_by_key(slot, |holder| slot_of(*holder)).is_ok();
            let done = &mut self.done;
            self.high.retain(|slot| {
                held(slot) || {
                    done.push((*slot, depth));
                    false
                }
            });
        }
    }

    fn is_over(&self) -> bool {
        self.low == 0 && self.high.is_empty()
    }

    fn finish(mut self, depth: u32) -> Vec<(Slot, u32)> {
        let mut low = self.low;
        while low != 0 {
            self.done.push((Slot(low.trailing_zeros() as u16), depth));
            low &= low - 1;
        }
        self.done.extend(self.high.iter().map(|slot| (*slot, depth)));
        self.done
    }
}
