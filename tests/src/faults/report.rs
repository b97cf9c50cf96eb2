//! What a run of the table found.

use serde::Serialize;

use super::judge::Outcome;

/// One cell's runs.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    pub cell: String,
    pub runs: usize,
    /// The client had the right text.
    pub right: usize,
    pub clean_errors: usize,
    /// The client's own server was killed.
    pub broken: usize,
    /// The client was the one to leave, or there was none.
    pub no_answer: usize,
    pub seconds: f64,
    /// What was not allowed, run by run.
    pub failures: Vec<String>,
}

impl Report {
    /// Takes one run's outcomes.
    pub fn add(&mut self, run: Result<Vec<Outcome>, String>) {
        self.runs += 1;
        match run {
            Err(failure) => self.failures.push(failure),
            Ok(outcomes) if outcomes.is_empty() => self.no_answer += 1,
            Ok(outcomes) => match outcomes[0] {
                Outcome::Right => self.right += 1,
                Outcome::CleanError => self.clean_errors += 1,
                Outcome::Broken => self.broken += 1,
            },
        }
    }
}
