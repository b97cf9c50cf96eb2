//! The text of one answer as it grows.

use std::sync::Arc;

use engine::api::TokenId;
use models::{Detokenizer, StopMatcher, Tokenizer};

use crate::error::ApiError;

/// Tokens in, text out, up to the first stop string.
#[derive(Debug)]
pub struct AnswerText {
    tokenizer: Arc<Tokenizer>,
    detokenizer: Detokenizer,
    matcher: StopMatcher,
    stop: Vec<String>,
    /// Stop strings that are complete within so many tokens do not count.
    min_tokens: usize,
    tokens: usize,
    /// Characters so far, those held back or cut off included.
    chars: usize,
    /// The end of the text of the first `min_tokens` tokens, if a stop string could begin there.
    early: String,
}

impl AnswerText {
    pub fn new(
        tokenizer: Arc<Tokenizer>,
        stop: &[String],
        min_tokens: usize,
        skip_special_tokens: bool,
    ) -> Result<Self, ApiError> {
        Ok(Self {
            detokenizer: Detokenizer::new(Arc::clone(&tokenizer), skip_special_tokens),
            tokenizer,
            matcher: StopMatcher::new(stop.to_vec())?,
            stop: stop.to_vec(),
            min_tokens,
            tokens: 0,
            chars: 0,
            early: String::new(),
        })
    }

    /// What `id` stands for, special or not; empty for ids without a token.
    pub fn token_bytes(&self, id: TokenId) -> &[u8] {
        self.tokenizer.token_bytes(id).unwrap_or_default()
    }

    /// How many characters the tokens so far made. A character that is not complete does not count.
    pub fn chars(&self) -> usize {
        self.chars
    }

    /// Appends what is certain with one more token; the stop string that ended the text, if one did.
    pub fn push(&mut self, id: TokenId, text: &mut String) -> Option<String> {
        self.tokens += 1;
        let delta = self.detokenizer.push(id);
        self.take(delta, text)
    }

    /// Appends what was held back, after the last token.
    pub fn finish(&mut self, text: &mut String) -> Option<String> {
        let delta = self.detokenizer.flush();
        let stopped = self.take(delta, text);
        if stopped.is_none() {
            text.push_str(&self.early);
            text.push_str(&self.matcher.flush());
        }
        stopped
    }

    fn take(&mut self, delta: String, text: &mut String) -> Option<String> {
        self.chars += delta.chars().count();
        self.early.push_str(&delta);
        if self.tokens <= self.min_tokens {
            text.extend(self.early.drain(..self.early_end()));
            return None;
        }
        let step = self.matcher.push(&std::mem::take(&mut self.early));
        text.push_str(&step.text);
        step.matched.map(|index| self.stop[index].clone())
    }

    /// From where on the early text could begin a stop string and does not hold a whole one, which the matcher would
    /// find. (So one that begins early, ends late and has another one in its early part is missed.)
    fn early_end(&self) -> usize {
        let begins = |tail: &str| self.stop.iter().any(|stop| stop.starts_with(tail));
        let holds = |tail: &str| self.stop.iter().any(|stop| tail.contains(stop.as_str()));
        let mut starts = self.early.char_indices().map(|(at, _)| at);
        let kept = starts.find(|&at| begins(&self.early[at..]) && !holds(&self.early[at..]));
        kept.unwrap_or(self.early.len())
    }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    /// Joined text and the stop string, with one token for each character.
    fn run(text: &str, stop: &[&str], min_tokens: usize) -> (String, Option<String>) {
        let demo = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../models/demo");
        let tokenizer = Arc::new(Tokenizer::load(&demo).unwrap());
        let stop: Vec<_> = stop.iter().map(|stop| stop.to_string()).collect();
        let mut answer = AnswerText::new(Arc::clone(&tokenizer), &stop, min_tokens, true).unwrap();
        let mut out = String::new();
        for c in text.chars() {
            let ids = tokenizer.encode(&c.to_string(), false).unwrap();
            assert_eq!(ids.len(), 1);
            if let Some(stop) = answer.push(ids[0], &mut out) {
                return (out, Some(stop));
            }
        }
        assert_eq!(answer.chars(), text.chars().count());
        let stop = answer.finish(&mut out);
        (out, stop)
    }

    fn stopped(text: &str, stop: &str) -> (String, Option<String>) {
        (text.into(), Some(stop.into()))
    }

    #[test]
    fn stop_strings_count_only_after_the_least_length() {
        assert_eq!(run("abcabc", &["b"], 0), stopped("a", "b"));
        assert_eq!(run("abcabc", &["b"], 1), stopped("a", "b"));
        assert_eq!(run("abcabc", &["b"], 2), stopped("abca", "b"));
        assert_eq!(run("abcabc", &["b"], 5), ("abcabc".into(), None));
        assert_eq!(run("abc", &["c"], 9), ("abc".into(), None));
    }

    #[test]
    fn a_stop_string_may_begin_early_and_end_late() {
        assert_eq!(run("xabcd", &["bcd"], 4), stopped("xa", "bcd"));
        assert_eq!(run("xabcd", &["bcd"], 5), ("xabcd".into(), None));
        assert_eq!(run("aab", &["aab"], 2), stopped("", "aab"));
        assert_eq!(run("xabx", &["abc"], 3), ("xabx".into(), None));
        assert_eq!(run("xab", &["abc"], 9), ("xab".into(), None));
    }
}
