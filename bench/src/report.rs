//! What `bench ttft` makes of its samples: checks, a summary, two tables and a file.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use crate::deployment::Shape;
use crate::machine::{Load, Machine};
use crate::sample::Sample;
use crate::stats::{Spread, mean};
use crate::table::{Table, grouped, ms, or_dash};
use crate::transfers::{Transfers, gb_per_s};
use crate::ttft::{Args, Cell};

/// One cell of one repeat on one deployment.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    pub repeat: usize,
    pub deployment: Shape,
    /// The transport that was really opened.
    pub transport: Option<String>,
    #[serde(flatten)]
    pub cell: Cell,
    pub wall_ms: f64,
    pub transfers: Option<Transfers>,
    pub samples: Vec<Sample>,
}

/// A cell on one deployment, over all repeats. Milliseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    #[serde(flatten)]
    pub cell: Cell,
    pub deployment: Shape,
    pub transport: Option<String>,
    pub requests: usize,
    pub ttft: Option<Spread>,
    pub second_token: Option<Spread>,
    pub itl: Option<Spread>,
    pub total: Option<Spread>,
    pub transfers: Option<TransferSummary>,
}

/// Means over all handoffs of a [`Summary`].
#[derive(Clone, Debug, Serialize)]
pub struct TransferSummary {
    pub handoffs: u64,
    pub bytes: f64,
    pub descriptors: f64,
    /// `None` where the decode worker did not log it.
    pub writes: Option<f64>,
    pub compute_ms: f64,
    pub wire_ms: f64,
    pub exposed_ms: f64,
    pub gb_per_s: Option<f64>,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    pub command: Vec<String>,
    pub settings: Args,
    pub machine: Machine,
    pub load_before: Option<Load>,
    pub load_after: Option<Load>,
    pub seconds: f64,
    pub problems: Vec<String>,
    pub summary: Vec<Summary>,
    pub runs: Vec<Run>,
}

/// What was not as it must be; empty if the numbers may be believed. Answers are compared unless any will do.
pub fn check(runs: &[Run], output_tokens: usize, any_answer: bool) -> Vec<String> {
    let mut problems = Vec::new();
    let mut first: BTreeMap<usize, (&Run, &Sample)> = BTreeMap::new();
    for run in runs {
        problems.extend(check_transfers(run));
        for sample in &run.samples {
            let name = format!("{} on {}", sample.request_id, run.deployment);
            for (what, got, expected) in [
                ("prompt tokens", sample.prompt_tokens, run.cell.prompt_tokens),
                ("output tokens", sample.completion_tokens, output_tokens),
                ("cached tokens", sample.cached_tokens, 0),
            ] {
                if got != expected {
                    problems.push(format!("{name}: {got} {what}, expected {expected}"));
                }
            }
            let (other, reference) = first.entry(sample.prompt).or_insert((run, sample));
            if !any_answer && sample.text != reference.text {
                let at = sample.text.bytes().zip(reference.text.bytes()).take_while(|(a, b)| a == b).count();
                let (ours, theirs) = (run.deployment, other.deployment);
                problems.push(format!(
                    "{}: {ours} and {theirs} answer differently from byte {at} on",
                    sample.request_id
                ));
            }
        }
    }
    problems
}

/// A right answer may still have been made without a transfer.
fn check_transfers(run: &Run) -> Option<String> {
    let expected = match run.deployment {
        Shape::Both => 0,
        Shape::Disaggregated(_) => run.samples.len() as u64,
    };
    let (handoffs, failed, recomputed) =
        run.transfers.as_ref().map_or((0, 0, 0), |t| (t.handoffs, t.failed_tickets, t.recomputed));
    let Cell { prompt_tokens, concurrency } = run.cell;
    ((handoffs, failed, recomputed) != (expected, 0, 0)).then(|| {
        format!(
            "{}, {prompt_tokens} tokens, concurrency {concurrency}: {handoffs} handoffs, {failed} failed, \
             {recomputed} prompts recomputed, expected {expected} handoffs",
            run.deployment
        )
    })
}

/// One entry for each cell and deployment.
pub fn summary(cells: &[Cell], shapes: &[Shape], runs: &[Run]) -> Vec<Summary> {
    let pairs = cells.iter().flat_map(|&cell| shapes.iter().map(move |&shape| (cell, shape)));
    pairs.map(|(cell, shape)| summarize(cell, shape, runs)).collect()
}

fn summarize(cell: Cell, deployment: Shape, runs: &[Run]) -> Summary {
    let runs: Vec<_> = runs.iter().filter(|run| run.cell == cell && run.deployment == deployment).collect();
    let spread = |values: &dyn Fn(&Sample) -> Vec<f64>| {
        let of_run = |run: &&Run| run.samples.iter().flat_map(values).collect();
        Spread::of(&runs.iter().map(of_run).collect::<Vec<_>>())
    };
    Summary {
        cell,
        deployment,
        transport: runs.first().and_then(|run| run.transport.clone()),
        requests: runs.iter().map(|run| run.samples.len()).sum(),
        ttft: spread(&|sample| sample.ttft().into_iter().collect()),
        second_token: spread(&|sample| sample.second().into_iter().collect()),
        itl: spread(&|sample| sample.gaps().collect()),
        total: spread(&|sample| vec![sample.total_ms]),
        transfers: summarize_transfers(&runs),
    }
}

fn summarize_transfers(runs: &[&Run]) -> Option<TransferSummary> {
    let transfers: Vec<_> = runs.iter().filter_map(|run| run.transfers.as_ref()).collect();
    let handoffs: u64 = transfers.iter().map(|t| t.handoffs).sum();
    let weighted = |value: &dyn Fn(&Transfers) -> f64| {
        transfers.iter().map(|t| value(t) * t.handoffs as f64).sum::<f64>() / handoffs as f64
    };
    let logged = runs.iter().flat_map(|run| &run.samples).filter_map(|sample| sample.handoff.as_ref());
    let writes: Vec<_> = logged.map(|handoff| handoff.writes as f64).collect();
    let (bytes, wire_ms) = (weighted(&|t| t.bytes), weighted(&|t| t.wire_ms));
    (handoffs > 0).then(|| TransferSummary {
        handoffs,
        bytes,
        descriptors: weighted(&|t| t.descriptors),
        writes: mean(&writes),
        compute_ms: weighted(&|t| t.compute_ms),
        wire_ms,
        exposed_ms: weighted(&|t| t.exposed_ms),
        gb_per_s: gb_per_s(bytes, wire_ms),
    })
}

/// The part of a transfer that computing did not hide.
fn share(exposed_ms: f64, wire_ms: f64) -> Option<String> {
    (wire_ms > 0.0).then(|| format!("{:.0}%", 100.0 * exposed_ms / wire_ms))
}

impl Report {
    /// The entry of one process for the same cell.
    fn baseline(&self, summary: &Summary) -> Option<&Summary> {
        self.summary.iter().find(|other| other.cell == summary.cell && other.deployment == Shape::Both)
    }

    fn latencies(&self) -> Table {
        let mut table = Table::new(&[
            "prompt",
            "conc",
            "<deployment",
            "TTFT ms",
            "range",
            "x",
            "2nd tok ms",
            "range",
            "x",
            "ITL ms",
            "range",
            "x",
            "total ms",
            "x",
        ]);
        for summary in &self.summary {
            let base = self.baseline(summary).filter(|_| summary.deployment != Shape::Both);
            let three = |of: fn(&Summary) -> Option<Spread>| {
                let spread = of(summary);
                [
                    or_dash(spread.map(|s| ms(s.median))),
                    spread.map(|s| format!("{}-{}", ms(s.low), ms(s.high))).unwrap_or_default(),
                    ratio(spread, base.and_then(of)),
                ]
            };
            let [total, _, total_ratio] = three(|s| s.total);
            let mut row = head(summary);
            row.extend(three(|s| s.ttft));
            row.extend(three(|s| s.second_token));
            row.extend(three(|s| s.itl));
            row.extend([total, total_ratio]);
            table.row(row);
        }
        table
    }

    fn transfers(&self) -> Table {
        let mut table = Table::new(&[
            "prompt",
            "conc",
            "<deployment",
            "handoffs",
            "bytes",
            "descr.",
            "writes",
            "compute ms",
            "wire ms",
            "exposed ms",
            "of wire",
            "GB/s",
        ]);
        for summary in &self.summary {
            let Some(transfers) = &summary.transfers else { continue };
            let mut row = head(summary);
            row.extend([
                transfers.handoffs.to_string(),
                grouped(transfers.bytes.round() as u64),
                format!("{:.1}", transfers.descriptors),
                or_dash(transfers.writes.map(|writes| format!("{writes:.1}"))),
                ms(transfers.compute_ms),
                ms(transfers.wire_ms),
                ms(transfers.exposed_ms),
                or_dash(share(transfers.exposed_ms, transfers.wire_ms)),
                or_dash(transfers.gb_per_s.map(|rate| format!("{rate:.2}"))),
            ]);
            table.row(row);
        }
        table
    }
}

fn head(summary: &Summary) -> Vec<String> {
    let Cell { prompt_tokens, concurrency } = summary.cell;
    let asked = summary.deployment.to_string();
    let deployment = match &summary.transport {
        // Only `auto` opens another one than its name.
        Some(transport) if !asked.ends_with(transport.as_str()) => format!("{asked} ({transport})"),
        _ => asked,
    };
    vec![prompt_tokens.to_string(), concurrency.to_string(), deployment]
}

fn ratio(spread: Option<Spread>, base: Option<Spread>) -> String {
    match (spread, base) {
        (Some(spread), Some(base)) if base.median > 0.0 => format!("{:.2}", spread.median / base.median),
        _ => String::new(),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cpu = self.machine.cpu_model.as_deref().unwrap_or("unknown CPU");
        let load = |load: Option<Load>| or_dash(load.map(|load| format!("{:.1}", load[0])));
        writeln!(
            f,
            "{}: {} output tokens, {} repeats of {} requests; {cpu}, {} cores, load {} to {}; {:.0} s in all",
            self.settings.model,
            self.settings.output_tokens,
            self.settings.repeats,
            self.settings.requests,
            self.machine.cores,
            load(self.load_before),
            load(self.load_after),
            self.seconds
        )?;
        writeln!(
            f,
            "\n{}\nKV handoffs, means (prefill worker's clock):\n\n{}",
            self.latencies(),
            self.transfers()
        )
    }
}
