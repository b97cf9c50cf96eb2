//! `bench routing`: the published experiment on KV-aware routing. Two workers, more prefixes than one of them has room
//! for, one request at a time: what does each mode find in the caches?

mod report;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::Client;
use crate::error::{BenchError, Result};
use crate::machine::{Machine, load};
use crate::output::write_json;
use crate::process::{Process, serve_binary};
use crate::prompts;
use crate::sample::{self, Load};
use crate::workload::{Shape, Workload};
pub use report::{Report, Run};

/// Compare the router's modes on two workers: requests that repeat prefixes in random order, one at a time.
///
/// A repeat is a hit when its whole prefix was cached on the worker it was sent to. Caches are emptied and the frontend is
/// started anew for every run.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to serve: a folder, a Hugging Face id, or `demo`; a simulated device needs no weights.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    model: String,
    /// Where the workers compute; only `sim` is cheap enough for ten seeds.
    #[arg(long, value_name = "sim|cpu", default_value = "sim")]
    device: String,
    /// The GPU to imitate.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100")]
    sim_profile: String,
    /// How many times faster than the profile.
    #[arg(long, value_name = "FACTOR", default_value_t = 20.0)]
    sim_speed: f64,
    /// Worker processes.
    #[arg(long, value_name = "N", default_value_t = 2)]
    workers: usize,
    /// Tokens that a worker's cache holds.
    #[arg(long, value_name = "N", default_value_t = 14_800)]
    worker_tokens: usize,
    /// Different prefixes.
    #[arg(long, value_name = "N", default_value_t = 12)]
    prefixes: usize,
    /// Requests for each prefix.
    #[arg(long, value_name = "N", default_value_t = 6)]
    repeats: usize,
    /// Tokens of a prefix.
    #[arg(long, value_name = "N", default_value_t = 1440)]
    prefix_tokens: usize,
    /// Tokens after the prefix, new in each request.
    #[arg(long, value_name = "N", default_value_t = 60)]
    suffix_tokens: usize,
    /// Requests at the same time.
    #[arg(long, value_name = "N", default_value_t = 1)]
    concurrency: usize,
    /// Runs of each mode, each with another order.
    #[arg(long, value_name = "N", default_value_t = 10)]
    seeds: u64,
    /// The modes to compare.
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Mode::value_variants().to_vec())]
    modes: Vec<Mode>,
    /// Write everything to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
`silent` is a worker that publishes no KV events although the router expects them: kv-one-silent must find as much as kv, \
and say that it is degraded. kv-one-silent-undegraded has --router-kv-degrade off, as routers without such a fallback \
behave.

Examples:
  bench routing
  bench routing --seeds 3 --modes kv,round-robin --json routing.json";

/// A way to route, and what the workers publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// kv, all workers publish events.
    Kv,
    /// kv by the router's own decisions.
    KvApproximate,
    /// kv, one worker publishes no events.
    KvOneSilent,
    /// kv, no worker publishes events.
    KvAllSilent,
    /// The same as kv-one-silent, without degradation.
    KvOneSilentUndegraded,
    /// The same as kv-all-silent, without degradation.
    KvAllSilentUndegraded,
    RoundRobin,
    Random,
}

impl Mode {
    fn frontend_flags(self) -> &'static [&'static str] {
        match self {
            Mode::Kv | Mode::KvOneSilent | Mode::KvAllSilent => &["--router-mode=kv"],
            Mode::KvApproximate => &["--router-mode=kv", "--no-router-kv-events"],
            Mode::KvOneSilentUndegraded | Mode::KvAllSilentUndegraded => {
                &["--router-mode=kv", "--router-kv-degrade=off"]
            }
            Mode::RoundRobin => &["--router-mode=round-robin"],
            Mode::Random => &["--router-mode=random"],
        }
    }

    /// How many of `workers` publish no events.
    fn silent(self, workers: usize) -> usize {
        match self {
            Mode::KvOneSilent | Mode::KvOneSilentUndegraded => 1,
            Mode::KvAllSilent | Mode::KvAllSilentUndegraded | Mode::KvApproximate => workers,
            Mode::Kv | Mode::RoundRobin | Mode::Random => 0,
        }
    }

    /// Workers whose index has to be fed by events before anything is measured.
    fn followed(self, workers: usize) -> usize {
        match self {
            Mode::RoundRobin | Mode::Random | Mode::KvApproximate => 0,
            _ => workers - self.silent(workers),
        }
    }

    /// Workers about which the router must complain.
    fn mismatches(self, workers: usize) -> usize {
        match self {
            Mode::RoundRobin | Mode::Random | Mode::KvApproximate => 0,
            _ => self.silent(workers),
        }
    }
}

/// A worker with events and its twin without.
struct Pair {
    events: Process,
    silent: Process,
}

pub async fn run(args: Args) -> Result<()> {
    let (began, load_before) = (Instant::now(), load());
    let logs = tempfile::tempdir().map_err(BenchError::io("a temporary folder"))?;
    let mut pairs = Vec::new();
    for index in 0..args.workers {
        let dir = |kind: &str| -> Result<PathBuf> {
            let dir = logs.path().join(format!("{kind}-{index}"));
            std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
            Ok(dir)
        };
        let events = worker(&args, &dir("events")?, &["--kv-events"]).await?;
        pairs.push(Pair { events, silent: worker(&args, &dir("silent")?, &["--no-kv-events"]).await? });
    }
    let alphabet = prompts::alphabet(&Client::new(pairs[0].events.url())).await?;
    let mut runs = Vec::new();
    for &mode in &args.modes {
        for seed in 0..args.seeds {
            let dir = logs.path().join(format!("{mode:?}-{seed}"));
            std::fs::create_dir(&dir).map_err(BenchError::io(dir.display().to_string()))?;
            runs.push(one(&args, mode, seed, &pairs, &dir, &alphabet).await?);
        }
        eprintln!(
            "{mode:?}: {:?}",
            runs.iter().filter(|run| run.mode == mode).map(|run| run.hits).collect::<Vec<_>>()
        );
    }
    for pair in pairs {
        pair.events.stop().await?;
        pair.silent.stop().await?;
    }
    let report = Report {
        command: std::env::args().collect(),
        machine: Machine::look(),
        load_before,
        seconds: began.elapsed().as_secs_f64(),
        repeats: args.prefixes * (args.repeats - 1),
        settings: args,
        runs,
    };
    println!("{report}");
    write_json(report.settings.json.as_deref(), &report)?;
    match report.problems() {
        problems if problems.is_empty() => Ok(()),
        problems => Err(BenchError::Checks(problems)),
    }
}

async fn worker(args: &Args, dir: &std::path::Path, more: &[&str]) -> Result<Process> {
    let mut flags = vec![
        format!("--model={}", args.model),
        "--role=both".to_owned(),
        format!("--device={}", args.device),
        format!("--num-kv-blocks={}", args.worker_tokens / 16),
    ];
    if args.device == "sim" {
        flags.extend([
            format!("--sim-profile={}", args.sim_profile),
            format!("--sim-speed={}", args.sim_speed),
        ]);
    }
    flags.extend(more.iter().map(|&flag| flag.to_owned()));
    let mut process = Process::start(&serve_binary()?, dir, "worker", &flags).await?;
    let client = Client::new(process.url());
    process.ready(&client).await?;
    Ok(process)
}

async fn one(
    args: &Args,
    mode: Mode,
    seed: u64,
    pairs: &[Pair],
    dir: &std::path::Path,
    alphabet: &[u32],
) -> Result<Run> {
    let silent = mode.silent(pairs.len());
    let workers: Vec<&Process> = pairs
        .iter()
        .enumerate()
        .map(|(i, pair)| if i < silent { &pair.silent } else { &pair.events })
        .collect();
    for worker in &workers {
        Client::new(worker.url()).reset_prefix_cache().await?;
    }
    let urls: Vec<_> = workers.iter().map(|worker| worker.url()).collect();
    let mut flags = vec!["--role=frontend".to_owned(), format!("--model={}", args.model)];
    flags.push(format!("--worker-url={}", urls.join(",")));
    flags.extend(mode.frontend_flags().iter().map(|&flag| flag.to_owned()));
    let mut front = Process::start(&serve_binary()?, dir, "frontend", &flags).await?;
    let client = Client::new(front.url());
    match mode.mismatches(pairs.len()) {
        0 => front.ready(&client).await?,
        // It is degraded, and is to say so.
        silent => loud(&mut front, &client, silent).await?,
    }
    followed(front.url(), mode.followed(pairs.len())).await?;
    // The order is the seed's; the prefixes are, too.
    let shape = Shape {
        kinds: args.prefixes,
        repeats: args.repeats,
        workers: 1,
        prefix_tokens: args.prefix_tokens,
        suffix_tokens: args.suffix_tokens,
        seed,
    };
    let workload = Workload::new(shape, alphabet);
    let load = Load { concurrency: args.concurrency, output_tokens: 1 };
    let id = |prompt: &sample::Prompt| format!("routing-{}", prompt.number);
    let samples = sample::complete_all(&client, &workload.prompts[0], load, id).await?;
    let whole = args.prefix_tokens / 16 * 16;
    let again = |number: usize| !workload.requests[number].first_touch;
    let repeats = samples.iter().filter(|sample| again(sample.prompt));
    let (hits, some) = repeats.fold((0, 0), |(hits, some), sample| {
        (hits + usize::from(sample.cached_tokens >= whole), some + usize::from(sample.cached_tokens > 0))
    });
    let mismatches =
        client.metrics().await?.sum("dynamo_component_router_kv_event_source_mismatch_workers", &[]) as usize;
    let ttft: Vec<_> = samples.iter().filter_map(sample::Sample::ttft).collect();
    front.stop().await?;
    Ok(Run {
        mode,
        seed,
        hits,
        some,
        mismatches,
        expected_mismatches: mode.mismatches(pairs.len()),
        mean_ttft_ms: crate::stats::mean(&ttft),
    })
}

/// Waits until the frontend has met its workers and says of so many that they publish no events.
async fn loud(front: &mut Process, client: &Client, silent: usize) -> Result<()> {
    const WITHIN: Duration = Duration::from_secs(60);
    let started = Instant::now();
    loop {
        front.check_alive()?;
        let found = match client.metrics().await {
            Ok(metrics) => {
                metrics.sum("dynamo_component_router_kv_event_source_mismatch_workers", &[]) as usize
            }
            // It does not answer yet.
            Err(_) => 0,
        };
        if found >= silent {
            return Ok(());
        }
        if started.elapsed() > WITHIN {
            let reason =
                format!("{found} workers are said to publish no events after {WITHIN:?}, expected {silent}");
            return Err(BenchError::Answer { url: front.url().to_owned(), reason });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Waits until the frontend follows the events of so many workers.
pub async fn followed(url: &str, expected: usize) -> Result<()> {
    #[derive(Deserialize)]
    struct Status {
        workers: Vec<Value>,
    }
    const WITHIN: Duration = Duration::from_secs(20);
    let started = Instant::now();
    loop {
        let status: Status = crate::client::get_json(&format!("{url}/status")).await?;
        let found = status.workers.iter().filter(|worker| worker["index"] == "events").count();
        if found >= expected {
            return Ok(());
        }
        if started.elapsed() > WITHIN {
            let reason =
                format!("{found} workers have an index by events after {WITHIN:?}, expected {expected}");
            return Err(BenchError::Answer { url: url.to_owned(), reason });
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
