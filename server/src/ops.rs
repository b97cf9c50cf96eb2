//! What operators and their tools ask for: health, version, metrics, an empty prefix cache.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use engine::event::Event;
use prometheus::{Encoder, TextEncoder};
use serde_json::{Value, json};

use crate::discovery::WorkerRecord;
use crate::error::ApiError;
use crate::state::{AppState, Handoffs};

/// 200 if a request sent now would be served, else 503; both with the state and, where there is one, a reason.
pub async fn health(State(state): State<Arc<AppState>>) -> Response {
    let readiness = state.readiness.get();
    let status = if readiness.serves() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let mut body = json!({
        "status": readiness.label(),
        "reason": readiness.reason(),
        "role": state.role.as_str(),
    });
    if let Some(record) = state.record.get() {
        body["incarnation"] = json!(record.incarnation);
    }
    if let Some(Handoffs::Fetches { peers, .. }) = state.kv.get() {
        body["prefill"] = peers.details().into();
    }
    if let Some(transfers) = state.transfers.get() {
        body["kv_transport"] = transfers.details();
    }
    (status, Json(body)).into_response()
}

/// What this worker says of itself to frontends; 503 until it is loaded.
pub async fn worker(State(state): State<Arc<AppState>>) -> Result<Json<WorkerRecord>, ApiError> {
    let record = state.record.get().ok_or_else(|| ApiError::unavailable("the model is being loaded"))?;
    let draining = state.readiness.get() == crate::readiness::State::Draining;
    let measured = state.serving().ok().and_then(|serving| serving.engine.metrics().prefill_tokens_per_sec());
    let prefill_tokens_per_sec = measured.map(|speed| speed as f32);
    Ok(Json(WorkerRecord { draining, prefill_tokens_per_sec, ..record.clone() }))
}

/// 200 as long as the process answers.
pub async fn live() -> Json<serde_json::Value> {
    Json(json!({ "status": "alive" }))
}

pub async fn version() -> Json<serde_json::Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}

/// Prometheus' text format 0.0.4: the process's registry, and the engine's once it is there.
pub async fn metrics(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let encoder = TextEncoder::new();
    let mut families = state.registry.gather();
    if let Ok(serving) = state.serving() {
        families.extend(serving.engine.metrics().registry.gather());
    }
    let mut text = Vec::new();
    encoder
        .encode(&families, &mut text)
        .map_err(|error| ApiError::internal(format!("metrics cannot be encoded: {error}")))?;
    Ok(([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response())
}

/// vLLM's name. Requests sent after the answer find no block that was cached before; those that run keep theirs.
/// The body of the request does not matter.
pub async fn reset_prefix_cache(State(state): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    match state.serving()?.engine.send(Event::ResetPrefixCache) {
        true => Ok(Json(json!({}))),
        false => Err(ApiError::unavailable("the engine's thread has ended")),
    }
}
