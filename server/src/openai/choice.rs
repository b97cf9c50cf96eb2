//! One answer as it grows: tokens from the engine in, text out, up to the first stop string.

use engine::api::{KeptKv, Logprobs, Output, RequestError, TokenId};
use engine::handle::OutputStream;
use serde::Serialize;

use super::logprobs::{Entry, Scored};
use super::response::Usage;
use super::timeline::Report;
use crate::answer_text::AnswerText;

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

/// A choice's part of the request's usage, and of its timeline.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Share {
    /// Which of the request's prompts it continues.
    pub prompt: usize,
    pub prompt_tokens: usize,
    pub completion_tokens: usize,
    pub cached_tokens: usize,
    /// There when the engine ended the choice.
    pub report: Option<Report>,
}

impl Share {
    /// The usage of this choice alone.
    pub fn usage(&self) -> Usage {
        Usage::new(self.prompt_tokens, self.completion_tokens, self.cached_tokens)
    }
}

/// More of a choice.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Piece {
    /// Empty while text is held back.
    pub text: String,
    /// Of the tokens since the last piece with text; empty unless asked for, and while text is held back.
    pub logprobs: Vec<Entry>,
    /// Present once, in the last piece.
    pub finish: Option<Finish>,
}

/// How a choice ends, and what is to be known of it then.
pub struct Ends {
    pub max_tokens: usize,
    /// Wait for the engine's report even if a stop string ends the choice.
    pub report: bool,
    /// Told of the KV that a prefill worker keeps.
    pub on_kept: Box<dyn Fn(&KeptKv) + Send>,
}

/// One sequence that the engine generates. Dropping it aborts the sequence.
pub struct Choice {
    /// Its number in the answer.
    pub index: usize,
    pub share: Share,
    ends: Ends,
    outputs: OutputStream,
    text: AnswerText,
    /// Wait for text to come with.
    logprobs: Vec<Entry>,
}

impl Choice {
    /// Answer number `index`; `share` names its prompt.
    pub fn new(
        index: usize,
        share: Share,
        ends: Ends,
        outputs: OutputStream,
        text: AnswerText,
    ) -> Self {
        Self { index, share, ends, outputs, text, logprobs: Vec::new() }
    }

    /// The next output's text and that of all others which are there already. Not to be called after the end.
    pub async fn next(&mut self) -> Result<Piece, RequestError> {
        let mut piece = Piece::default();
        self.fill(&mut piece).await?;
        if !piece.text.is_empty() || piece.finish.is_some() {
            piece.logprobs = std::mem::take(&mut self.logprobs);
        }
        Ok(piece)
    }

    async fn fill(&mut self, piece: &mut Piece) -> Result<(), RequestError> {
        let mut output = self.outputs.next().await;
        loop {
            let ended = || RequestError::Internal("the engine sent nothing after the last token".into());
            self.take(output.ok_or_else(ended)?, piece)?;
            if piece.finish.is_some() {
                return self.finish().await;
            }
            // The end follows the last token at once; in the same piece it is no further event, which clients that
            // measure the time between tokens would take for one.
            output = match self.share.completion_tokens >= self.ends.max_tokens {
                true => self.outputs.next().await,
                false => self.outputs.try_next(),
            };
            if output.is_none() {
                return Ok(());
            }
        }
    }

    /// Tells the engine of an end that it does not know of, which a stop string is.
    async fn finish(&mut self) -> Result<(), RequestError> {
        self.outputs.finish();
        while self.ends.report && self.share.report.is_none() {
            match self.outputs.next().await {
                Some(Output::Finished { usage, timeline, .. }) => {
                    self.share.report = Some(Report::new(timeline, &usage));
                }
                Some(Output::Token { .. }) => {}
                Some(Output::Failed(error)) => return Err(error),
                None => break,
            }
        }
        Ok(())
    }

    fn take(&mut self, output: Output, piece: &mut Piece) -> Result<(), RequestError> {
        match output {
            Output::Token { id, cached_tokens, logprobs } => {
                self.share.completion_tokens += 1;
                self.share.cached_tokens = cached_tokens;
                self.logprobs.extend(logprobs.map(|logprobs| self.entry(id, &logprobs)));
                if let Some(stop) = self.text.push(id, &mut piece.text) {
                    piece.finish = Some(stopped_by(stop));
                }
            }
            Output::Finished { reason, stop_token, usage, timeline, kept } => {
                if let Some(kept) = kept {
                    (self.ends.on_kept)(&kept);
                }
                self.share.report = Some(Report::new(timeline, &usage));
                self.share.completion_tokens = usage.completion_tokens;
                self.share.cached_tokens = usage.cached_tokens;
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

    /// Before the token's text is taken.
    fn entry(&self, id: TokenId, logprobs: &Logprobs) -> Entry {
        let scored = |id, logprob| Scored { bytes: self.text.token_bytes(id).to_vec(), logprob };
        Entry {
            offset: self.text.chars(),
            token: scored(id, logprobs.logprob),
            top: logprobs.top.iter().map(|&(id, logprob)| scored(id, logprob)).collect(),
        }
    }
}

fn stopped_by(stop: String) -> Finish {
    Finish { reason: "stop", stop_reason: Some(StopReason::Text(stop)) }
}
