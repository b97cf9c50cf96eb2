//! Sends requests as several clients would, and keeps what each of them saw.

use std::time::Instant;

use futures_util::future::try_join_all;
use serde::Serialize;
use serde_json::json;

use crate::client::{Answer, Client};
use crate::error::Result;
use crate::serve_log::Handoff;

/// A prompt with a number of its own within a measurement.
#[derive(Clone, Debug)]
pub struct Prompt {
    pub number: usize,
    pub tokens: Vec<u32>,
}

/// One request as its client saw it. Times are milliseconds since it was sent.
#[derive(Clone, Debug, Serialize)]
pub struct Sample {
    /// The prompt's number: samples with the same one must have the same text.
    pub prompt: usize,
    pub request_id: String,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
    pub finish_reason: Option<String>,
    /// When each token came.
    pub token_ms: Vec<f64>,
    pub total_ms: f64,
    /// From the decode worker's log; `None` where nothing was handed off, or it was not logged.
    pub handoff: Option<Handoff>,
    pub text: String,
}

/// How to send the requests.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// Requests under way at any time.
    pub concurrency: usize,
    pub output_tokens: usize,
}

impl Sample {
    /// Time to the first token.
    pub fn ttft(&self) -> Option<f64> {
        self.token_ms.first().copied()
    }

    /// Time to the second token, from the request on: the first that needs the prompt's KV where it is decoded.
    pub fn second(&self) -> Option<f64> {
        self.token_ms.get(1).copied()
    }

    /// From each token to the next.
    pub fn gaps(&self) -> impl Iterator<Item = f64> {
        self.token_ms.windows(2).map(|pair| pair[1] - pair[0])
    }
}

/// Completes each of `prompts` greedily, every client taking the next when its last is answered. `id` makes the
/// request's id. Samples are in the order of prompts.
pub async fn complete_all(
    client: &Client,
    prompts: &[Prompt],
    load: Load,
    id: impl Fn(&Prompt) -> String,
) -> Result<Vec<Sample>> {
    let queue = std::cell::RefCell::new(prompts.iter());
    let one_client = || async {
        let mut samples = Vec::new();
        loop {
            // The borrow ends here: it must not be held while another client runs.
            let next = queue.borrow_mut().next();
            let Some(prompt) = next else { return Result::<Vec<_>>::Ok(samples) };
            samples.push(complete(client, prompt, load.output_tokens, id(prompt)).await?);
        }
    };
    let mut samples = try_join_all((0..load.concurrency).map(|_| one_client())).await?.concat();
    samples.sort_by_key(|sample| sample.prompt);
    Ok(samples)
}

async fn complete(
    client: &Client,
    prompt: &Prompt,
    output_tokens: usize,
    request_id: String,
) -> Result<Sample> {
    let body = json!({
        "prompt": prompt.tokens, "max_tokens": output_tokens, "temperature": 0, "ignore_eos": true,
    });
    let answer = client.stream("/v1/completions", &request_id, body, |_| {}).await?;
    Ok(sample(prompt.number, request_id, answer))
}

fn sample(prompt: usize, request_id: String, answer: Answer) -> Sample {
    let ms = |duration: std::time::Duration| duration.as_secs_f64() * 1000.0;
    Sample {
        prompt,
        request_id,
        prompt_tokens: answer.usage.prompt_tokens,
        completion_tokens: answer.usage.completion_tokens,
        cached_tokens: answer.usage.prompt_tokens_details.cached_tokens,
        finish_reason: answer.finish_reason,
        token_ms: answer.arrivals.into_iter().map(ms).collect(),
        total_ms: ms(answer.total),
        handoff: None,
        text: answer.text,
    }
}

/// Milliseconds since `start`.
pub fn elapsed_ms(start: Instant) -> f64 {
    start.elapsed().as_secs_f64() * 1000.0
}
