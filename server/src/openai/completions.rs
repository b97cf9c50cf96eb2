//! `POST /v1/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;

use super::body::JsonBody;
use super::generate::{Job, respond};
use super::options::Options;
use super::prompt::{Prompt, take_prompts};
use super::response::Api;
use super::unsupported::check_completions;
use crate::error::ApiError;
use crate::layers::RequestId;
use crate::state::AppState;

/// OpenAI's default.
const DEFAULT_MAX_TOKENS: usize = 16;

pub async fn completions(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    state.check_model(fields.str("model")?)?;
    let serving = state.serving()?;
    check_completions(&fields)?;
    let options = Options::parse(&fields, &serving.defaults, serving.engine.info())?;
    let mut prompts = Vec::new();
    for prompt in take_prompts(&mut fields)? {
        prompts.push(match prompt {
            Prompt::Ids(ids) => ids,
            Prompt::Text(text) => serving.text.clone().encode(text).await?,
        });
    }
    let default_max_tokens = DEFAULT_MAX_TOKENS;
    let job = Job { api: Api::Completions, request_id, arrival, options, prompts, default_max_tokens };
    respond(&state, serving, job).await
}
