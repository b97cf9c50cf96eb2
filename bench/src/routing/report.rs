//! What `bench routing` found.

use std::fmt;

use serde::Serialize;

use super::{Args, Mode};
use crate::machine::{Load, Machine};
use crate::stats::mean;
use crate::table::{Table, ms, or_dash};

/// One mode with one order.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub mode: Mode,
    pub seed: u64,
    /// Repeats that found their whole prefix.
    pub hits: usize,
    /// Repeats that found anything.
    pub some: usize,
    /// Workers that the frontend said to be without events.
    pub mismatches: usize,
    pub expected_mismatches: usize,
    pub mean_ttft_ms: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub command: Vec<String>,
    pub settings: Args,
    pub machine: Machine,
    pub load_before: Option<Load>,
    pub seconds: f64,
    /// Requests that could be hits.
    pub repeats: usize,
    pub runs: Vec<Run>,
}

impl Report {
    /// A worker without events must be seen, and no other.
    pub fn problems(&self) -> Vec<String> {
        let wrong = self.runs.iter().filter(|run| run.mismatches != run.expected_mismatches);
        wrong
            .map(|run| {
                let (mode, seed, found, expected) =
                    (run.mode, run.seed, run.mismatches, run.expected_mismatches);
                format!(
                    "{mode:?}, seed {seed}: {found} workers said to be without events, expected {expected}"
                )
            })
            .collect()
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&["<mode", "hits", "least", "most", "any", "degraded", "TTFT ms"]);
        for &mode in &self.settings.modes {
            let runs: Vec<_> = self.runs.iter().filter(|run| run.mode == mode).collect();
            let hits = || runs.iter().map(|run| run.hits);
            let average = |values: Vec<f64>| mean(&values);
            table.row([
                format!("{mode:?}"),
                or_dash(average(hits().map(|hits| hits as f64).collect()).map(|hits| format!("{hits:.1}"))),
                or_dash(hits().min().map(|hits| hits.to_string())),
                or_dash(hits().max().map(|hits| hits.to_string())),
                or_dash(
                    average(runs.iter().map(|run| run.some as f64).collect())
                        .map(|some| format!("{some:.1}")),
                ),
                or_dash(runs.iter().map(|run| run.mismatches).max().map(|count| count.to_string())),
                or_dash(average(runs.iter().filter_map(|run| run.mean_ttft_ms).collect()).map(ms)),
            ]);
        }
        writeln!(
            f,
            "{} repeats in each run, {} runs of each mode, {:.0} s in all\n",
            self.repeats, self.settings.seeds, self.seconds
        )?;
        write!(f, "{table}")
    }
}
