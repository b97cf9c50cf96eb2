//! A served demo tokenizer and chat template with a scripted engine behind them.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use engine::api::{FinishReason, GenerateRequest, Logprobs, Output, RequestError, TokenId, Usage};
use engine::event::Event;
use engine::handle::{EngineHandle, EngineInfo, RequestId, Submission};
use engine::metrics::Metrics;
use models::{ChatTemplate, SamplingDefaults, Tokenizer};
use prometheus::Registry;
use reqwest::{RequestBuilder, Response};
use serde_json::{Value, json};
use server::args::Role;
use server::readiness::{Readiness, State};
use server::state::{AppState, Identity, Serving};
use server::text::Text;
use tokio::net::TcpListener;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

pub const MODEL: &str = "demo";
pub const MAX_MODEL_LEN: usize = 512;
pub const VOCAB_SIZE: usize = 4160;
/// Of the requests the fake engine answers; their prompts are said to be cached this far.
pub const CACHED: usize = 3;

/// Longer than anything here takes, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(20);

/// A server and the engine's side of its channel.
pub struct Harness {
    pub state: Arc<AppState>,
    pub tokenizer: Arc<Tokenizer>,
    pub url: String,
    pub address: std::net::SocketAddr,
    pub client: reqwest::Client,
    pub events: UnboundedReceiver<Event>,
    shutdown: Option<oneshot::Sender<()>>,
    server: JoinHandle<std::io::Result<()>>,
}

/// What differs between tests.
pub struct Setup {
    pub role: Role,
    pub grace: Duration,
    /// Whether the model is loaded and the worker ready.
    pub loaded: bool,
}

impl Default for Setup {
    fn default() -> Self {
        Self { role: Role::Both, grace: PATIENCE, loaded: true }
    }
}

/// A server whose engine the test plays.
pub async fn start(setup: Setup) -> Harness {
    let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
    let tokenizer = Arc::new(Tokenizer::load(&demo).unwrap());
    let (role, request_timeout) = (setup.role, PATIENCE);
    let identity = Identity { role, model_name: MODEL.into(), model_root: MODEL.into(), request_timeout };
    let state = AppState::new(identity, Readiness::default(), Registry::new()).unwrap();
    let (engine, events) = engine();
    if setup.loaded {
        let chat = ChatTemplate::load(&demo, tokenizer.config()).unwrap();
        let text = Arc::new(Text::new(Arc::clone(&tokenizer), chat));
        let defaults = SamplingDefaults { temperature: Some(0.6), ..SamplingDefaults::default() };
        state.serve(Serving { engine, text, defaults });
        state.readiness.set(State::Ready);
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, told) = oneshot::channel();
    let told = async {
        let _ = told.await;
    };
    let drained = state.drain.clone().run(told, state.readiness.clone(), setup.grace);
    let server =
        tokio::spawn(server::http::run(listener, server::routes::router(state.clone(), routes()), drained));
    let client = reqwest::Client::new();
    let url = format!("http://{address}");
    Harness { state, tokenizer, url, address, client, events, shutdown: Some(shutdown), server }
}

/// A server that answers every request with `text`.
pub async fn answering(text: &'static str) -> Harness {
    let mut harness = start(Setup::default()).await;
    harness.answer_all(text);
    harness
}

/// Beside the real ones: a handler with a bug.
fn routes() -> Router {
    async fn bug() -> &'static str {
        panic!("a bug for the test")
    }
    Router::new().route("/bug", get(bug))
}

fn engine() -> (EngineHandle, UnboundedReceiver<Event>) {
    let info = EngineInfo {
        model_name: MODEL.into(),
        max_model_len: MAX_MODEL_LEN,
        vocab_size: VOCAB_SIZE,
        block_size: 16,
        num_blocks: 1024,
        max_queued: 1024,
    };
    let (sender, receiver) = std::sync::mpsc::channel();
    let (forward, events) = unbounded_channel();
    std::thread::spawn(move || {
        for event in receiver {
            if forward.send(event).is_err() {
                break;
            }
        }
    });
    let metrics = Arc::new(Metrics::new(MODEL));
    let (waiting, alive) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(true)));
    (EngineHandle::new(sender, info, metrics, waiting, alive), events)
}

impl Harness {
    /// Plays the engine until the end of the test: every request gets `text`, as far as its limit goes.
    pub fn answer_all(&mut self, text: &str) {
        let ids = self.tokenizer.encode(text, false).unwrap();
        let (_, none) = unbounded_channel();
        let mut events = std::mem::replace(&mut self.events, none);
        tokio::spawn(async move {
            while let Some(event) = events.recv().await {
                if let Event::Submit(submission) = event {
                    answer(&submission, &ids);
                }
            }
        });
    }

    /// The next request that reaches the engine.
    pub async fn submission(&mut self) -> Submission {
        match self.event().await {
            Event::Submit(submission) => submission,
            other => panic!("expected a request, got {other:?}"),
        }
    }

    /// Waits until the engine is told to abort a request.
    pub async fn abort(&mut self) -> RequestId {
        match self.event().await {
            Event::Abort(id) => id,
            other => panic!("expected an abort, got {other:?}"),
        }
    }

    pub async fn event(&mut self) -> Event {
        soon(self.events.recv()).await.expect("the server is there as long as the harness is")
    }

    pub fn request(&self, path: &str, body: Value) -> RequestBuilder {
        self.client.post(format!("{}{path}", self.url)).json(&body)
    }

    /// Status and JSON of the answer.
    pub async fn post(&self, path: &str, body: Value) -> (u16, Value) {
        json_of(soon(self.request(path, body).send()).await.unwrap()).await
    }

    pub async fn get(&self, path: &str) -> (u16, Value) {
        json_of(soon(self.client.get(format!("{}{path}", self.url)).send()).await.unwrap()).await
    }

    /// The `data` of all events of a stream.
    pub async fn events(&self, path: &str, body: Value) -> Vec<String> {
        let response = soon(self.request(path, body).send()).await.unwrap();
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["content-type"], "text/event-stream; charset=utf-8");
        split_events(&soon(response.text()).await.unwrap())
    }

    pub fn ids(&self, text: &str) -> Vec<TokenId> {
        self.tokenizer.encode(text, false).unwrap()
    }

    /// As SIGTERM does.
    pub fn signal(&mut self) {
        self.shutdown.take().expect("the first signal").send(()).unwrap();
    }

    /// Waits until the server has closed its socket and its connections.
    pub async fn stopped(self) {
        soon(self.server).await.unwrap().unwrap();
    }
}

/// Fails the test instead of letting it hang.
pub async fn soon<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("this took too long")
}

pub async fn json_of(response: Response) -> (u16, Value) {
    let status = response.status().as_u16();
    let text = soon(response.text()).await.unwrap();
    (status, serde_json::from_str(&text).unwrap_or_else(|_| panic!("not JSON: {text}")))
}

pub fn split_events(text: &str) -> Vec<String> {
    let events = text.split_terminator("\n\n");
    events.map(|event| event.strip_prefix("data: ").expect("every event is data").to_owned()).collect()
}

/// All events but `[DONE]`, parsed; that one must be the last.
pub fn whole(mut events: Vec<String>) -> Vec<Value> {
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
}

/// Text of choice `index` in the chunks of a completion or a chat.
pub fn joined(chunks: &[Value], index: usize) -> String {
    let choices = chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap());
    let texts = choices.filter(|choice| choice["index"] == index).map(|choice| {
        let text = choice.get("text").unwrap_or(&choice["delta"]["content"]);
        text.as_str().unwrap().to_owned()
    });
    texts.collect()
}

pub fn token(id: TokenId) -> Output {
    Output::Token { id, cached_tokens: CACHED, logprobs: None }
}

/// A token with the log-probabilities that `request` asks for: the likeliest are this one and the ids after it.
pub fn scored_token(request: &GenerateRequest, id: TokenId) -> Output {
    let logprob = |rank: u32| -0.25 - f64::from(id % 64 + rank) as f32;
    let top = |count| (0..count).map(|rank| ((id + rank) % VOCAB_SIZE as u32, logprob(rank))).collect();
    let logprobs =
        request.sampling.logprobs.map(|count| Box::new(Logprobs { logprob: logprob(0), top: top(count) }));
    Output::Token { id, cached_tokens: CACHED, logprobs }
}

pub fn finished(request: &GenerateRequest, completion_tokens: usize, reason: FinishReason) -> Output {
    let (prompt_tokens, cached_tokens) = (request.prompt.len(), CACHED);
    let usage = Usage { prompt_tokens, completion_tokens, cached_tokens, transferred_tokens: 0 };
    Output::Finished { reason, stop_token: None, usage, timeline: Default::default(), kept: None }
}

/// As the engine answers: `ids` up to the request's limit. Errors only mean that nobody listens any more.
pub fn answer(submission: &Submission, ids: &[TokenId]) {
    let limit = submission.request.sampling.max_tokens;
    let (sent, reason) = match ids.len() >= limit {
        true => (limit, FinishReason::Length),
        false => (ids.len(), FinishReason::Stop),
    };
    for &id in &ids[..sent] {
        let _ = submission.outputs.send(scored_token(&submission.request, id));
    }
    // An end-of-sequence token counts but is not sent.
    let count = sent + usize::from(reason == FinishReason::Stop);
    let _ = submission.outputs.send(finished(&submission.request, count, reason));
}

pub fn fail(submission: &Submission, error: RequestError) {
    submission.outputs.send(Output::Failed(error)).unwrap();
}

/// A completion request; `more` wins over the defaults.
pub fn completion(prompt: &str, more: Value) -> Value {
    merged(json!({"model": MODEL, "prompt": prompt, "max_tokens": 64, "temperature": 0}), more)
}

/// A chat request of one user message.
pub fn chat(content: &str, more: Value) -> Value {
    let messages = json!([{"role": "user", "content": content}]);
    merged(json!({"model": MODEL, "messages": messages, "max_tokens": 64, "temperature": 0}), more)
}

fn merged(mut request: Value, more: Value) -> Value {
    request.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    request
}
