//! An HTTP client of one server.

use std::time::Duration;

use futures_util::StreamExt;
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::ask::{Answer, Ask, Failure, Usage};
use crate::metrics::Metrics;
use crate::wait::until;

/// Longer than any answer of a test takes on a busy machine; what takes longer hangs.
const ANSWER: Duration = Duration::from_secs(90);

/// How long a server may take to give back everything after its last request.
const SETTLE: Duration = Duration::from_secs(10);

/// A client. Each request has a connection of its own, so that dropping one shows the server that the client left.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
}

impl Client {
    pub fn new(port: u16) -> Self {
        Self::at("127.0.0.1", port)
    }

    /// A client of the worker at another address of this machine; an IPv6 address in brackets.
    pub fn at(host: &str, port: u16) -> Self {
        let http = reqwest::Client::builder().pool_max_idle_per_host(0).no_proxy().build();
        Self {
            http: http.expect("a client without TLS needs nothing"),
            base: format!("http://{host}:{port}"),
        }
    }

    /// The address, as `--prefill` takes it.
    pub fn url(&self) -> &str {
        &self.base
    }

    /// The whole answer.
    pub async fn ask(&self, ask: &Ask) -> Result<Answer, Failure> {
        let answered = async {
            if ask.is_streamed() {
                return self.open(ask).await?.finish().await;
            }
            let (status, body) = self.post(ask.path, &Value::Object(ask.body.clone())).await?;
            match status {
                200 => Answer::read(&body).map_err(Failure::Broken),
                _ => Err(Failure::Status { status, message: message(&body)? }),
            }
        };
        timeout(ANSWER, answered)
            .await
            .unwrap_or_else(|_| Err(Failure::Broken(format!("no end within {ANSWER:?}"))))
    }

    /// The whole answer, which must be one.
    pub async fn answer(&self, ask: &Ask) -> Answer {
        self.ask(ask).await.unwrap_or_else(|failure| panic!("{}{} {ask:?}: {failure:?}", self.base, ask.path))
    }

    /// The whole answers to requests that run at the same time.
    pub async fn answers(&self, asks: &[Ask]) -> Vec<Answer> {
        crate::wait::all(asks.iter().map(|ask| self.answer(ask))).await
    }

    /// Opens a stream; returns when the server begins to answer. Dropping it is a client that leaves.
    pub async fn open(&self, ask: &Ask) -> Result<Stream, Failure> {
        let request = self.http.post(format!("{}{}", self.base, ask.path)).json(&ask.body);
        let response = request.send().await.map_err(broken)?;
        let status = response.status().as_u16();
        if status != 200 {
            let body: Value = response.json().await.map_err(broken)?;
            return Err(Failure::Status { status, message: message(&body)? });
        }
        let body = response.bytes_stream().map(|bytes| bytes.map(|bytes| bytes.to_vec())).boxed();
        Ok(Stream { body, received: Vec::new(), text: String::new() })
    }

    /// Status and body of a POST.
    pub async fn post(&self, path: &str, body: &Value) -> Result<(u16, Value), Failure> {
        let response =
            self.http.post(format!("{}{path}", self.base)).json(body).send().await.map_err(broken)?;
        let status = response.status().as_u16();
        Ok((status, response.json().await.map_err(broken)?))
    }

    /// Status, headers and text of a POST.
    pub async fn exchange(&self, ask: &Ask) -> Result<(u16, Vec<(String, String)>, String), Failure> {
        let request = self.http.post(format!("{}{}", self.base, ask.path)).json(&ask.body);
        let response = request.timeout(ANSWER).send().await.map_err(broken)?;
        let status = response.status().as_u16();
        let header = |(name, value): (&reqwest::header::HeaderName, &reqwest::header::HeaderValue)| {
            (name.to_string(), String::from_utf8_lossy(value.as_bytes()).into_owned())
        };
        let headers = response.headers().iter().map(header).collect();
        Ok((status, headers, response.text().await.map_err(broken)?))
    }

    /// Status and text of a GET.
    pub async fn get(&self, path: &str) -> Result<(u16, String), Failure> {
        let request = self.http.get(format!("{}{path}", self.base)).timeout(SETTLE);
        let response = request.send().await.map_err(broken)?;
        let status = response.status().as_u16();
        Ok((status, response.text().await.map_err(broken)?))
    }

    /// Token ids of a text.
    pub async fn tokenize(&self, text: &str) -> Vec<u32> {
        self.tokens_of(json!({ "prompt": text })).await
    }

    /// Token ids of a conversation of one question, up to where the answer begins.
    pub async fn tokenize_chat(&self, question: &str) -> Vec<u32> {
        self.tokens_of(json!({ "messages": [{ "role": "user", "content": question }] })).await
    }

    async fn tokens_of(&self, body: Value) -> Vec<u32> {
        let (status, body) = self.post("/tokenize", &body).await.expect("/tokenize answers");
        assert_eq!(status, 200, "{body}");
        let ids = body["tokens"].as_array().expect("/tokenize lists tokens");
        ids.iter().map(|id| id.as_u64().expect("a token id is a number") as u32).collect()
    }

    pub async fn metrics(&self) -> Metrics {
        self.try_metrics().await.unwrap_or_else(|reason| panic!("{}/metrics: {reason}", self.base))
    }

    /// As [`Self::metrics`], for a server that may not be able to answer now.
    pub async fn try_metrics(&self) -> Result<Metrics, String> {
        let (_, text) = self.get("/metrics").await.map_err(|failure| format!("{failure:?}"))?;
        Ok(Metrics::parse(&text))
    }

    /// Status of `/health`, and its `status` and `reason`.
    pub async fn health(&self) -> Result<(u16, String, String), String> {
        let (status, text) = self.get("/health").await.map_err(|failure| format!("{failure:?}"))?;
        let body: Value = serde_json::from_str(&text).map_err(|error| format!("{text:?}: {error}"))?;
        let word = |field: &str| body[field].as_str().unwrap_or_default().to_owned();
        Ok((status, word("status"), word("reason")))
    }

    /// Waits for `ready` in `/health`.
    pub async fn is_ready(&self) {
        until(ANSWER, "ready", || async {
            let (_, status, reason) = self.health().await?;
            (status == "ready").then_some(()).ok_or(format!("{status}: {reason}"))
        })
        .await
    }

    /// Waits until no request is left and every block is free or cached.
    pub async fn settled(&self) -> Metrics {
        until(SETTLE, "all blocks free or cached and no request left", || async {
            let metrics = self.try_metrics().await?;
            match (metrics.account().held(), metrics.in_progress()) {
                (0, [0, 0, 0]) => Ok(metrics),
                state => Err(format!("{}: {state:?}, {:?}", self.base, metrics.account())),
            }
        })
        .await
    }

    /// Waits until `/metrics` is as `condition` says.
    pub async fn metrics_when(&self, what: &str, condition: impl Fn(&Metrics) -> bool) -> Metrics {
        until(ANSWER, what, || async {
            let metrics = self.try_metrics().await?;
            condition(&metrics).then_some(()).ok_or_else(|| metrics.state())?;
            Ok(metrics)
        })
        .await
    }
}

/// A stream of server-sent events that a server has begun.
pub struct Stream {
    body: futures_util::stream::BoxStream<'static, reqwest::Result<Vec<u8>>>,
    received: Vec<u8>,
    text: String,
}

impl Stream {
    /// The next event's data; `None` when the body ends.
    async fn event(&mut self) -> Result<Option<String>, Failure> {
        loop {
            if let Some(end) = self.received.windows(2).position(|pair| pair == b"\n\n") {
                let event: Vec<u8> = self.received.drain(..end + 2).collect();
                let event = String::from_utf8(event).map_err(|error| Failure::Broken(error.to_string()))?;
                let data = event.trim_end().strip_prefix("data: ");
                return data
                    .map(|data| Some(data.to_owned()))
                    .ok_or(Failure::Broken(format!("event {event:?}")));
            }
            match self.body.next().await {
                Some(Ok(bytes)) => self.received.extend_from_slice(&bytes),
                Some(Err(error)) => return Err(broken(error)),
                None if self.received.is_empty() => return Ok(None),
                None => return Err(Failure::Broken("the stream ends within an event".into())),
            }
        }
    }

    /// The next event that is no error and not the end.
    async fn chunk(&mut self) -> Result<Option<Value>, Failure> {
        let Some(data) = self.event().await? else {
            return Err(Failure::Broken(format!("the stream ends without [DONE], after {:?}", self.text)));
        };
        if data == "[DONE]" {
            return Ok(None);
        }
        let chunk: Value = serde_json::from_str(&data).map_err(|error| Failure::Broken(error.to_string()))?;
        if chunk.get("error").is_some() {
            return Err(Failure::InStream { text: self.text.clone(), message: message(&chunk)? });
        }
        let choice = &chunk["choices"][0];
        let piece = choice["text"].as_str().or(choice["delta"]["content"].as_str());
        self.text.push_str(piece.unwrap_or_default());
        Ok(Some(chunk))
    }

    /// Waits for text to come; the text so far.
    pub async fn more_text(&mut self) -> Result<&str, Failure> {
        let before = self.text.len();
        while self.text.len() == before {
            let next = timeout(ANSWER, self.chunk()).await;
            if next.map_err(|_| Failure::Broken("no text in time".into()))??.is_none() {
                return Err(Failure::Broken(format!("the stream ended after {:?}", self.text)));
            }
        }
        Ok(&self.text)
    }

    /// Reads to the end.
    pub async fn finish(mut self) -> Result<Answer, Failure> {
        let (mut finish, mut usage) = (None, None);
        loop {
            let next = timeout(ANSWER, self.chunk()).await;
            let Some(chunk) = next.map_err(|_| Failure::Broken("no event in time".into()))?? else { break };
            finish = finish.or(chunk["choices"][0]["finish_reason"].as_str().map(str::to_owned));
            usage = Usage::read(&chunk["usage"]).or(usage);
        }
        match (finish, usage) {
            (Some(finish), Some(usage)) => Ok(Answer { text: self.text, finish, usage }),
            missing => Err(Failure::Broken(format!("[DONE] without finish_reason or usage: {missing:?}"))),
        }
    }
}

/// The message of an error in OpenAI's shape, which every error has.
fn message(body: &Value) -> Result<String, Failure> {
    let error = &body["error"];
    match (error["message"].as_str(), error["type"].as_str(), error["code"].as_u64()) {
        (Some(message), Some(_), Some(_)) => Ok(message.to_owned()),
        _ => Err(Failure::Broken(format!("not an error in OpenAI's shape: {body}"))),
    }
}

fn broken(error: reqwest::Error) -> Failure {
    let source = std::error::Error::source(&error).map(ToString::to_string).unwrap_or_default();
    Failure::Broken(format!("{error}: {source}"))
}
