//! Prompts of an exact length: real tokens of the model, no two alike.

use std::collections::{BTreeSet, HashSet};

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};

use crate::client::Client;
use crate::error::{BenchError, Result};

/// Every prompt differs from all others within this many tokens: a smaller block than any that is served, so that no
/// prompt finds another's blocks in a prefix cache.
const DISTINCT_WITHIN: usize = 8;

/// Common words; what the text says does not matter, that it is made of usual tokens does.
pub const WORDS: &[&str] = &[
    "the", "a", "of", "to", "and", "in", "is", "it", "for", "with", "on", "as", "was", "by", "at", "from",
    "or", "an", "be", "this", "that", "which", "one", "time", "house", "water", "light", "river", "morning",
    "story", "letter", "ship", "road", "garden", "window", "friend", "winter", "paper", "answer", "question",
    "small", "old", "new", "long", "great", "little", "first", "last", "good", "dark", "quiet", "found",
    "made", "went", "came", "took", "gave", "saw", "knew", "kept", "under", "over", "between", "again",
    "never", "always",
];

/// Makes prompts; the same seed and model make the same ones.
pub struct Prompts {
    rng: StdRng,
    heads: HashSet<Vec<u32>>,
}

/// Different ids of usual tokens, for prompts that are made of ids.
pub async fn alphabet(client: &Client) -> Result<Vec<u32>> {
    let ids = client.tokenize(&WORDS.join(" ")).await?;
    Ok(ids.into_iter().collect::<BTreeSet<_>>().into_iter().collect())
}

impl Prompts {
    pub fn new(seed: u64) -> Self {
        Self { rng: StdRng::seed_from_u64(seed), heads: HashSet::new() }
    }

    /// A prompt of exactly `tokens` token ids, tokenized by the server.
    pub async fn next(&mut self, client: &Client, tokens: usize) -> Result<Vec<u32>> {
        // A short prompt may be like an earlier one; then another is tried.
        for _ in 0..100 {
            let mut ids = client.tokenize(&self.text(tokens)).await?;
            if ids.len() < tokens {
                let reason = format!("{tokens} words are {} tokens", ids.len());
                return Err(BenchError::Usage(format!("this model's tokenizer cannot be used: {reason}")));
            }
            ids.truncate(tokens);
            if self.heads.insert(ids[..tokens.min(DISTINCT_WITHIN)].to_vec()) {
                return Ok(ids);
            }
        }
        Err(BenchError::Usage(format!("there are not enough different prompts of {tokens} tokens")))
    }

    /// At least one token a word. A number is among the first words: it makes the beginnings differ.
    fn text(&mut self, words: usize) -> String {
        let number = self.rng.random_range(0..1_000_000_u32);
        let mut text = format!("{number:06}");
        for _ in 0..words {
            text.push(' ');
            text.push_str(WORDS.choose(&mut self.rng).expect("the list is not empty. This is a bug."));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_seed_decides_the_text() {
        let text = |seed| Prompts::new(seed).text(20);
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
        assert_eq!(text(1).split(' ').count(), 21);
    }
}
