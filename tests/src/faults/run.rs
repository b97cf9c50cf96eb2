//! One cell's runs: bring a request to its stage, let the fault happen, and look at everything afterwards.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;

use super::cell::{Cell, Fault, Stage, Victim};
use super::judge::{Outcome, judge};
use super::report::Report;
use super::startup;
use crate::ask::{Answer, Ask, Failure};
use crate::client::Client;
use crate::cluster::{Cluster, Deployment};
use crate::metrics::Metrics;
use crate::process::Worker;
use crate::prompts;

/// The prefill worker's lease; links time out in half of it.
const LEASE: Duration = Duration::from_millis(600);

/// No run may take longer, whatever happened in it: far beyond lease, link and request time-outs.
const LIMIT: Duration = Duration::from_secs(60);

/// Lines of a worker's log that are shown of a run that went wrong.
const LOG_LINES: usize = 16;

/// KV blocks of each worker.
const BLOCKS: u64 = 256;

/// Texts that a request must have streamed to be decoding.
const DECODING: usize = 5;

/// Steps of the simulated device take so long that a stage can be met.
const PROFILE: &str = r#"{"base_s":0.004,"prefill_s_per_token":0,"attention_s_per_pair":0,"decode_s_per_sequence":0,
    "decode_s_per_context_token":0}"#;

/// What all cells have in common.
#[derive(Clone, Debug)]
pub struct Setup {
    transport: String,
    /// The simulated device's times; the folder goes with the last clone.
    profile: PathBuf,
    _dir: std::sync::Arc<tempfile::TempDir>,
}

impl Setup {
    /// # Panics
    /// When no temporary file can be written.
    pub fn new(transport: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let profile = dir.path().join("profile.json");
        std::fs::write(&profile, PROFILE).expect("the folder is writable");
        Self { transport: transport.to_owned(), profile, _dir: std::sync::Arc::new(dir) }
    }

    fn common(&self, deployment: Deployment) -> Deployment {
        deployment.flags(&format!(
            "--device sim --sim-profile {} --num-kv-blocks {BLOCKS} --kv-lease-secs {} --kv-link-timeout-secs {} \
             --request-timeout-secs 20",
            self.profile.display(),
            LEASE.as_secs_f64(),
            LEASE.as_secs_f64() / 2.0
        ))
    }

    /// Two workers whose transfers take a while.
    pub fn deployment(&self) -> Deployment {
        self.common(Deployment::split(&self.transport))
            .flags("--kv-faults delay-ms=60")
            .prefill_flags("--max-num-seqs 1 --max-num-batched-tokens 16 --kv-push-layers 2")
            .decode_flags("--kv-checksum")
    }

    async fn start(&self, cell: &Cell) -> Cluster {
        let deployment =
            self.deployment().decode_flags(&format!("--kv-direction {}", cell.direction.as_str()));
        let deployment = match cell.fault {
            Fault::NoteLost => deployment.decode_flags("--kv-faults lose-note=7"),
            Fault::MixUp => deployment.flags("--kv-faults mix-up=3"),
            _ => deployment,
        };
        deployment.start().await
    }
}

/// The request that is hit, and one that keeps the prefill worker busy before it.
fn victim(run: usize) -> Ask {
    Ask::completion(prompts::ids(320, 1)).tokens(40).streamed().salted(&format!("run {run}"))
}

fn blocker(run: usize) -> Ask {
    Ask::completion(prompts::ids(640, 2)).tokens(10).salted(&format!("run {run}"))
}

fn follower(run: usize) -> Ask {
    Ask::completion(prompts::ids(100, 3)).tokens(10).salted(&format!("run {run}"))
}

/// What one process answers.
#[derive(Clone, Debug)]
struct Expected {
    victim: Answer,
    blocker: Answer,
    follower: Answer,
}

/// Runs a cell `runs` times.
///
/// # Panics
/// When one process alone cannot answer.
pub async fn run(setup: &Setup, cell: Cell, runs: usize) -> Report {
    let started = Instant::now();
    let expected = {
        let both = setup.common(Deployment::both()).start().await;
        let client = both.client();
        Expected {
            victim: client.answer(&victim(0)).await,
            blocker: client.answer(&blocker(0)).await,
            follower: client.answer(&follower(0)).await,
        }
    };
    let mut report = Report { cell: cell.to_string(), ..Report::default() };
    let mut cluster = None;
    for run in 0..runs {
        let (setup, expected, running) = (setup.clone(), expected.clone(), cluster.take());
        // On a task of its own, so that a panic is this run's failure and not the table's end.
        let task = tokio::spawn(async move {
            match cell.fault {
                Fault::PortTaken => startup::port_taken(&setup).await.map(|()| (vec![], None)),
                Fault::Misfit { flag, named } => {
                    startup::misfit(&setup, flag, named).await.map(|()| (vec![], None))
                }
                _ => {
                    let mut cluster = match running {
                        Some(cluster) => cluster,
                        None => setup.start(&cell).await,
                    };
                    let outcomes = one(&mut cluster, &cell, run, &expected).await?;
                    Ok((outcomes, Some(cluster)))
                }
            }
        });
        report.add(match tokio::time::timeout(LIMIT, task).await {
            Err(_) => Err(format!("no end within {LIMIT:?}")),
            Ok(Err(panic)) => Err(panicked(panic)),
            Ok(Ok(Err(reason))) => Err(reason),
            Ok(Ok(Ok((outcomes, kept)))) => {
                cluster = kept;
                Ok(outcomes)
            }
        });
    }
    report.seconds = started.elapsed().as_secs_f64();
    report
}

fn panicked(error: tokio::task::JoinError) -> String {
    match error.try_into_panic() {
        Ok(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            text.or(panic.downcast_ref::<&str>().map(|text| (*text).to_owned())).unwrap_or_default()
        }
        Err(error) => error.to_string(),
    }
}

/// One run; the outcome of the request that was hit, and of those around it.
async fn one(
    cluster: &mut Cluster,
    cell: &Cell,
    run: usize,
    expected: &Expected,
) -> Result<Vec<Outcome>, String> {
    let before = cluster.prefill().client().metrics().await;
    let blocking = match cell.stage() {
        Some(Stage::Queued) => {
            let probe = Probe::start(cluster.client(), blocker(run));
            poll(&cluster.prefill().client(), |m| m.value("vllm:num_requests_running") >= 1.0).await?;
            Some(probe)
        }
        _ => None,
    };
    let probe = Probe::start(cluster.client(), victim(run));
    if let Some(stage) = cell.stage() {
        reach(stage, cluster, &before, &probe).await?;
    }
    let leaves = matches!(cell.fault, Fault::ClientLeaves(_));
    match leaves {
        true => probe.task.abort(),
        false => happen(cluster, cell.fault).await,
    }
    let may_break = may_break(cell.fault);
    let mut outcomes = Vec::new();
    if !leaves {
        outcomes.push(judge(probe.end().await, &expected.victim, may_break)?);
    }
    if let Some(blocking) = blocking {
        outcomes.push(judge(blocking.end().await, &expected.blocker, may_break)?);
    }
    recovered(cluster, cell, run, expected).await?;
    Ok(outcomes)
}

/// A request under way.
struct Probe {
    task: JoinHandle<Result<Answer, Failure>>,
    /// Texts that have come so far, up to [`DECODING`].
    texts: watch::Receiver<usize>,
}

impl Probe {
    fn start(client: Client, ask: Ask) -> Self {
        let (count, texts) = watch::channel(0);
        let task = tokio::spawn(async move {
            if !ask.is_streamed() {
                return client.ask(&ask).await;
            }
            let mut stream = client.open(&ask).await?;
            for texts in 1..=DECODING {
                stream.more_text().await?;
                count.send_replace(texts);
            }
            stream.finish().await
        });
        Self { task, texts }
    }

    async fn end(self) -> Result<Answer, Failure> {
        self.task.await.unwrap_or_else(|error| Err(Failure::Broken(format!("the client: {error}"))))
    }

    async fn has(&self, texts: usize) -> Result<(), String> {
        let mut seen = self.texts.clone();
        let reached = seen.wait_for(|count| *count >= texts).await;
        reached.map(drop).map_err(|_| format!("the request ended before it had {texts} texts"))
    }
}

async fn reach(stage: Stage, cluster: &Cluster, before: &Metrics, probe: &Probe) -> Result<(), String> {
    let prefill = cluster.prefill().client();
    match stage {
        Stage::BeforeAdmission => Ok(()),
        Stage::Queued => poll(&prefill, |m| m.value("vllm:num_requests_waiting") >= 1.0).await,
        Stage::MidPrefill => {
            let computed = before.prompt_tokens("local_compute") + 32;
            poll(&prefill, |m| m.prompt_tokens("local_compute") >= computed).await
        }
        Stage::MidTransfer => poll(&cluster.client(), |m| m.account().ticketed > 0).await,
        Stage::AfterFirstToken => probe.has(1).await,
        Stage::MidDecode => probe.has(DECODING).await,
    }
}

async fn poll(client: &Client, reached: impl Fn(&Metrics) -> bool) -> Result<(), String> {
    let started = Instant::now();
    while started.elapsed() < Duration::from_secs(10) {
        if client.try_metrics().await.is_ok_and(|metrics| reached(&metrics)) {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    Err("the request did not come to its stage".into())
}

async fn happen(cluster: &mut Cluster, fault: Fault) {
    match fault {
        Fault::Kill(victim, _) => worker(cluster, victim).kill(),
        Fault::Stop(victim, _) => {
            worker(cluster, victim).pause();
            // The fault is this time.
            tokio::time::sleep(LEASE * 2).await;
            worker(cluster, victim).resume();
        }
        Fault::Restart(victim, _) => worker(cluster, victim).terminate(),
        _ => {}
    }
}

fn worker(cluster: &mut Cluster, victim: Victim) -> &mut Worker {
    match victim {
        Victim::Prefill => cluster.prefill_mut(),
        Victim::Decode | Victim::Client => cluster.front_mut(),
    }
}

/// Only the client of a process that is gone may see its connection break.
fn may_break(fault: Fault) -> bool {
    matches!(fault, Fault::Kill(Victim::Decode, _) | Fault::Restart(Victim::Decode, Stage::BeforeAdmission))
}

/// Everything is as before: both workers serve, hold no block, and the next request goes through both.
async fn recovered(
    cluster: &mut Cluster,
    cell: &Cell,
    run: usize,
    expected: &Expected,
) -> Result<(), String> {
    match cell.fault {
        Fault::Kill(victim, _) => worker(cluster, victim).restart().await,
        Fault::Restart(victim, _) => {
            let status = worker(cluster, victim).exited().await;
            if !status.success() {
                return Err(format!("left with {status} on SIGTERM"));
            }
            worker(cluster, victim).restart().await;
        }
        _ => {}
    }
    cluster.prefill().health_is("ready").await;
    cluster.front().health_is("ready").await;
    for client in [cluster.client(), cluster.prefill().client()] {
        let account = client.settled().await.account();
        if account.free + account.cached != BLOCKS {
            return Err(format!("blocks were lost: {account:?} of {BLOCKS}"));
        }
    }
    let before = cluster.client().metrics().await.transfers();
    let answer = cluster.client().ask(&follower(run)).await;
    judge(answer, &expected.follower, false).map_err(|reason| format!("the next request: {reason}"))?;
    let faulty = matches!(cell.fault, Fault::NoteLost | Fault::MixUp);
    let after = cluster.client().settled().await.transfers();
    match after == before + 1 || faulty {
        true => Ok(()),
        false => {
            let log = cluster.front().log();
            let lines: Vec<_> = log.lines().collect();
            let last = lines[lines.len().saturating_sub(LOG_LINES)..].join("\n        ");
            let brought = after - before;
            Err(format!(
                "the next request brought {brought} transfers, expected 1; the decode worker said last:\n        {last}"
            ))
        }
    }
}
