//! What a worker's prefix cache must hit: least recently used blocks go first, in the simplest form.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// Name of a full block: of its tokens and of all before them.
type Name = u64;

/// The blocks of one worker that answers one request after another.
///
/// Blocks are touched when their request ends, a request's last block first, so that the tail of a prefix is forgotten
/// before its head. Nothing is known here of sharing, steps and states: this is written apart from the engine, to be
/// compared with it.
#[derive(Debug)]
pub struct BlockLru {
    capacity: usize,
    block_size: usize,
    /// When each cached block was touched last; times are unique.
    touched: HashMap<Name, u64>,
    by_time: BTreeMap<u64, Name>,
    now: u64,
}

impl BlockLru {
    pub fn new(capacity: usize, block_size: usize) -> Self {
        Self { capacity, block_size, touched: HashMap::new(), by_time: BTreeMap::new(), now: 0 }
    }

    /// Tokens of `prompt` that are found, of a request that then ends after `output_tokens`.
    ///
    /// The last prompt token is always computed, and the last token of an answer never is.
    pub fn request(&mut self, prompt: &[u32], output_tokens: usize) -> usize {
        let names = self.names(prompt);
        let may_hit = names.iter().take((prompt.len() - 1) / self.block_size);
        let found = may_hit.take_while(|name| self.touched.contains_key(name)).count();
        names[..found].iter().for_each(|name| self.forget(*name));
        let needed = (prompt.len() + output_tokens - 1).div_ceil(self.block_size);
        assert!(needed <= self.capacity, "checked with the arguments. This is a bug.");
        while self.touched.len() + needed > self.capacity {
            let (_, &oldest) = self.by_time.first_key_value().expect("it is not empty. This is a bug.");
            self.forget(oldest);
        }
        let filled = (prompt.len() + output_tokens - 1) / self.block_size;
        for index in (names.len()..filled).rev() {
            // What the answer says is not known here; no later prompt begins with it.
            let name = hash(&(self.now, index));
            self.touch(name);
        }
        names.iter().rev().for_each(|name| self.touch(*name));
        found * self.block_size
    }

    /// Names of the prompt's full blocks.
    fn names(&self, prompt: &[u32]) -> Vec<Name> {
        let mut parent = 0;
        let name = |tokens: &[u32]| {
            parent = hash(&(parent, tokens));
            parent
        };
        prompt.chunks_exact(self.block_size).map(name).collect()
    }

    fn touch(&mut self, name: Name) {
        self.forget(name);
        self.now += 1;
        self.touched.insert(name, self.now);
        self.by_time.insert(self.now, name);
    }

    fn forget(&mut self, name: Name) {
        if let Some(time) = self.touched.remove(&name) {
            self.by_time.remove(&time);
        }
    }
}

fn hash(content: &impl Hash) -> Name {
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lru(capacity: usize) -> BlockLru {
        BlockLru::new(capacity, 4)
    }

    fn prompt(head: u32, tokens: usize) -> Vec<u32> {
        (0..tokens as u32).map(|i| head * 1000 + i).collect()
    }

    #[test]
    fn full_blocks_hit_but_never_the_last_token() {
        let mut lru = lru(10);
        assert_eq!(lru.request(&prompt(1, 8), 1), 0);
        assert_eq!(lru.request(&prompt(1, 8), 1), 4, "the second block has the last token");
        assert_eq!(lru.request(&prompt(1, 9), 1), 8);
        assert_eq!(lru.request(&prompt(1, 11), 1), 8, "a partial block is not shared");
        assert_eq!(lru.request(&prompt(2, 9), 1), 0);
    }

    #[test]
    fn the_least_recently_used_goes_first_its_tail_before_its_head() {
        let mut lru = lru(6);
        lru.request(&prompt(1, 12), 1);
        lru.request(&prompt(2, 12), 1);
        lru.request(&prompt(1, 12), 1);
        // Takes 2 blocks: from the tail of 2, which was used before 1 was.
        lru.request(&prompt(3, 8), 1);
        assert_eq!(lru.request(&prompt(2, 13), 1), 4);
    }

    #[test]
    fn the_answer_takes_room_and_keeps_it() {
        for (output, expected) in [(1, 4), (2, 0)] {
            let mut lru = lru(3);
            lru.request(&prompt(1, 4), 1);
            lru.request(&prompt(2, 8), output);
            assert_eq!(lru.request(&prompt(1, 5), 1), expected, "{output} output tokens");
        }
        for (output, expected) in [(4, 4), (5, 0)] {
            let mut lru = lru(4);
            lru.request(&prompt(1, 4), 1);
            // A fifth token fills a second block with the first four, which stays cached.
            lru.request(&prompt(2, 4), output);
            lru.request(&prompt(3, 7), 1);
            assert_eq!(lru.request(&prompt(1, 5), 1), expected, "{output} output tokens");
        }
    }

    #[test]
    fn all_hit_when_all_fit() {
        let mut lru = lru(2 * 6);
        let hits: Vec<_> = (0..20).map(|i| lru.request(&prompt(i % 2, 24), 1)).collect();
        assert_eq!(hits[..2], [0, 0]);
        assert!(hits[2..].iter().all(|&hit| hit == 20), "{hits:?}");
    }
}
