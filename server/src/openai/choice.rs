//! One answer as it grows: tokens from the engine in, text out, up to the first stop string.

use engine::api::{Output, RequestError, TokenId};
use engine::handle::OutputStream;
use serde::Serialize;

use crate::text::AnswerText;

/// Why and how a choice ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finish {
    /// OpenAI's word.
    pub reason: &'static str,
    pub stop_reason: Option<StopReason>,
}

/// What stopped a choice, if the request named it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum StopReason {
    Text(String),
    Token(TokenId),
}

/// More of a choice.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Empty while text is held back.
    pub text: String,
    /// Present once, in the last piece.
    pub finish: Option<Finish>,
}

/// One sequence that the engine generates. Dropping it aborts the sequence.
pub struct Choice {
    /// Its number in the answer.
    pub index: usize,
    /// Which of the request's prompts it continues, and that prompt's length.
    pub prompt: usize,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
    outputs: OutputStream,
    text: AnswerText,
}

impl Choice {
    pub fn new(
        index: usize,
        prompt: usize,
        prompt_tokens: usize,
        outputs: OutputStream,
        text: AnswerText,
    ) -> Self {
        Self { index, prompt, prompt_tokens, completion_tokens: 0, cached_tokens: 0, outputs, text }
    }

    /// The next output's text and that of all others which are there already. Not to be called after the end.
    pub async fn next(&mut self) -> Result<Piece, RequestError> {
        let mut piece = Piece { text: String::new(), finish: None };
        let mut output = self.outputs.next().await;
        loop {
            let ended = || RequestError::Internal("the engine sent nothing after the last token".into());
            self.take(output.ok_or_else(ended)?, &mut piece)?;
            if piece.finish.is_some() {
                return Ok(piece);
            }
            output = self.outputs.try_next();
            if output.is_none() {
                return Ok(piece);
            }
        }
    }

    fn take(&mut self, output: Output, piece: &mut Piece) -> Result<(), RequestError> {
        match output {
            Output::Token { id, cached_tokens } => {
                self.completion_tokens += 1;
                self.cached_tokens = cached_tokens;
                if let Some(stop) = self.text.push(id, &mut piece.text) {
                    piece.finish = Some(stopped_by(stop));
                }
            }
            Output::Finished { reason, stop_token, usage, .. } => {
                self.completion_tokens = usage.completion_tokens;
                self.cached_tokens = usage.cached_tokens;
                // The last token may have left text behind that is only now known to be no stop string; and
                // incomplete characters, whose replacement may complete one.
                piece.finish = Some(match self.text.finish(&mut piece.text) {
                    Some(stop) => stopped_by(stop),
                    None => {
                        Finish { reason: reason.as_str(), stop_reason: stop_token.map(StopReason::Token) }
                    }
                });
            }
            Output::Failed(error) => return Err(error),
        }
        Ok(())
    }
}

fn stopped_by(stop: String) -> Finish {
    Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) }
}
