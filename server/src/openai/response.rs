//! The shapes of answers and of stream events, in OpenAI's words with vLLM's additions.

use serde::Serialize;
use serde_json::{Map, Value, json};

use super::choice::{Finish, Piece};
use super::logprobs::{Entry, of_chat, of_completion};

/// What made the answer; clients compare it to notice a change of server.
const SYSTEM_FINGERPRINT: &str = concat!("kvferry-", env!("CARGO_PKG_VERSION"));

/// Which API an answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Api {
    Completions,
    Chat,
}

impl Api {
    fn id_prefix(self) -> &'static str {
        match self {
            Api::Completions => "cmpl",
            Api::Chat => "chatcmpl",
        }
    }

    fn object(self, streams: bool) -> &'static str {
        match (self, streams) {
            (Api::Completions, _) => "text_completion",
            (Api::Chat, false) => "chat.completion",
            (Api::Chat, true) => "chat.completion.chunk",
        }
    }
}

/// Tokens of a request, over all its prompts and answers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    pub prompt_tokens: usize,
    pub total_tokens: usize,
    pub completion_tokens: usize,
    pub prompt_tokens_details: PromptTokensDetails,
}

/// Always sent, so that clients can tell "no hit" from "not measured".
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct PromptTokensDetails {
    pub cached_tokens: usize,
}

impl Usage {
    pub fn new(prompt_tokens: usize, completion_tokens: usize, cached_tokens: usize) -> Self {
        let total_tokens = prompt_tokens + completion_tokens;
        Self {
            prompt_tokens,
            total_tokens,
            completion_tokens,
            prompt_tokens_details: PromptTokensDetails { cached_tokens },
        }
    }
}

/// What all parts of one answer have in common.
#[derive(Clone, Debug)]
pub struct Envelope {
    api: Api,
    id: String,
    created: u64,
    model: String,
}

/// A finished choice.
#[derive(Clone, Debug)]
pub struct Answer {
    pub text: String,
    /// `None` unless asked for.
    pub logprobs: Option<Vec<Entry>>,
    pub finish: Finish,
}

#[derive(Serialize)]
struct Chunk<'a> {
    id: &'a str,
    object: &'static str,
    created: u64,
    model: &'a str,
    choices: &'a [Value],
    #[serde(skip_serializing_if = "Option::is_none")]
    usage: Option<Usage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    system_fingerprint: Option<&'static str>,
    #[serde(flatten)]
    extras: Map<String, Value>,
}

impl Envelope {
    pub fn new(api: Api, request_id: &str, created: u64, model: &str) -> Self {
        Self { api, id: format!("{}-{request_id}", api.id_prefix()), created, model: model.to_owned() }
    }

    /// The whole answer, with the fields of `extras`.
    pub fn answer(&self, answers: Vec<Answer>, usage: Usage, extras: Map<String, Value>) -> Value {
        let choices: Vec<_> =
            answers.into_iter().enumerate().map(|(i, answer)| self.choice(i, answer)).collect();
        let mut answer = json!({
            "id": self.id, "object": self.api.object(false), "created": self.created, "model": self.model,
            "choices": choices, "service_tier": null, "system_fingerprint": SYSTEM_FINGERPRINT, "usage": usage,
        });
        answer.as_object_mut().expect("made as an object. This is a bug.").extend(extras);
        answer
    }

    fn choice(&self, index: usize, Answer { text, logprobs, finish }: Answer) -> Value {
        let (reason, stop) = (finish.reason, finish.stop_reason);
        let logprobs = logprobs.map(|entries| self.logprobs(&entries));
        match self.api {
            Api::Completions => json!({
                "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop,
            }),
            Api::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null},
                "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop,
            }),
        }
    }

    fn logprobs(&self, entries: &[Entry]) -> Value {
        match self.api {
            Api::Completions => of_completion(entries),
            Api::Chat => of_chat(entries),
        }
    }

    /// The chunk before a choice's first text; only chat has one.
    pub fn opening(&self, index: usize, usage: Option<Usage>) -> Option<String> {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        (self.api == Api::Chat).then(|| self.chunk(&[choice], usage, false, Map::new()))
    }

    /// More of a choice, and its end if that is there.
    pub fn piece(&self, index: usize, piece: &Piece, usage: Option<Usage>) -> String {
        let (text, finish) = (&piece.text, piece.finish.as_ref());
        let (reason, stop) = (finish.map(|f| f.reason), finish.and_then(|f| f.stop_reason.as_ref()));
        let logprobs = (!piece.logprobs.is_empty()).then(|| self.logprobs(&piece.logprobs));
        let choice = match self.api {
            Api::Completions => json!({
                "index": index, "text": text, "logprobs": logprobs, "finish_reason": reason, "stop_reason": stop,
            }),
            Api::Chat => json!({
                "index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": reason,
                "stop_reason": stop,
            }),
        };
        self.chunk(&[choice], usage, finish.is_some(), Map::new())
    }

    /// The last chunk of a stream that was asked for its usage or its timeline.
    pub fn last(&self, usage: Option<Usage>, extras: Map<String, Value>) -> String {
        self.chunk(&[], usage, true, extras)
    }

    fn chunk(
        &self,
        choices: &[Value],
        usage: Option<Usage>,
        last: bool,
        extras: Map<String, Value>,
    ) -> String {
        let chunk = Chunk {
            id: &self.id,
            object: self.api.object(true),
            created: self.created,
            model: &self.model,
            choices,
            usage,
            system_fingerprint: last.then_some(SYSTEM_FINGERPRINT),
            extras,
        };
        serde_json::to_string(&chunk).expect("strings and numbers always serialize. This is a bug.")
    }
}
