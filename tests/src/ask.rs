//! What a test asks a server, and what it gets back.

use serde_json::{Map, Value, json};

/// A request to one of OpenAI's two APIs. Greedy and 24 tokens at most unless told otherwise.
#[derive(Clone, Debug)]
pub struct Ask {
    pub(crate) path: &'static str,
    pub(crate) body: Map<String, Value>,
}

/// Tokens as the server counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub prompt: u64,
    pub completion: u64,
    /// Prompt tokens found in a prefix cache; differs between a cold and a warm one, unlike all else.
    pub cached: u64,
}

/// A whole answer, streamed or not.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub text: String,
    pub finish: String,
    pub usage: Usage,
}

/// No whole answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// An answer with another status than 200.
    Status { status: u16, message: String },
    /// An error event in a stream, after `text`.
    InStream { text: String, message: String },
    /// The connection failed, ended early, or nothing came in time: no server may do that to a client.
    Broken(String),
}

impl Ask {
    /// `prompt` is text or a list of token ids.
    pub fn completion(prompt: impl Into<Value>) -> Self {
        Self::new("/v1/completions", json!({ "prompt": prompt.into() }))
    }

    pub fn chat(question: &str) -> Self {
        Self::new("/v1/chat/completions", json!({ "messages": [{ "role": "user", "content": question }] }))
    }

    fn new(path: &'static str, body: Value) -> Self {
        let Value::Object(body) = body else { unreachable!("built from an object. This is a bug.") };
        Self { path, body }.with("model", "demo").with("temperature", 0).with("max_tokens", 24)
    }

    /// Sets a field of the body.
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.body.insert(field.to_owned(), value.into());
        self
    }

    /// Exactly `count` tokens, whatever the model would end with.
    pub fn tokens(self, count: u64) -> Self {
        self.with("max_tokens", count).with("ignore_eos", true)
    }

    pub fn max_tokens(self, count: u64) -> Self {
        self.with("max_tokens", count)
    }

    /// Shares cached blocks only with requests of the same salt.
    pub fn salted(self, salt: &str) -> Self {
        self.with("cache_salt", salt)
    }

    /// As a stream that ends with its usage.
    pub fn streamed(self) -> Self {
        self.with("stream", true).with("stream_options", json!({ "include_usage": true }))
    }

    /// The path that it is sent to.
    pub fn path(&self) -> &'static str {
        self.path
    }

    /// What is sent.
    pub fn json(&self) -> Value {
        Value::Object(self.body.clone())
    }

    pub fn is_streamed(&self) -> bool {
        self.body.get("stream") == Some(&Value::Bool(true))
    }
}

impl Answer {
    /// The same but for what the caches did: equal in every deployment.
    pub fn content(&self) -> (&str, &str, u64, u64) {
        (&self.text, &self.finish, self.usage.prompt, self.usage.completion)
    }

    /// Reads an answer that was not streamed.
    pub(crate) fn read(body: &Value) -> Result<Self, String> {
        let choice = &body["choices"][0];
        let text = choice["text"].as_str().or(choice["message"]["content"].as_str());
        let finish = choice["finish_reason"].as_str();
        match (text, finish, Usage::read(&body["usage"])) {
            (Some(text), Some(finish), Some(usage)) => {
                Ok(Self { text: text.to_owned(), finish: finish.to_owned(), usage })
            }
            _ => Err(format!("the answer lacks text, finish_reason or usage: {body}")),
        }
    }
}

impl Usage {
    /// `None` if a field is missing, `prompt_tokens_details.cached_tokens` among them: it is always sent.
    pub(crate) fn read(usage: &Value) -> Option<Self> {
        let number = |value: &Value| value.as_u64();
        let (prompt, completion) = (number(&usage["prompt_tokens"])?, number(&usage["completion_tokens"])?);
        let cached = number(&usage["prompt_tokens_details"]["cached_tokens"])?;
        (number(&usage["total_tokens"]) == Some(prompt + completion)).then_some(Self {
            prompt,
            completion,
            cached,
        })
    }
}

impl Failure {
    /// The status a client saw, if the failure came with one.
    pub fn status(&self) -> Option<u16> {
        match self {
            Failure::Status { status, .. } => Some(*status),
            _ => None,
        }
    }

    /// What the server said.
    pub fn message(&self) -> &str {
        match self {
            Failure::Status { message, .. }
            | Failure::InStream { message, .. }
            | Failure::Broken(message) => message,
        }
    }
}
