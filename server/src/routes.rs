//! Which path is served by what, and the layers around them.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{Method, StatusCode, Uri};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};

use crate::error::{ApiError, shown};
use crate::openai::{MAX_BODY_BYTES, chat, completions, models, tokenize};
use crate::state::AppState;
use crate::{layers, ops};

/// All routes of a worker: those here and `more`, which are not behind the gate of the completions.
pub fn router(state: Arc<AppState>, more: Router) -> Router {
    let generation = Router::new()
        .route("/v1/completions", post(completions::completions))
        .route("/v1/chat/completions", post(chat::chat_completions))
        .route_layer(from_fn_with_state(state.clone(), layers::gate));
    let routes = Router::new()
        .route("/v1/models", get(models::list))
        .route("/v1/models/{id}", get(models::get))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/health", get(ops::health))
        .route("/live", get(ops::live))
        .route("/ping", get(ops::live).post(ops::live))
        .route("/version", get(ops::version))
        .route("/metrics", get(ops::metrics))
        .route("/reset_prefix_cache", post(ops::reset_prefix_cache))
        .merge(generation)
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(DefaultBodyLimit::max(MAX_BODY_BYTES))
        .with_state(state.clone());
    // Around everything, so that panics and unknown paths are seen too.
    routes.merge(more).layer(from_fn_with_state(state, layers::observe))
}

async fn no_route(method: Method, uri: Uri) -> ApiError {
    ApiError::not_found(format!(
        "there is no {} {}",
        shown(&method.as_str().into()),
        shown(&uri.path().into())
    ))
}

async fn no_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not take {}", shown(&uri.path().into()), shown(&method.as_str().into()));
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, message)
}
