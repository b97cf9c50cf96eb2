//! JSON values, one a line, as they come over a long answer.

use futures_util::{Stream, StreamExt};
use serde::de::DeserializeOwned;

/// The longest line that is believed: a list of a few thousand workers.
const MAX_LINE: usize = 16 << 20;

/// The stream broke, or a line is not what was expected.
#[derive(Debug, thiserror::Error)]
pub enum LinesError {
    #[error("the stream broke: {0}")]
    Broke(#[from] reqwest::Error),
    #[error("{line:?}: {source}")]
    Line { line: String, source: serde_json::Error },
    #[error("a line of more than {MAX_LINE} bytes")]
    TooLong,
}

/// Reads values from an answer's body.
pub struct Lines<S> {
    body: S,
    rest: Vec<u8>,
}

impl<S: Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin> Lines<S> {
    pub fn new(body: S) -> Self {
        Self { body, rest: Vec::new() }
    }

    /// The next value; `None` at the end. May be dropped and called again: nothing is lost.
    pub async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, LinesError> {
        loop {
            if let Some(end) = self.rest.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.rest.drain(..=end).collect();
                if line.trim_ascii().is_empty() {
                    continue;
                }
                let shown = || String::from_utf8_lossy(&line).chars().take(80).collect();
                let value = serde_json::from_slice(&line);
                return value.map(Some).map_err(|source| LinesError::Line { line: shown(), source });
            }
            if self.rest.len() > MAX_LINE {
                return Err(LinesError::TooLong);
            }
            match self.body.next().await {
                Some(piece) => self.rest.extend_from_slice(&piece?),
                None => return Ok(None),
            }
        }
    }
}
