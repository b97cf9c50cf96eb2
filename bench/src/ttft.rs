//! `bench ttft`: the same requests to one process and to a prefill and a decode worker.

use std::io::Write;
use std::path::PathBuf;
use std::time::Instant;

use clap::ValueEnum;
use serde::Serialize;

use crate::client::Client;
use crate::deployment::{Deployment, Launcher, Shape, Transport};
use crate::error::{BenchError, Result};
use crate::machine::{self, Machine};
use crate::output::write_json;
use crate::prompts::Prompts;
use crate::report::{self, Report, Run};
use crate::sample::{self, Load, Prompt, elapsed_ms};
use crate::serve_log;
use crate::transfers::Transfers;

/// Compare one process (`both`) with a prefill and a decode worker: time to the first and second token, time between
/// tokens, and what the KV transfers cost.
///
/// Starts the `serve` beside this program on free loopback ports, one deployment at a time so that they do not share
/// the cores, in turns (both, disaggregated, both, ...) so that a machine that drifts drifts for all. Every repeat
/// starts new processes. Each prompt is sent once to each deployment, shares no prefix with any other, and is completed
/// greedily past any end of text. It is an error if a deployment answers a prompt differently, finds a prefix in its
/// cache, counts other tokens than were asked for, or computes a prompt again because its handoff failed.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to serve: a folder, a Hugging Face id, or `demo`.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    pub model: String,
    /// Prompt lengths, in tokens.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "256,1024", value_parser = at_least::<1>)]
    prompt_tokens: Vec<usize>,
    /// Tokens of each answer; the second one is the first that needs the handoff.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least::<2>)]
    pub output_tokens: usize,
    /// Clients that send requests at the same time, each its next when the last is answered.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4", value_parser = at_least::<1>)]
    concurrency: Vec<usize>,
    /// Requests for each prompt length and concurrency in a repeat; at least one for each client.
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = at_least::<1>)]
    pub requests: usize,
    /// How often everything is measured.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least::<1>)]
    pub repeats: usize,
    /// How KV moves between the two workers; several are measured in turn.
    #[arg(
        long,
        value_name = "NAME,...",
        env = "KV_TRANSPORT",
        value_delimiter = ',',
        default_value = "auto"
    )]
    #[serde(serialize_with = "names")]
    transport: Vec<Transport>,
    /// Precision of weights, activations and KV cache (auto, bf16, f32); serve's default when not given.
    #[arg(long, value_name = "DTYPE")]
    dtype: Option<String>,
    /// Compute threads of each process; one per core when not given.
    #[arg(long, value_name = "N", value_parser = at_least::<1>)]
    threads: Option<usize>,
    /// A further argument for every `serve`, such as --serve-arg=--block-size=32; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    serve_arg: Vec<String>,
    /// A further argument for the decode worker, such as --decode-arg=--cpu-nice=0; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    decode_arg: Vec<String>,
    /// Do not compare answers: a GPU's rounding depends on what is computed together, and with random weights a tie is
    /// never far.
    #[arg(long)]
    any_answer: bool,
    /// Requests of the longest prompt that are sent to new processes and not measured.
    #[arg(long, value_name = "N", default_value_t = 2)]
    warmup: usize,
    /// Write everything to this file: every token of every request, the machine, the command.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
    /// Decides the prompts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

const AFTER_HELP: &str = "\
Times are the client's, from sending the request on. A number is the median of the repeats' medians over requests (ITL: \
over all gaps between tokens), `range` the lowest and highest of these medians; `x` is the ratio to one process. A number \
whose range is as wide as the difference says nothing.

The transfers' numbers are means over handoffs, taken from the decode worker's /metrics before and after: histograms \
vllm:nixl_bytes_transferred, vllm:nixl_num_descriptors and kvferry:kv_transfer_seconds by stage. `writes` is from its \
log (`KV received`), which --serve-arg=--log-level=warn silences. `wire` is the time during which a handoff's writes were \
under way, `GB/s` its bytes over that. `exposed` is what computing the prompt did not hide, from the first token's \
arrival at the decode worker to the last write's; `of wire` its share.

Examples:
  bench ttft
  bench ttft --transport tcp,shm,socket --prompt-tokens 1024 --concurrency 1,4 --json ttft.json
  bench ttft --model Qwen/Qwen3-0.6B --prompt-tokens 512 --requests 2 --threads 1
  bench ttft --dtype f32 --serve-arg=--max-num-batched-tokens=256";

/// One combination that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Cell {
    pub prompt_tokens: usize,
    pub concurrency: usize,
}

/// Measures, prints, and fails if a check does.
pub async fn run(args: Args) -> Result<()> {
    let began = Instant::now();
    let load_before = machine::load();
    let mut launcher = Launcher::new(&args.model, &args.serve_args())?.with_decode_args(&args.decode_arg);
    let mut plan = None;
    let mut runs = Vec::new();
    for repeat in 0..args.repeats {
        for shape in args.shapes() {
            eprint!("repeat {}/{}  {:<13}", repeat + 1, args.repeats, shape.to_string());
            let started = Instant::now();
            let mut deployment = launcher.start(shape).await?;
            eprint!("  ready after {:.1} s  ", started.elapsed().as_secs_f64());
            let measured = measure(&args, &mut plan, repeat, shape, &deployment).await;
            runs.extend(deployment.blame(measured).await?);
            deployment.stop().await?;
            eprintln!("  {:.1} s", started.elapsed().as_secs_f64());
        }
    }
    let report = Report {
        command: std::env::args().collect(),
        machine: Machine::look(),
        load_before,
        load_after: machine::load(),
        seconds: began.elapsed().as_secs_f64(),
        summary: report::summary(&args.cells(), &args.shapes(), &runs),
        problems: report::check(&runs, args.output_tokens, args.any_answer),
        settings: args,
        runs,
    };
    print!("\n{report}");
    write_json(report.settings.json.as_deref(), &report)?;
    match report.problems.is_empty() {
        true => Ok(()),
        false => Err(BenchError::Checks(report.problems)),
    }
}

/// All cells of a repeat on one deployment. The first one to be ready tokenizes the prompts of all.
async fn measure(
    args: &Args,
    plan: &mut Option<Plan>,
    repeat: usize,
    shape: Shape,
    deployment: &Deployment,
) -> Result<Vec<Run>> {
    let plan = match plan {
        Some(plan) => plan,
        None => plan.insert(Plan::make(args, &deployment.client).await?),
    };
    let load = Load { concurrency: 1, output_tokens: args.output_tokens };
    sample::complete_all(&deployment.client, &plan.warmup, load, |p| format!("warmup-{}", p.number)).await?;
    let mut runs = Vec::new();
    for (cell, prompts) in args.cells().into_iter().zip(&plan.repeats[repeat]) {
        let load = Load { concurrency: cell.concurrency, output_tokens: args.output_tokens };
        let before = deployment.client.metrics().await?;
        let started = Instant::now();
        let mut samples =
            sample::complete_all(&deployment.client, prompts, load, |p| format!("ttft-{}", p.number)).await?;
        let wall_ms = elapsed_ms(started);
        let transfers = Transfers::between(&before, &deployment.client.metrics().await?);
        let handoffs = serve_log::handoffs(&deployment.log());
        for sample in &mut samples {
            sample.handoff = handoffs.iter().find(|h| h.request_id == sample.request_id).cloned();
        }
        let transport = deployment.transport();
        runs.push(Run { repeat, deployment: shape, transport, cell, wall_ms, transfers, samples });
        eprint!(".");
        // Progress that cannot be shown is no reason to stop.
        let _ = std::io::stderr().flush();
    }
    Ok(runs)
}

/// The prompts of a measurement.
struct Plan {
    warmup: Vec<Prompt>,
    /// By repeat and cell.
    repeats: Vec<Vec<Vec<Prompt>>>,
}

impl Plan {
    async fn make(args: &Args, client: &Client) -> Result<Self> {
        let longest = args.prompt_tokens.iter().copied().max().unwrap_or(1);
        let limit = client.model().await?.max_model_len;
        if longest + args.output_tokens > limit {
            let asked = format!("{longest} prompt and {} output tokens", args.output_tokens);
            return Err(BenchError::Usage(format!("{asked} are more than the model's limit of {limit}")));
        }
        let mut maker = Maker { prompts: Prompts::new(args.seed), client, made: 0 };
        let warmup = maker.make(args.warmup, longest).await?;
        let mut repeats = Vec::new();
        for _ in 0..args.repeats {
            let mut cells = Vec::new();
            for cell in args.cells() {
                cells.push(maker.make(args.requests.max(cell.concurrency), cell.prompt_tokens).await?);
            }
            repeats.push(cells);
        }
        Ok(Self { warmup, repeats })
    }
}

/// Numbers prompts as it makes them.
struct Maker<'a> {
    prompts: Prompts,
    client: &'a Client,
    made: usize,
}

impl Maker<'_> {
    async fn make(&mut self, count: usize, tokens: usize) -> Result<Vec<Prompt>> {
        let mut made = Vec::new();
        for _ in 0..count {
            let tokens = self.prompts.next(self.client, tokens).await?;
            made.push(Prompt { number: self.made, tokens });
            self.made += 1;
        }
        Ok(made)
    }
}

impl Args {
    fn cells(&self) -> Vec<Cell> {
        let cell = |&prompt_tokens| {
            self.concurrency.iter().map(move |&concurrency| Cell { prompt_tokens, concurrency })
        };
        self.prompt_tokens.iter().flat_map(cell).collect()
    }

    fn shapes(&self) -> Vec<Shape> {
        let disaggregated = self.transport.iter().map(|&transport| Shape::Disaggregated(transport));
        [Shape::Both].into_iter().chain(disaggregated).collect()
    }

    fn serve_args(&self) -> Vec<String> {
        let mut args = Vec::new();
        if let Some(dtype) = &self.dtype {
            args.push(format!("--dtype={dtype}"));
        }
        if let Some(threads) = self.threads {
            args.push(format!("--threads={threads}"));
        }
        args.extend_from_slice(&self.serve_arg);
        args
    }
}

fn at_least<const MIN: usize>(text: &str) -> std::result::Result<usize, String> {
    let number = text.parse().ok().filter(|&n| n >= MIN);
    number.ok_or_else(|| format!("expected a whole number of at least {MIN}"))
}

fn names<S: serde::Serializer>(
    transports: &[Transport],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    let name = |transport: &Transport| transport.to_possible_value().map(|value| value.get_name().to_owned());
    serializer.collect_seq(transports.iter().filter_map(name))
}
