//! What can go wrong in a measurement.

use std::fmt;
use std::path::PathBuf;

/// The one error type of this crate.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    #[error("{} is not there; build it with: cargo build --release --bin serve", path.display())]
    NoServe { path: PathBuf },
    #[error("{what}: {source}")]
    Io { what: String, source: std::io::Error },
    /// A process ended, or did not become ready; the end of its log says why.
    #[error("{name} {reason}{log}")]
    Process { name: &'static str, reason: String, log: LogTail },
    #[error("{url}: {}", chain(source))]
    Http { url: String, source: reqwest::Error },
    #[error("{url} answered {status}: {body}")]
    Status { url: String, status: u16, body: String },
    #[error("{url} answered something unexpected: {reason}")]
    Answer { url: String, reason: String },
    #[error(transparent)]
    Model(#[from] models::ModelError),
    #[error(transparent)]
    Cuda(#[from] kernels::cuda::CudaError),
    #[error("{0}")]
    Usage(String),
    /// The measurement ran, but what it measured was not right.
    #[error("{} of the checks failed:{}", .0.len(), Listed(.0))]
    Checks(Vec<String>),
}

pub type Result<T> = std::result::Result<T, BenchError>;

impl BenchError {
    pub fn io(what: impl Into<String>) -> impl FnOnce(std::io::Error) -> Self {
        let what = what.into();
        |source| Self::Io { what, source }
    }
}

/// The last lines of a log.
#[derive(Debug)]
pub struct LogTail(pub Vec<String>);

impl fmt::Display for LogTail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\nthe end of its log:")?;
        self.0.iter().try_for_each(|line| write!(f, "\n  {line}"))
    }
}

struct Listed<'a>(&'a [String]);

impl fmt::Display for Listed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 10;
        self.0.iter().take(SHOWN).try_for_each(|line| write!(f, "\n  {line}"))?;
        match self.0.len().saturating_sub(SHOWN) {
            0 => Ok(()),
            more => write!(f, "\n  and {more} more"),
        }
    }
}

/// reqwest's own message leaves out the cause, which is what matters.
fn chain(error: &reqwest::Error) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_are_listed_up_to_a_limit() {
        let message = BenchError::Checks((0..12).map(|i| format!("check {i}")).collect()).to_string();
        assert!(message.starts_with("12 of the checks failed:\n  check 0\n"), "{message}");
        assert!(message.ends_with("check 9\n  and 2 more"), "{message}");
    }
}
