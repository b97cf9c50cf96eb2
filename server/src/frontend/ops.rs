//! What operators and their tools ask a frontend for.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use futures_util::future::join_all;
use prometheus::{Encoder, TextEncoder};
use serde_json::{Value, json};

use super::fleet::{ModelCard, Worker};
use super::state::Front;
use crate::error::ApiError;

/// How long a worker may take to tokenize.
const TOKENIZE: std::time::Duration = std::time::Duration::from_secs(30);

/// 200 if a request sent now would be served, else 503; with each worker's standing.
pub async fn health(State(front): State<Arc<Front>>) -> Response<Body> {
    let readiness = front.readiness();
    let status = if readiness.serves() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    let now = Instant::now();
    let workers: Vec<_> = front.fleet.all().iter().map(|worker| with_index(&front, worker, now)).collect();
    let body = json!({
        "status": readiness.label(),
        "reason": readiness.reason(),
        "role": "frontend",
        "router_mode": front.config.mode.as_str(),
        "kv_event_source_mismatch_workers": front.router.mismatches(),
        "workers": workers,
    });
    (status, Json(body)).into_response()
}

/// A worker's standing, and where its part of the index comes from.
fn with_index(front: &Front, worker: &Worker, now: Instant) -> Value {
    let mut of = standing(worker, now);
    let id = worker.life().map(|life| life.id);
    let statuses = front.router.workers();
    let status = statuses.iter().find(|status| Some(status.record.incarnation) == id);
    of["kv_index"] = json!(status.map(|status| status.index));
    of["kv_event_code"] = json!(status.and_then(|status| status.alarm));
    of
}

fn standing(worker: &Worker, now: Instant) -> Value {
    let life = worker.life();
    let standing = worker.standing();
    let obstacle = standing.obstacle(now);
    json!({
        "url": worker.name,
        "role": worker.role.as_str(),
        "id": life.map(|life| life.id),
        "state": obstacle.map_or("ready", |obstacle| obstacle.label()),
        "reason": obstacle.map(|obstacle| obstacle.reason()),
    })
}

pub async fn models(State(front): State<Arc<Front>>) -> Json<Value> {
    let models = match front.readiness().serves() {
        true => front.models(),
        false => Vec::new(),
    };
    let cards: Vec<_> = models.iter().map(|model| card(&front, model)).collect();
    Json(json!({ "object": "list", "data": cards }))
}

/// 404 for a model that nobody has, 503 while nobody serves it.
pub async fn model(State(front): State<Arc<Front>>, Path(id): Path<String>) -> Result<Json<Value>, ApiError> {
    front.app.admit()?;
    front.check_model(Some(&id))?;
    let model = front.models().into_iter().find(|model| model.id == id);
    let model = model
        .ok_or_else(|| ApiError::unavailable(format!("no worker with the model {id:?} takes requests")))?;
    Ok(Json(card(&front, &model)))
}

fn card(front: &Front, model: &ModelCard) -> Value {
    json!({
        "id": model.id,
        "object": "model",
        "created": front.app.created,
        "owned_by": "kvferry",
        "max_model_len": model.max_model_len,
    })
}

/// Answered by a worker: all have the same tokenizer.
pub async fn tokenize(
    State(front): State<Arc<Front>>,
    _: HeaderMap,
    body: Bytes,
) -> Result<Response<Body>, ApiError> {
    forward(&front, "/tokenize", body).await
}

pub async fn detokenize(State(front): State<Arc<Front>>, body: Bytes) -> Result<Response<Body>, ApiError> {
    forward(&front, "/detokenize", body).await
}

/// vLLM's name, for all workers that can be reached: 200 if each has an empty prefix cache now, else 503 with what each said.
/// What was guessed of those that publish no events is forgotten.
pub async fn reset_prefix_cache(State(front): State<Arc<Front>>) -> Response<Body> {
    let workers = front.fleet.all();
    let resets = workers.iter().map(|worker| async {
        let uri = worker.uri("/reset_prefix_cache").ok_or("not a path")?;
        let answer = front.upstream.post_json(uri, Bytes::new(), front.config.probe_timeout).await;
        let (status, body) = answer.map_err(|error| error.to_string())?;
        if !status.is_success() {
            return Err(format!("it answered {status}: {}", String::from_utf8_lossy(&body)));
        }
        if let Some(life) = worker.life() {
            front.router.forget_guesses(life.id);
        }
        Ok(())
    });
    let outcomes: Vec<Result<(), String>> = join_all(resets).await;
    let status = match outcomes.iter().all(Result::is_ok) && !workers.is_empty() {
        true => StatusCode::OK,
        false => StatusCode::SERVICE_UNAVAILABLE,
    };
    let said: Vec<_> = workers
        .iter()
        .zip(outcomes)
        .map(|(worker, outcome)| json!({ "url": worker.name, "reset": outcome.is_ok(), "reason": outcome.err() }))
        .collect();
    (status, Json(json!({ "workers": said }))).into_response()
}

async fn forward(front: &Front, path: &str, body: Bytes) -> Result<Response<Body>, ApiError> {
    front.app.admit()?;
    let now = Instant::now();
    let workers = front.fleet.all();
    let worker = workers.iter().find(|worker| worker.role.serves() && worker.usable(now).is_ok());
    let worker = worker.ok_or_else(|| ApiError::unavailable("no worker takes requests"))?;
    let uri = worker.uri(path).ok_or_else(|| ApiError::internal(format!("{path} is no path")))?;
    let answer = front.upstream.post_json(uri, body, TOKENIZE).await;
    let (status, body) =
        answer.map_err(|error| ApiError::unavailable(format!("worker {}: {error}", worker.name)))?;
    Ok((status, [(header::CONTENT_TYPE, "application/json")], body).into_response())
}

/// Prometheus' text format 0.0.4.
pub async fn metrics(State(front): State<Arc<Front>>) -> Result<Response<Body>, ApiError> {
    front.export();
    let encoder = TextEncoder::new();
    let mut text = Vec::new();
    encoder
        .encode(&front.app.registry.gather(), &mut text)
        .map_err(|error| ApiError::internal(format!("metrics cannot be encoded: {error}")))?;
    Ok(([(header::CONTENT_TYPE, encoder.format_type().to_owned())], text).into_response())
}

/// Each worker with what it said of itself.
pub async fn workers(State(front): State<Arc<Front>>) -> Json<Value> {
    let now = Instant::now();
    let workers: Vec<_> = front
        .fleet
        .all()
        .iter()
        .map(|worker| {
            let mut of = standing(worker, now);
            of["record"] = json!(worker.life().map(|life| life.record.clone()));
            of
        })
        .collect();
    Json(json!({ "workers": workers }))
}
