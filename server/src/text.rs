//! Text to tokens and back, for the handlers: the model's tokenizer and chat template with the server's errors.

use std::sync::Arc;
use std::time::SystemTime;

use engine::api::TokenId;
use models::{ChatInput, ChatTemplate, ModelError, Tokenizer};
use serde_json::{Map, Value};

use crate::answer_text::AnswerText;
use crate::error::ApiError;
use crate::openai::Prompt;

/// Longer texts are tokenized on a thread of their own: this much keeps a thread that serves other connections busy for
/// about 2 ms, at some 40 MB/s of our own encoder and 5 MB/s of the library.
const INLINE_BYTES: usize = 64 << 10;
const INLINE_BYTES_LIBRARY: usize = 8 << 10;

/// What the chat template is given.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// Objects with `role` and `content`, and what else the client sent.
    pub messages: Vec<Value>,
    pub tools: Vec<Value>,
    /// Further variables of the template.
    pub kwargs: Map<String, Value>,
    pub add_generation_prompt: bool,
    /// The answer continues the last message, instead of being a new one.
    pub continue_final_message: bool,
}

/// A model's tokenizer and chat template.
pub struct Text {
    tokenizer: Arc<Tokenizer>,
    /// Some models have none; then only completions are served.
    chat: Option<ChatTemplate>,
}

impl Text {
    pub fn new(tokenizer: Arc<Tokenizer>, chat: Option<ChatTemplate>) -> Self {
        Self { tokenizer, chat }
    }

    /// Tokens of a completion's prompts.
    pub async fn encode(self: Arc<Self>, prompts: Vec<Prompt>) -> Result<Vec<Vec<TokenId>>, ApiError> {
        let size = prompts
            .iter()
            .map(|prompt| if let Prompt::Text(text) = prompt { text.len() } else { 0 })
            .sum::<usize>();
        let inline = self.inline_bytes();
        let encode = move |prompt| match prompt {
            Prompt::Ids(ids) => Ok(ids),
            Prompt::Text(text) => Ok(self.tokenizer.encode(&text, true)?),
        };
        off_thread(size <= inline, move || prompts.into_iter().map(encode).collect()).await
    }

    /// Tokens of a conversation, by the chat template.
    pub async fn encode_chat(self: Arc<Self>, conversation: Conversation) -> Result<Vec<TokenId>, ApiError> {
        let content = |message: &Value| message["content"].as_str().map_or(0, str::len);
        let size = conversation.messages.iter().map(content).sum::<usize>();
        off_thread(size <= self.inline_bytes(), move || self.render(&conversation)).await
    }

    /// Texts up to this length are tokenized where they are.
    fn inline_bytes(&self) -> usize {
        if self.tokenizer.is_fast() { INLINE_BYTES } else { INLINE_BYTES_LIBRARY }
    }

    fn render(&self, conversation: &Conversation) -> Result<Vec<TokenId>, ApiError> {
        let template = self.chat.as_ref().ok_or(ModelError::NoChatTemplate)?;
        let mut prompt = template.render(ChatInput {
            messages: &conversation.messages,
            tools: &conversation.tools,
            add_generation_prompt: conversation.add_generation_prompt,
            kwargs: Some(&conversation.kwargs),
            now: SystemTime::now(),
        })?;
        if conversation.continue_final_message {
            let last = conversation.messages.last().and_then(|message| message["content"].as_str());
            prompt.truncate(end_of_last(&prompt, last.unwrap_or_default())?);
        }
        // The template writes the special tokens itself.
        Ok(self.tokenizer.encode(&prompt, false)?)
    }

    /// The text of `ids`, special tokens included; for `/detokenize`.
    pub fn decode(&self, ids: &[TokenId]) -> String {
        self.tokenizer.decode(ids, false)
    }

    /// The text of one token, for people.
    pub fn token(&self, id: TokenId) -> String {
        String::from_utf8_lossy(self.tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
    }

    /// Turns the tokens of one answer into text that ends before the first of `stop`, as far as that is not
    /// complete within the first `min_tokens` tokens.
    pub fn answer(
        &self,
        stop: &[String],
        min_tokens: usize,
        skip_special_tokens: bool,
    ) -> Result<AnswerText, ApiError> {
        AnswerText::new(Arc::clone(&self.tokenizer), stop, min_tokens, skip_special_tokens)
    }
}

/// Where the last message's text ends in the rendered prompt; templates may have trimmed it.
fn end_of_last(prompt: &str, last: &str) -> Result<usize, ApiError> {
    let trimmed = last.trim();
    let start = prompt.rfind(trimmed).filter(|_| !trimmed.is_empty()).ok_or_else(|| {
        let message = "continue_final_message needs a last message whose content is not empty and appears in the prompt";
        ApiError::bad_field("continue_final_message", message)
    })?;
    let tail = &last[last.len() - last.trim_start().len()..];
    let kept = if prompt[start..].starts_with(tail) { tail.len() } else { trimmed.len() };
    Ok(start + kept)
}

impl From<ModelError> for ApiError {
    fn from(error: ModelError) -> Self {
        match error.is_client_error() {
            true => ApiError::bad_request(error.to_string()),
            false => ApiError::internal(error.to_string()),
        }
    }
}

/// Runs `work` here if it is short, else on a thread for blocking work.
async fn off_thread<T: Send + 'static>(
    short: bool,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if short {
        return work();
    }
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prompt_ends_where_the_last_message_does() {
        let prompt = "<u>hi</u><a>The sky is </a>\n";
        let cut = |last| end_of_last(prompt, last).map(|end| &prompt[..end]);
        assert_eq!(cut("The sky is ").unwrap(), "<u>hi</u><a>The sky is ");
        assert_eq!(cut(" The sky is").unwrap(), "<u>hi</u><a>The sky is");
        assert_eq!(cut("The sky is  \n").unwrap(), "<u>hi</u><a>The sky is");
        assert!(cut("  ").is_err() && cut("gone").is_err());
    }
}
