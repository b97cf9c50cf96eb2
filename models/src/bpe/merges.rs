//! Byte pair encoding: of all neighbours the pair that was learned first is joined, the leftmost of equals, until no pair is
//! known.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::shape::Shape;

/// A slot is left id, right id and rank; these are their bits.
const ID_BITS: u32 = 20;
const RANK_BITS: u32 = 24;
const EMPTY: u64 = u64::MAX;

/// The rank of a pair that is not joined.
const NEVER: u32 = u32::MAX;

/// Up to so many bytes, the lowest rank is looked for among all of them each time, which vector units do faster than a
/// heap keeps order.
const SHORT: usize = 80;

/// Which pairs of tokens are joined, how early, and to what.
pub(super) struct Merges {
    /// Open addressing; each slot holds a pair with its rank.
    slots: Vec<u64>,
    shift: u32,
    /// The token that each rank makes.
    made: Vec<u32>,
    /// The token of each byte.
    bytes: [u32; 256],
    /// Ranks of pairs of bytes, which every word begins with.
    byte_ranks: Vec<u32>,
}

/// Memory that is used for one word after the other.
#[derive(Default)]
pub(super) struct Scratch {
    ids: Vec<u32>,
    /// Of each token with its right neighbour.
    ranks: Vec<u32>,
    left: Vec<u32>,
    right: Vec<u32>,
    heap: BinaryHeap<Reverse<u64>>,
}

impl Merges {
    pub fn new(shape: &Shape) -> Result<Self, String> {
        let highest = shape.tokens.iter().map(|(_, id)| *id).max().unwrap_or(0);
        if highest >= (1 << ID_BITS) - 1 || shape.merges.len() >= 1 << RANK_BITS {
            return Err(format!("{highest} as the highest id, {} merges", shape.merges.len()));
        }
        let capacity = (shape.merges.len().max(1) * 3).next_power_of_two();
        let mut merges = Self {
            slots: vec![EMPTY; capacity],
            shift: 64 - capacity.trailing_zeros(),
            made: shape.merges.iter().map(|(_, _, made)| *made).collect(),
            bytes: shape.bytes,
            byte_ranks: Vec::new(),
        };
        for (rank, (left, right, _)) in shape.merges.iter().enumerate() {
            // Of a pair that is there twice the last one holds, as in the library.
            let at = merges.find(*left, *right);
            merges.slots[at] = pair(*left, *right) | rank as u64;
        }
        let tokens = &shape.bytes;
        merges.byte_ranks =
            (0..1 << 16).map(|two| merges.rank(tokens[two >> 8], tokens[two & 255])).collect();
        Ok(merges)
    }

    /// Appends the tokens of `word`.
    pub fn encode(&self, word: &[u8], scratch: &mut Scratch, ids: &mut Vec<u32>) {
        scratch.ids.clear();
        scratch.ids.extend(word.iter().map(|byte| self.bytes[usize::from(*byte)]));
        let two = |two: &[u8]| self.byte_ranks[usize::from(two[0]) << 8 | usize::from(two[1])];
        scratch.ranks.clear();
        scratch.ranks.extend(word.windows(2).map(two));
        match word.len() {
            0..=SHORT => self.join_short(&mut scratch.ids, &mut scratch.ranks),
            _ => self.join_long(scratch),
        }
        ids.extend_from_slice(&scratch.ids);
    }

    fn join_short(&self, ids: &mut Vec<u32>, ranks: &mut Vec<u32>) {
        loop {
            let least = ranks.iter().copied().min().unwrap_or(NEVER);
            if least == NEVER {
                return;
            }
            let at = ranks.iter().position(|rank| *rank == least).expect("it is their least. This is a bug.");
            ids[at] = self.made[least as usize];
            ids.remove(at + 1);
            ranks.remove(at);
            if at > 0 {
                ranks[at - 1] = self.rank(ids[at - 1], ids[at]);
            }
            if at < ranks.len() {
                ranks[at] = self.rank(ids[at], ids[at + 1]);
            }
        }
    }

    /// The same with a heap of pairs over a linked list of tokens.
    fn join_long(&self, scratch: &mut Scratch) {
        let Scratch { ids, ranks, left, right, heap } = scratch;
        let len = ids.len();
        // The last token has no right neighbour.
        ranks.push(NEVER);
        left.clear();
        left.extend((0..len as u32).map(|at| at.wrapping_sub(1)));
        right.clear();
        right.extend(1..=len as u32);
        heap.clear();
        let entry = |rank: u32, at: usize| Reverse(u64::from(rank) << 32 | at as u64);
        heap.extend((0..len).filter(|at| ranks[*at] != NEVER).map(|at| entry(ranks[at], at)));
        while let Some(Reverse(top)) = heap.pop() {
            let (rank, at) = ((top >> 32) as u32, top as u32 as usize);
            // It is of before one of the two was joined with another one.
            if ranks[at] != rank {
                continue;
            }
            let gone = right[at] as usize;
            ids[at] = self.made[rank as usize];
            ranks[gone] = NEVER;
            let next = right[gone] as usize;
            right[at] = next as u32;
            let mut rerank = |at: usize, rank: u32| {
                ranks[at] = rank;
                if rank != NEVER {
                    heap.push(entry(rank, at));
                }
            };
            match next < len {
                true => {
                    left[next] = at as u32;
                    rerank(at, self.rank(ids[at], ids[next]));
                }
                false => rerank(at, NEVER),
            }
            if at > 0 {
                let before = left[at] as usize;
                rerank(before, self.rank(ids[before], ids[at]));
            }
        }
        let (mut at, mut kept) = (0, 0);
        while at < len {
            ids[kept] = ids[at];
            kept += 1;
            at = right[at] as usize;
        }
        ids.truncate(kept);
    }

    fn rank(&self, left: u32, right: u32) -> u32 {
        let slot = self.slots[self.find(left, right)];
        if slot == EMPTY { NEVER } else { (slot & ((1 << RANK_BITS) - 1)) as u32 }
    }

    /// The slot of a pair, or the empty one where it would be.
    fn find(&self, left: u32, right: u32) -> usize {
        let wanted = pair(left, right);
        let mut at = (wanted.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize;
        while self.slots[at] != EMPTY && self.slots[at] >> RANK_BITS != wanted >> RANK_BITS {
            at = (at + 1) & (self.slots.len() - 1);
        }
        at
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << (ID_BITS + RANK_BITS) | u64::from(right) << RANK_BITS
}
