//! Cached tokens on a small trace equal those of an LRU simulation (`examples/lru_trace.rs` takes any trace).

mod lru;

use proptest::prelude::*;

#[test]
fn cached_tokens_on_a_trace_are_those_of_an_lru_simulation() {
    let trace = include_str!("fixtures/mooncake_conv_first40_div32.jsonl");
    let lines: Vec<lru::Line> = trace.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    // Three rounds, so that a small pool evicts what the next round would have used.
    let once: Vec<_> = lines.iter().map(|line| lru::prompt(line, lru::BLOCK)).collect();
    let prompts = [once.clone(), once.clone(), once].concat();
    let mut totals = Vec::new();
    for num_blocks in [120, 300, 700, 5000] {
        let hits = lru::by_engine(&prompts, num_blocks);
        assert_eq!(hits, lru::by_rule(&prompts, num_blocks), "{num_blocks} blocks");
        totals.push(hits.iter().sum::<usize>());
    }
    assert!(totals.is_sorted() && totals[0] < totals[3], "more blocks hit more: {totals:?}");
}

/// A prompt: the start of one of a few long texts, then something of its own.
fn prompt(&(text, shared, own): &(u32, usize, usize)) -> Vec<u32> {
    let shared_part = (0..shared as u32).map(|i| text * 1000 + i);
    shared_part.chain((0..own as u32).map(|i| 50_000 + text + 3 * i)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn cached_tokens_of_random_prompts_are_those_of_an_lru_simulation(
        prompts in prop::collection::vec((0..4u32, 0..200usize, 1..60usize), 1..60),
        num_blocks in 1..60usize,
    ) {
        let prompts: Vec<_> = prompts.iter().map(prompt).collect();
        prop_assert_eq!(lru::by_engine(&prompts, num_blocks), lru::by_rule(&prompts, num_blocks));
    }
}
