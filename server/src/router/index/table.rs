//! A flat hash table from block names to one word each.
//!
//! Linear probing over pairs of name and word, so that an entry is one miss of the memory and its page, and erasing by
//! shifting back, so that there are no tombstones. It is cut into shards that grow by a quarter each at its own time: 10 million
//! entries then take 20 to 25 bytes each, and no insertion pays for moving more than one shard.

use crate::router::policy::BlockKey;

/// Shards; at 10 million entries one of them is moved in half a millisecond.
const SHARD_BITS: u32 = 8;

/// A shard is at most 4/5 full: a search then looks at 3 names on average if there is one, at 13 if not.
const FULL: (usize, usize) = (4, 5);

/// The smallest shard that is allocated.
const SMALLEST: usize = 16;

/// A place without an entry has this name; the block of that name goes by [`INSTEAD`].
const EMPTY: u64 = 0;
const INSTEAD: u64 = 1;

/// Name -> word.
#[derive(Debug)]
pub struct Table {
    shards: Vec<Shard>,
    len: usize,
}

#[derive(Debug, Default)]
struct Shard {
    entries: Vec<Entry>,
    len: usize,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    name: u64,
    word: u64,
}

const FREE: Entry = Entry { name: EMPTY, word: 0 };

impl Default for Table {
    fn default() -> Self {
        Self { shards: (0..1 << SHARD_BITS).map(|_| Shard::default()).collect(), len: 0 }
    }
}

impl Table {
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.shards.iter().map(|shard| shard.entries.capacity() * size_of::<Entry>()).sum()
    }

    pub fn get(&self, key: BlockKey) -> Option<u64> {
        let name = stored(key);
        let (shard, spread) = place(name);
        let shard = &self.shards[shard];
        shard.find(name, spread).ok().map(|at| shard.entries[at].word)
    }

    /// Looks at where the entries of some names are or would be. The memory works on all of them at once, and what is asked
    /// of them next is there already: to be called for a few at a time.
    pub fn prefetch(&self, keys: &[BlockKey]) {
        let mut seen = 0;
        for key in keys {
            let (shard, spread) = place(stored(*key));
            let shard = &self.shards[shard];
            if let Some(entry) = shard.entries.get(shard.start(spread)) {
                seen ^= entry.name;
            }
        }
        std::hint::black_box(seen);
    }

    /// The entry's word; one that is not there is added with `word`, and `None` returned.
    pub fn get_or_add(&mut self, key: BlockKey, word: u64) -> Option<u64> {
        let name = stored(key);
        let (index, spread) = place(name);
        let shard = &mut self.shards[index];
        match shard.find(name, spread) {
            Ok(at) => Some(shard.entries[at].word),
            Err(at) => {
                shard.add(at, name, spread, word);
                self.len += 1;
                None
            }
        }
    }

    /// Adds an entry, or overwrites its word.
    pub fn set(&mut self, key: BlockKey, word: u64) {
        let name = stored(key);
        let (index, spread) = place(name);
        let shard = &mut self.shards[index];
        match shard.find(name, spread) {
            Ok(at) => shard.entries[at].word = word,
            Err(at) => {
                shard.add(at, name, spread, word);
                self.len += 1;
            }
        }
    }

    pub fn remove(&mut self, key: BlockKey) -> Option<u64> {
        let name = stored(key);
        let (index, spread) = place(name);
        let shard = &mut self.shards[index];
        let at = shard.find(name, spread).ok()?;
        let word = shard.entries[at].word;
        shard.erase(at);
        self.len -= 1;
        // Half of what a shard that just grew would be: it does not grow and shrink in turns.
        if shard.len * 3 < shard.entries.len() && shard.entries.len() > SMALLEST {
            shard.resize((shard.len * 3 / 2).max(SMALLEST));
        }
        Some(word)
    }
}

fn stored(key: BlockKey) -> u64 {
    if key.0 == EMPTY { INSTEAD } else { key.0 }
}

/// The shard of a name, and where in it to begin as a fraction of 2^64. Names are hashes, but a worker may number its
/// blocks all the same: the multiplication spreads those, too.
fn place(name: u64) -> (usize, u64) {
    let spread = name.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    ((spread >> (64 - SHARD_BITS)) as usize, spread << SHARD_BITS)
}

impl Shard {
    fn is_full(&self) -> bool {
        (self.len + 1) * FULL.1 > self.entries.len() * FULL.0
    }

    /// Puts a name that is not there where [`Self::find`] said.
    fn add(&mut self, at: usize, name: u64, spread: u64, word: u64) {
        let at = match self.is_full() {
            false => at,
            true => {
                let capacity = self.entries.len();
                self.resize((capacity + capacity / 4).max(SMALLEST));
                self.find(name, spread).expect_err("it was not there before. This is a bug.")
            }
        };
        self.entries[at] = Entry { name, word };
        self.len += 1;
    }

    fn start(&self, spread: u64) -> usize {
        ((u128::from(spread) * self.entries.len() as u128) >> 64) as usize
    }

    /// Where the name is, or the free place where it would go (meaningless in a shard without places).
    fn find(&self, name: u64, spread: u64) -> Result<usize, usize> {
        if self.entries.is_empty() {
            return Err(0);
        }
        let mut at = self.start(spread);
        loop {
            match self.entries[at].name {
                found if found == name => return Ok(at),
                EMPTY => return Err(at),
                _ => at = self.after(at),
            }
        }
    }

    fn after(&self, at: usize) -> usize {
        if at + 1 == self.entries.len() { 0 } else { at + 1 }
    }

    /// Frees a place and moves what was pushed beyond it back, so that every search still ends at a free place.
    fn erase(&mut self, mut hole: usize) {
        let size = self.entries.len();
        let mut at = hole;
        loop {
            at = self.after(at);
            if self.entries[at].name == EMPTY {
                break;
            }
            let start = self.start(place(self.entries[at].name).1);
            // It may move only if the hole is on the way from its start to where it is.
            if (at + size - start) % size >= (at + size - hole) % size {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.entries[hole] = FREE;
        self.len -= 1;
    }

    fn resize(&mut self, capacity: usize) {
        let entries = std::mem::replace(&mut self.entries, vec![FREE; capacity]);
        for entry in entries.into_iter().filter(|entry| entry.name != EMPTY) {
            let Err(at) = self.find(entry.name, place(entry.name).1) else { continue };
            self.entries[at] = entry;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn it_is_a_map(operations in prop::collection::vec((0_u8..3, 0_u64..400, any::<u64>()), 1..3000), stride in 1_u64..5) {
            let (mut table, mut model) = (Table::default(), HashMap::new());
            for (operation, name, word) in operations {
                // One shard gets most of them, so that its places run over and are shifted.
                let key = BlockKey(name.wrapping_mul(stride << 56));
                // Names 0 and 1 are one block to the table.
                if key.0 == INSTEAD { continue }
                match operation {
                    0 => prop_assert_eq!(table.remove(key), model.remove(&key)),
                    1 => {
                        table.prefetch(&[key]);
                        prop_assert_eq!(table.get_or_add(key, word), model.get(&key).copied());
                        model.entry(key).or_insert(word);
                    }
                    _ => { table.set(key, word); model.insert(key, word); }
                }
                prop_assert_eq!(table.len(), model.len());
            }
            for name in 0..400_u64 {
                let key = BlockKey(name.wrapping_mul(stride << 56));
                prop_assert_eq!(table.get(key), model.get(&key).copied());
            }
        }
    }

    #[test]
    fn memory_follows_what_is_in_it() {
        let mut table = Table::default();
        let key = |i: u64| BlockKey(i.wrapping_mul(0x2545_f491_4f6c_dd1d));
        (1..=200_000).for_each(|i| table.set(key(i), i));
        let per_entry = table.bytes() as f64 / 200_000.0;
        assert!((20.0..=25.5).contains(&per_entry), "{per_entry} bytes an entry");
        (1..=200_000).for_each(|i| assert_eq!(table.remove(key(i)), Some(i)));
        assert!(table.is_empty() && table.bytes() < 100_000, "{} bytes for nothing", table.bytes());
    }
}
