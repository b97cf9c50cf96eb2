//! What a frontend reads of a request: the model, whether it streams, and the names of its prompt's blocks.
//!
//! With a tokenizer the blocks are of tokens, named as workers name them. Without, the prompt's JSON text is cut into
//! pieces that are named in the same way: equal beginnings have equal names, which is all that an approximate index
//! needs. Everything else in the body is for the worker to judge.

use std::borrow::Cow;
use std::sync::Arc;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::error::ApiError;
use crate::openai::chat::take_conversation;
use crate::openai::{Api, Fields, parse_object, take_prompts};
use crate::router::prompt::Prompt;
use crate::text::Text;

/// A longer answer is not booked for more than this when the request names no limit.
const DEFAULT_MAX_TOKENS: usize = 256;

/// A request as far as routing needs it.
#[derive(Clone, Debug)]
pub struct Asked {
    pub model: Option<String>,
    pub stream: bool,
    /// Tokens that the answer may have, as far as the request says.
    pub max_tokens: usize,
    pub prompt: Prompt,
}

/// How prompts are named.
pub enum Naming {
    /// Not at all: only its length counts.
    None { block_size: usize },
    /// By the text.
    Text,
    /// By tokens, in blocks of this many.
    Tokens { text: Arc<Text>, block_size: usize },
}

/// The fields that are read without taking the body apart. Their types are the worker's business.
#[derive(Deserialize)]
struct Peek<'a> {
    #[serde(borrow, default)]
    model: Option<&'a RawValue>,
    #[serde(borrow, default)]
    stream: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    max_completion_tokens: Option<&'a RawValue>,
    #[serde(borrow, default)]
    prompt: Option<&'a RawValue>,
    #[serde(borrow, default)]
    messages: Option<&'a RawValue>,
}

impl Asked {
    /// Reads `body`. Errors: it is no JSON object, or, where prompts are tokenized, one that cannot be.
    pub async fn read(api: Api, body: &[u8], naming: Naming) -> Result<Self, ApiError> {
        match naming {
            Naming::None { block_size } => Self::peek(body, |text| Prompt::unnamed(text, block_size)),
            Naming::Text => Self::peek(body, Prompt::from_text),
            Naming::Tokens { text, block_size } => Self::tokenize(api, body, text, block_size).await,
        }
    }

    fn peek(body: &[u8], name: impl FnOnce(&[u8]) -> Prompt) -> Result<Self, ApiError> {
        // A list of values would be read as the fields, in their order.
        let text = std::str::from_utf8(body).ok().filter(|text| text.trim_start().starts_with('{'));
        let peek: Option<Peek<'_>> = text.and_then(|text| serde_json::from_str(text).ok());
        // The slow way finds the words for what is wrong. A field that is there twice is not: the last one counts, for workers
        // as well.
        let Some(peek) = peek else {
            let fields = parse_object(body)?;
            let once = json!({
                "model": fields.get("model"), "stream": fields.get("stream"), "max_tokens": fields.get("max_tokens"),
                "max_completion_tokens": fields.get("max_completion_tokens"), "prompt": fields.get("prompt"),
                "messages": fields.get("messages"),
            });
            return Self::peek(once.to_string().as_bytes(), name);
        };
        let number = |value: Option<&RawValue>| value.and_then(|value| value.get().parse::<usize>().ok());
        let model: Option<Cow<'_, str>> = peek.model.and_then(|model| serde_json::from_str(model.get()).ok());
        let prompt = peek.messages.or(peek.prompt).map_or("", RawValue::get);
        Ok(Self {
            model: model.map(Cow::into_owned),
            stream: peek.stream.is_some_and(|stream| stream.get() == "true"),
            max_tokens: number(peek.max_completion_tokens)
                .or(number(peek.max_tokens))
                .unwrap_or(DEFAULT_MAX_TOKENS),
            prompt: name(prompt.as_bytes()),
        })
    }

    async fn tokenize(api: Api, body: &[u8], text: Arc<Text>, block_size: usize) -> Result<Self, ApiError> {
        let mut fields = parse_object(body)?;
        let model = fields.str("model")?.map(str::to_owned);
        let stream = fields.bool("stream")?.unwrap_or(false);
        let limit =
            |fields: &Fields, name| fields.get(name).and_then(Value::as_u64).map(|limit| limit as usize);
        let max_tokens = limit(&fields, "max_completion_tokens").or(limit(&fields, "max_tokens"));
        let salt = fields.str("cache_salt")?.map(str::to_owned);
        let tokens = match api {
            Api::Chat => text.encode_chat(take_conversation(&mut fields)?).await?,
            // Further prompts of the same request go where the first one goes.
            Api::Completions => {
                let prompts = take_prompts(&mut fields)?;
                text.encode(prompts.into_iter().take(1).collect()).await?.remove(0)
            }
        };
        Ok(Self {
            model,
            stream,
            max_tokens: max_tokens.unwrap_or(DEFAULT_MAX_TOKENS),
            prompt: Prompt::from_tokens(&tokens, salt.as_deref(), block_size),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peek(body: &str) -> Result<Asked, ApiError> {
        Asked::peek(body.as_bytes(), Prompt::from_text)
    }

    #[test]
    fn equal_beginnings_have_equal_names() {
        let chat = |tail: &str| {
            let system = "You are a ferry. ".repeat(100);
            let body = format!(
                r#"{{"messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{tail}"}}],"model":"m"}}"#
            );
            peek(&body).unwrap().prompt.keys
        };
        let (one, other) = (chat(&"a".repeat(500)), chat(&"b".repeat(500)));
        let same = one.iter().zip(other.iter()).take_while(|(a, b)| a == b).count();
        assert!((3..one.len()).contains(&same), "{same} of {}", one.len());
        // A name covers everything before it.
        assert!(one[same..].iter().zip(&other[same..]).all(|(a, b)| a != b));
    }

    #[test]
    fn only_what_routing_needs_is_read() {
        let asked =
            peek(r#"{"model":"a\"b","stream":true,"max_tokens":7,"temperature":"hot","prompt":[1,2,3]}"#)
                .unwrap();
        assert_eq!((asked.model.as_deref(), asked.stream, asked.max_tokens), (Some("a\"b"), true, 7));
        let asked = peek(r#"{"stream":"yes","max_tokens":7,"max_completion_tokens":9}"#).unwrap();
        assert_eq!((asked.model, asked.stream, asked.max_tokens), (None, false, 9));
    }

    #[test]
    fn what_is_no_object_is_refused() {
        for (body, expected) in
            [("", "the body is empty"), ("[1]", "the body is [1]"), ("{\"a\":", "not valid JSON")]
        {
            let error = peek(body).unwrap_err();
            assert!(error.status == 400 && error.message.contains(expected), "{body}: {}", error.message);
        }
        // As workers read it.
        assert_eq!(peek(r#"{"model":"a","model":"b"}"#).unwrap().model.as_deref(), Some("b"));
        assert!(
            Asked::peek(b"{\"a\":\"\xff\"}", Prompt::from_text).unwrap_err().message.contains("not UTF-8")
        );
    }
}
