//! `POST /v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;

use super::body::JsonBody;
use super::generate::{Job, respond};
use super::kv_transfer::KvTransfer;
use super::options::Options;
use super::prompt::take_prompts;
use super::response::Api;
use super::unsupported::check_completions;
use crate::error::ApiError;
use crate::layers::RequestId;
use crate::link::named::PrefillName;
use crate::state::AppState;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

pub async fn completions(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    headers: HeaderMap,
    JsonBody(mut fields): JsonBody,
) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    state.check_model(fields.str("model")?)?;
    let serving = state.serving()?;
    check_completions(&fields)?;
    let prefill = PrefillName::of(&headers)?;
    let kv = KvTransfer::parse(&fields, &state)?;
    let mut options = Options::parse(Api::Completions, &fields, &serving.defaults, serving.engine.info())?;
    let prompts = take_prompts(&mut fields)?;
    kv.restrict(prompts.len(), &mut options)?;
    check_count(prompts.len() * options.n, serving.engine.info().max_queued)?;
    let prompts = serving.text.clone().encode(prompts).await?;
    let default_max_tokens = DEFAULT_MAX_TOKENS;
    let job =
        Job { api: Api::Completions, request_id, arrival, options, prompts, default_max_tokens, kv, prefill };
    respond(&state, serving, job).await
}

/// A request that alone fills the queue could not be taken even by an idle server.
fn check_count(sequences: usize, max_queued: usize) -> Result<(), ApiError> {
    match sequences > max_queued {
        true => {
            let message = format!(
                "prompt and n ask for {sequences} answers, expected at most {max_queued} in a request"
            );
            Err(ApiError::bad_field("prompt", message))
        }
        false => Ok(()),
    }
}
