//! From checked requests to answers: submits one sequence per prompt and answer, then collects or streams them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::response::{IntoResponse, Response};
use engine::api::{GenerateRequest, KeptKv, PrefillBy, RequestError, TokenId};
use engine::core::Fetch;
use futures_util::future::try_join_all;
use serde_json::Value;

use super::choice::{Choice, Ends, Share};
use super::kv_transfer::{self, Extras, KvTransfer};
use super::options::Options;
use super::response::{Answer, Api, Envelope, Usage};
use super::sse;
use crate::error::ApiError;
use crate::frontend::headers::{PREFILL, UNLINKED};
use crate::layers::RequestId;
use crate::link::named::PrefillName;
use crate::state::{AppState, Handoffs, Serving, unix_time};

/// A request whose fields are read and whose prompts are tokens.
pub struct Job {
    pub api: Api,
    pub request_id: RequestId,
    pub arrival: Instant,
    pub options: Options,
    pub prompts: Vec<Vec<TokenId>>,
    /// For requests that set no limit; cut to what the model's length leaves.
    pub default_max_tokens: usize,
    pub kv: KvTransfer,
    /// Who computes the prompts, if a frontend said.
    pub prefill: PrefillName,
}

/// Runs `job` and answers it in one piece or as a stream. Dropping the future, or the body of the response, aborts it.
pub async fn respond(state: &Arc<AppState>, serving: &Serving, job: Job) -> Result<Response, ApiError> {
    let extras = Extras {
        return_timeline: job.options.return_timeline,
        with_kv: job.kv != KvTransfer::None,
        kept: Arc::default(),
    };
    let source = KvSource { fetch: job.kv.fetch(state).await?, prefill: prefill(state, &job.prefill).await };
    let unlinked = source.prefill == PrefillBy::Unlinked;
    let answered = answer(state, serving, &job, &source, extras).await;
    if !unlinked {
        return answered;
    }
    // An error, too, is the missing link's and not this worker's.
    let mut response = answered.unwrap_or_else(IntoResponse::into_response);
    response.headers_mut().insert(PREFILL, UNLINKED);
    Ok(response)
}

async fn answer(
    state: &Arc<AppState>,
    serving: &Serving,
    job: &Job,
    source: &KvSource,
    extras: Extras,
) -> Result<Response, ApiError> {
    let choices = submit(state, serving, job, source, &extras)?;
    let envelope = Envelope::new(job.api, &job.request_id.0, unix_time(), &state.model_name);
    match job.options.stream {
        Some(stream) => sse::respond(envelope, stream, extras, choices, state.drain.clone()).await,
        None => Ok(collect(envelope, &job.options, extras, choices).await?.into_response()),
    }
}

/// Where the KV of a request's prompts comes from.
struct KvSource {
    fetch: Option<Fetch>,
    prefill: PrefillBy,
}

/// Only a decode worker has a choice.
async fn prefill(state: &AppState, name: &PrefillName) -> PrefillBy {
    match state.kv.get() {
        Some(Handoffs::Fetches { named, .. }) => named.prefill(name).await,
        _ => PrefillBy::Anyone,
    }
}

/// If one is refused, the ones before it are dropped and so aborted.
fn submit(
    state: &Arc<AppState>,
    serving: &Serving,
    job: &Job,
    source: &KvSource,
    extras: &Extras,
) -> Result<Vec<Choice>, ApiError> {
    serving.engine.metrics().asked(job.options.n);
    let mut choices = Vec::new();
    for (prompt, ids) in job.prompts.iter().enumerate() {
        for copy in 0..job.options.n {
            let max_len = serving.engine.info().max_model_len;
            let request = GenerateRequest {
                request_id: job.request_id.0.clone(),
                prompt: ids.clone(),
                sampling: job.options.sampling_for(copy, ids.len(), job.default_max_tokens, max_len),
                cache_salt: job.options.cache_salt.clone(),
                keep: job.kv == KvTransfer::Keep,
                fetch: source.fetch.clone(),
                prefill: source.prefill,
                arrival: job.arrival,
                timeout: job.options.timeout.unwrap_or(Duration::MAX).min(state.request_timeout),
            };
            let min_tokens = request.sampling.min_tokens;
            let text = serving.text.answer(&job.options.stop, min_tokens, job.options.skip_special_tokens)?;
            let max_tokens = request.sampling.max_tokens;
            let outputs = serving.engine.submit(request)?;
            let share = Share { prompt, prompt_tokens: ids.len(), ..Share::default() };
            let report = extras.return_timeline || extras.with_kv;
            let on_kept = {
                let (state, kept) = (state.clone(), extras.kept.clone());
                move |kv: &KeptKv| drop(kept.set(kv_transfer::params_of(kv, &state)))
            };
            let ends = Ends { max_tokens, report, on_kept: Box::new(on_kept) };
            choices.push(Choice::new(choices.len(), share, ends, outputs, text));
        }
    }
    Ok(choices)
}

async fn collect(
    envelope: Envelope,
    options: &Options,
    extras: Extras,
    choices: Vec<Choice>,
) -> Result<Json<Value>, ApiError> {
    let with_logprobs = options.with_logprobs();
    let finished = try_join_all(choices.into_iter().map(|choice| finish(choice, with_logprobs))).await?;
    let (answers, shares): (Vec<_>, Vec<_>) = finished.into_iter().unzip();
    let extras = extras.fields(&shares);
    Ok(Json(envelope.answer(answers, usage(&shares), extras)))
}

async fn finish(mut choice: Choice, with_logprobs: bool) -> Result<(Answer, Share), RequestError> {
    let (mut text, mut logprobs) = (String::new(), Vec::new());
    loop {
        let piece = choice.next().await?;
        text.push_str(&piece.text);
        logprobs.extend(piece.logprobs);
        if let Some(finish) = piece.finish {
            let logprobs = with_logprobs.then_some(logprobs);
            return Ok((Answer { text, logprobs, finish }, choice.share));
        }
    }
}

/// The sum of all choices. Each prompt counts once, however many answers it got; so do its cached tokens, which
/// are those of its first answer, since the others find the first one's blocks.
pub fn usage(shares: &[Share]) -> Usage {
    let completion = shares.iter().map(|share| share.completion_tokens).sum();
    let firsts =
        || shares.iter().enumerate().filter(|&(i, share)| i == 0 || shares[i - 1].prompt != share.prompt);
    let prompt = firsts().map(|(_, share)| share.prompt_tokens).sum();
    Usage::new(prompt, completion, firsts().map(|(_, share)| share.cached_tokens).sum())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_prompt_counts_once_however_many_answers_it_got() {
        let base = Share { prompt_tokens: 10, completion_tokens: 4, ..Share::default() };
        let share = |prompt, cached_tokens| Share { prompt, cached_tokens, ..base };
        let shares = [share(0, 0), share(0, 8), share(1, 3), share(1, 8)];
        assert_eq!(usage(&shares), Usage::new(20, 16, 3));
        assert_eq!(usage(&[share(0, 2)]), Usage::new(10, 4, 2));
    }
}
