//! Seconds of prefill and milliseconds of decode of a checkpoint, beside the floors of a machine with two Zen 4 cores:
//! `cargo run --release -p models --example speed -- MODEL_DIR [RUNS]`
//!
//! Best of several runs: on a shared machine the least disturbed one says what the code can do. Tokens are random, so
//! nothing hits a cache that a user's text would not.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::qwen::{Batch, ComputeDtype, Qwen};
use models::{ModelConfig, Weights};

const BLOCK_SIZE: usize = 16;
/// Prompt lengths, with the floor in seconds of Qwen3-0.6B in bf16 at 440 GFLOP/s.
const PREFILL: [(usize, f64); 3] = [(512, 1.03), (1500, 3.37), (3000, 7.84)];
/// Sequences, with the floor in milliseconds of one step at [`CONTEXT`] tokens each, at 58 GB/s.
const DECODE: [(usize, f64); 2] = [(1, 21.5), (8, 28.6)];
const CONTEXT: usize = 512;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

struct Speed {
    model: Qwen,
    pool: Arc<KvPool>,
    vocab: u32,
}

impl Speed {
    fn load(dir: &Path) -> Result<Self> {
        let started = Instant::now();
        let config = ModelConfig::load(dir)?;
        let files = Weights::open(dir)?;
        files.check(&config)?;
        let model = Qwen::load(&config, &files, ComputeDtype::Stored, 4096)?;
        let layout = KvLayout {
            num_layers: config.num_hidden_layers,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            dtype: KvDtype::Bf16,
        };
        let pool = Arc::new(KvPool::new(layout, 8 * (CONTEXT + BLOCK_SIZE) / BLOCK_SIZE)?);
        println!("load {:.2} s, resident {} MB", started.elapsed().as_secs_f64(), status("VmRSS"));
        Ok(Self { model, pool, vocab: config.vocab_size as u32 })
    }

    /// Seconds of one step over sequences of `(context before, new tokens)`, each in blocks of its own.
    fn step(&self, seqs: &[(usize, usize)]) -> Result<f64> {
        let (mut meta, mut logits_rows, mut block) = (BatchMeta::default(), Vec::new(), 0u32);
        for &(computed, new) in seqs {
            let blocks = (computed + new).div_ceil(BLOCK_SIZE) as u32;
            let table: Vec<u32> = (block..block + blocks).collect();
            meta.push(&table, computed, new, BLOCK_SIZE);
            logits_rows.push(meta.num_tokens() as u32 - 1);
            block += blocks;
        }
        let tokens =
            (0..meta.num_tokens() as u32).map(|i| i.wrapping_mul(2_654_435_761) % self.vocab).collect();
        let batch = Batch { tokens, meta: Arc::new(meta), logits_rows };
        let started = Instant::now();
        let logits = self.model.forward(&batch, &self.pool)?.ok_or("no logits")?;
        let elapsed = started.elapsed().as_secs_f64();
        assert_eq!(logits.dims2()?.0, seqs.len());
        Ok(elapsed)
    }

    /// Seconds of the fastest of `runs`, and CPU seconds of all threads of an average one. Where others use the same
    /// cores, half of the latter says what two quiet ones would do.
    fn best(&self, runs: usize, seqs: &[(usize, usize)]) -> Result<(f64, f64)> {
        let started = cpu_seconds();
        let best =
            (0..runs).try_fold(f64::INFINITY, |best, _| self.step(seqs).map(|seconds| best.min(seconds)))?;
        Ok((best, (cpu_seconds() - started) / runs as f64))
    }
}

fn main() -> Result<()> {
    let mut args = std::env::args().skip(1);
    let dir = args.next().ok_or("usage: speed MODEL_DIR [RUNS]")?;
    let runs = args.next().map_or(Ok(3), |runs| runs.parse::<usize>())?;
    let speed = Speed::load(Path::new(&dir))?;
    for (tokens, floor) in PREFILL {
        let (seconds, cpu) = speed.best(runs, &[(0, tokens)])?;
        let ratio = seconds / floor;
        println!(
            "prefill {tokens:5} tokens  {seconds:7.3} s   floor {floor:5.2} s   {ratio:5.2} x   CPU {cpu:.3} s"
        );
    }
    for (count, floor) in DECODE {
        speed.step(&vec![(0, CONTEXT); count])?;
        let (ms, cpu) = speed.best(100 * runs, &vec![(CONTEXT, 1); count])?;
        let (ms, cpu) = (ms * 1e3, cpu * 1e3);
        let (ratio, rate) = (ms / floor, count as f64 / ms * 1e3);
        println!(
            "decode  batch {count}       {ms:7.2} ms  floor {floor:5.1} ms  {ratio:5.2} x   CPU {cpu:.1} ms  {rate:.1} tokens/s"
        );
    }
    println!("peak resident {} MB", status("VmHWM"));
    Ok(())
}

/// User and system time of all threads so far; ticks are hundredths of a second.
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = text.rsplit(')').next().unwrap_or_default();
    after_name.split_whitespace().skip(11).take(2).filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>()
        / 100.0
}

/// A size of this process from /proc, in MB (10^6 bytes).
fn status(key: &str) -> u64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = text.lines().find(|line| line.starts_with(key)).unwrap_or_default();
    line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024 / 1_000_000
}
