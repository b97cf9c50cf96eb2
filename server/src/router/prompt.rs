//! A prompt as the router knows it: the names of its blocks.

use std::sync::Arc;

use engine::TokenId;
use engine::hash;

use super::policy::{BlockKey, RequestBlocks};

/// Bytes of English in a token, for texts that nobody tokenizes.
const TOKEN_BYTES: usize = 4;

/// Tokens in a block of text, estimated. More than workers have in theirs: a shorter beginning is hardly worth a detour, and
/// an index entry for each few words would take longer to keep than the request takes to relay.
pub const TEXT_BLOCK_TOKENS: usize = 128;

const TEXT_BLOCK: usize = TEXT_BLOCK_TOKENS * TOKEN_BYTES;

/// A prompt's blocks; cheap to clone.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub keys: Arc<[BlockKey]>,
    pub num_tokens: usize,
    pub block_size: usize,
}

impl Prompt {
    /// The blocks of `tokens` as workers name them, within the domain of `cache_salt`.
    pub fn from_tokens(tokens: &[TokenId], cache_salt: Option<&str>, block_size: usize) -> Self {
        let block_size = block_size.max(1);
        let mut parent = hash::root(cache_salt);
        let name = |block: &[TokenId]| {
            parent = hash::chain(parent, block);
            BlockKey(parent.key())
        };
        Self {
            keys: tokens.chunks_exact(block_size).map(name).collect(),
            num_tokens: tokens.len(),
            block_size,
        }
    }

    /// Blocks of [`TEXT_BLOCK_TOKENS`] of a text that is not tokenized here. These names are known to nobody else, so that
    /// only the approximate index can use them.
    pub fn from_text(text: &[u8]) -> Self {
        let mut parent = hash::root(Some("kvferry text"));
        let name = |block: &[u8]| {
            parent = hash::chain_bytes(parent, block);
            BlockKey(parent.key())
        };
        let keys: Arc<[_]> = text.chunks_exact(TEXT_BLOCK).map(name).collect();
        Self { keys, num_tokens: text.len().div_ceil(TOKEN_BYTES), block_size: TEXT_BLOCK_TOKENS }
    }

    /// A prompt whose blocks nobody looks at.
    pub fn unnamed(text: &[u8], block_size: usize) -> Self {
        let num_tokens = text.len().div_ceil(TOKEN_BYTES);
        Self { keys: Arc::default(), num_tokens, block_size: block_size.max(1) }
    }

    pub fn blocks(&self) -> RequestBlocks<'_> {
        RequestBlocks { keys: &self.keys, num_tokens: self.num_tokens, block_size: self.block_size }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// rt-10: the router's names are the engine's, cut to 64 bits; the vector is that of `engine::hash`.
    #[test]
    fn names_are_those_of_the_engine() {
        let tokens: Vec<TokenId> = (0..40).collect();
        let prompt = Prompt::from_tokens(&tokens, None, 16);
        assert_eq!(*prompt.keys, [BlockKey(0xb389_87e6_5a67_5473), BlockKey(0xa4d0_af37_218f_0603)]);
        assert_eq!((prompt.num_tokens, prompt.blocks().num_blocks()), (40, 3));
    }

    /// kv-04: each salt is a domain of its own, and so is none.
    #[test]
    fn a_salt_gives_other_names() {
        let tokens: Vec<TokenId> = (0..64).collect();
        let names =
            [None, Some(""), Some("t1"), Some("t2")].map(|salt| Prompt::from_tokens(&tokens, salt, 16).keys);
        for (index, a) in names.iter().enumerate() {
            assert!(names[index + 1..].iter().all(|b| a.iter().all(|key| !b.contains(key))));
        }
    }

    #[test]
    fn texts_share_what_they_begin_with() {
        let text = |tail: char| "a system prompt for all ".repeat(80) + &tail.to_string().repeat(400);
        let (one, two) = (Prompt::from_text(text('x').as_bytes()), Prompt::from_text(text('y').as_bytes()));
        let same = one.keys.iter().zip(two.keys.iter()).take_while(|(a, b)| a == b).count();
        assert_eq!((same, one.keys.len(), one.blocks().num_blocks(), one.num_tokens), (3, 4, 5, 580));
        assert_eq!(Prompt::from_text(b"").blocks().num_blocks(), 0);
    }
}
