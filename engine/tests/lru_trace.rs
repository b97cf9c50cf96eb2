//! Cached tokens on a small trace equal those of an LRU simulation (`examples/lru_trace.rs` takes any trace).

mod lru;

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
