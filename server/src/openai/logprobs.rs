//! Log-probabilities in OpenAI's two shapes.
//!
//! One entry for each token that the engine sent, so as many as `completion_tokens`, less one when an end-of-sequence
//! or stop token ended the answer: it counts, but is no part of the answer. A stop string that cuts the text cuts no
//! entries, as in vLLM.
//!
//! Tokens may be parts of characters. Chat shows their text with U+FFFD and their exact `bytes` beside it;
//! completions, which have no such field and use the text as a key, write them as OpenAI does: `bytes:\xf0\x9f`.

use std::fmt::Write;

use serde_json::{Map, Value, json};

/// JSON has no infinity; vLLM's number for it.
const LOWEST: f64 = -9999.0;

/// A token with its logarithm of probability.
#[derive(Clone, Debug, PartialEq)]
pub struct Scored {
    /// What it stands for; may be part of a character.
    pub bytes: Vec<u8>,
    pub logprob: f32,
}

/// One generated token.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Characters of the answer's text before it. Those that a stop string cut off count.
    pub offset: usize,
    pub token: Scored,
    /// The likeliest tokens, likeliest first.
    pub top: Vec<Scored>,
}

/// `logprobs` of a choice of `/v1/completions`. The alternatives are the generated token and the likeliest ones,
/// so up to one more than asked for.
pub fn of_completion(entries: &[Entry]) -> Value {
    let alternatives = |entry: &Entry| {
        let mut map = Map::new();
        for scored in std::iter::once(&entry.token).chain(&entry.top) {
            map.entry(scored.key()).or_insert(scored.number().into());
        }
        map
    };
    json!({
        "text_offset": entries.iter().map(|entry| entry.offset).collect::<Vec<_>>(),
        "token_logprobs": entries.iter().map(|entry| entry.token.number()).collect::<Vec<_>>(),
        "tokens": entries.iter().map(|entry| entry.token.key()).collect::<Vec<_>>(),
        "top_logprobs": entries.iter().map(alternatives).collect::<Vec<_>>(),
    })
}

/// `logprobs` of a choice of `/v1/chat/completions`. `top_logprobs` are the likeliest tokens, exactly as many as
/// asked for, whether or not the generated one is among them.
pub fn of_chat(entries: &[Entry]) -> Value {
    let content = entries.iter().map(|entry| {
        let mut object = entry.token.object();
        object["top_logprobs"] = entry.top.iter().map(Scored::object).collect();
        object
    });
    json!({ "content": content.collect::<Vec<_>>() })
}

impl Scored {
    fn number(&self) -> f64 {
        f64::from(self.logprob).max(LOWEST)
    }

    fn object(&self) -> Value {
        json!({ "token": String::from_utf8_lossy(&self.bytes), "logprob": self.number(), "bytes": self.bytes })
    }

    fn key(&self) -> String {
        match std::str::from_utf8(&self.bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => self.bytes.iter().fold("bytes:".to_owned(), |mut key, byte| {
                write!(key, "\\x{byte:02x}").expect("strings take all that is written. This is a bug.");
                key
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scored(bytes: &[u8], logprob: f32) -> Scored {
        Scored { bytes: bytes.to_vec(), logprob }
    }

    fn entries() -> Vec<Entry> {
        let first = Entry {
            offset: 0,
            token: scored(b" a", -0.5),
            top: vec![scored(b" a", -0.5), scored(b"b", -1.0)],
        };
        let second = Entry {
            offset: 2,
            token: scored(b"\xf0\x9f", f32::NEG_INFINITY),
            top: vec![scored(b"\xf0\x9e", -0.25), scored(b"c", -2.0)],
        };
        vec![first, second]
    }

    #[test]
    fn completions_have_lists_and_the_generated_token_among_the_alternatives() {
        let expected = json!({
            "text_offset": [0, 2], "token_logprobs": [-0.5, -9999.0], "tokens": [" a", "bytes:\\xf0\\x9f"],
            "top_logprobs": [
                {" a": -0.5, "b": -1.0},
                {"bytes:\\xf0\\x9f": -9999.0, "bytes:\\xf0\\x9e": -0.25, "c": -2.0},
            ],
        });
        assert_eq!(of_completion(&entries()), expected);
        let none = json!({"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []});
        assert_eq!(of_completion(&[]), none);
    }

    #[test]
    fn chat_has_objects_with_bytes() {
        let alternative = |token: &str, logprob: f64, bytes: &[u8]| json!({ "token": token, "logprob": logprob, "bytes": bytes });
        let expected = json!({ "content": [
            {
                "token": " a", "logprob": -0.5, "bytes": [32, 97],
                "top_logprobs": [alternative(" a", -0.5, b" a"), alternative("b", -1.0, b"b")],
            },
            {
                "token": "\u{fffd}", "logprob": -9999.0, "bytes": [0xf0, 0x9f],
                "top_logprobs": [alternative("\u{fffd}", -0.25, b"\xf0\x9e"), alternative("c", -2.0, b"c")],
            },
        ]});
        assert_eq!(of_chat(&entries()), expected);
    }
}
