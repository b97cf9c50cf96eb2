//! `GET /v1/models` and `GET /v1/models/{id}`: the model, once requests for it would be served.

use std::sync::Arc;

use axum::Json;
use axum::extract::{Path, State};
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::state::AppState;

pub async fn list(State(state): State<Arc<AppState>>) -> Json<Value> {
    let models: Vec<_> = card(&state).into_iter().collect();
    Json(json!({ "object": "list", "data": models }))
}

/// 404 for another model, 503 while this one cannot be served.
pub async fn get(
    State(state): State<Arc<AppState>>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    state.check_model(Some(&id))?;
    state.admit()?;
    card(&state).map(Json).ok_or_else(|| ApiError::unavailable("the model is being loaded"))
}

fn card(state: &AppState) -> Option<Value> {
    let serving = state.serving().ok().filter(|_| state.readiness.get().serves())?;
    Some(json!({
        "id": state.model_name,
        "object": "model",
        "created": state.created,
        "owned_by": "kvferry",
        "root": state.model_root,
        "parent": null,
        "max_model_len": serving.engine.info().max_model_len,
    }))
}
