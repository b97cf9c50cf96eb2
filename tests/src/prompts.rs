//! Prompts of every kind that the engine treats differently.

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::ask::Ask;

/// Tokens in a block, where a test does not say otherwise.
pub const BLOCK: usize = 16;

/// Ids from here on are ordinary tokens of the demo model's vocabulary...
const FIRST_ID: u32 = 20;
/// ...and below here; special tokens come after.
const LAST_ID: u32 = 4000;

/// `len` token ids; other seeds differ from the first token on.
pub fn ids(len: usize, seed: u64) -> Vec<u32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(FIRST_ID..LAST_ID)).collect()
}

/// Prompts of one token up to 700, around the borders of blocks, as ids, text and chat.
pub fn varied() -> Vec<Ask> {
    let by_ids = [1, 15, 16, 17, 33, 128, 257, 700].map(|len| Ask::completion(ids(len, len as u64)));
    let long = "The ferry crosses the river with blocks of keys and values. ".repeat(12);
    let texts = ["A", "What moves the KV cache between the workers?", long.trim()].map(Ask::completion);
    let chats = ["What is kvferry?", "Who may free a block, and when?"].map(Ask::chat);
    by_ids.into_iter().chain(texts).chain(chats).collect()
}

/// Requests of random length and size, the same for the same seed; every second one is streamed.
pub fn random(count: usize, max_prompt: usize, max_tokens: u64, seed: u64) -> Vec<Ask> {
    let mut rng = StdRng::seed_from_u64(seed);
    let one = |index: usize| {
        let prompt = ids(rng.random_range(1..=max_prompt), seed * 1_000_003 + index as u64);
        let ask = Ask::completion(prompt).tokens(rng.random_range(1..=max_tokens));
        if index.is_multiple_of(2) { ask } else { ask.streamed() }
    };
    (0..count).map(one).collect()
}

/// Prompt tokens that a prefix cache can give to a request whose prompt it has seen: whole blocks, and never the last
/// token, which is always computed.
pub fn reusable(prompt: u64) -> u64 {
    (prompt - 1) / BLOCK as u64 * BLOCK as u64
}
