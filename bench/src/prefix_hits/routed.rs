//! The same requests through a frontend: how many find their prefix on the worker that it picks.

use std::fmt;
use std::time::Instant;

use serde::Serialize;

use super::Args;
use crate::client::Client;
use crate::error::{BenchError, Result};
use crate::machine::Machine;
use crate::output::write_json;
use crate::process::{Process, serve_binary};
use crate::sample::{self, Load};
use crate::stats::median;
use crate::table::{Table, ms, or_dash};
use crate::workload::Workload;
use crate::{prompts, routing};

/// One number of prefixes.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    pub kinds: usize,
    pub requests: usize,
    /// Share of requests that found their whole prefix.
    pub whole: f64,
    /// Share of requests that found any of it.
    pub any: f64,
    /// Cached tokens of prefix tokens.
    pub prefix_tokens: f64,
    /// The most and the fewest requests that one worker answered.
    pub spread: (u64, u64),
    pub hit_ttft_ms: Option<f64>,
    pub miss_ttft_ms: Option<f64>,
    pub seconds: f64,
}

#[derive(Debug, Serialize)]
struct Report {
    command: Vec<String>,
    settings: Args,
    machine: Machine,
    rows: Vec<Row>,
}

pub async fn run(args: Args) -> Result<()> {
    let logs = tempfile::tempdir().map_err(BenchError::io("a temporary folder"))?;
    let router = args.router.clone().unwrap_or_default();
    let events = router == "kv" && !args.router_arg.iter().any(|arg| arg == "--no-router-kv-events");
    let mut workers = Vec::new();
    for index in 0..args.workers {
        let dir = logs.path().join(format!("worker-{index}"));
        std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
        let mut flags = vec![format!("--model={}", args.model), "--role=both".to_owned()];
        flags.extend(args.serve_args());
        let mut worker = Process::start(&serve_binary()?, &dir, "worker", &flags).await?;
        worker.ready(&Client::new(worker.url())).await?;
        workers.push(worker);
    }
    let alphabet = prompts::alphabet(&Client::new(workers[0].url())).await?;
    let mut rows = Vec::new();
    for &kinds in &args.kinds {
        let dir = logs.path().join(format!("front-{kinds}"));
        std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
        let row = measure(&args, kinds, &workers, events, &dir, &alphabet).await?;
        eprintln!("{kinds} prefixes: {:.1} % in {:.0} s", row.whole * 100.0, row.seconds);
        rows.push(row);
    }
    for worker in workers {
        worker.stop().await?;
    }
    println!(
        "\n{} through --router-mode {router}, {} at a time\n\n{}",
        args.device_text(),
        args.concurrency,
        Rows(&rows)
    );
    let report =
        Report { command: std::env::args().collect(), machine: Machine::look(), rows, settings: args };
    write_json(report.settings.json.as_deref(), &report)
}

async fn measure(
    args: &Args,
    kinds: usize,
    workers: &[Process],
    events: bool,
    dir: &std::path::Path,
    alphabet: &[u32],
) -> Result<Row> {
    for worker in workers {
        Client::new(worker.url()).reset_prefix_cache().await?;
    }
    let before = answered(workers).await?;
    let urls: Vec<_> = workers.iter().map(Process::url).collect();
    let mut flags = vec![
        "--role=frontend".to_owned(),
        format!("--model={}", args.model),
        format!("--worker-url={}", urls.join(",")),
        format!("--router-mode={}", args.router.as_deref().unwrap_or_default()),
    ];
    flags.extend(args.router_arg.iter().cloned());
    let mut front = Process::start(&serve_binary()?, dir, "frontend", &flags).await?;
    let client = Client::new(front.url());
    front.ready(&client).await?;
    routing::followed(front.url(), if events { workers.len() } else { 0 }).await?;
    let workload = Workload::new(crate::workload::Shape { workers: 1, ..args.workload(kinds) }, alphabet);
    let load = Load { concurrency: args.concurrency, output_tokens: args.output_tokens };
    let started = Instant::now();
    let id = |prompt: &sample::Prompt| format!("routed-{kinds}-{}", prompt.number);
    let samples = sample::complete_all(&client, &workload.prompts[0], load, id).await?;
    let seconds = started.elapsed().as_secs_f64();
    front.stop().await?;
    let after = answered(workers).await?;
    let counts: Vec<_> = after.iter().zip(before).map(|(after, before)| after - before).collect();
    let prefix = args.full_prefix();
    let share = |count: usize| count as f64 / samples.len().max(1) as f64;
    let found: usize = samples.iter().map(|sample| sample.cached_tokens.min(prefix)).sum();
    let ttft = |hit: bool| {
        let like = samples.iter().filter(|sample| (sample.cached_tokens >= prefix) == hit);
        median(&like.filter_map(sample::Sample::ttft).collect::<Vec<_>>())
    };
    Ok(Row {
        kinds,
        requests: samples.len(),
        whole: share(samples.iter().filter(|sample| sample.cached_tokens >= prefix).count()),
        any: share(samples.iter().filter(|sample| sample.cached_tokens > 0).count()),
        prefix_tokens: found as f64 / (prefix * samples.len()).max(1) as f64,
        spread: (counts.iter().copied().max().unwrap_or(0), counts.iter().copied().min().unwrap_or(0)),
        hit_ttft_ms: ttft(true),
        miss_ttft_ms: ttft(false),
        seconds,
    })
}

/// Requests that each worker has answered since its start.
async fn answered(workers: &[Process]) -> Result<Vec<u64>> {
    let mut counts = Vec::new();
    for worker in workers {
        let metrics = Client::new(worker.url()).metrics().await?;
        counts.push(metrics.sum("vllm:e2e_request_latency_seconds_count", &[]) as u64);
    }
    Ok(counts)
}

struct Rows<'a>(&'a [Row]);

impl fmt::Display for Rows<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = [
            "prefixes", "requests", "whole %", "any %", "prefix %", "most", "fewest", "hit ms", "miss ms",
            "s",
        ];
        let mut table = Table::new(&columns);
        for row in self.0 {
            let percent = |share: f64| format!("{:.1}", share * 100.0);
            table.row([
                row.kinds.to_string(),
                row.requests.to_string(),
                percent(row.whole),
                percent(row.any),
                percent(row.prefix_tokens),
                row.spread.0.to_string(),
                row.spread.1.to_string(),
                or_dash(row.hit_ttft_ms.map(ms)),
                or_dash(row.miss_ttft_ms.map(ms)),
                format!("{:.0}", row.seconds),
            ]);
        }
        write!(f, "{table}")
    }
}
