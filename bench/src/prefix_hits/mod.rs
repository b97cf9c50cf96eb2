//! `bench prefix-hits`: how often shared prefixes are found in the workers' caches, and what that is worth.

mod args;
mod counted;
mod lru;
mod report;
mod routed;

use std::time::Instant;

use futures_util::future::try_join_all;

use crate::client::Client;
use crate::deployment::{Deployment, Launcher, Shape};
use crate::error::{BenchError, Result};
use crate::machine::{self, Machine};
use crate::output::write_json;
use crate::prompts;
use crate::sample::{self, Load, Prompt, Sample};
use crate::workload::Workload;
pub use args::Args;
use counted::Counted;
use lru::BlockLru;
use report::{Outcome, Report, Summary};

/// Fewer different token ids could make two suffixes begin alike.
const ALPHABET: usize = 32;

/// Measures, prints, and fails if a check does.
pub async fn run(args: Args) -> Result<()> {
    args.check()?;
    if args.router.is_some() {
        return routed::run(args).await;
    }
    let (began, load_before) = (Instant::now(), machine::load());
    let mut launcher = Launcher::new(&args.model, &args.serve_args())?;
    let mut workers = Vec::new();
    for _ in 0..args.workers {
        workers.push(launcher.start(Shape::Both).await?);
    }
    eprintln!("{} workers ready after {:.1} s", args.workers, began.elapsed().as_secs_f64());
    let measured = measure_all(&args, &workers).await;
    let measured = blame(&mut workers, measured).await?;
    for worker in workers {
        worker.stop().await?;
    }
    let report = Report {
        command: std::env::args().collect(),
        machine: Machine::look(),
        load_before,
        load_after: machine::load(),
        seconds: began.elapsed().as_secs_f64(),
        prefixes_that_fit: args.fit(),
        problems: measured.problems,
        summary: measured.summary,
        requests: measured.requests,
        settings: args,
    };
    print!("\n{report}");
    write_json(report.settings.json.as_deref(), &report)?;
    match report.problems.is_empty() {
        true => Ok(()),
        false => Err(BenchError::Checks(report.problems)),
    }
}

#[derive(Default)]
struct Measured {
    summary: Vec<Summary>,
    requests: Vec<Vec<Outcome>>,
    problems: Vec<String>,
}

async fn measure_all(args: &Args, workers: &[Deployment]) -> Result<Measured> {
    let limit = workers[0].client.model().await?.max_model_len;
    let length = args.prefix_tokens + args.suffix_tokens + args.output_tokens;
    if length > limit {
        return Err(BenchError::Usage(format!(
            "{length} tokens a request are more than the limit of {limit}"
        )));
    }
    let alphabet = prompts::alphabet(&workers[0].client).await?;
    if alphabet.len() < ALPHABET {
        let reason = format!("only {} different tokens in a long text", alphabet.len());
        return Err(BenchError::Usage(format!("this model's tokenizer cannot be used: {reason}")));
    }
    let mut measured = Measured::default();
    for &kinds in &args.kinds {
        eprint!("{kinds} prefixes, {} requests ...", kinds * args.repeats(kinds));
        let started = Instant::now();
        let preemptions = measure(args, kinds, workers, &alphabet, &mut measured).await?;
        let outcomes = &measured.requests[measured.requests.len() - 1];
        let mut summary = Summary::new(kinds, args.repeats(kinds), args.full_prefix(), args.fit(), outcomes);
        (summary.seconds, summary.preemptions) = (started.elapsed().as_secs_f64(), preemptions);
        eprintln!(" {:.1} s", summary.seconds);
        measured.problems.extend(args.complaints(&summary));
        measured.summary.push(summary);
    }
    Ok(measured)
}

/// One number of prefixes on empty caches. How many requests were preempted.
async fn measure(
    args: &Args,
    kinds: usize,
    workers: &[Deployment],
    alphabet: &[u32],
    measured: &mut Measured,
) -> Result<u64> {
    let workload = Workload::new(args.workload(kinds), alphabet);
    let load = Load { concurrency: args.concurrency, output_tokens: args.output_tokens };
    let pairs = workers.iter().zip(&workload.prompts);
    let runs = pairs.map(|(worker, prompts)| complete(&worker.client, prompts, load, kinds));
    let runs = try_join_all(runs).await?;
    let mut outcomes = vec![None; workload.requests.len()];
    for (worker, ((samples, counted), prompts)) in runs.iter().zip(&workload.prompts).enumerate() {
        let mut lru = BlockLru::new(args.num_blocks(), args.block_size);
        let cached = samples.iter().map(|sample| sample.cached_tokens).sum();
        let problem =
            counted.unlike(total(prompts), cached).map(|p| format!("{kinds} prefixes, worker {worker}: {p}"));
        measured.problems.extend(problem);
        for (sample, prompt) in samples.iter().zip(prompts) {
            let request = workload.requests[prompt.number];
            let asked = (prompt.tokens.len(), args.output_tokens);
            if (sample.prompt_tokens, sample.completion_tokens) != asked {
                let got = (sample.prompt_tokens, sample.completion_tokens);
                let id = &sample.request_id;
                measured
                    .problems
                    .push(format!("{id}: (prompt, output) tokens are {got:?}, expected {asked:?}"));
            }
            outcomes[prompt.number] = Some(Outcome {
                kind: request.kind,
                worker: request.worker,
                first_touch: request.first_touch,
                prompt_tokens: sample.prompt_tokens,
                cached_tokens: sample.cached_tokens,
                lru_cached_tokens: lru.request(&prompt.tokens, args.output_tokens),
                ttft_ms: sample.ttft(),
            });
        }
    }
    measured.requests.push(outcomes.into_iter().flatten().collect());
    Ok(runs.iter().map(|(_, counted)| counted.preemptions).sum())
}

/// The requests of one worker, on an empty cache.
async fn complete(
    client: &Client,
    prompts: &[Prompt],
    load: Load,
    kinds: usize,
) -> Result<(Vec<Sample>, Counted)> {
    client.reset_prefix_cache().await?;
    let before = client.metrics().await?;
    let id = |prompt: &Prompt| format!("hits-{kinds}-{}", prompt.number);
    let samples = sample::complete_all(client, prompts, load, id).await?;
    let counted = Counted::since(client, &before, total(prompts)).await?;
    Ok((samples, counted))
}

fn total(prompts: &[Prompt]) -> usize {
    prompts.iter().map(|prompt| prompt.tokens.len()).sum()
}

/// What became of `result`: if a worker has died that is the reason.
async fn blame<T>(workers: &mut [Deployment], mut result: Result<T>) -> Result<T> {
    for worker in workers {
        result = worker.blame(result).await;
    }
    result
}
