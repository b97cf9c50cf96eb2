//! The command line of `bench prefix-hits`, and what follows from it.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::Serialize;

use super::report::Summary;
use crate::error::{BenchError, Result};
use crate::workload;

/// Requests for each number of prefixes when --repeats is not given. A share near one half then has a standard error of
/// 0.6 percentage points, so that a difference of three means something.
const DEFAULT_REQUESTS: usize = 7200;

/// Send requests that share prefixes to workers chosen at random, and compare the hits in their prefix caches with an
/// LRU model and with the capacity rule.
///
/// Starts --workers `serve` processes with small caches. For each number of prefixes the caches are emptied and every
/// prefix is sent --repeats times, in random order, each time with a new suffix and to a worker chosen at random. It is
/// an error if the cached tokens in the answers are not those in the workers' vllm:prefix_cache_hits, if the workers
/// looked up other tokens than were sent, or, with --concurrency 1, if any request finds other tokens than the LRU
/// model says.
#[derive(Clone, Debug, clap::Args, Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to serve: a folder, a Hugging Face id, or `demo`. A simulated device needs no weights.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    pub model: String,
    /// Where the workers compute.
    #[arg(long, value_enum, default_value_t = Device::Sim)]
    device: Device,
    /// With --device sim: the GPU to imitate (h200, h100, a100, l40s, l4), or a file from `bench profile`.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100")]
    sim_profile: String,
    /// With --device sim: how many times faster than the profile.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero)]
    sim_speed: f64,
    /// Worker processes.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one)]
    pub workers: usize,
    /// Tokens in each worker's KV cache, rounded down to whole blocks.
    #[arg(long, value_name = "N", default_value_t = 9362, value_parser = at_least_one)]
    worker_tokens: usize,
    /// Tokens in a KV block.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = at_least_one)]
    pub block_size: usize,
    /// Numbers of shared prefixes, each measured by itself.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "2,7,12,24", value_parser = at_least_one)]
    pub kinds: Vec<usize>,
    /// Requests for each prefix; when not given, as many as make 7,200 requests for each number of prefixes.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    repeats: Option<usize>,
    /// Tokens of each shared prefix.
    #[arg(long, value_name = "N", default_value_t = 2000, value_parser = at_least_one)]
    pub prefix_tokens: usize,
    /// Tokens that follow it, different in each request.
    #[arg(long, value_name = "N", default_value_t = 300, value_parser = at_least_one)]
    pub suffix_tokens: usize,
    /// Tokens of each answer.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub output_tokens: usize,
    /// Requests under way on each worker at any time.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = at_least_one)]
    pub concurrency: usize,
    /// Send requests through a frontend with this mode (kv, round-robin, random, ...) instead of to workers chosen here;
    /// --concurrency is then that of all workers together.
    #[arg(long, value_name = "MODE")]
    pub router: Option<String>,
    /// With --router: a further argument of the frontend, such as --router-arg=--no-router-kv-events.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub router_arg: Vec<String>,
    /// Fail if the ratio `warm: prefix` is further than this from the rule, in percentage points.
    #[arg(long, value_name = "POINTS", value_parser = above_zero)]
    assert_rule: Option<f64>,
    /// A further argument for every `serve`, such as --serve-arg=--max-num-batched-tokens=1024; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    serve_arg: Vec<String>,
    /// Write everything to this file: every request, the machine, the command.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    pub json: Option<PathBuf>,
    /// Decides prefixes, suffixes, order and workers.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
}

const AFTER_HELP: &str = "\
Ratios are in percent. `raw` is over all requests; `warm` leaves out the first one for each prefix on each worker, which \
must miss. `tokens`: cached tokens of prompt tokens, which is vllm:prefix_cache_hits / queries. `whole`: requests that \
found their whole prefix. `prefix`: cached tokens of prefix tokens (those that fill blocks), which counts the partial \
hits as what they are: the tail of a prefix is forgotten before its head. `+-` is twice the standard error of `warm: \
prefix`, `LRU` what the LRU model says for the same requests in the same order. Where requests overlap on a worker \
(--concurrency above 1) the model is an estimate: a prefix that is being computed is not yet found by the next request.

The rule is min(1, prefixes that fit / prefixes), and `off` is `warm: prefix` less the rule. Prefixes that fit: tokens of \
a worker's cache divided by the tokens that one request leaves there (prefix, suffix, and all but the last of the \
answer), not rounded. Each prefix is counted with one suffix; older suffixes of the same prefix take room as well, and \
the more the fewer prefixes there are, so the rule is a little high where not quite all prefixes fit.

With 12 repeats of 7 prefixes (84 requests) the ratio of one run is off by 6 points or less in two of three runs: that \
cannot show a difference of 3. With the default of 7,200 requests it is 0.6 points.

`hit` and `miss` are the client's median times to the first token of requests that found their whole prefix, or \
nothing; `x` is their ratio. Where all prefixes fit only the first touches miss: too few for a ratio. The times contain HTTP and the work of the simulation itself, which --sim-speed does not make \
shorter: take them from --sim-speed 1, with a profile far slower than this machine's own work. A full-size model such \
as a folder with Qwen3-0.6B's config and tokenizer needs 112 KiB of memory a token: 1 GiB for each worker of 9,362.

Examples:
  bench prefix-hits --sim-speed 100 --assert-rule 3
  bench prefix-hits --device sim --workers 3 --kinds 2,7,12,24 --json hits.json
  bench prefix-hits --workers 1 --worker-tokens 14800 --kinds 12 --repeats 6
  bench prefix-hits --kinds 7 --repeats 40 --sim-profile l4 --concurrency 4
  bench prefix-hits --router kv --workers 6 --kinds 2,7,12,24 --concurrency 8 --sim-speed 100";

/// Where the workers compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Device {
    /// Times as a profile says, no weights needed.
    Sim,
    /// The model itself.
    Cpu,
}

impl Args {
    /// Finds what `clap` cannot.
    pub fn check(&self) -> Result<()> {
        let needed = self.kv_tokens().div_ceil(self.block_size);
        if needed > self.num_blocks() {
            let (asked, there) = (self.kv_tokens(), self.pool_tokens());
            return Err(BenchError::Usage(format!(
                "a request of {asked} tokens does not fit into --worker-tokens {} ({there} tokens in blocks of {})",
                self.worker_tokens, self.block_size
            )));
        }
        if self.full_prefix() == 0 {
            return Err(BenchError::Usage(format!(
                "--prefix-tokens {} do not fill a block of {}: nothing could be found",
                self.prefix_tokens, self.block_size
            )));
        }
        Ok(())
    }

    pub fn repeats(&self, kinds: usize) -> usize {
        self.repeats.unwrap_or(DEFAULT_REQUESTS.div_ceil(kinds))
    }

    pub fn num_blocks(&self) -> usize {
        self.worker_tokens / self.block_size
    }

    pub fn pool_tokens(&self) -> usize {
        self.num_blocks() * self.block_size
    }

    /// Tokens of a prefix that fill blocks, and can be found.
    pub fn full_prefix(&self) -> usize {
        self.prefix_tokens / self.block_size * self.block_size
    }

    /// How many prefixes a worker has room for, each with one suffix.
    pub fn fit(&self) -> f64 {
        self.pool_tokens() as f64 / self.kv_tokens() as f64
    }

    pub fn workload(&self, kinds: usize) -> workload::Shape {
        workload::Shape {
            kinds,
            repeats: self.repeats(kinds),
            workers: self.workers,
            prefix_tokens: self.prefix_tokens,
            suffix_tokens: self.suffix_tokens,
            seed: self.seed,
        }
    }

    pub fn serve_args(&self) -> Vec<String> {
        let blocks = format!("--num-kv-blocks={}", self.num_blocks());
        let mut args = vec![blocks, format!("--block-size={}", self.block_size)];
        match self.device {
            Device::Cpu => args.push("--device=cpu".into()),
            Device::Sim => args.extend([
                "--device=sim".into(),
                format!("--sim-profile={}", self.sim_profile),
                format!("--sim-speed={}", self.sim_speed),
            ]),
        }
        args.extend_from_slice(&self.serve_arg);
        args
    }

    pub fn device_text(&self) -> String {
        match self.device {
            Device::Cpu => "cpu".into(),
            Device::Sim => format!("a simulated {} x {}", self.sim_profile, self.sim_speed),
        }
    }

    /// What is wrong with a measurement.
    pub fn complaints(&self, summary: &Summary) -> Vec<String> {
        let mut complaints = Vec::new();
        let (kinds, unlike) = (summary.kinds, summary.unlike_lru);
        if self.concurrency == 1 && unlike > 0 {
            complaints.push(format!("{kinds} prefixes: {unlike} requests found other tokens than LRU says"));
        }
        let off = summary.off_rule();
        if let Some(points) = self.assert_rule.filter(|points| off.abs() > *points) {
            complaints
                .push(format!("{kinds} prefixes: {off:+.1} points off the rule, expected at most {points}"));
        }
        complaints
    }

    /// Tokens whose KV a request leaves behind: the last one of an answer is never computed.
    fn kv_tokens(&self) -> usize {
        self.prefix_tokens + self.suffix_tokens + self.output_tokens - 1
    }
}

fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|&n| n >= 1).ok_or_else(|| "expected a whole number of at least 1".into())
}

fn above_zero(text: &str) -> std::result::Result<f64, String> {
    let valid = |number: &f64| *number > 0.0 && number.is_finite();
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number above 0".into())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::super::report::Outcome;
    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn parse(flags: &[&str]) -> std::result::Result<Args, String> {
        let line = Line::try_parse_from(["bench"].iter().chain(flags));
        line.map(|line| line.args).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_the_published_experiment_with_enough_requests() {
        let args = parse(&[]).unwrap();
        args.check().unwrap();
        assert_eq!((args.num_blocks(), args.pool_tokens(), args.full_prefix()), (585, 9360, 2000));
        assert!((args.fit() - 4.07).abs() < 0.001, "{}", args.fit());
        assert_eq!([2, 7, 12, 24].map(|kinds| args.repeats(kinds)), [3600, 1029, 600, 300]);
        assert_eq!(parse(&["--repeats", "6"]).unwrap().repeats(12), 6);
    }

    #[test]
    fn bad_arguments_are_named() {
        for (flags, expected) in [
            (&["--kinds", "2,0"][..], "--kinds"),
            (&["--workers", "0"], "--workers"),
            (&["--sim-speed", "0"], "--sim-speed"),
            (&["--assert-rule=-1"], "--assert-rule"),
            (&["--device", "tpu"], "--device"),
        ] {
            let message = parse(flags).unwrap_err();
            assert!(message.contains(expected), "{flags:?}: {message}");
        }
        for (flags, expected) in [
            (&["--worker-tokens", "2299"][..], "2300 tokens does not fit into --worker-tokens 2299"),
            (&["--worker-tokens", "9"], "does not fit"),
            (&["--prefix-tokens", "15"], "do not fill a block of 16"),
        ] {
            let message = parse(flags).unwrap().check().unwrap_err().to_string();
            assert!(message.contains(expected), "{flags:?}: {message}");
        }
    }

    #[test]
    fn a_ratio_off_the_rule_or_off_lru_is_a_complaint() {
        let outcome = |cached_tokens| Outcome {
            kind: 0,
            worker: 0,
            first_touch: false,
            prompt_tokens: 2300,
            cached_tokens,
            lru_cached_tokens: 2000,
            ttft_ms: None,
        };
        let args = parse(&["--assert-rule", "3"]).unwrap();
        let all = Summary::new(2, 1, 2000, args.fit(), &[outcome(2000), outcome(2000)]);
        assert_eq!(args.complaints(&all), Vec::<String>::new());
        let half = Summary::new(2, 1, 2000, args.fit(), &[outcome(2000), outcome(0)]);
        let complaints = args.complaints(&half);
        assert_eq!(complaints.len(), 2, "{complaints:?}");
        assert!(complaints[1].contains("-50.0 points off the rule"), "{complaints:?}");
        let overlapping = parse(&["--concurrency", "2"]).unwrap();
        assert_eq!(overlapping.complaints(&half), Vec::<String>::new());
    }
}
