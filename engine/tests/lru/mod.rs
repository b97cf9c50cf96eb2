//! The engine's prefix cache against a brute-force LRU of whole blocks, on a trace of requests one after another.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use engine::core::{Core, CoreConfig, Effect, Input, KvFailure, Submit};
use engine::sampler::Sampled;
use engine::{Output, RequestId, SamplingParams};
use serde::Deserialize;

/// Tokens in a block of the cache.
pub const BLOCK: usize = 16;

/// A line of a Mooncake trace: the prompt's length, and an id for each `unit` tokens of it (the last one may be cut).
#[derive(Clone, Debug, Deserialize)]
pub struct Line {
    pub input_length: usize,
    pub hash_ids: Vec<u32>,
}

/// The prompt as token ids: equal ids give equal tokens.
pub fn prompt(line: &Line, unit: usize) -> Vec<u32> {
    let token = |i: usize| line.hash_ids[i / unit].wrapping_mul(1024) + (i % unit) as u32;
    (0..line.input_length.min(line.hash_ids.len() * unit)).map(token).collect()
}

/// Cached tokens of each prompt, by the engine. Prompts that cannot fit are left out.
pub fn by_engine(prompts: &[Vec<u32>], num_blocks: usize) -> Vec<usize> {
    let mut core = Core::new(CoreConfig {
        block_size: BLOCK,
        num_blocks,
        block_bytes: 1,
        num_layers: 1,
        push_layers: 1,
        lease: Duration::from_secs(30),
        notification_time: Duration::from_secs(5),
        kv_checksum: false,
        max_model_len: usize::MAX,
        max_batched_tokens: usize::MAX,
        max_seqs: 1,
        eos: vec![],
        kv_failure: KvFailure::Recompute,
        first_ticket: 0,
        check_invariants: false,
    });
    let mut hits = Vec::new();
    for (id, prompt) in
        prompts.iter().enumerate().filter(|(_, prompt)| prompt.len().div_ceil(BLOCK) <= num_blocks)
    {
        core.apply(
            Input::Submit(Submit {
                id: RequestId(id as u64),
                request_id: String::new(),
                prompt: prompt.clone(),
                sampling: SamplingParams { max_tokens: 1, ..Default::default() },
                cache_salt: None,
                seed: 0,
                keep: false,
                fetch: None,
                prefill: Default::default(),
                arrival: Duration::ZERO,
                deadline: Duration::MAX,
            }),
            Duration::ZERO,
        );
        while let Some(plan) = core.plan(Duration::ZERO) {
            let sampled = plan.samples.iter().map(|_| Ok(Sampled { token: 0, logprobs: None })).collect();
            core.commit(&plan, sampled, Duration::ZERO);
        }
        let usage = core.take_effects().into_iter().find_map(|effect| match effect {
            Effect::Output(_, Output::Finished { usage, .. }) => Some(usage),
            _ => None,
        });
        hits.push(usage.expect("each request ends").cached_tokens);
    }
    hits
}

/// The same by the rule alone: a block's name is its whole prefix; the least recently used name goes first, and among those
/// of one request the end of the prompt before its beginning.
pub fn by_rule(prompts: &[Vec<u32>], num_blocks: usize) -> Vec<usize> {
    let mut names: HashMap<(u64, Vec<u32>), u64> = HashMap::new();
    let mut used: HashMap<u64, u64> = HashMap::new();
    let mut by_age: BTreeMap<u64, u64> = BTreeMap::new();
    let (mut next_name, mut clock) = (1u64, 0u64);
    let mut hits = Vec::new();
    for prompt in prompts.iter().filter(|prompt| prompt.len().div_ceil(BLOCK) <= num_blocks) {
        let mut parent = 0;
        let chain: Vec<u64> = prompt
            .chunks_exact(BLOCK)
            .map(|tokens| {
                let name = *names.entry((parent, tokens.to_vec())).or_insert_with(|| {
                    next_name += 1;
                    next_name
                });
                parent = name;
                name
            })
            .collect();
        let usable = (prompt.len() - 1) / BLOCK;
        let hit = chain.iter().take(usable).take_while(|name| used.contains_key(name)).count();
        hits.push(hit * BLOCK);
        // Blocks in use cannot be evicted: take the hit ones out of the order first.
        for name in &chain[..hit] {
            by_age.remove(&used.remove(name).expect("hit just now"));
        }
        let needed = prompt.len().div_ceil(BLOCK);
        while used.len() + needed > num_blocks {
            let (_, name) = by_age.pop_first().expect("the prompt alone fits");
            used.remove(&name);
        }
        for name in chain.iter().rev() {
            clock += 1;
            // The last full block of a prompt may be cached from before although it was computed again; the copy that
            // was there stays, at its old age.
            if !used.contains_key(name) {
                used.insert(*name, clock);
                by_age.insert(clock, *name);
            }
        }
    }
    hits
}
