//! Compares our forward pass with golden logits of any checkpoint, for those too large for the repository:
//! `cargo run --release -p tests --bin golden -- MODEL_DIR GOLDEN.json`
//!
//! Fails above 1e-3 in f32, above a relative error of 1e-2 in bf16, or if a greedy token differs in f32.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use kernels::KvDtype;
use models::qwen::ComputeDtype;
use tests::golden::{Bench, Golden, max_difference, relative_error};

fn main() -> Result<()> {
    let mut args = std::env::args_os().skip(1).map(PathBuf::from);
    let usage = "usage: golden MODEL_DIR GOLDEN.json";
    let (dir, golden) = (args.next().context(usage)?, args.next().context(usage)?);
    let golden = Golden::load(&golden)?;
    let longest =
        golden.prompts.iter().map(|prompt| prompt.input_ids.len()).max().context("no prompts")? + 64;
    let mut worst = (0f32, 0f32);
    let exact = Bench::load(&dir, ComputeDtype::F32, KvDtype::F32, longest)?;
    for prompt in &golden.prompts {
        let started = Instant::now();
        let logits = exact.prompt(&prompt.input_ids, prompt.input_ids.len())?;
        let difference = max_difference(logits.last().context("no logits")?, &prompt.last_logits);
        let same = exact.greedy(&prompt.input_ids, prompt.greedy.len(), golden.tokens)? == prompt.greedy;
        println!(
            "f32  {:12} max |difference| {difference:.2e}  greedy equal {same}  {:.1?}",
            prompt.name,
            started.elapsed()
        );
        worst.0 = worst.0.max(difference);
        ensure!(same, "{}: greedy tokens differ", prompt.name);
    }
    drop(exact);
    let stored = Bench::load(&dir, ComputeDtype::Stored, KvDtype::Bf16, longest)?;
    for prompt in &golden.prompts {
        let started = Instant::now();
        let logits = stored.prompt(&prompt.input_ids, prompt.input_ids.len())?;
        let error = relative_error(logits.last().context("no logits")?, &prompt.last_logits);
        println!("bf16 {:12} relative error   {error:.2e}  {:.1?}", prompt.name, started.elapsed());
        worst.1 = worst.1.max(error);
    }
    println!("worst: f32 {:.2e} (limit 1e-3), bf16 {:.2e} (limit 1e-2)", worst.0, worst.1);
    ensure!(worst.0 <= 1e-3 && worst.1 <= 1e-2, "above a limit");
    Ok(())
}
