//! How fast the router decides and takes events, and what the index takes in memory, at full size.
//!
//! ```sh
//! cargo run --release -p server --example index_speed [-- WORKERS BLOCKS]
//! ```
//!
//! Every worker holds prompts of 250 blocks (4,000 tokens): the first 32 blocks are the same on all workers, the rest its
//! own. A request repeats a prompt of one worker, so that its whole length is walked.

use std::time::{Duration, Instant};

use server::router::disagg::DisaggPolicy;
use server::router::policies::KvPolicy;
use server::router::policy::BlockKey;
use server::router::shared::IndexChange;
use server::router::{Prompt, Router, RouterConfig, WorkerId, WorkerRole};

const PROMPT: usize = 250;
const SHARED: usize = 32;
const BLOCK: usize = 16;

fn main() {
    let mut args = std::env::args().skip(1).map(|text| text.parse().expect("a number"));
    let (workers, blocks) = (args.next().unwrap_or(64_u64), args.next().unwrap_or(10_000_000_u64));
    let router = router();
    for id in 1..=workers {
        router.join(record(id)).expect("it fits");
        router.observed(WorkerId(id));
    }
    let prompts = blocks / workers / PROMPT as u64;
    let before = resident();

    let started = Instant::now();
    let mut stored = 0;
    for prompt in 0..prompts {
        for worker in 1..=workers {
            let keys = keys(worker, prompt);
            // As an engine says it: a chunk of 512 tokens a step.
            for (index, chunk) in keys.chunks(32).enumerate() {
                let parent = index.checked_sub(1).map(|_| keys[index * 32 - 1]);
                let change = IndexChange::Store { parent, keys: chunk.to_vec() };
                stored += router.apply(WorkerId(worker), &[change]).stored;
            }
        }
    }
    let took = started.elapsed();
    let offered = prompts * workers * PROMPT as u64;
    let sizes = router.sizes();
    println!(
        "store: {:.2} M blocks/s ({offered} offered, {stored} new)",
        offered as f64 / took.as_secs_f64() / 1e6
    );
    println!(
        "memory: {} blocks of workers, {:.1} bytes each by count, {:.1} by resident size",
        sizes.exact_blocks,
        sizes.exact_bytes as f64 / sizes.exact_blocks as f64,
        (resident() - before) as f64 / sizes.exact_blocks as f64
    );

    let tokens: Vec<u32> = (0..4000).map(|token| token * 37 % 151_936).collect();
    time("hash a prompt of 4,000 tokens", 2000, |_| Prompt::from_tokens(&tokens, None, BLOCK).keys.len());
    let asked: Vec<Prompt> = (0..4096_u64)
        .map(|at| {
            let number = at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16;
            let keys = keys(1 + number % workers, (number >> 20) % prompts);
            Prompt { keys: keys.into(), num_tokens: PROMPT * BLOCK, block_size: BLOCK }
        })
        .collect();
    time("decide (dry run: index, loads, policy)", 4096, |at| {
        router.explain(&asked[at]).cluster.workers.len()
    });
    time("decide, book, end", 4096, |at| {
        router.route(&asked[at], &[]).expect("there are workers").choice().scores.len()
    });
    let running: Vec<_> =
        asked[..512].iter().map(|prompt| router.route(prompt, &[]).expect("there are workers")).collect();
    time("decide, book, end; 512 requests running", 4096, |at| {
        router.route(&asked[at], &[]).expect("there are workers").choice().scores.len()
    });
    drop(running);

    let started = Instant::now();
    let mut removed = 0;
    for prompt in 0..prompts / 2 {
        for worker in 1..=workers {
            removed += router.apply(WorkerId(worker), &[IndexChange::Remove(keys(worker, prompt))]).removed;
        }
    }
    println!("remove: {:.2} M blocks/s", removed as f64 / started.elapsed().as_secs_f64() / 1e6);
    let of_one = router.indexed_keys(WorkerId(1)).len();
    let started = Instant::now();
    router.leave(WorkerId(1));
    println!("a worker with {of_one} blocks leaves: {:.1} ms", started.elapsed().as_secs_f64() * 1e3);
}

fn time(what: &str, count: usize, mut work: impl FnMut(usize) -> usize) {
    let mut samples: Vec<f64> = (0..count)
        .map(|at| {
            let started = Instant::now();
            std::hint::black_box(work(at));
            started.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    println!("{what}: median {:.1} us, p99 {:.1} us", samples[count / 2], samples[count * 99 / 100]);
}

/// Names of a worker's prompt, as random as hashes are.
fn keys(worker: u64, prompt: u64) -> Vec<BlockKey> {
    let name = |domain: u64, at: usize| {
        let seed =
            domain.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ (at as u64).wrapping_mul(0xd6e8_feb8_6659_fd93);
        let mixed = (seed ^ (seed >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        BlockKey(mixed ^ (mixed >> 32))
    };
    (0..PROMPT)
        .map(|at| name(if at < SHARED { prompt % 8 } else { 1000 + (worker << 32) + prompt }, at))
        .collect()
}

fn router() -> std::sync::Arc<Router> {
    Router::new(RouterConfig {
        policy: Box::new(KvPolicy::default()),
        model: "m".into(),
        block_size: None,
        kv_events: true,
        kv_degrade: true,
        kv_events_required: false,
        kv_events_patience: Duration::from_secs(3600),
        ttl: Duration::from_secs(120),
        predicted_ttl: None,
        index_bytes: 4 << 30,
        booking_lease: Duration::from_secs(3600),
        disagg: DisaggPolicy::Auto,
        max_decode_share: None,
        max_prefill_tokens: None,
    })
}

fn record(id: u64) -> server::discovery::WorkerRecord {
    let json = serde_json::json!({
        "version": 1, "worker_id": id.to_string(), "incarnation": WorkerId(id), "role": WorkerRole::Both, "model": "m",
        "url": format!("http://worker-{id}:8000"), "block_size": BLOCK, "capacity_blocks": 1_000_000,
        "events": { "endpoint": "tcp://127.0.0.1:1" },
    });
    serde_json::from_value(json).expect("it is a record")
}

fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").expect("this runs on Linux");
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("it has a size");
    line.trim().trim_end_matches("kB").trim().parse::<usize>().expect("a number") << 10
}
