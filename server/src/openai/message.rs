//! `messages` of a chat request, in the one form that chat templates are written for: a known role and a
//! string as content. Other fields of a message are left for the template.

use serde_json::{Map, Value};

use super::fields::Fields;
use crate::error::ApiError;

const ROLES: &str = "system, developer, user, assistant or tool";

/// Between the texts of a message that comes in parts, as vLLM joins them.
const PART_SEPARATOR: &str = "\n";

/// The conversation, at least one message.
pub fn take_messages(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    match fields.take("messages") {
        None => Err(ApiError::bad_field("messages", "messages is missing, expected a list of messages")),
        Some(Value::Array(list)) if list.is_empty() => {
            Err(ApiError::bad_field("messages", "messages is an empty list, expected at least one message"))
        }
        Some(Value::Array(list)) => list.into_iter().enumerate().map(|(i, item)| message(i, item)).collect(),
        Some(other) => Err(ApiError::bad_value("messages", &other, "a list of messages")),
    }
}

fn message(index: usize, item: Value) -> Result<Value, ApiError> {
    let at = |field: &str| format!("messages.{index}.{field}");
    let mut message = match item {
        Value::Object(map) => map,
        other => {
            return Err(ApiError::bad_value(
                format!("messages.{index}"),
                &other,
                "an object with role and content",
            ));
        }
    };
    let role = match message.get("role") {
        // OpenAI's newer word for the same thing; templates know only the older one.
        Some(Value::String(role)) if role == "developer" => "system",
        Some(Value::String(role)) if role == "system" => "system",
        Some(Value::String(role)) if role == "user" => "user",
        Some(Value::String(role)) if role == "assistant" => "assistant",
        Some(Value::String(role)) if role == "tool" => "tool",
        Some(other) => return Err(ApiError::bad_value(at("role"), other, ROLES)),
        None => {
            return Err(ApiError::bad_field(
                at("role"),
                format!("{} is missing, expected {ROLES}", at("role")),
            ));
        }
    };
    let content = content(&at("content"), role, message.remove("content").unwrap_or_default())?;
    if role == "assistant" {
        parse_arguments(&mut message);
    }
    message.insert("role".into(), role.into());
    message.insert("content".into(), content.into());
    Ok(Value::Object(message))
}

fn content(name: &str, role: &str, content: Value) -> Result<String, ApiError> {
    match content {
        Value::String(text) => Ok(text),
        Value::Array(parts) => {
            let texts: Result<Vec<_>, _> = parts
                .into_iter()
                .enumerate()
                .map(|(i, part)| part_text(&format!("{name}.{i}"), part))
                .collect();
            Ok(texts?.join(PART_SEPARATOR))
        }
        Value::Null if role == "assistant" => Ok(String::new()),
        Value::Null => Err(ApiError::bad_field(
            name,
            format!("{name} is missing, expected a string or a list of text parts"),
        )),
        other => Err(ApiError::bad_value(name, &other, "a string or a list of text parts")),
    }
}

fn part_text(name: &str, part: Value) -> Result<String, ApiError> {
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let field = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "" => return Err(ApiError::bad_value(name, &part, "an object with type \"text\" and text")),
        other => {
            let message = format!("{name} has type {other:?}, expected \"text\": this model takes only text");
            return Err(ApiError::bad_field(name, message));
        }
    };
    match part.get(field) {
        Some(Value::String(text)) => Ok(text.clone()),
        other => {
            Err(ApiError::bad_value(format!("{name}.{field}"), other.unwrap_or(&Value::Null), "a string"))
        }
    }
}

/// Clients send a call's arguments as JSON in a string, templates print them as JSON: parsed here, so that
/// they are not quoted twice. Text that is not an object stays as it is.
fn parse_arguments(message: &mut Map<String, Value>) {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
    for call in calls.into_iter().flatten() {
        let Some(arguments) = call.pointer_mut("/function/arguments") else { continue };
        let parsed = arguments.as_str().map(serde_json::from_str::<Map<String, Value>>);
        if let Some(Ok(parsed)) = parsed {
            *arguments = Value::Object(parsed);
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn messages(messages: Value) -> Result<Vec<Value>, ApiError> {
        take_messages(&mut Fields::new(json!({ "messages": messages }).as_object().unwrap().clone()))
    }

    #[test]
    fn parts_are_joined_in_order_and_developer_is_system() {
        let found = messages(json!([
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "My number is 41."}, {"type": "text", "text": "Say it."}]},
            {"role": "assistant", "content": null},
            {"role": "user", "content": []},
        ]));
        let expected = json!([
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "My number is 41.\nSay it."},
            {"role": "assistant", "content": ""},
            {"role": "user", "content": ""},
        ]);
        assert_eq!(Value::Array(found.unwrap()), expected);
    }

    #[test]
    fn tool_calls_keep_the_order_of_their_arguments() {
        let call = json!({"function": {"name": "f", "arguments": "{\"z\": 1, \"a\": \"<&'é\"}"}});
        let found = messages(json!([{"role": "assistant", "tool_calls": [call]}])).unwrap();
        let arguments = &found[0]["tool_calls"][0]["function"]["arguments"];
        assert_eq!(arguments.to_string(), "{\"z\":1,\"a\":\"<&'é\"}");
    }

    #[test]
    fn faults_are_named_with_their_place() {
        let image = json!([{"type": "image_url", "image_url": {"url": "data:,"}}]);
        let cases = [
            (json!(null), "messages is missing"),
            (json!("hi"), "messages is \"hi\", expected a list"),
            (json!([]), "messages is an empty list"),
            (json!(["hi"]), "messages.0 is \"hi\", expected an object"),
            (json!([{"content": "a"}]), "messages.0.role is missing, expected system"),
            (json!([{"role": "wizard", "content": "x"}]), "messages.0.role is \"wizard\", expected system"),
            (json!([{"role": "user"}]), "messages.0.content is missing"),
            (json!([{"role": "user", "content": 5}]), "messages.0.content is 5, expected a string"),
            (
                json!([{"role": "user", "content": image}]),
                "messages.0.content.0 has type \"image_url\", expected",
            ),
            (
                json!([{"role": "user", "content": ["a"]}]),
                "messages.0.content.0 is \"a\", expected an object",
            ),
            (
                json!([{"role": "user", "content": [{"type": "text"}]}]),
                "messages.0.content.0.text is null, expected",
            ),
        ];
        for (request, expected) in cases {
            let message = messages(request.clone()).unwrap_err().message;
            assert!(message.starts_with(expected), "{request}: {message}");
        }
    }
}
