//! Which path of a frontend is served by what.

use std::sync::Arc;
use std::time::Instant;

use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::http::{HeaderMap, Response, StatusCode};
use axum::middleware::from_fn_with_state;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use axum::{Extension, Router};
use bytes::Bytes;

use super::deliver::{Order, deliver};
use super::flight::Ledger;
use super::request::Asked;
use super::state::Front;
use super::upstream::Upstream;
use super::{audit, explain, ops, page};
use crate::error::ApiError;
use crate::layers::{self, RequestId};
use crate::openai::{Api, MAX_BODY_BYTES, check_content_type};
use crate::routes::{no_method, no_route};

/// All routes of a frontend. Each router has a client of the workers of its own: made and used by one thread, its connections
/// live there too.
pub fn router(front: Arc<Front>) -> Router {
    let app = front.app.clone();
    Router::new()
        .route("/v1/chat/completions", post(chat))
        .route("/v1/completions", post(completions))
        .route("/v1/models", get(ops::models))
        .route("/v1/models/{id}", get(ops::model))
        .route("/tokenize", post(ops::tokenize))
        .route("/detokenize", post(ops::detokenize))
        .route("/reset_prefix_cache", post(ops::reset_prefix_cache))
        .route("/health", get(ops::health))
        .route("/live", get(crate::ops::live))
        .route("/ping", get(crate::ops::live).post(crate::ops::live))
        .route("/version", get(crate::ops::version))
        .route("/metrics", get(ops::metrics))
        .route("/workers", get(ops::workers))
        .route("/route/explain", post(explain::explain))
        .route("/route/index", get(audit::index))
        .route("/", get(page::page))
        .route("/status", get(page::status))
        .route("/status/events", get(page::events))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(front)
        .layer(Extension(Upstream::new()))
        .layer(from_fn_with_state(app, layers::observe))
}

async fn chat(
    State(front): State<Arc<Front>>,
    Extension(id): Extension<RequestId>,
    Extension(upstream): Extension<Upstream>,
    headers: HeaderMap,
    body: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Response<Body> {
    generate(&front, Api::Chat, id, upstream, headers, body).await.unwrap_or_else(IntoResponse::into_response)
}

async fn completions(
    State(front): State<Arc<Front>>,
    Extension(id): Extension<RequestId>,
    Extension(upstream): Extension<Upstream>,
    headers: HeaderMap,
    body: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Response<Body> {
    generate(&front, Api::Completions, id, upstream, headers, body)
        .await
        .unwrap_or_else(IntoResponse::into_response)
}

async fn generate(
    front: &Arc<Front>,
    api: Api,
    request_id: RequestId,
    upstream: Upstream,
    headers: HeaderMap,
    body: Result<Bytes, axum::extract::rejection::BytesRejection>,
) -> Result<Response<Body>, ApiError> {
    let arrival = Instant::now();
    // Counted before readiness is read: a shutdown that begins in between waits for this request.
    let running = Arc::new(front.app.drain.enter());
    front.app.admit()?;
    let limit = front.config.max_concurrent;
    if limit > 0 && front.metrics.inflight.get() >= limit as i64 {
        front.metrics.rejected.with_label_values(&["max_concurrent_requests"]).inc();
        let message = format!("{limit} requests are under way already (--max-concurrent-requests)");
        return Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, message));
    }
    check_content_type(&headers)?;
    let body = body.map_err(crate::openai::body_error)?;
    let asked = Asked::read(api, &body, front.naming()).await?;
    front.check_model(asked.model.as_deref())?;
    front.metrics.hashing_ms.observe(super::metrics::ms(arrival.elapsed()));
    let endpoint = match api {
        Api::Chat => "chat_completions",
        Api::Completions => "completions",
    };
    let ledger = Ledger {
        metrics: front.metrics.clone(),
        model: front.metrics.model(&front.model_label(asked.model.as_deref()), endpoint),
        recent: front.recent.clone(),
    };
    let order =
        Order { api, request_id: request_id.0, upstream, headers, body, asked, ledger, arrival, running };
    Ok(deliver(front, &order).await)
}
