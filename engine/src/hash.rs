//! Names of cached blocks.
//!
//! A block's name covers everything before it: the hash chain's root (one for each `cache_salt`, one for none), then
//! each block's token ids. Seeds are fixed, so every process gives the same content the same name.

use xxhash_rust::xxh3::{Xxh3, xxh3_128_with_seed};

use crate::api::TokenId;

/// Changes whenever names would: part of the layout that peers compare.
const SEED: u64 = 0x6b76_6665_7272_7901;

/// Name of a full block and of everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockHash(pub u128);

impl BlockHash {
    /// The name as it is in events and in routers' indexes: the low 64 bits, which every reader of such events can hold.
    pub fn key(self) -> u64 {
        self.0 as u64
    }
}

/// Where the chain of a salt begins. No salt is a domain of its own, different from every salt, the empty one too.
pub fn root(salt: Option<&str>) -> BlockHash {
    match salt {
        None => BlockHash(xxh3_128_with_seed(b"unsalted", SEED)),
        Some(salt) => BlockHash(xxh3_128_with_seed(&[b"salt:", salt.as_bytes()].concat(), SEED)),
    }
}

/// The name of the block of `tokens` that follows `parent`.
pub fn chain(parent: BlockHash, tokens: &[TokenId]) -> BlockHash {
    let mut bytes = [0_u8; SHORT];
    let Some(end) = tokens.len().checked_mul(4).map(|len| len + 16).filter(|end| *end <= SHORT) else {
        return chain_long(parent, tokens.iter().map(|token| token.to_le_bytes()));
    };
    bytes[..16].copy_from_slice(&parent.0.to_le_bytes());
    for (place, token) in bytes[16..end].chunks_exact_mut(4).zip(tokens) {
        place.copy_from_slice(&token.to_le_bytes());
    }
    BlockHash(xxh3_128_with_seed(&bytes[..end], SEED))
}

/// The same for a block of other content than tokens.
pub fn chain_bytes(parent: BlockHash, content: &[u8]) -> BlockHash {
    chain_long(parent, std::iter::once(content))
}

/// Up to this many bytes XXH3 needs no secret made from the seed, and hashing in one piece is several times faster.
const SHORT: usize = 240;

fn chain_long(parent: BlockHash, content: impl Iterator<Item = impl AsRef<[u8]>>) -> BlockHash {
    let mut hasher = Xxh3::with_seed(SEED);
    hasher.update(&parent.0.to_le_bytes());
    content.for_each(|part| hasher.update(part.as_ref()));
    BlockHash(hasher.digest128())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computed with Python's `xxhash`. These values are in events and in other processes' indexes: changing them is a protocol change.
    #[test]
    fn names_are_the_same_in_every_process_and_release() {
        let first = chain(root(None), &(0..16).collect::<Vec<_>>());
        let second = chain(first, &(16..32).collect::<Vec<_>>());
        assert_eq!(format!("{:032x}", first.0), FIRST);
        assert_eq!(format!("{:032x}", second.0), SECOND);
    }

    const FIRST: &str = "1b8fd3f3a322c5d6b38987e65a675473";
    const SECOND: &str = "2c2a86cc6db10d39a4d0af37218f0603";

    /// Both ways to hash give the same names.
    #[test]
    fn long_and_short_blocks_are_named_alike() {
        for len in [0, 1, 15, 16, 55, 56, 57, 64, 300] {
            let tokens: Vec<TokenId> =
                (0..len).map(|token: u32| token.wrapping_mul(2_654_435_761) % 151_936).collect();
            let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
            assert_eq!(chain(root(None), &tokens), chain_bytes(root(None), &bytes), "{len}");
        }
    }

    /// kv-03: names of different content do not meet, and do not depend on how the content was walked.
    #[test]
    fn a_million_blocks_have_a_million_names() {
        let block = |i: u32| -> Vec<TokenId> {
            (0..16).map(|j| i.wrapping_mul(2_654_435_761).rotate_left(j) % 151_643).collect()
        };
        let names: std::collections::HashSet<_> =
            (0..1_000_000).map(|i| chain(root(None), &block(i))).collect();
        let contents: std::collections::HashSet<_> = (0..1_000_000).map(block).collect();
        assert_eq!(names.len(), contents.len());
    }

    #[test]
    fn a_salt_is_a_domain_of_its_own() {
        let names = [root(None), root(Some("")), root(Some("a")), root(Some("b")), root(Some("unsalted"))];
        for (i, a) in names.iter().enumerate() {
            assert!(names[i + 1..].iter().all(|b| a != b));
        }
    }
}
