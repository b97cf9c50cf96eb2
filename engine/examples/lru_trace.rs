//! Compares the engine's cached tokens with an LRU simulation on a Mooncake trace:
//! `cargo run --release -p engine --example lru_trace -- TRACE.jsonl [REQUESTS] [BLOCKS …]`

#[path = "../tests/lru/mod.rs"]
mod lru;

/// Tokens that one id of a Mooncake trace stands for.
const UNIT: usize = 512;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("usage: lru_trace TRACE.jsonl [REQUESTS] [BLOCKS …]");
    let requests = args.next().map_or(5000, |text| text.parse().expect("REQUESTS is a number"));
    let mut capacities: Vec<usize> = args.map(|text| text.parse().expect("BLOCKS are numbers")).collect();
    if capacities.is_empty() {
        capacities = vec![10_000, 50_000, 200_000];
    }
    let text = std::fs::read_to_string(&path).expect("the trace can be read");
    let lines =
        text.lines().take(requests).map(|line| serde_json::from_str(line).expect("a line of a trace"));
    let prompts: Vec<Vec<u32>> = lines.map(|line: lru::Line| lru::prompt(&line, UNIT)).collect();
    let total: usize = prompts.iter().map(Vec::len).sum();
    println!("{} requests, {total} prompt tokens", prompts.len());
    let mut differ = false;
    for num_blocks in capacities {
        let (engine, rule) = (lru::by_engine(&prompts, num_blocks), lru::by_rule(&prompts, num_blocks));
        let hits: usize = engine.iter().sum();
        let same = engine == rule;
        differ |= !same;
        let verdict = if same { "equal to" } else { "DIFFERENT from" };
        println!(
            "{num_blocks} blocks ({} tokens): {hits} cached tokens, {:.1} %, of {} requests, {verdict} the LRU simulation",
            num_blocks * lru::BLOCK,
            100.0 * hits as f64 / total as f64,
            engine.len(),
        );
    }
    assert!(!differ, "the engine differs from the simulation");
}
