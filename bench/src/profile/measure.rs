//! Times of steps, as a client sees them.

use std::fmt;

use super::Args;
use super::fit::{Work, decode_work, prompt_work};
use crate::client::Client;
use crate::error::{BenchError, Result};
use crate::prompts::Prompts;
use crate::sample::{self, Load, Prompt, Sample};
use crate::stats::{mean, median};

/// One kind of work, and how long it takes.
#[derive(Clone, Debug)]
pub struct Point {
    pub what: String,
    /// Times that `seconds` is the median of.
    pub values: usize,
    pub seconds: f64,
    pub work: Work,
}

/// What a point measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Job {
    /// The time to the first token of a prompt of this length.
    Prompt(usize),
    /// The time of a step in which `batch` sequences, with prompts of `context` tokens, get their next token.
    Decode { batch: usize, context: usize },
}

/// A step that makes one token for each sequence, or all steps of a prompt.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    ms: f64,
    /// Tokens that decoding sequences see, over all of them.
    context: f64,
}

/// All points, prompts first.
pub async fn measure(args: &Args, client: &Client) -> Result<Vec<Point>> {
    let limit = client.model().await?.max_model_len;
    if args.longest() > limit {
        let asked = args.longest();
        return Err(BenchError::Usage(format!("a text of {asked} tokens is more than the limit of {limit}")));
    }
    let mut prompts = Prompts::new(args.seed);
    // The first steps of a process are slow.
    let longest = args.prompt_tokens.iter().copied().max().unwrap_or(1);
    send(args, client, &mut prompts, "warmup", (1, longest), 2).await?;
    let jobs = args.jobs();
    let mut seen = vec![Vec::new(); jobs.len()];
    // In turns, so that a machine that drifts drifts for all.
    for _ in 0..args.repeats {
        for (&job, seen) in jobs.iter().zip(&mut seen) {
            match job {
                Job::Prompt(tokens) => {
                    let samples = send(args, client, &mut prompts, "prompt", (1, tokens), 1).await?;
                    seen.extend(samples[0].ttft().map(|ms| Step { ms, context: 0.0 }));
                }
                Job::Decode { batch, context } => {
                    let output = args.output_tokens(batch, context);
                    let samples =
                        send(args, client, &mut prompts, "decode", (batch, context), output).await?;
                    seen.extend(full_steps(&samples, context));
                }
            }
        }
    }
    jobs.into_iter()
        .zip(&seen)
        .map(|(job, seen)| Point::new(job, seen, args.max_num_batched_tokens))
        .collect()
}

/// `batch` new prompts of `tokens` at once.
async fn send(
    args: &Args,
    client: &Client,
    prompts: &mut Prompts,
    name: &str,
    (batch, tokens): (usize, usize),
    output_tokens: usize,
) -> Result<Vec<Sample>> {
    let mut sent = Vec::new();
    for number in 0..batch {
        sent.push(Prompt { number, tokens: prompts.next(client, tokens).await? });
    }
    let load = Load { concurrency: batch, output_tokens };
    let samples =
        sample::complete_all(client, &sent, load, |p| format!("{name}-{tokens}-{}", p.number)).await?;
    let asked = (tokens, output_tokens, 0);
    let got = |s: &Sample| (s.prompt_tokens, s.completion_tokens, s.cached_tokens);
    match samples.iter().find(|sample| got(sample) != asked) {
        None => Ok(samples),
        Some(sample) => Err(BenchError::Checks(vec![format!(
            "{} on {}: (prompt, output, cached) tokens are {:?}, expected {asked:?}",
            sample.request_id,
            args.device,
            got(sample)
        )])),
    }
}

/// The steps in which every one of `samples`, sent at the same time, got a token: from the last one's first token to the
/// first one's last.
fn full_steps(samples: &[Sample], prompt_tokens: usize) -> Vec<Step> {
    let first = |sample: &&Sample| sample.ttft().unwrap_or(f64::INFINITY);
    let Some(last_to_start) = samples.iter().max_by(|a, b| first(a).total_cmp(&first(b))) else {
        return Vec::new();
    };
    let ends = samples.iter().filter_map(|s| s.token_ms.last()).fold(f64::INFINITY, |a, &b| a.min(b));
    let gaps = last_to_start.token_ms.windows(2).filter(|gap| gap[1] <= ends);
    let step = |gap: &[f64]| {
        let made = |sample: &Sample| sample.token_ms.iter().filter(|&&at| at <= gap[0]).count();
        let context: usize = samples.iter().map(|sample| prompt_tokens + made(sample)).sum();
        Step { ms: gap[1] - gap[0], context: context as f64 }
    };
    gaps.map(step).collect()
}

impl Point {
    fn new(job: Job, seen: &[Step], chunk: usize) -> Result<Self> {
        let (times, contexts): (Vec<_>, Vec<_>) = seen.iter().map(|step| (step.ms, step.context)).unzip();
        let Some((ms, context)) = median(&times).zip(mean(&contexts)) else {
            let reason = "no step was seen; is the KV cache too small?";
            return Err(BenchError::Checks(vec![format!("{job}: {reason}")]));
        };
        let work = match job {
            Job::Prompt(tokens) => prompt_work(tokens, chunk),
            Job::Decode { batch, .. } => decode_work(batch, context),
        };
        Ok(Self { what: job.to_string(), values: times.len(), seconds: ms / 1000.0, work })
    }
}

impl fmt::Display for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Job::Prompt(tokens) => write!(f, "prompt of {tokens}"),
            Job::Decode { batch, context } => write!(f, "decode {batch} x {context}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(token_ms: &[f64]) -> Sample {
        Sample {
            prompt: 0,
            request_id: String::new(),
            prompt_tokens: 100,
            completion_tokens: token_ms.len(),
            cached_tokens: 0,
            finish_reason: None,
            token_ms: token_ms.to_vec(),
            total_ms: 0.0,
            handoff: None,
            text: String::new(),
        }
    }

    #[test]
    fn only_steps_of_all_sequences_count() {
        let early = sample(&[10.0, 20.0, 31.0, 42.0]);
        let late = sample(&[20.0, 31.0, 42.0, 50.0]);
        let steps = full_steps(&[early, late], 100);
        let expected = [Step { ms: 11.0, context: 203.0 }, Step { ms: 11.0, context: 205.0 }];
        assert_eq!(steps, expected);
        assert_eq!(full_steps(&[sample(&[1.0, 2.0]), sample(&[3.0, 4.0])], 100), []);
        assert_eq!(full_steps(&[], 100), []);
    }

    #[test]
    fn a_point_without_values_is_an_error() {
        let error = Point::new(Job::Decode { batch: 8, context: 128 }, &[], 512).unwrap_err().to_string();
        assert!(error.contains("decode 8 x 128: no step"), "{error}");
    }
}
