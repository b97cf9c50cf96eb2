//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use serde_json::{Map, Value};

use super::body::JsonBody;
use super::fields::Fields;
use super::generate::{Job, respond};
use super::kv_transfer::KvTransfer;
use super::message::take_messages;
use super::options::Options;
use super::response::Api;
use super::unsupported::check_chat;
use crate::error::ApiError;
use crate::layers::RequestId;
use crate::state::AppState;
use crate::text::Conversation;

/// As far as the model's length goes.
const DEFAULT_MAX_TOKENS: usize = usize::MAX;

pub async fn chat_completions(
    State(state): State<Arc<AppState>>,
    Extension(request_id): Extension<RequestId>,
    JsonBody(mut fields): JsonBody,
) -> Result<Response, ApiError> {
    let arrival = Instant::now();
    state.check_model(fields.str("model")?)?;
    let serving = state.serving()?;
    check_chat(&fields)?;
    let kv = KvTransfer::parse(&fields, &state)?;
    let mut options = Options::parse(Api::Chat, &fields, &serving.defaults, serving.engine.info())?;
    kv.restrict(1, &mut options)?;
    let conversation = take_conversation(&mut fields)?;
    let prompts = vec![serving.text.clone().encode_chat(conversation).await?];
    let default_max_tokens = DEFAULT_MAX_TOKENS;
    let job = Job { api: Api::Chat, request_id, arrival, options, prompts, default_max_tokens, kv };
    respond(&state, serving, job).await
}

/// What the chat template is given.
pub fn take_conversation(fields: &mut Fields) -> Result<Conversation, ApiError> {
    let tools = take_tools(fields)?;
    let add_generation_prompt = fields.bool("add_generation_prompt")?;
    let continue_final_message = fields.bool("continue_final_message")?.unwrap_or(false);
    if continue_final_message && add_generation_prompt == Some(true) {
        return Err(fields.unexpected("add_generation_prompt", "false when continue_final_message is true"));
    }
    let kwargs = match fields.take("chat_template_kwargs") {
        None => Map::new(),
        Some(Value::Object(kwargs)) => kwargs,
        Some(other) => return Err(ApiError::bad_value("chat_template_kwargs", &other, "an object")),
    };
    let messages = take_messages(fields)?;
    Ok(Conversation {
        messages,
        tools,
        kwargs,
        add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
        continue_final_message,
    })
}

/// The tools are told to the model; its calls come back as text, for there is no parser for them.
fn take_tools(fields: &mut Fields) -> Result<Vec<Value>, ApiError> {
    let tools = match fields.take("tools") {
        None => Vec::new(),
        Some(Value::Array(tools)) => tools,
        Some(other) => return Err(ApiError::bad_value("tools", &other, "a list of tools")),
    };
    if let Some((index, tool)) = tools.iter().enumerate().find(|(_, tool)| !tool.is_object()) {
        return Err(ApiError::bad_value(format!("tools.{index}"), tool, "an object with type and function"));
    }
    match fields.get("tool_choice").map(Value::as_str) {
        None | Some(Some("none")) => Ok(tools),
        Some(Some("auto")) if tools.is_empty() => {
            Err(fields.unexpected("tool_choice", "\"none\" when there are no tools"))
        }
        Some(Some("auto")) => Ok(tools),
        Some(_) => Err(fields.unexpected("tool_choice", "\"none\" or \"auto\": calls cannot be forced")),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn conversation(mut request: Value) -> Result<Conversation, ApiError> {
        let map = request.as_object_mut().unwrap();
        map.entry("messages").or_insert_with(|| json!([{"role": "user", "content": "a"}]));
        take_conversation(&mut Fields::new(map.clone()))
    }

    #[test]
    fn the_generation_prompt_is_added_unless_the_last_message_goes_on() {
        let flags = |request| {
            let conversation = conversation(request).unwrap();
            (conversation.add_generation_prompt, conversation.continue_final_message)
        };
        assert_eq!(flags(json!({})), (true, false));
        assert_eq!(flags(json!({"add_generation_prompt": false})), (false, false));
        assert_eq!(flags(json!({"continue_final_message": true})), (false, true));
        assert!(
            conversation(json!({"continue_final_message": true, "add_generation_prompt": true})).is_err()
        );
    }

    #[test]
    fn tools_are_told_but_cannot_be_forced() {
        let tool = json!({"type": "function", "function": {"name": "f"}});
        let told = conversation(json!({"tools": [tool]})).unwrap().tools;
        assert_eq!(told, json!([tool]).as_array().unwrap().as_slice());
        assert!(conversation(json!({"tools": [tool], "tool_choice": "auto"})).is_ok());
        assert!(conversation(json!({"tool_choice": "none"})).is_ok());
        let cases = [
            (json!({"tool_choice": "auto"}), "tool_choice is \"auto\", expected \"none\" when"),
            (json!({"tools": [tool], "tool_choice": "required"}), "tool_choice is \"required\", expected"),
            (json!({"tools": [tool], "tool_choice": {"type": "function"}}), "tool_choice is {"),
            (json!({"tools": {}}), "tools is {}, expected a list"),
            (json!({"tools": [1]}), "tools.0 is 1, expected an object"),
            (json!({"chat_template_kwargs": 1}), "chat_template_kwargs is 1, expected an object"),
        ];
        for (request, expected) in cases {
            let message = conversation(request.clone()).unwrap_err().message;
            assert!(message.starts_with(expected), "{request}: {message}");
        }
    }
}
