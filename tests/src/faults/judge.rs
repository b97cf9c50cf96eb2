//! Whether what a client got is allowed.

use crate::ask::{Answer, Failure};

/// How a request may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The text that one process answers.
    Right,
    /// An error in OpenAI's shape, as a status or in the stream, after nothing but right text.
    CleanError,
    /// The connection broke, since the process at its end was killed or had closed its port.
    Broken,
}

/// Errors: what was wrong.
pub fn judge(
    result: Result<Answer, Failure>,
    expected: &Answer,
    may_break: bool,
) -> Result<Outcome, String> {
    match result {
        Ok(answer) if answer.content() == expected.content() => Ok(Outcome::Right),
        Ok(answer) => Err(format!("answered {:?}, expected {:?}", answer.content(), expected.content())),
        Err(Failure::Status { status: 500.., .. }) => Ok(Outcome::CleanError),
        Err(Failure::InStream { text, .. }) if expected.text.starts_with(&text) => Ok(Outcome::CleanError),
        Err(Failure::Broken(_)) if may_break => Ok(Outcome::Broken),
        Err(failure) => Err(format!("{failure:?}")),
    }
}
