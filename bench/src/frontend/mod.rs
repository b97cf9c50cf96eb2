//! `bench frontend`: what a router costs. The same load straight to a trivial worker, and through the router.

mod backend;
mod load;
mod wire;

use std::path::PathBuf;
use std::time::Duration;

use serde::Serialize;

use crate::error::{BenchError, Result};
use crate::machine::{Load, Machine, load as machine_load};
use crate::output::write_json;
use crate::process::{Process, serve_binary};
use crate::table::{Table, grouped, ms};
use load::{Kind, Outcome, Target, Until};

/// Measure what a router adds: requests per second, latency and memory, with a worker that answers at once.
///
/// Starts `serve --role frontend` in front of the worker, or measures the router at --base-url. Every body is another one,
/// so that nothing is found in any cache.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// Another router, in front of the worker at --backend-port; such as http://127.0.0.1:9000.
    #[arg(long, value_name = "URL")]
    base_url: Option<String>,
    /// The trivial worker's port; any free one when not given. Give it where the other router must be told first, and
    /// start the worker with --backend-only.
    #[arg(long, value_name = "PORT")]
    backend_port: Option<u16>,
    /// Only run the trivial worker, print its address, and wait.
    #[arg(long)]
    backend_only: bool,
    /// The other router's process, for its memory.
    #[arg(long, value_name = "PID")]
    pid: Option<u32>,
    /// With our own frontend: tokenize prompts with this model's tokenizer (a folder, an id or `demo`). Without, it
    /// relays and names prompts by their text.
    #[arg(long, value_name = "PATH|ID|demo")]
    tokenizer: Option<String>,
    /// The model's name in requests to another router.
    #[arg(long, value_name = "NAME", default_value_t = load::default_model())]
    model: String,
    /// Our own frontend's mode.
    #[arg(long, value_name = "MODE", default_value = "kv")]
    router_mode: String,
    /// What is sent.
    #[arg(long, value_enum, value_delimiter = ',', default_value = "small,chat-stream,long")]
    kinds: Vec<Kind>,
    /// Connections at the same time.
    #[arg(long, value_delimiter = ',', value_name = "N", default_value = "1,8,32")]
    concurrency: Vec<usize>,
    /// Length of each run.
    #[arg(long, value_name = "SECS", default_value_t = 5.0)]
    seconds: f64,
    /// Instead of a time: so many requests in each run.
    #[arg(long, value_name = "N")]
    requests: Option<u64>,
    /// A further argument for our own frontend, such as --serve-arg=--router-temperature=0.5; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    serve_arg: Vec<String>,
    /// Write everything to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
`direct` is the worker without a router; `added` is the router's median less the direct one. `CPU us` is the router's CPU \
time for a request (user and system), `MB` its memory after the run (resident).

Examples:
  bench frontend
  bench frontend --tokenizer demo --kinds small,long
  bench frontend --requests 1000000 --kinds small --concurrency 32
  bench frontend --backend-only --backend-port 9100 &
  bench frontend --base-url http://127.0.0.1:9000 --backend-port 9100 --pid $(pgrep -f router)";

#[derive(Debug, Serialize)]
struct Run {
    kind: Kind,
    concurrency: usize,
    direct: Option<Outcome>,
    routed: Outcome,
    /// The router's CPU time for each request of the routed run.
    cpu_us: Option<f64>,
    resident_mb: Option<f64>,
}

#[derive(Serialize)]
struct Report {
    command: Vec<String>,
    settings: Args,
    machine: Machine,
    load_before: Option<Load>,
    runs: Vec<Run>,
}

pub async fn run(args: Args) -> Result<()> {
    if args.backend_only {
        let port =
            backend::start(args.backend_port.unwrap_or(0)).map_err(BenchError::io("the trivial worker"))?;
        println!("http://127.0.0.1:{port}");
        std::future::pending::<()>().await;
    }
    let load_before = machine_load();
    let port = match (args.base_url.is_some(), args.backend_port) {
        // It runs already, or another program is measured without a direct run to compare with.
        (true, port) => port,
        (false, port) => {
            Some(backend::start(port.unwrap_or(0)).map_err(BenchError::io("the trivial worker"))?)
        }
    };
    let direct = port.map(|port| Target { address: format!("127.0.0.1:{port}"), model: args.model.clone() });
    let logs = tempfile::tempdir().map_err(BenchError::io("a temporary folder"))?;
    let mut own = match (&args.base_url, &direct) {
        (None, Some(direct)) => Some(start(&args, direct, logs.path()).await?),
        _ => None,
    };
    let address = match (&args.base_url, &own) {
        (Some(url), _) => address(url)?,
        (None, Some(process)) => address(process.url())?,
        (None, None) => unreachable!("our own frontend is started when there is no other. This is a bug."),
    };
    let routed = Target { address, model: args.model.clone() };
    let pid = args.pid.or(own.as_ref().and_then(Process::id));
    let mut runs = Vec::new();
    for &kind in &args.kinds {
        for &concurrency in &args.concurrency {
            eprintln!("{} at {concurrency} ...", kind.name());
            let run = measure(&args, kind, concurrency, direct.as_ref(), &routed, pid, runs.len() as u64)?;
            if let Some(process) = &mut own {
                process.check_alive()?;
            }
            runs.push(run);
        }
    }
    println!("{}", table(&runs));
    let problems = problems(&runs);
    let command = std::env::args().collect();
    let report = Report { command, settings: args.clone(), machine: Machine::look(), load_before, runs };
    write_json(args.json.as_deref(), &report)?;
    if let Some(process) = own {
        process.stop().await?;
    }
    match problems.is_empty() {
        true => Ok(()),
        false => Err(BenchError::Checks(problems)),
    }
}

async fn start(args: &Args, direct: &Target, logs: &std::path::Path) -> Result<Process> {
    let worker = format!("http://{}", direct.address);
    let mut flags: Vec<String> = [
        "--role",
        "frontend",
        "--worker-url",
        &worker,
        "--router-mode",
        &args.router_mode,
        "--log-level",
        "warn",
    ]
    .map(str::to_owned)
    .to_vec();
    if let Some(tokenizer) = &args.tokenizer {
        // The trivial worker publishes no events, and that is no fault of it.
        let name = args.model.clone();
        flags.extend(["--model".into(), tokenizer.clone(), "--served-model-name".into(), name]);
        flags.push("--no-router-kv-events".into());
    }
    flags.extend(args.serve_arg.iter().cloned());
    let mut process = Process::start(&serve_binary()?, logs, "frontend", &flags).await?;
    let client = crate::client::Client::new(process.url());
    process.ready(&client).await?;
    Ok(process)
}

#[expect(clippy::too_many_arguments, reason = "one cell of the table")]
fn measure(
    args: &Args,
    kind: Kind,
    concurrency: usize,
    direct: Option<&Target>,
    routed: &Target,
    pid: Option<u32>,
    number: u64,
) -> Result<Run> {
    let until = args.requests.map_or(Until::Time(Duration::from_secs_f64(args.seconds)), Until::Count);
    let nonce = std::process::id() as u64 ^ (number << 48);
    let go = |target: &Target, until| {
        load::run(kind, target, concurrency, until, nonce).map_err(BenchError::io("the load generator"))
    };
    // The direct run only shows what is left to gain: a short one is enough.
    let short = Until::Time(Duration::from_secs_f64(args.seconds.min(2.0)));
    let direct = direct.map(|direct| go(direct, short)).transpose()?;
    // Connections are made, and whatever is made only once.
    go(routed, Until::Count(20 * concurrency as u64))?;
    let before = pid.and_then(cpu_seconds);
    let routed = go(routed, until)?;
    let cpu_us = pid.and_then(cpu_seconds).zip(before).filter(|_| routed.requests > 0);
    let cpu_us = cpu_us.map(|(after, before)| (after - before) * 1e6 / routed.requests as f64);
    Ok(Run { kind, concurrency, direct, routed, cpu_us, resident_mb: pid.and_then(resident_mb) })
}

fn table(runs: &[Run]) -> Table {
    let mut table = Table::new(&[
        "<kind", "at", "req/s", "p50 ms", "p99 ms", "max ms", "failed", "direct", "p50", "added", "CPU us",
        "MB",
    ]);
    for run in runs {
        let direct = run.direct.as_ref();
        let rate = |outcome: &Outcome| grouped(outcome.rate() as u64);
        table.row([
            run.kind.name().to_owned(),
            run.concurrency.to_string(),
            rate(&run.routed),
            ms(run.routed.p50_ms),
            ms(run.routed.p99_ms),
            ms(run.routed.max_ms),
            run.routed.failed.to_string(),
            direct.map_or("-".into(), rate),
            direct.map_or("-".into(), |direct| ms(direct.p50_ms)),
            direct.map_or("-".into(), |direct| ms(run.routed.p50_ms - direct.p50_ms)),
            run.cpu_us.map_or("-".into(), |us| format!("{us:.0}")),
            run.resident_mb.map_or("-".into(), |mb| format!("{mb:.0}")),
        ]);
    }
    table
}

fn problems(runs: &[Run]) -> Vec<String> {
    let failed = runs.iter().filter(|run| run.routed.failed > 0);
    failed
        .map(|run| {
            let reason = run.routed.failure.as_deref().unwrap_or("no reason");
            format!(
                "{} at {}: {} requests failed: {reason}",
                run.kind.name(),
                run.concurrency,
                run.routed.failed
            )
        })
        .collect()
}

fn address(url: &str) -> Result<String> {
    let address = url.strip_prefix("http://").map(|rest| rest.trim_end_matches('/').to_owned());
    let expected =
        || BenchError::Usage(format!("--base-url is {url:?}, expected a URL such as http://127.0.0.1:9000"));
    address.filter(|address| address.contains(':') && !address.contains('/')).ok_or_else(expected)
}

fn resident_mb(pid: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kb: f64 = line.trim().trim_end_matches(" kB").parse().ok()?;
    Some(kb * 1024.0 / 1e6)
}

/// User and system time of a process and its threads since its start, in ticks of 10 ms.
fn cpu_seconds(pid: u32) -> Option<f64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The second field is a name in brackets, which may hold anything; the 14th and 15th are the times.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks = fields.get(11)?.parse::<f64>().ok()? + fields.get(12)?.parse::<f64>().ok()?;
    Some(ticks / 100.0)
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn cpu_time_counts_what_was_computed() {
        let before = cpu_seconds(std::process::id()).expect("this process");
        let started = Instant::now();
        while started.elapsed() < Duration::from_millis(300) {
            std::hint::spin_loop();
        }
        let spent = cpu_seconds(std::process::id()).expect("this process") - before;
        assert!(spent > 0.0 && spent < 60.0, "{spent} s");
    }
}
