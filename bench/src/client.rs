//! A client of one `serve` process, on OpenAI's API.

use std::time::{Duration, Instant};

use futures_util::StreamExt;
use reqwest::{RequestBuilder, Response};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::error::{BenchError, Result};
use crate::prometheus::Scrape;
use crate::sse::SseReader;

/// Talks to one process.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    base: String,
}

/// What `/health` says.
#[derive(Clone, Debug, Deserialize)]
pub struct Health {
    pub status: String,
    pub reason: Option<String>,
}

/// What `/v1/models` says of the one model.
#[derive(Clone, Debug, Deserialize)]
pub struct ModelCard {
    pub max_model_len: usize,
}

/// OpenAI's token counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    #[serde(default)]
    pub prompt_tokens_details: PromptTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}

/// A streamed answer, whole.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Answer {
    pub text: String,
    pub usage: Usage,
    pub finish_reason: Option<String>,
    /// When each token was known to the client, since it sent the request. A token that gave no text yet counts with
    /// the event that follows it.
    pub arrivals: Vec<Duration>,
    /// When the stream ended.
    pub total: Duration,
}

/// An event of a stream, of either API.
#[derive(Debug, Deserialize)]
struct Chunk {
    #[serde(default)]
    choices: Vec<Choice>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    text: Option<String>,
    delta: Option<Delta>,
    finish_reason: Option<String>,
}

#[derive(Debug, Deserialize)]
struct Delta {
    content: Option<String>,
}

impl Client {
    /// `base` is like `http://127.0.0.1:8000`.
    pub fn new(base: &str) -> Self {
        let http = reqwest::Client::builder().no_proxy().build();
        let http =
            http.expect("a client without proxies and TLS needs nothing from the system. This is a bug.");
        Self { http, base: base.to_owned() }
    }

    pub fn base(&self) -> &str {
        &self.base
    }

    /// Answered while the process loads, too.
    pub async fn health(&self) -> Result<Health> {
        let url = self.url("/health");
        let response = self.http.get(&url).send().await.map_err(http_error(&url))?;
        response.json().await.map_err(http_error(&url))
    }

    pub async fn model(&self) -> Result<ModelCard> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<ModelCard>,
        }
        let url = self.url("/v1/models");
        let models: Models = self.json(self.http.get(&url), &url).await?;
        models.data.into_iter().next().ok_or_else(|| unexpected(&url, "no model".into()))
    }

    pub async fn tokenize(&self, text: &str) -> Result<Vec<u32>> {
        #[derive(Deserialize)]
        struct Tokens {
            tokens: Vec<u32>,
        }
        let url = self.url("/tokenize");
        let tokens: Tokens = self.json(self.http.post(&url).json(&json!({ "prompt": text })), &url).await?;
        Ok(tokens.tokens)
    }

    /// Requests sent from now on find nothing that was cached before.
    pub async fn reset_prefix_cache(&self) -> Result<()> {
        let url = self.url("/reset_prefix_cache");
        self.send(self.http.post(&url), &url).await.map(|_| ())
    }

    pub async fn metrics(&self) -> Result<Scrape> {
        let url = self.url("/metrics");
        let text = self.send(self.http.get(&url), &url).await?.text().await.map_err(http_error(&url))?;
        Scrape::parse(&text).map_err(|line| unexpected(&url, format!("{line:?} is no sample")))
    }

    /// Sends `body` to `path` as a stream under `request_id`, and gives every piece of text to `on_text` at once.
    pub async fn stream(
        &self,
        path: &str,
        request_id: &str,
        mut body: Value,
        mut on_text: impl FnMut(&str),
    ) -> Result<Answer> {
        body["stream"] = true.into();
        body["stream_options"] = json!({ "include_usage": true, "continuous_usage_stats": true });
        let url = self.url(path);
        let request = self.http.post(&url).header("x-request-id", request_id).json(&body);
        let sent = Instant::now();
        let mut bytes = self.send(request, &url).await?.bytes_stream();
        let (mut reader, mut answer, mut done) = (SseReader::default(), Answer::default(), false);
        while let Some(bytes) = bytes.next().await {
            let events = reader.feed(&bytes.map_err(http_error(&url))?);
            let now = sent.elapsed();
            for event in events {
                match event.as_str() {
                    "[DONE]" => done = true,
                    event => on_text(&answer.take(event, now).map_err(|reason| unexpected(&url, reason))?),
                }
            }
            answer.total = now;
        }
        match done {
            true => Ok(answer),
            false => Err(unexpected(&url, "the stream ended before [DONE]".into())),
        }
    }

    fn url(&self, path: &str) -> String {
        format!("{}{path}", self.base)
    }

    async fn json<T: DeserializeOwned>(&self, request: RequestBuilder, url: &str) -> Result<T> {
        self.send(request, url).await?.json().await.map_err(http_error(url))
    }

    async fn send(&self, request: RequestBuilder, url: &str) -> Result<Response> {
        let response = request.send().await.map_err(http_error(url))?;
        let status = response.status().as_u16();
        match status {
            200 => Ok(response),
            _ => {
                let body = response.text().await.map_err(http_error(url))?;
                Err(BenchError::Status { url: url.to_owned(), status, body })
            }
        }
    }
}

impl Answer {
    /// Adds an event's text, which it returns, and notes when its tokens came.
    fn take(&mut self, event: &str, now: Duration) -> std::result::Result<String, String> {
        let chunk: Chunk = serde_json::from_str(event).map_err(|error| format!("{event}: {error}"))?;
        if let Some(error) = chunk.error {
            return Err(format!("the request failed within the stream: {error}"));
        }
        if let Some(usage) = chunk.usage {
            self.usage = usage;
            self.arrivals.resize(usage.completion_tokens.max(self.arrivals.len()), now);
        }
        let mut text = String::new();
        for choice in chunk.choices {
            text += &choice.text.or(choice.delta.and_then(|delta| delta.content)).unwrap_or_default();
            self.finish_reason = choice.finish_reason.or(self.finish_reason.take());
        }
        self.text += &text;
        Ok(text)
    }
}

/// The JSON at `url`.
pub async fn get_json<T: DeserializeOwned>(url: &str) -> Result<T> {
    let client = Client::new("");
    client.json(client.http.get(url), url).await
}

fn http_error(url: &str) -> impl FnOnce(reqwest::Error) -> BenchError {
    let url = url.to_owned();
    // The address is in our own message.
    |source| BenchError::Http { url, source: source.without_url() }
}

fn unexpected(url: &str, reason: String) -> BenchError {
    BenchError::Answer { url: url.to_owned(), reason }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn events_of_both_apis_make_an_answer() {
        let mut answer = Answer::default();
        let usage = |n: usize| json!({"prompt_tokens": 3, "completion_tokens": n, "prompt_tokens_details": {"cached_tokens": 1}});
        let opening = json!({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}], "usage": usage(0)});
        let events = [
            (1, opening),
            (5, json!({"choices": [{"delta": {"content": "a"}, "finish_reason": null}], "usage": usage(1)})),
            // Two tokens in one event: the first gave no text.
            (9, json!({"choices": [{"text": "é", "finish_reason": "length"}], "usage": usage(3)})),
            (9, json!({"choices": [], "usage": usage(3)})),
        ];
        for (at, event) in events {
            answer.take(&event.to_string(), ms(at)).unwrap();
        }
        assert_eq!((answer.text.as_str(), answer.finish_reason.as_deref()), ("aé", Some("length")));
        assert_eq!(answer.arrivals, [ms(5), ms(9), ms(9)]);
        assert_eq!(
            (answer.usage.completion_tokens, answer.usage.prompt_tokens_details.cached_tokens),
            (3, 1)
        );
    }

    #[test]
    fn an_error_within_a_stream_is_an_error() {
        let error = json!({"error": {"message": "boom", "code": 503}}).to_string();
        assert!(Answer::default().take(&error, ms(0)).unwrap_err().contains("boom"));
        assert!(Answer::default().take("{", ms(0)).is_err());
    }
}
