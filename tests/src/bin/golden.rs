//! Compares our forward pass with golden logits of any checkpoint, for those too large for the repository:
//! `cargo run --release -p tests --bin golden -- MODEL_DIR GOLDEN.json [--device cpu|cuda|cuda:N] [--longest TOKENS]`
//!
//! Fails above 1e-3 in f32, above a relative error of 1e-2 in bf16 (2e-2 on a CUDA device, which rounds activations, too), or
//! if a greedy token differs in f32.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use kernels::KvDtype;
use kernels::cuda::Gpu;
use models::qwen::ComputeDtype;
use tests::golden::{Bench, Golden, max_difference, relative_error};

const USAGE: &str =
    "usage: golden MODEL_DIR GOLDEN.json [--device cpu|cuda|cuda:N] [--cuda-emulator FILE] [--longest TOKENS]
--longest leaves out longer prompts: an emulated GPU takes a second for a few tokens";

fn main() -> Result<()> {
    let mut files = Vec::new();
    let (mut device, mut emulator, mut limit) = ("cpu".to_owned(), None, usize::MAX);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--device" => device = args.next().context(USAGE)?,
            "--cuda-emulator" => emulator = Some(PathBuf::from(args.next().context(USAGE)?)),
            "--longest" => limit = args.next().and_then(|tokens| tokens.parse().ok()).context(USAGE)?,
            _ => files.push(PathBuf::from(arg)),
        }
    }
    let [dir, golden] = &files[..] else { bail!(USAGE) };
    let mut golden = Golden::load(golden)?;
    golden.prompts.retain(|prompt| prompt.input_ids.len() <= limit);
    let longest =
        golden.prompts.iter().map(|prompt| prompt.input_ids.len()).max().context("no prompts")? + 64;
    if device == "cpu" {
        exact(dir, &golden, longest)?;
        let bench = Bench::load(dir, ComputeDtype::Stored, KvDtype::Bf16, longest)?;
        return rounded(&bench, &golden, 1e-2);
    }
    let number = if device == "cuda" { Some("0") } else { device.strip_prefix("cuda:") };
    let ordinal = number.and_then(|number| number.parse().ok()).context(USAGE)?;
    let gpu =
        emulator.map_or_else(|| Gpu::open(ordinal), |library| Gpu::emulated_device(&library, 0, ordinal))?;
    rounded(&Bench::load_on(&gpu, dir, longest)?, &golden, 2e-2)
}

/// In f32: logits to 1e-3, and the same greedy tokens.
fn exact(dir: &Path, golden: &Golden, longest: usize) -> Result<()> {
    let bench = Bench::load(dir, ComputeDtype::F32, KvDtype::F32, longest)?;
    for prompt in &golden.prompts {
        let started = Instant::now();
        let logits = bench.prompt(&prompt.input_ids, prompt.input_ids.len())?;
        let difference = max_difference(logits.last().context("no logits")?, &prompt.last_logits);
        let same = bench.greedy(&prompt.input_ids, prompt.greedy.len(), golden.tokens)? == prompt.greedy;
        println!(
            "f32  {:12} max |difference| {difference:.2e}  greedy equal {same}  {:.1?}",
            prompt.name,
            started.elapsed()
        );
        ensure!(same, "{}: greedy tokens differ", prompt.name);
        ensure!(
            difference <= 1e-3,
            "{}: a logit differs by {difference}, expected at most 1e-3",
            prompt.name
        );
    }
    Ok(())
}

/// In bf16: logits within `limit` of their length.
fn rounded(bench: &Bench, golden: &Golden, limit: f32) -> Result<()> {
    for prompt in &golden.prompts {
        let started = Instant::now();
        let logits = bench.prompt(&prompt.input_ids, prompt.input_ids.len())?;
        let error = relative_error(logits.last().context("no logits")?, &prompt.last_logits);
        println!("bf16 {:12} relative error   {error:.2e}  {:.1?}", prompt.name, started.elapsed());
        ensure!(error <= limit, "{}: relative error {error}, expected at most {limit}", prompt.name);
    }
    Ok(())
}
