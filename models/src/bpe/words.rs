//! Words that are one token.

use xxhash_rust::xxh3::xxh3_64;

use super::merges::{Merges, Scratch};
use super::shape::Shape;

/// From a word's bytes to its token, for words that merging makes one token of. Not every token is what merging makes of its
/// own bytes: that was tried for each of them.
pub(super) struct Words {
    /// Open addressing; the upper half of the hash and the place in `spans`, plus one. 0 is empty.
    slots: Vec<u64>,
    /// Where the bytes are, and the id.
    spans: Vec<(u32, u32, u32)>,
    bytes: Vec<u8>,
}

impl Words {
    pub fn new(shape: &Shape, merges: &Merges) -> Self {
        let capacity = (shape.tokens.len().max(1) * 2).next_power_of_two();
        let mut words = Self { slots: vec![0; capacity], spans: Vec::new(), bytes: Vec::new() };
        let (mut scratch, mut ids) = (Scratch::default(), Vec::new());
        for (token, id) in &shape.tokens {
            ids.clear();
            merges.encode(token, &mut scratch, &mut ids);
            // What is not UTF-8 is never a word.
            if ids == [*id] && std::str::from_utf8(token).is_ok() {
                words.insert(token, *id);
            }
        }
        words
    }

    fn insert(&mut self, word: &[u8], id: u32) {
        let start = self.bytes.len() as u32;
        self.bytes.extend(word);
        self.spans.push((start, self.bytes.len() as u32, id));
        let hash = xxh3_64(word);
        let mut at = self.first(hash);
        while self.slots[at] != 0 {
            at = (at + 1) & (self.slots.len() - 1);
        }
        self.slots[at] = hash >> 32 << 32 | self.spans.len() as u64;
    }

    pub fn get(&self, word: &[u8]) -> Option<u32> {
        let hash = xxh3_64(word);
        let mut at = self.first(hash);
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if slot >> 32 == hash >> 32 {
                let (start, end, id) = self.spans[(slot as u32 - 1) as usize];
                if self.bytes[start as usize..end as usize] == *word {
                    return Some(id);
                }
            }
            at = (at + 1) & (self.slots.len() - 1);
        }
    }

    fn first(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }
}
