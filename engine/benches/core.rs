//! What the engine's own bookkeeping costs: `cargo bench -p engine`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BatchSize, Criterion, criterion_group, criterion_main};
use engine::core::{Core, CoreConfig, Input, KvFailure, Submit};
use engine::hash::{chain, root};
use engine::pool::{BlockPool, Holder};
use engine::sampler::Sampled;
use engine::{RequestId, SamplingParams};

fn allocate_and_free(c: &mut Criterion) {
    let mut pool = BlockPool::new(100_000);
    c.bench_function("allocate and free 64 blocks", |b| {
        b.iter(|| {
            let blocks = pool.allocate(64, Holder::Running).expect("the pool is large");
            pool.release_chain(black_box(&blocks));
        });
    });
}

fn hash_a_prompt(c: &mut Criterion) {
    let tokens: Vec<u32> = (0..4000).collect();
    c.bench_function("hash a prompt of 4,000 tokens", |b| {
        b.iter(|| black_box(&tokens).chunks_exact(16).fold(root(None), chain));
    });
}

/// 256 requests of 512 tokens that all decode.
fn running() -> Core {
    let mut core = Core::new(CoreConfig {
        block_size: 16,
        num_blocks: 20_000,
        block_bytes: 1,
        num_layers: 1,
        push_layers: 1,
        lease: Duration::from_secs(30),
        notification_time: Duration::from_secs(5),
        kv_checksum: false,
        max_model_len: 1 << 20,
        max_batched_tokens: 1 << 20,
        max_seqs: 256,
        eos: vec![],
        kv_failure: KvFailure::Recompute,
        first_ticket: 0,
        check_invariants: false,
    });
    for id in 0..256 {
        let submit = Submit {
            id: RequestId(id),
            request_id: String::new(),
            prompt: (0..512).map(|i| i * 256 + id as u32).collect(),
            sampling: SamplingParams { max_tokens: 1 << 19, ..Default::default() },
            cache_salt: None,
            seed: 0,
            keep: false,
            fetch: None,
            prefill: Default::default(),
            arrival: Duration::ZERO,
            deadline: Duration::MAX,
        };
        core.apply(Input::Submit(submit), Duration::ZERO);
    }
    step(&mut core);
    core
}

fn step(core: &mut Core) {
    let plan = core.plan(Duration::ZERO).expect("requests run");
    let sampled = plan.samples.iter().map(|_| Ok(Sampled { token: 7, logprobs: None })).collect();
    core.commit(&plan, sampled, Duration::ZERO);
    black_box(core.take_effects());
}

fn schedule(c: &mut Criterion) {
    let mut core = running();
    c.bench_function("plan a step of 256 decodes", |b| {
        // The plan is dropped: nothing is committed, so each is the same.
        b.iter_batched(|| (), |()| black_box(core.plan(Duration::ZERO)), BatchSize::SmallInput);
    });
    let mut core = running();
    c.bench_function("plan and commit a step of 256 decodes", |b| b.iter(|| step(&mut core)));
}

criterion_group!(benches, allocate_and_free, hash_a_prompt, schedule);
criterion_main!(benches);
