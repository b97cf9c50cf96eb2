//! `bench replay`: a trace of real requests through a frontend, and how much of their prompts each mode finds cached.

use std::collections::HashSet;
use std::path::PathBuf;
use std::time::Instant;

use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::client::Client;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::output::write_json;
use crate::process::{Process, serve_binary};
use crate::sample::{self, Load, Prompt};
use crate::stats::{median, percentile};
use crate::table::{Table, ms, or_dash};
use crate::{prompts, routing};

/// Tokens of a block of the trace, as Mooncake publishes it.
const TRACE_BLOCK: usize = 512;

/// Tokens of a block of the workers.
const BLOCK: usize = 16;

/// Replay a Mooncake trace through a frontend, once for each mode, and compare cached tokens with what an endless cache
/// would find.
///
/// A trace has lines such as {"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}, with 512
/// tokens for each hash. Lengths are divided by --scale, so that a small model can take them; the shares stay the same.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Args {
    /// The trace, JSON lines.
    #[arg(long, value_name = "FILE")]
    trace: PathBuf,
    /// So many requests from its beginning.
    #[arg(long, value_name = "N", default_value_t = 2000)]
    requests: usize,
    /// Lengths are divided by this: 32 makes a block of the trace one of ours.
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..=32))]
    scale: u32,
    /// Whose tokenizer and limits; the device is simulated.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    model: String,
    /// The GPU to imitate.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100")]
    sim_profile: String,
    /// How many times faster than the profile.
    #[arg(long, value_name = "FACTOR", default_value_t = 100.0)]
    sim_speed: f64,
    /// Worker processes.
    #[arg(long, value_name = "N", default_value_t = 4)]
    workers: usize,
    /// Tokens that a worker's cache holds, after scaling.
    #[arg(long, value_name = "N", default_value_t = 32_768)]
    worker_tokens: usize,
    /// Requests at the same time, in the trace's order; its times are not kept.
    #[arg(long, value_name = "N", default_value_t = 16)]
    concurrency: usize,
    /// Modes of the router; kv-approximate is kv without events.
    #[arg(
        long,
        value_name = "MODE",
        value_delimiter = ',',
        default_value = "kv,kv-approximate,round-robin,random"
    )]
    modes: Vec<String>,
    /// Write everything to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

#[derive(Clone, Debug, Deserialize)]
struct Line {
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u64>,
}

#[derive(Debug, Serialize)]
struct Row {
    mode: String,
    /// Cached tokens of prompt tokens.
    hit_rate: f64,
    ttft_p50_ms: Option<f64>,
    ttft_p99_ms: Option<f64>,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    command: Vec<String>,
    settings: Args,
    machine: Machine,
    requests: usize,
    prompt_tokens: usize,
    /// What one endless cache would find, in whole blocks.
    ideal: f64,
    rows: Vec<Row>,
}

pub async fn run(args: Args) -> Result<()> {
    let lines = read(&args)?;
    let logs = tempfile::tempdir().map_err(BenchError::io("a temporary folder"))?;
    let mut workers = Vec::new();
    for index in 0..args.workers {
        let dir = logs.path().join(format!("worker-{index}"));
        std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
        let flags = [
            "--role=both".to_owned(),
            "--device=sim".to_owned(),
            format!("--model={}", args.model),
            format!("--num-kv-blocks={}", args.worker_tokens / BLOCK),
            format!("--sim-profile={}", args.sim_profile),
            format!("--sim-speed={}", args.sim_speed),
        ];
        let mut worker = Process::start(&serve_binary()?, &dir, "worker", &flags).await?;
        worker.ready(&Client::new(worker.url())).await?;
        workers.push(worker);
    }
    let client = Client::new(workers[0].url());
    let (alphabet, limit) = (prompts::alphabet(&client).await?, client.model().await?.max_model_len);
    let requests = prompts_of(&args, &lines, &alphabet, limit);
    let (ideal, prompt_tokens) = ideal(&requests);
    println!(
        "{} requests, {prompt_tokens} prompt tokens; an endless cache would find {:.1} %",
        requests.len(),
        ideal * 100.0
    );
    let mut rows = Vec::new();
    for mode in &args.modes {
        let row = replay(&args, mode, &workers, &requests, logs.path()).await?;
        eprintln!("{mode}: {:.1} % in {:.0} s", row.hit_rate * 100.0, row.seconds);
        rows.push(row);
    }
    for worker in workers {
        worker.stop().await?;
    }
    println!("\n{}", table(&rows, ideal));
    let report = Report {
        command: std::env::args().collect(),
        machine: Machine::look(),
        requests: requests.len(),
        prompt_tokens,
        ideal,
        rows,
        settings: args,
    };
    write_json(report.settings.json.as_deref(), &report)
}

fn read(args: &Args) -> Result<Vec<Line>> {
    let path = args.trace.display().to_string();
    let text = std::fs::read_to_string(&args.trace).map_err(BenchError::io(path.clone()))?;
    let parse = |(number, line): (usize, &str)| {
        serde_json::from_str(line)
            .map_err(|error| BenchError::Usage(format!("{path}, line {}: {error}", number + 1)))
    };
    text.lines().filter(|line| !line.trim().is_empty()).take(args.requests).enumerate().map(parse).collect()
}

/// One prompt, and the length of its answer.
#[derive(Clone, Debug)]
struct Request {
    prompt: Prompt,
    output_tokens: usize,
}

/// Each hash stands for its own tokens, so that prompts begin alike exactly as in the trace.
fn prompts_of(args: &Args, lines: &[Line], alphabet: &[u32], limit: usize) -> Vec<Request> {
    let scale = args.scale as usize;
    let block = TRACE_BLOCK / scale;
    let tokens = |hash: u64| -> Vec<u32> {
        let mut rng = StdRng::seed_from_u64(hash);
        // 64 random bits in the first tokens keep blocks apart, whatever the alphabet's size.
        (0..block)
            .map(|_| *alphabet.choose(&mut rng).expect("checked by its maker. This is a bug."))
            .collect()
    };
    let request = |(number, line): (usize, &Line)| {
        let output_tokens = line.output_length.div_ceil(scale).max(1);
        let length = line.input_length.div_ceil(scale).clamp(1, limit.saturating_sub(output_tokens).max(1));
        let mut prompt: Vec<u32> = line.hash_ids.iter().flat_map(|hash| tokens(*hash)).collect();
        // A trace may name fewer blocks than its length has.
        let mut rng = StdRng::seed_from_u64(number as u64 ^ 0x5eed);
        while prompt.len() < length {
            prompt.push(alphabet[rng.random_range(0..alphabet.len())]);
        }
        prompt.truncate(length);
        Request { prompt: Prompt { number, tokens: prompt }, output_tokens }
    };
    lines.iter().enumerate().map(request).collect()
}

/// The share of tokens in blocks that an earlier prompt began with, and all tokens. The last token is always computed.
fn ideal(requests: &[Request]) -> (f64, usize) {
    let mut seen: HashSet<(u64, Vec<u32>)> = HashSet::new();
    let (mut found, mut all) = (0, 0);
    for request in requests {
        let tokens = &request.prompt.tokens;
        all += tokens.len();
        let usable = tokens.len().saturating_sub(1) / BLOCK;
        let (mut parent, mut hit) = (0_u64, true);
        for (index, block) in tokens.chunks_exact(BLOCK).enumerate() {
            let known = !seen.insert((parent, block.to_vec()));
            hit &= known && index < usable;
            found += if hit { BLOCK } else { 0 };
            parent = block
                .iter()
                .fold(parent, |hash, token| (hash ^ u64::from(*token)).wrapping_mul(0x0100_0000_01b3));
        }
    }
    (found as f64 / all.max(1) as f64, all)
}

async fn replay(
    args: &Args,
    mode: &str,
    workers: &[Process],
    requests: &[Request],
    logs: &std::path::Path,
) -> Result<Row> {
    for worker in workers {
        Client::new(worker.url()).reset_prefix_cache().await?;
    }
    let dir = logs.join(mode);
    std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
    let urls: Vec<_> = workers.iter().map(Process::url).collect();
    let mut flags = vec![
        "--role=frontend".to_owned(),
        format!("--model={}", args.model),
        format!("--worker-url={}", urls.join(",")),
        format!("--router-mode={}", mode.trim_end_matches("-approximate")),
    ];
    flags.extend((mode == "kv-approximate").then(|| "--no-router-kv-events".to_owned()));
    let mut front = Process::start(&serve_binary()?, &dir, "frontend", &flags).await?;
    let client = Client::new(front.url());
    front.ready(&client).await?;
    routing::followed(front.url(), if mode == "kv" { workers.len() } else { 0 }).await?;
    let started = Instant::now();
    // Answers are of one length for all, so that one load generator serves every benchmark: the mean one.
    let mean = requests.iter().map(|request| request.output_tokens).sum::<usize>() / requests.len().max(1);
    let load = Load { concurrency: args.concurrency, output_tokens: mean.max(1) };
    let prompts: Vec<_> = requests.iter().map(|request| request.prompt.clone()).collect();
    let samples =
        sample::complete_all(&client, &prompts, load, |prompt| format!("replay-{}", prompt.number)).await?;
    front.stop().await?;
    let sum = |of: fn(&sample::Sample) -> usize| samples.iter().map(of).sum::<usize>() as f64;
    let ttft: Vec<_> = samples.iter().filter_map(sample::Sample::ttft).collect();
    Ok(Row {
        mode: mode.to_owned(),
        hit_rate: sum(|sample| sample.cached_tokens) / sum(|sample| sample.prompt_tokens).max(1.0),
        ttft_p50_ms: median(&ttft),
        ttft_p99_ms: percentile(&ttft, 0.99),
        seconds: started.elapsed().as_secs_f64(),
    })
}

fn table(rows: &[Row], ideal: f64) -> Table {
    let mut table = Table::new(&["<mode", "cached %", "of ideal %", "TTFT p50", "p99", "s"]);
    for row in rows {
        table.row([
            row.mode.clone(),
            format!("{:.1}", row.hit_rate * 100.0),
            format!("{:.0}", row.hit_rate / ideal.max(1e-9) * 100.0),
            or_dash(row.ttft_p50_ms.map(ms)),
            or_dash(row.ttft_p99_ms.map(ms)),
            format!("{:.0}", row.seconds),
        ]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_ideal_counts_whole_blocks_that_came_before() {
        let request = |tokens: Vec<u32>| Request { prompt: Prompt { number: 0, tokens }, output_tokens: 1 };
        let base: Vec<u32> = (0..40).collect();
        let longer = [&base[..32], &[7; 16]].concat();
        // 40 tokens new; 2 of 3 blocks known; all known, but the last token is computed.
        let (share, all) = ideal(&[request(base.clone()), request(longer), request(base[..32].to_vec())]);
        assert_eq!(all, 40 + 48 + 32);
        assert_eq!(share, (32 + 16) as f64 / 120.0);
    }
}
