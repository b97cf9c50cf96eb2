//! What a worker answers about its KV events.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};

use super::snapshot;
use crate::error::ApiError;
use crate::state::AppState;

/// `GET /kv_event_sources`: as vLLM 0.33, one entry a data-parallel rank, with what our own readers need beside it.
pub async fn sources(State(state): State<Arc<AppState>>) -> Result<Json<Value>, ApiError> {
    let record = state.record.get().ok_or_else(|| ApiError::unavailable("the model is being loaded"))?;
    let source = record.events.as_ref().map(|events| {
        json!({
            "data_parallel_rank": 0,
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay_endpoint,
            "topic": events.topic,
            "block_size": record.block_size,
            "incarnation": record.incarnation,
            "hash_scheme": record.hash_scheme,
            "snapshot_url": events.snapshot_url,
        })
    });
    Ok(Json(source.into_iter().collect()))
}

/// `GET /kv_events/snapshot`: what the prefix cache holds, in lines ([`super::snapshot`]).
pub async fn snapshot(State(state): State<Arc<AppState>>) -> Result<Response, ApiError> {
    let serving = state.serving()?;
    let record = state.record.get().ok_or_else(|| ApiError::unavailable("the model is being loaded"))?;
    let taken = serving.engine.kv_snapshot().await;
    let taken =
        taken.ok_or_else(|| ApiError::unavailable("the engine is too far ahead of its events; ask again"))?;
    let block_size = serving.engine.info().block_size as u32;
    let lines = snapshot::lines(taken, record.incarnation, block_size).map(Ok::<_, std::convert::Infallible>);
    let body = Body::from_stream(stream::iter(lines));
    Ok(([(CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}
