//! What happens around every request: an id, a count, a caught panic, and the gate that refuses work which
//! this worker cannot do now.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures_util::FutureExt;
use prometheus::{IntCounterVec, Opts, Registry};
use rand::Rng;

use crate::error::ApiError;
use crate::state::AppState;

const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Longer ids are replaced: they end in logs and answers.
const MAX_REQUEST_ID: usize = 128;

/// The client's `X-Request-Id`, or one made here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestId(pub String);

impl RequestId {
    fn of(headers: &HeaderMap) -> Self {
        let given = headers.get(X_REQUEST_ID).and_then(|id| id.to_str().ok());
        let usable = |id: &&str| !id.is_empty() && id.len() <= MAX_REQUEST_ID && id.is_ascii();
        match given.filter(usable) {
            Some(id) => Self(id.to_owned()),
            None => Self(format!("{:016x}", rand::rng().random::<u64>())),
        }
    }
}

/// Requests by route, method and status. Labels have few values whatever clients send.
#[derive(Clone, Debug)]
pub struct HttpMetrics {
    requests: IntCounterVec,
}

impl HttpMetrics {
    /// Fails only if `registry` has a metric of this name already.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        let opts = Opts::new("http_requests_total", "HTTP requests by handler, method and status.");
        let requests = IntCounterVec::new(opts, &["handler", "method", "status"])?;
        registry.register(Box::new(requests.clone()))?;
        Ok(Self { requests })
    }

    fn count(&self, handler: &str, method: &Method, response: &Response) {
        self.requests.with_label_values(&[handler, known(method), response.status().as_str()]).inc();
    }
}

/// Clients may send any word as a method; the ones that no route has share a label.
fn known(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::POST => "POST",
        Method::HEAD => "HEAD",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// Outermost: names the request, counts it, and turns a panic into 500.
pub async fn observe(State(state): State<Arc<AppState>>, mut request: Request, next: Next) -> Response {
    let id = RequestId::of(request.headers());
    let method = request.method().clone();
    let path = request.extensions().get::<MatchedPath>().cloned();
    request.extensions_mut().insert(id.clone());
    let mut response = panic_to_500(next.run(request), &id).await;
    state.http_metrics.count(path.as_ref().map_or("none", MatchedPath::as_str), &method, &response);
    if let Ok(id) = HeaderValue::from_str(&id.0) {
        response.headers_mut().insert(X_REQUEST_ID, id);
    }
    response
}

async fn panic_to_500(response: impl Future<Output = Response>, id: &RequestId) -> Response {
    // The state behind the handlers is locks that recover from poison and channels, so what a panic leaves
    // behind is as good as what an error leaves behind.
    AssertUnwindSafe(response).catch_unwind().await.unwrap_or_else(|_| {
        tracing::error!(request_id = id.0, "a handler panicked; this is a bug");
        ApiError::internal("the server has a bug: a handler panicked").into_response()
    })
}

/// In front of everything that needs the engine: refuses with 503 unless the worker is ready, and ends what
/// still runs when the grace period of a shutdown is over.
pub async fn gate(State(state): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    // Counted before readiness is read: a shutdown that begins in between waits for this request.
    let _running = state.drain.enter();
    if let Err(refusal) = state.admit() {
        return refusal.into_response();
    }
    let cut = state.drain.cut();
    tokio::select! {
        response = next.run(request) => response,
        () = cut => AppState::cut_error().into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id_of(value: &[u8]) -> String {
        let mut headers = HeaderMap::new();
        headers.insert(X_REQUEST_ID, HeaderValue::from_bytes(value).unwrap());
        RequestId::of(&headers).0
    }

    #[test]
    fn usable_request_ids_are_kept_and_others_replaced() {
        assert_eq!(id_of(b"my-id-123"), "my-id-123");
        for bad in [&b""[..], &[b'x'; MAX_REQUEST_ID + 1], "naïve".as_bytes()] {
            let made = id_of(bad);
            assert!(made.len() == 16 && made.bytes().all(|b| b.is_ascii_hexdigit()), "{made}");
        }
    }
}
