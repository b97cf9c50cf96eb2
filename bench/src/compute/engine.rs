//! `bench engine`: an engine's steps in this process, beside the floors of the machine.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use engine::SamplingParams;
use engine::core::{Plan, SampleRow};
use engine::runner::{ModelRunner, Runner};
use engine::sampler::Vocabulary;
use kernels::cpu::arena::Arena;
use kernels::cpu::{Isa, Precision};
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::qwen::{ComputeDtype, Qwen};
use models::{ModelConfig, SourceOptions, Weights, resolve};
use serde::Serialize;

use super::roofs::{Measured, Roofs};
use super::{Cpu, Report, aside, at_least_one, seconds};
use crate::error::{BenchError, Result};
use crate::machine;
use crate::output::write_json;
use crate::table::Table;

/// Measure prefill and decode steps of the engine in this process, sampling included, beside the floors of this machine.
///
/// A floor is what the step's operations or bytes take at the roofs, which are measured in the same run, in turns with the
/// steps.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to load: a folder, a Hugging Face id, or `demo`. Text files are not needed.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    model: String,
    /// Lengths of prompts, each computed in one step.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "512,1500,3000", value_parser = at_least_two)]
    prompt_tokens: Vec<usize>,
    /// Sequences that decode together.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8", value_parser = at_least_one)]
    batch: Vec<usize>,
    /// Tokens before the one that each of them decodes.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least_one)]
    context: usize,
    /// Prefills and runs of 20 decode steps of each size; the best counts, the median is printed too.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least_one)]
    rounds: usize,
    /// The layers' matrices as bytes, as serve --quantization int8 has them.
    #[arg(long)]
    int8: bool,
    #[command(flatten)]
    cpu: Cpu,
    /// Write the results to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
Prefill's floor: two operations for each weight of the layers and token, four for each pair of a token and one that it \
sees, query head and element of a head, and one row of the head, all at the roof of the CPU's arithmetic. Decode's floor: \
the weights and the batch's KV once at the roof of the memory. scripts/bench-peers.py and scripts/bench-llama-cpp.py measure \
torch and llama.cpp at the same sizes.

Examples:
  bench engine --model Qwen/Qwen3-0.6B --json engine.json
  bench engine --model Qwen/Qwen3-0.6B --prompt-tokens 1500 --batch 1,8 --context 2048 --int8";

const BLOCK_SIZE: usize = 16;
/// Steps of one decode measurement: long enough that a clock tick and a wake-up do not count.
const STEPS: usize = 20;

/// A step's size and time.
#[derive(Clone, Debug, Serialize)]
struct Row {
    phase: &'static str,
    sequences: usize,
    /// Before the step.
    context: usize,
    /// New in the step, of each sequence.
    tokens: usize,
    best_ms: f64,
    median_ms: f64,
    tokens_per_s: f64,
    floor_ms: f64,
    /// How many times the floor.
    of_floor: f64,
}

#[derive(Debug, Serialize)]
struct Results {
    load_s: f64,
    weight_bytes: f64,
    /// How fast the system gives memory that nobody had before, which loading waits for.
    fresh_memory_gb_s: f64,
    peak_resident_bytes: Option<u64>,
    roofs: Measured,
    steps: Vec<Row>,
}

/// Measures and prints.
pub async fn run(args: Args) -> Result<()> {
    aside(move || measure(&args)).await
}

fn measure(args: &Args) -> Result<()> {
    let load = machine::load();
    args.cpu.start()?;
    let precision = if args.int8 { Precision::Int8 } else { Precision::Bf16 };
    let isa = Isa::detect_for(precision);
    let usage = |error: &dyn std::fmt::Display| BenchError::Usage(format!("--model {}: {error}", args.model));
    let options = SourceOptions::from_vars(|name| std::env::var(name).ok());
    let dir = resolve(&args.model, &options).map_err(|error| usage(&error))?;
    let mut loaded = None;
    let load_s = seconds(|| loaded = Some(Steps::load(&dir, args)));
    let mut steps = loaded.expect("set by the closure. This is a bug.").map_err(|error| usage(&error))?;
    let fresh = fresh_memory()?;
    let mut roofs = Roofs::new()?;
    let mut sizes: Vec<(usize, usize, usize)> = args.prompt_tokens.iter().map(|&n| (1, 0, n)).collect();
    sizes.extend(args.batch.iter().map(|&n| (n, args.context, 1)));
    let mut times = vec![Vec::new(); sizes.len()];
    for _ in 0..args.rounds {
        for (&(sequences, context, tokens), times) in sizes.iter().zip(&mut times) {
            roofs.read();
            roofs.compute(isa, precision);
            times.push(steps.time(sequences, context, tokens).map_err(|error| usage(&error))?);
        }
    }
    let (read, compute) = (roofs.read() * 1e9, roofs.compute(isa, precision) * 1e9);
    let rows: Vec<Row> = sizes
        .into_iter()
        .zip(times)
        .map(|((sequences, context, tokens), times)| {
            let floor = steps.size.floor(sequences, context, tokens, read, compute);
            row((sequences, context, tokens), times, floor)
        })
        .collect();
    let peak = machine::peak_resident_bytes();
    let weight_bytes = steps.size.bytes;
    print(&rows, (load_s, fresh), weight_bytes, peak, (isa, &roofs.measured()));
    let results = Results {
        load_s,
        weight_bytes,
        fresh_memory_gb_s: fresh,
        peak_resident_bytes: peak,
        roofs: roofs.measured(),
        steps: rows,
    };
    write_json(args.json.as_deref(), &Report::new(args.clone(), isa, load, results))
}

/// GB/s of touching memory for the first time, as weights and KV are. A virtual machine may have to ask its host for it.
fn fresh_memory() -> Result<f64> {
    const WORDS: usize = 64 << 20;
    let mut memory = Arena::default().alloc(WORDS).map_err(BenchError::io("256 MiB of memory"))?;
    let taken = seconds(|| memory.fill(1));
    Ok((WORDS * size_of::<u32>()) as f64 / taken / 1e9)
}

fn row((sequences, context, tokens): (usize, usize, usize), mut times: Vec<f64>, floor: f64) -> Row {
    times.sort_by(f64::total_cmp);
    let best = times[0];
    Row {
        phase: if tokens == 1 { "decode" } else { "prefill" },
        sequences,
        context,
        tokens,
        best_ms: best * 1e3,
        median_ms: times[times.len() / 2] * 1e3,
        tokens_per_s: (sequences * tokens) as f64 / best,
        floor_ms: floor * 1e3,
        of_floor: best / floor,
    }
}

fn print(
    rows: &[Row],
    (load_s, fresh): (f64, f64),
    bytes: f64,
    peak: Option<u64>,
    (isa, roofs): (Isa, &Measured),
) {
    println!(
        "loaded {:.2} GB of weights in {load_s:.2} s; {} threads, {}",
        bytes / 1e9,
        kernels::cpu::team::threads(),
        isa.as_str()
    );
    println!("fresh memory: {fresh:.2} GB/s, {:.2} s for as much as the weights", bytes / 1e9 / fresh);
    if let Some(peak) = peak {
        println!("most memory: {:.2} GB, of which the roofs' measurement takes 0.54", peak as f64 / 1e9);
    }
    println!("memory: {:.1} GB/s read in order", roofs.read_gb_s);
    for peak in &roofs.compute {
        println!("arithmetic: {:.0} GFLOP/s {} on {}", peak.gflop_s, peak.precision, peak.isa);
    }
    let mut table = Table::new(&[
        "<step",
        "sequences",
        "context",
        "tokens",
        "best ms",
        "median ms",
        "tokens/s",
        "floor ms",
        "x floor",
    ]);
    for row in rows {
        table.row([
            row.phase.to_owned(),
            row.sequences.to_string(),
            row.context.to_string(),
            row.tokens.to_string(),
            format!("{:.2}", row.best_ms),
            format!("{:.2}", row.median_ms),
            format!("{:.1}", row.tokens_per_s),
            format!("{:.2}", row.floor_ms),
            format!("{:.2}", row.of_floor),
        ]);
    }
    print!("\n{table}");
}

fn at_least_two(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|&n| n >= 2).ok_or_else(|| "expected a whole number of at least 2".into())
}

/// What of a model decides its floors.
struct Size {
    /// Weights of the layers' matrices, and of the head.
    layers: f64,
    head: f64,
    /// Bytes of all that a decode step reads.
    bytes: f64,
    /// Layers times query heads times head size.
    attention: f64,
    kv_bytes_per_token: f64,
}

impl Size {
    fn new(config: &ModelConfig, layout: &KvLayout, int8: bool) -> Self {
        let (hidden, mlp) = (config.hidden_size as f64, config.intermediate_size as f64);
        let q = (config.num_attention_heads * config.head_dim) as f64;
        let kv = (config.num_key_value_heads * config.head_dim) as f64;
        let depth = config.num_hidden_layers as f64;
        let layers = depth * (hidden * (2.0 * q + 2.0 * kv) + 3.0 * hidden * mlp);
        let head = hidden * config.vocab_size as f64;
        let bytes = layers * if int8 { 1.0 } else { 2.0 } + 2.0 * head;
        Self { layers, head, bytes, attention: depth * q, kv_bytes_per_token: layout.token_bytes() as f64 }
    }

    /// Seconds of a step at `read` bytes/s and `compute` operations/s.
    fn floor(&self, sequences: usize, context: usize, tokens: usize, read: f64, compute: f64) -> f64 {
        let (sequences, context, tokens) = (sequences as f64, context as f64, tokens as f64);
        let seen = tokens * context + tokens * (tokens + 1.0) / 2.0;
        let operations =
            sequences * (2.0 * self.layers * tokens + 4.0 * self.attention * seen + 2.0 * self.head);
        let bytes = self.bytes + sequences * (context + tokens) * self.kv_bytes_per_token;
        (operations / compute).max(bytes / read)
    }
}

struct Steps {
    runner: ModelRunner,
    size: Size,
    vocabulary: u32,
}

type Loaded<T> = std::result::Result<T, Box<dyn std::error::Error>>;

impl Steps {
    fn load(dir: &Path, args: &Args) -> Loaded<Self> {
        let config = ModelConfig::load(dir)?;
        let files = Weights::open(dir)?;
        files.check(&config)?;
        let longest = args.prompt_tokens.iter().copied().max().unwrap_or(0);
        let context = args.context + 1;
        let limit = config.max_position_embeddings;
        if longest.max(context) > limit {
            return Err(
                format!("{} tokens asked for, the model's limit is {limit}", longest.max(context)).into()
            );
        }
        let dtype = if args.int8 { ComputeDtype::Int8 } else { ComputeDtype::Stored };
        let model = Qwen::load(&config, &files, dtype, longest.max(context))?;
        let layout = KvLayout {
            num_layers: config.num_hidden_layers,
            num_kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            block_size: BLOCK_SIZE,
            dtype: KvDtype::Bf16,
        };
        let sequences = args.batch.iter().copied().max().unwrap_or(1);
        let blocks = longest.div_ceil(BLOCK_SIZE).max(sequences * context.div_ceil(BLOCK_SIZE));
        let pool = Arc::new(KvPool::new(layout, blocks)?);
        let size = Size::new(&config, &layout, args.int8);
        let vocabulary = Vocabulary::new(vec![true; config.vocab_size]);
        Ok(Self {
            runner: ModelRunner::new(Box::new(model), pool, vocabulary),
            size,
            vocabulary: config.vocab_size as u32,
        })
    }

    /// Seconds of a step in which `sequences` get `tokens` after `context`; of many for one token each, the mean.
    fn time(&mut self, sequences: usize, context: usize, tokens: usize) -> Loaded<f64> {
        if tokens == 1 {
            // So that the KV is there, and different from place to place.
            self.run(&self.plan(sequences, 0, context))?;
        }
        let plan = self.plan(sequences, context, tokens);
        let count = if tokens == 1 { STEPS } else { 1 };
        let mut result = Ok(());
        let seconds = seconds(|| result = (0..count).try_for_each(|_| self.run(&plan)));
        result.map(|()| seconds / count as f64)
    }

    fn run(&mut self, plan: &Plan) -> Loaded<()> {
        let sampled = self.runner.run(plan, &mut |_| ())?;
        sampled.into_iter().try_for_each(|token| token.map(drop)).map_err(Into::into)
    }

    /// Random tokens in blocks of each sequence's own, sampled greedily.
    fn plan(&self, sequences: usize, context: usize, tokens: usize) -> Plan {
        let (mut meta, mut samples) = (BatchMeta::default(), Vec::new());
        let blocks = (context + tokens).div_ceil(BLOCK_SIZE) as u32;
        for sequence in 0..sequences as u32 {
            let table: Vec<u32> = (sequence * blocks..(sequence + 1) * blocks).collect();
            meta.push(&table, context, tokens, BLOCK_SIZE);
            samples.push(SampleRow {
                row: meta.num_tokens() as u32 - 1,
                params: SamplingParams::default(),
                seed: 0,
                index: 0,
                history: Vec::new(),
                prompt_len: 0,
                suppressed: Vec::new(),
            });
        }
        let token = |i: u32| i.wrapping_mul(2_654_435_761) % self.vocabulary;
        Plan { items: Vec::new(), tokens: (0..meta.num_tokens() as u32).map(token).collect(), meta, samples }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floors_of_qwen3_0_6b_are_the_published_ones() {
        let size = Size {
            layers: 440.4e6,
            head: 155.6e6,
            bytes: 2.0 * (440.4e6 + 155.6e6),
            attention: 28.0 * 2048.0,
            kv_bytes_per_token: 114_688.0,
        };
        let (read, compute) = (58e9, 440e9);
        let near = |found: f64, expected: f64| (found / expected - 1.0).abs() < 0.02;
        for (tokens, floor) in [(512, 1.03 + 0.06), (1500, 3.37 + 0.22), (3000, 7.84 + 0.5)] {
            let found = size.floor(1, 0, tokens, read, compute);
            assert!((found / floor - 1.0).abs() < 0.1, "{tokens}: {found}");
        }
        assert!(near(size.floor(1, 511, 1, read, compute), 21.5e-3));
        assert!(size.floor(8, 511, 1, read, compute) > 21.5e-3);
    }
}
