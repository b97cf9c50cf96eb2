//! A worker that is not ours: OpenAI's API with whatever fault a test needs, over real sockets.

use std::sync::{Arc, Mutex, PoisonError};

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// The model that it serves: the one that tests ask for.
const MODEL: &str = "demo";

/// What becomes of the next requests.
#[derive(Clone, Debug, Default, PartialEq)]
pub enum Behaviour {
    /// A short answer.
    #[default]
    Answer,
    /// This status, with `Retry-After: 1` and an error's body.
    Refuse(u16),
    /// A stream that stops after so many events, with its connection.
    Break(usize),
    /// A stream that ends after so many events, as if that were all.
    Stop(usize),
    /// Nothing, for ever.
    Hang,
    /// As a prefill worker of vLLM: one token, and where the KV is. With `None`: the answer without it.
    Prefill(Option<Value>),
}

/// What it was sent.
#[derive(Clone, Debug)]
pub struct Received {
    pub path: &'static str,
    pub headers: HeaderMap,
    pub bytes: Bytes,
    pub body: Value,
}

/// A running fake; ends when dropped.
#[derive(Debug)]
pub struct FakeWorker {
    port: u16,
    shared: Arc<Shared>,
    server: JoinHandle<()>,
}

#[derive(Debug, Default)]
struct Shared {
    behaviour: Mutex<Behaviour>,
    received: Mutex<Vec<Received>>,
    /// Requests that run; a client that leaves ends one.
    running: Arc<()>,
}

impl FakeWorker {
    pub async fn start(behaviour: Behaviour) -> Self {
        let shared = Arc::new(Shared { behaviour: Mutex::new(behaviour), ..Shared::default() });
        let health = get(|| async { Json(json!({})) });
        let models =
            get(|| async { Json(json!({ "object": "list", "data": [{ "id": MODEL, "object": "model" }] })) });
        let router = Router::new()
            .route("/health", health)
            .route("/v1/models", models)
            .route("/v1/completions", post(completions))
            .route("/v1/chat/completions", post(chat))
            .with_state(shared.clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
        let port = listener.local_addr().expect("it is bound").port();
        let server = tokio::spawn(async move {
            let _ = axum::serve(listener, router).await;
        });
        Self { port, shared, server }
    }

    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// From the next request on.
    pub fn behave(&self, behaviour: Behaviour) {
        *lock(&self.shared.behaviour) = behaviour;
    }

    /// Everything it was sent so far.
    pub fn received(&self) -> Vec<Received> {
        lock(&self.shared.received).clone()
    }

    /// Requests whose client still waits.
    pub fn running(&self) -> usize {
        Arc::strong_count(&self.shared.running) - 1
    }
}

impl Drop for FakeWorker {
    fn drop(&mut self) {
        self.server.abort();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

async fn completions(State(shared): State<Arc<Shared>>, headers: HeaderMap, bytes: Bytes) -> Response {
    answer(shared, "/v1/completions", headers, bytes).await
}

async fn chat(State(shared): State<Arc<Shared>>, headers: HeaderMap, bytes: Bytes) -> Response {
    answer(shared, "/v1/chat/completions", headers, bytes).await
}

async fn answer(shared: Arc<Shared>, path: &'static str, headers: HeaderMap, bytes: Bytes) -> Response {
    let running = shared.running.clone();
    let body: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    let streams = body["stream"] == true;
    lock(&shared.received).push(Received { path, headers, bytes, body });
    let behaviour = lock(&shared.behaviour).clone();
    match behaviour {
        Behaviour::Answer if streams => stream(3, End::Done, running),
        Behaviour::Answer => whole(json!({})),
        Behaviour::Refuse(status) => {
            let status = StatusCode::from_u16(status).expect("a test names a real status");
            let error =
                json!({ "message": "no room", "type": "Refused", "param": null, "code": status.as_u16() });
            let body = json!({ "error": error });
            (status, [(header::RETRY_AFTER, "1")], Json(body)).into_response()
        }
        Behaviour::Break(events) => stream(events, End::Broken, running),
        Behaviour::Stop(events) => stream(events, End::Silent, running),
        Behaviour::Hang => {
            let _running = running;
            std::future::pending().await
        }
        Behaviour::Prefill(None) => whole(json!({})),
        Behaviour::Prefill(Some(params)) => whole(json!({ "kv_transfer_params": params })),
    }
}

fn whole(more: Value) -> Response {
    let mut body = json!({
        "id": "cmpl-1", "object": "text_completion", "model": MODEL,
        "choices": [{ "index": 0, "text": "a b c", "message": { "content": "a b c" }, "finish_reason": "length" }],
        "usage": {
            "prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6,
            "prompt_tokens_details": { "cached_tokens": 0 },
        },
    });
    let fields = body.as_object_mut().expect("an object");
    fields.extend(more.as_object().expect("further fields").clone());
    Json(body).into_response()
}

#[derive(Clone, Copy, PartialEq)]
enum End {
    Done,
    Silent,
    Broken,
}

fn stream(events: usize, end: End, running: Arc<()>) -> Response {
    let event = |index: usize| {
        let choice = json!({ "index": 0, "text": format!("{index} "), "finish_reason": null });
        Ok(format!("data: {}\n\n", json!({ "choices": [choice] })))
    };
    let last: Vec<std::io::Result<String>> = match end {
        End::Done => {
            let choice = json!({ "index": 0, "text": "", "finish_reason": "length" });
            let usage = json!({
                "prompt_tokens": 3, "completion_tokens": events, "total_tokens": 3 + events,
                "prompt_tokens_details": { "cached_tokens": 0 },
            });
            let chunk = json!({ "choices": [choice], "usage": usage });
            vec![Ok(format!("data: {chunk}\n\n")), Ok("data: [DONE]\n\n".into())]
        }
        End::Silent => vec![],
        End::Broken => vec![Err(std::io::Error::other("a fault of the test"))],
    };
    let pieces: Vec<std::io::Result<String>> = (0..events).map(event).chain(last).collect();
    // One after the other, so that none is written together with the fault behind it.
    let body = stream::iter(pieces).then(move |piece| {
        let running = running.clone();
        async move {
            tokio::task::yield_now().await;
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
            drop(running);
            piece
        }
    });
    ([(header::CONTENT_TYPE, "text/event-stream")], Body::from_stream(body)).into_response()
}
