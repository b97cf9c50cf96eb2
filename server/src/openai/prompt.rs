//! `prompt` of `/v1/completions`: a text, token ids, or a list of either.

use engine::api::TokenId;
use serde_json::Value;

use super::fields::{Fields, integer};
use crate::error::ApiError;

/// What to continue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    Text(String),
    Ids(Vec<TokenId>),
}

/// The prompts of a request, at least one; none of them is empty.
pub fn take_prompts(fields: &mut Fields) -> Result<Vec<Prompt>, ApiError> {
    let value = fields.take("prompt").ok_or_else(|| {
        ApiError::bad_field(
            "prompt",
            "prompt is missing, expected a string, a list of token ids, or a list of those",
        )
    })?;
    let prompts = match value {
        Value::String(text) => vec![Prompt::Text(text)],
        Value::Array(items) if items.first().is_some_and(Value::is_number) => {
            vec![Prompt::Ids(ids("prompt", &items)?)]
        }
        Value::Array(items) if items.is_empty() => {
            return Err(ApiError::bad_field(
                "prompt",
                "prompt is an empty list, expected at least one prompt",
            ));
        }
        Value::Array(items) => {
            items.into_iter().enumerate().map(|(i, item)| one(i, item)).collect::<Result<_, _>>()?
        }
        other => {
            return Err(ApiError::bad_value(
                "prompt",
                &other,
                "a string, a list of token ids, or a list of those",
            ));
        }
    };
    match prompts.iter().any(Prompt::is_empty) {
        true => Err(ApiError::bad_field("prompt", "prompt is empty, expected at least one token")),
        false => Ok(prompts),
    }
}

impl Prompt {
    fn is_empty(&self) -> bool {
        match self {
            Prompt::Text(text) => text.is_empty(),
            Prompt::Ids(ids) => ids.is_empty(),
        }
    }
}

fn one(index: usize, item: Value) -> Result<Prompt, ApiError> {
    let name = format!("prompt.{index}");
    match item {
        Value::String(text) => Ok(Prompt::Text(text)),
        Value::Array(items) => Ok(Prompt::Ids(ids(&name, &items)?)),
        other => Err(ApiError::bad_value(name, &other, "a string or a list of token ids")),
    }
}

/// Token ids; whether the vocabulary has them is for the engine to say.
pub fn ids(name: &str, items: &[Value]) -> Result<Vec<TokenId>, ApiError> {
    let id = |(index, item): (usize, &Value)| {
        let id = integer(item).and_then(|id| TokenId::try_from(id).ok());
        id.ok_or_else(|| {
            ApiError::bad_value(format!("{name}.{index}"), item, "a token id (a whole number from 0 on)")
        })
    };
    items.iter().enumerate().map(id).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn prompts(prompt: Value) -> Result<Vec<Prompt>, ApiError> {
        take_prompts(&mut Fields::new(json!({ "prompt": prompt }).as_object().unwrap().clone()))
    }

    #[test]
    fn all_four_forms_are_read() {
        let text = |text: &str| Prompt::Text(text.into());
        assert_eq!(prompts(json!("a")).unwrap(), [text("a")]);
        assert_eq!(prompts(json!([1, 2])).unwrap(), [Prompt::Ids(vec![1, 2])]);
        assert_eq!(prompts(json!(["a", "b"])).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts(json!([[1], [2, 3]])).unwrap(), [Prompt::Ids(vec![1]), Prompt::Ids(vec![2, 3])]);
    }

    #[test]
    fn anything_else_is_refused_by_name() {
        let cases = [
            (json!(null), "prompt is missing"),
            (json!(5), "prompt is 5, expected a string"),
            (json!(""), "prompt is empty"),
            (json!([]), "prompt is an empty list"),
            (json!([[]]), "prompt is empty"),
            (json!(["a", ""]), "prompt is empty"),
            (json!([-1]), "prompt.0 is -1, expected a token id"),
            (json!([1, "a"]), "prompt.1 is \"a\", expected a token id"),
            (json!([1, 1.5]), "prompt.1 is 1.5, expected a token id"),
            (json!(["a", 1]), "prompt.1 is 1, expected a string or a list of token ids"),
            (json!([[1, 4294967296u64]]), "prompt.0.1 is 4294967296, expected a token id"),
        ];
        for (prompt, expected) in cases {
            let message = prompts(prompt.clone()).unwrap_err().message;
            assert!(message.starts_with(expected), "{prompt}: {message}");
        }
    }
}
