//! Fields that would change the answer but are not implemented: refused when set, never ignored.

use serde_json::Value;

use super::fields::Fields;
use crate::error::ApiError;

/// A field, the values that change nothing, and those values in words.
struct Field {
    name: &'static str,
    neutral: fn(&Value) -> bool,
    expected: &'static str,
}

const fn field(name: &'static str, neutral: fn(&Value) -> bool, expected: &'static str) -> Field {
    Field { name, neutral, expected }
}

/// In both APIs.
const COMMON: &[Field] = &[
    field("prompt_logprobs", never, "null"),
    field("best_of", is_one, "1"),
    field("use_beam_search", is_false, "false"),
    field("response_format", is_text_format, "{\"type\":\"text\"}"),
    field("structured_outputs", never, "null"),
    field("guided_json", never, "null"),
    field("guided_regex", never, "null"),
    field("guided_choice", never, "null"),
    field("guided_grammar", never, "null"),
    field("bad_words", is_empty, "an empty list"),
    field("allowed_token_ids", never, "null"),
    field("truncate_prompt_tokens", never, "null"),
    field("include_stop_str_in_output", is_false, "false"),
    field("return_token_ids", is_false, "false"),
    field("return_tokens_as_token_ids", is_false, "false"),
    field("priority", is_zero, "0"),
    field("logits_processors", is_empty, "an empty list"),
    field("thinking_token_budget", never, "null"),
];

const COMPLETIONS: &[Field] = &[
    field("echo", is_false, "false"),
    field("suffix", never, "null"),
    field("prompt_embeds", never, "null"),
];

const CHAT: &[Field] = &[
    field("echo", is_false, "false"),
    field("chat_template", never, "null: this server renders only the model's own template"),
    field("functions", is_empty, "an empty list; use tools"),
    field("function_call", is_none_word, "\"none\""),
    field("modalities", is_text_only, "[\"text\"]"),
    field("audio", never, "null"),
    field("web_search_options", never, "null"),
];

/// Refuses what `/v1/completions` does not implement.
pub fn check_completions(fields: &Fields) -> Result<(), ApiError> {
    check(fields, COMMON)?;
    check(fields, COMPLETIONS)
}

/// Refuses what `/v1/chat/completions` does not implement.
pub fn check_chat(fields: &Fields) -> Result<(), ApiError> {
    check(fields, COMMON)?;
    check(fields, CHAT)
}

fn check(fields: &Fields, table: &[Field]) -> Result<(), ApiError> {
    let set = |field: &&Field| fields.get(field.name).is_some_and(|value| !(field.neutral)(value));
    match table.iter().find(set) {
        None => Ok(()),
        Some(field) => {
            let expected = format!("{} or no such field: other values are not supported", field.expected);
            Err(fields.unexpected(field.name, expected))
        }
    }
}

fn never(_: &Value) -> bool {
    false
}

fn is_zero(value: &Value) -> bool {
    value.as_f64() == Some(0.0)
}

fn is_one(value: &Value) -> bool {
    value.as_f64() == Some(1.0)
}

fn is_false(value: &Value) -> bool {
    value.as_bool() == Some(false)
}

fn is_empty(value: &Value) -> bool {
    value.as_object().is_some_and(serde_json::Map::is_empty) || value.as_array().is_some_and(Vec::is_empty)
}

fn is_none_word(value: &Value) -> bool {
    value.as_str() == Some("none")
}

fn is_text_format(value: &Value) -> bool {
    value.get("type").and_then(Value::as_str) == Some("text")
}

fn is_text_only(value: &Value) -> bool {
    value.as_array().is_some_and(|kinds| kinds.iter().all(|kind| kind.as_str() == Some("text")))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(value: Value) -> Fields {
        Fields::new(value.as_object().unwrap().clone())
    }

    #[test]
    fn neutral_values_pass() {
        let common = json!({
            "best_of": 1, "response_format": {"type": "text"}, "bad_words": [], "priority": 0, "echo": false,
            "suffix": null, "user": "u", "whatever": [1],
        });
        check_completions(&fields(common)).unwrap();
        check_chat(&fields(json!({"function_call": "none", "modalities": ["text"]}))).unwrap();
    }

    #[test]
    fn every_other_value_is_refused_by_name() {
        for entry in COMMON.iter().chain(COMPLETIONS) {
            let request = fields(json!({ entry.name: 7.5 }));
            let error = check_completions(&request).unwrap_err();
            assert!(
                error.message.starts_with(&format!("{} is 7.5, expected {}", entry.name, entry.expected))
            );
            assert_eq!(error.param.as_deref(), Some(entry.name));
        }
        for entry in CHAT {
            assert!(check_chat(&fields(json!({ entry.name: 7.5 }))).is_err(), "{}", entry.name);
        }
    }
}
