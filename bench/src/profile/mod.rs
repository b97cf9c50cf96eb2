//! `bench profile`: how long a real engine's steps take, as a file that `serve --device sim` reads.

mod fit;
mod measure;

use std::path::PathBuf;

use crate::deployment::{Launcher, Shape};
use crate::error::{BenchError, Result};
use crate::output::write_json;
use crate::table::{Table, ms};
use engine::sim::Profile;
use fit::Fit;
use measure::{Job, Point};

/// Steps in which all sequences of a batch decode, in each repeat.
const STEPS: usize = 32;

/// A prompt that costs next to nothing to compute: it tells what a request costs outside the engine. Shorter ones could
/// not all differ.
const SHORT_PROMPT: usize = 8;

/// `serve`'s own block size.
const BLOCK_SIZE: usize = 16;

/// Measure how long the steps of an engine take, and write a profile for `serve --device sim --sim-profile FILE`.
///
/// Starts a `serve`, sends prompts alone and batches that decode together, and fits the five coefficients of a
/// simulated step to what a client sees. Then starts a simulated `serve` with the file, which must accept it.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to serve: a folder, a Hugging Face id, or `demo`.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    model: String,
    /// Write the profile to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: PathBuf,
    /// What `serve --device` is to be.
    #[arg(long, value_name = "NAME", default_value = "cpu")]
    device: String,
    /// Lengths of prompts that are computed alone; at least three.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128,512,1024,2048", value_parser = at_least::<1>)]
    prompt_tokens: Vec<usize>,
    /// Lengths of prompts of sequences that decode; at least two.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "128,1024", value_parser = at_least::<1>)]
    contexts: Vec<usize>,
    /// Sequences that decode together; at least two numbers.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,4,8", value_parser = at_least::<1>)]
    batches: Vec<usize>,
    /// How often each point is measured.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = at_least::<1>)]
    repeats: usize,
    /// Tokens computed in one step: longer prompts are computed in chunks.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = at_least::<2>)]
    max_num_batched_tokens: usize,
    /// Measure the same points on the simulated `serve`, too.
    #[arg(long)]
    check: bool,
    /// A further argument for the measured `serve`, such as --serve-arg=--threads=1; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    serve_arg: Vec<String>,
    /// Decides the prompts.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

const AFTER_HELP: &str = "\
A step is modelled as base + prefill x prompt tokens + attention x pairs of a prompt token and a token that it sees + \
decode x sequences + context x tokens of decoding sequences' contexts. `prompt` points are the times to the first token \
of a prompt alone, over all its steps; `decode` points are the times between tokens while the whole batch decodes. Each \
is the median of what was seen. The fit is by non-negative least squares on relative errors. A sixth coefficient takes \
up what a request costs outside the engine (HTTP); it is printed and not written. A prompt of 8 tokens, which is always \
measured as well, decides it.

A machine that does other work at the same time is measured with it. Run it where and as the engine will run, and look \
at the errors of the points: some tens of percent mean that the model or the machine's quiet is not good enough.

Examples:
  bench profile --json demo.json
  bench profile --model Qwen/Qwen3-0.6B --json cpu.json --repeats 2
  bench profile --json demo.json --serve-arg=--threads=1 --check
  serve --model demo --device sim --sim-profile demo.json";

/// Measures, fits, writes, and tries the file.
pub async fn run(args: Args) -> Result<()> {
    args.check_points()?;
    let measured = measure_on(&args, &args.measured_args()).await?;
    let points: Vec<_> = measured.iter().map(|point| (point.work, point.seconds)).collect();
    let fit = Fit::of(&points).ok_or_else(|| BenchError::Checks(vec!["no time above 0 was seen".into()]))?;
    let path = args.json.display().to_string();
    write_json(Some(&args.json), &fit.profile())?;
    let simulated = match args.check {
        true => Some(measure_on(&args, &args.simulated_args()).await?),
        false => {
            Launcher::new(&args.model, &args.simulated_args())?.start(Shape::Both).await?.stop().await?;
            None
        }
    };
    println!("\n{}", table(&measured, &fit, simulated.as_deref()));
    println!("{}", describe(&fit));
    println!("written to {path}, which `serve --device sim --sim-profile {path}` accepts");
    Ok(())
}

async fn measure_on(args: &Args, serve_args: &[String]) -> Result<Vec<Point>> {
    let mut launcher = Launcher::new(&args.model, serve_args)?;
    let mut deployment = launcher.start(Shape::Both).await?;
    eprintln!("measuring `serve {}` ...", serve_args.join(" "));
    let measured = measure::measure(args, &deployment.client).await;
    let measured = deployment.blame(measured).await?;
    deployment.stop().await?;
    Ok(measured)
}

fn table(measured: &[Point], fit: &Fit, simulated: Option<&[Point]>) -> Table {
    let header = ["<point", "values", "measured ms", "fitted ms", "error %", "simulated ms", "error %"];
    let columns = if simulated.is_some() { header.len() } else { header.len() - 2 };
    let mut table = Table::new(&header[..columns]);
    let error = |seconds: f64, of: f64| format!("{:+.1}", (seconds / of - 1.0) * 100.0);
    for (index, point) in measured.iter().enumerate() {
        let fitted = fit.seconds(&point.work);
        let mut row = vec![
            point.what.clone(),
            point.values.to_string(),
            ms(point.seconds * 1e3),
            ms(fitted * 1e3),
            error(fitted, point.seconds),
        ];
        if let Some(simulated) = simulated.map(|points| points[index].seconds) {
            row.extend([ms(simulated * 1e3), error(simulated, point.seconds)]);
        }
        table.row(row);
    }
    table
}

/// The coefficients, one to a line.
fn describe(fit: &Fit) -> String {
    let Profile {
        base_s,
        prefill_s_per_token,
        attention_s_per_pair,
        decode_s_per_sequence,
        decode_s_per_context_token,
    } = fit.profile();
    let lines = [
        ("a step", base_s * 1e3, "ms"),
        ("a prompt token", prefill_s_per_token * 1e6, "us"),
        ("a pair of attention", attention_s_per_pair * 1e9, "ns"),
        ("a decoding sequence", decode_s_per_sequence * 1e6, "us"),
        ("a token of its context", decode_s_per_context_token * 1e9, "ns"),
        ("a request over HTTP, not in the profile", fit.request_s() * 1e3, "ms"),
    ];
    lines.map(|(what, value, unit)| format!("  {what:<40}{value:>10.3} {unit}\n")).concat()
}

impl Args {
    /// Enough points to tell the coefficients apart.
    fn check_points(&self) -> Result<()> {
        for (flag, given, least) in [
            ("prompt-tokens", &self.prompt_tokens, 3),
            ("contexts", &self.contexts, 2),
            ("batches", &self.batches, 2),
        ] {
            let mut different = given.clone();
            different.sort_unstable();
            different.dedup();
            if different.len() < least {
                let reason = format!("--{flag} has {} different values, expected", different.len());
                return Err(BenchError::Usage(format!("{reason} at least {least}")));
            }
        }
        Ok(())
    }

    /// The first sequence decodes while the prompts of the others are computed, with what its batch leaves of the steps.
    fn output_tokens(&self, batch: usize, context: usize) -> usize {
        let chunk = self.max_num_batched_tokens.saturating_sub(batch).max(1);
        STEPS + (batch * context).div_ceil(chunk) + batch
    }

    /// The longest text, prompt and answer.
    fn longest(&self) -> usize {
        let decodes = self.decodes().map(|(batch, context)| context + self.output_tokens(batch, context));
        self.prompt_tokens.iter().map(|tokens| tokens + 2).chain(decodes).max().unwrap_or(0)
    }

    /// What to measure, prompts first.
    fn jobs(&self) -> Vec<Job> {
        let prompts = [SHORT_PROMPT].into_iter().chain(self.prompt_tokens.iter().copied());
        let prompts = prompts.map(Job::Prompt);
        prompts.chain(self.decodes().map(|(batch, context)| Job::Decode { batch, context })).collect()
    }

    fn decodes(&self) -> impl Iterator<Item = (usize, usize)> {
        self.contexts.iter().flat_map(|&context| self.batches.iter().map(move |&batch| (batch, context)))
    }

    fn serve_args(&self) -> Vec<String> {
        let blocks = |(batch, context)| {
            let tokens: usize = context + self.output_tokens(batch, context);
            // One more than it needs: the scheduler keeps one free for each that runs.
            batch * (tokens.div_ceil(BLOCK_SIZE) + 1)
        };
        let prompt = self.longest().div_ceil(BLOCK_SIZE) + 1;
        let blocks = self.decodes().map(blocks).chain([prompt]).max().unwrap_or(prompt);
        let batch = self.batches.iter().max().unwrap_or(&1);
        vec![
            format!("--num-kv-blocks={blocks}"),
            format!("--block-size={BLOCK_SIZE}"),
            format!("--max-num-seqs={batch}"),
            format!("--max-num-batched-tokens={}", self.max_num_batched_tokens),
        ]
    }

    fn measured_args(&self) -> Vec<String> {
        let device = format!("--device={}", self.device);
        [self.serve_args(), vec![device], self.serve_arg.clone()].concat()
    }

    fn simulated_args(&self) -> Vec<String> {
        let profile = format!("--sim-profile={}", self.json.display());
        [self.serve_args(), vec!["--device=sim".into(), profile]].concat()
    }
}

fn at_least<const MIN: usize>(text: &str) -> std::result::Result<usize, String> {
    let number = text.parse().ok().filter(|&n| n >= MIN);
    number.ok_or_else(|| format!("expected a whole number of at least {MIN}"))
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(flags: &[&str]) -> std::result::Result<Args, String> {
        let line = Line::try_parse_from(["bench", "--json", "f"].iter().chain(flags));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn too_few_points_are_refused_by_name() {
        parse(&[]).unwrap().check_points().unwrap();
        for (flags, expected) in [
            (["--prompt-tokens", "1,2,2"], "--prompt-tokens has 2 different values, expected at least 3"),
            (["--contexts", "7"], "--contexts has 1"),
            (["--batches", "4,4"], "--batches has 1"),
        ] {
            let message = parse(&flags).unwrap().check_points().unwrap_err().to_string();
            assert!(message.contains(expected), "{flags:?}: {message}");
        }
        assert!(parse(&["--batches", "0"]).unwrap_err().contains("--batches"));
        assert!(Line::try_parse_from(["bench"]).unwrap_err().to_string().contains("--json"));
    }

    #[test]
    fn all_sequences_of_a_batch_fit_with_their_answers() {
        let args = parse(&[]).unwrap();
        // 8 prompts of 1024 in steps of 504 and the steps that count, then one for each that starts late.
        assert_eq!(args.output_tokens(8, 1024), 32 + 17 + 8);
        assert_eq!(args.longest(), 2050);
        assert_eq!(args.serve_args()[0], format!("--num-kv-blocks={}", 8 * (68 + 1)));
    }

    #[test]
    fn the_file_has_the_fields_that_the_simulation_reads() {
        let fit = Fit::of(&[([1.0, 0.0, 0.0, 0.0, 0.0, 0.0], 0.5)]).unwrap();
        let json = serde_json::to_value(fit.profile()).unwrap();
        let expected = serde_json::json!({
            "base_s": 0.5, "prefill_s_per_token": 0.0, "attention_s_per_pair": 0.0, "decode_s_per_sequence": 0.0,
            "decode_s_per_context_token": 0.0,
        });
        assert_eq!(json, expected);
    }
}
