//! `POST /tokenize` and `POST /detokenize`, in vLLM's shape.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use serde_json::{Value, json};

use super::body::JsonBody;
use super::chat::take_conversation;
use super::prompt::{Prompt, ids};
use crate::error::ApiError;
use crate::state::AppState;

/// Tokens of `prompt`, or of `messages` as the chat template renders them.
pub async fn tokenize(
    State(state): State<Arc<AppState>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Value>, ApiError> {
    state.check_model(fields.str("model")?)?;
    let serving = state.serving()?;
    let text = Arc::clone(&serving.text);
    let with_strings = fields.bool("return_token_strs")?.unwrap_or(false);
    let prompt = fields.str("prompt")?.map(str::to_owned);
    let tokens = match (prompt, fields.get("messages").is_some()) {
        (Some(prompt), false) => text.encode(vec![Prompt::Text(prompt)]).await?.remove(0),
        (None, true) => text.encode_chat(take_conversation(&mut fields)?).await?,
        _ => {
            return Err(ApiError::bad_field(
                "prompt",
                "expected either prompt (a string) or messages (a list)",
            ));
        }
    };
    let strings = with_strings.then(|| tokens.iter().map(|&id| serving.text.token(id)).collect::<Vec<_>>());
    Ok(Json(json!({
        "count": tokens.len(),
        "max_model_len": serving.engine.info().max_model_len,
        "tokens": tokens,
        "token_strs": strings,
    })))
}

/// The text of `tokens`, special tokens included.
pub async fn detokenize(
    State(state): State<Arc<AppState>>,
    JsonBody(mut fields): JsonBody,
) -> Result<Json<Value>, ApiError> {
    state.check_model(fields.str("model")?)?;
    let serving = state.serving()?;
    let tokens = match fields.take("tokens") {
        Some(Value::Array(items)) => ids("tokens", &items)?,
        other => {
            return Err(ApiError::bad_value("tokens", &other.unwrap_or_default(), "a list of token ids"));
        }
    };
    let vocab_size = serving.engine.info().vocab_size;
    if let Some((index, &id)) = tokens.iter().enumerate().find(|&(_, &id)| id as usize >= vocab_size) {
        return Err(ApiError::bad_value(
            format!("tokens.{index}"),
            &id.into(),
            format!("an id below {vocab_size}"),
        ));
    }
    Ok(Json(json!({ "prompt": serving.text.decode(&tokens) })))
}
