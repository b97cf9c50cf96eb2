//! What `bench prefix-hits` makes of its requests: ratios, the rule, and a table.

use std::fmt;

use serde::Serialize;

use super::Args;
use crate::machine::{Load, Machine};
use crate::stats::{mean, median};
use crate::table::{Table, ms, or_dash};

/// One request, as it went and as the LRU model says.
#[derive(Clone, Debug, Serialize)]
pub struct Outcome {
    pub kind: usize,
    pub worker: usize,
    pub first_touch: bool,
    pub prompt_tokens: usize,
    pub cached_tokens: usize,
    pub lru_cached_tokens: usize,
    pub ttft_ms: Option<f64>,
}

/// Shares of 1 over some requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Ratios {
    pub requests: usize,
    /// Cached tokens of prompt tokens.
    pub tokens: f64,
    /// Cached tokens of the tokens of shared prefixes that fill blocks.
    pub prefix_tokens: f64,
    /// Requests that found their whole prefix.
    pub whole: f64,
    /// Requests that found a part of it.
    pub part: f64,
}

/// One number of prefixes.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    pub kinds: usize,
    pub repeats: usize,
    pub seconds: f64,
    pub preemptions: u64,
    /// All requests.
    pub raw: Ratios,
    /// Without the first one for each prefix on each worker.
    pub warm: Ratios,
    /// Twice the standard error of `warm.prefix_tokens`, as if requests were independent.
    pub uncertainty: f64,
    pub lru_raw: Ratios,
    pub lru_warm: Ratios,
    /// Requests whose cached tokens are not those that the LRU model says.
    pub unlike_lru: usize,
    pub rule: f64,
    /// Of requests that found their whole prefix.
    pub hit_ttft_ms: Option<f64>,
    /// Of requests that found nothing.
    pub miss_ttft_ms: Option<f64>,
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
    pub prefixes_that_fit: f64,
    pub problems: Vec<String>,
    pub summary: Vec<Summary>,
    /// By number of prefixes, in the order of sending.
    pub requests: Vec<Vec<Outcome>>,
}

/// The capacity rule: `min(1, fit / kinds)`.
pub fn rule(fit: f64, kinds: usize) -> f64 {
    (fit / kinds as f64).min(1.0)
}

impl Ratios {
    /// `cached` says how many tokens each request found; `prefix` is how many it could at most.
    fn of<'a>(
        outcomes: impl Iterator<Item = &'a Outcome>,
        prefix: usize,
        cached: fn(&Outcome) -> usize,
    ) -> Self {
        let found: Vec<_> = outcomes.map(|outcome| (cached(outcome), outcome.prompt_tokens)).collect();
        let requests = found.len();
        let share = |part: usize, whole: usize| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
        let whole = found.iter().filter(|(cached, _)| *cached >= prefix).count();
        let any = found.iter().filter(|(cached, _)| *cached > 0).count();
        Self {
            requests,
            tokens: share(found.iter().map(|f| f.0).sum(), found.iter().map(|f| f.1).sum()),
            prefix_tokens: share(found.iter().map(|f| f.0.min(prefix)).sum(), prefix * requests),
            whole: share(whole, requests),
            part: share(any - whole.min(any), requests),
        }
    }
}

impl Summary {
    /// `prefix` are the tokens of a prefix that fill blocks.
    pub fn new(kinds: usize, repeats: usize, prefix: usize, fit: f64, outcomes: &[Outcome]) -> Self {
        let warm = || outcomes.iter().filter(|outcome| !outcome.first_touch);
        let measured = |outcome: &Outcome| outcome.cached_tokens;
        let lru = |outcome: &Outcome| outcome.lru_cached_tokens;
        let shares: Vec<f64> =
            warm().map(|o| o.cached_tokens.min(prefix) as f64 / prefix.max(1) as f64).collect();
        let ttft = |matching: &dyn Fn(&&Outcome) -> bool| {
            median(&outcomes.iter().filter(matching).filter_map(|o| o.ttft_ms).collect::<Vec<_>>())
        };
        Self {
            kinds,
            repeats,
            seconds: 0.0,
            preemptions: 0,
            raw: Ratios::of(outcomes.iter(), prefix, measured),
            warm: Ratios::of(warm(), prefix, measured),
            uncertainty: 2.0 * standard_error(&shares),
            lru_raw: Ratios::of(outcomes.iter(), prefix, lru),
            lru_warm: Ratios::of(warm(), prefix, lru),
            unlike_lru: outcomes.iter().filter(|o| o.cached_tokens != o.lru_cached_tokens).count(),
            rule: rule(fit, kinds),
            hit_ttft_ms: ttft(&|outcome| outcome.cached_tokens >= prefix),
            miss_ttft_ms: ttft(&|outcome| outcome.cached_tokens == 0),
        }
    }

    /// How far the measured ratio is above the rule, in percentage points.
    pub fn off_rule(&self) -> f64 {
        (self.warm.prefix_tokens - self.rule) * 100.0
    }
}

fn standard_error(values: &[f64]) -> f64 {
    let Some(mean) = mean(values) else { return 0.0 };
    let variance = values.iter().map(|value| (value - mean).powi(2)).sum::<f64>() / values.len() as f64;
    (variance / values.len() as f64).sqrt()
}

impl Report {
    fn table(&self) -> Table {
        let mut table = Table::new(&[
            "prefixes",
            "requests",
            "warm",
            "raw: tokens",
            "whole",
            "prefix",
            "warm: tokens",
            "whole",
            "prefix",
            "+-",
            "LRU",
            "rule",
            "off",
            "hit ms",
            "miss ms",
            "x",
            "s",
        ]);
        for summary in &self.summary {
            let percent = |share: f64| format!("{:.1}", share * 100.0);
            let ratio = summary.miss_ttft_ms.zip(summary.hit_ttft_ms).filter(|(_, hit)| *hit > 0.0);
            table.row([
                summary.kinds.to_string(),
                summary.raw.requests.to_string(),
                summary.warm.requests.to_string(),
                percent(summary.raw.tokens),
                percent(summary.raw.whole),
                percent(summary.raw.prefix_tokens),
                percent(summary.warm.tokens),
                percent(summary.warm.whole),
                percent(summary.warm.prefix_tokens),
                percent(summary.uncertainty),
                percent(summary.lru_warm.prefix_tokens),
                percent(summary.rule),
                format!("{:+.1}", summary.off_rule()),
                or_dash(summary.hit_ttft_ms.map(ms)),
                or_dash(summary.miss_ttft_ms.map(ms)),
                or_dash(ratio.map(|(miss, hit)| format!("{:.2}", miss / hit))),
                format!("{:.0}", summary.seconds),
            ]);
        }
        table
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let args = &self.settings;
        writeln!(
            f,
            "{} on {}: {} workers of {} tokens, prefixes of {} + {} tokens, {} output tokens, {} at a time on each; \
             {:.2} prefixes fit; {:.0} s in all",
            args.model,
            args.device_text(),
            args.workers,
            args.pool_tokens(),
            args.prefix_tokens,
            args.suffix_tokens,
            args.output_tokens,
            args.concurrency,
            self.prefixes_that_fit,
            self.seconds
        )?;
        writeln!(f, "\n{}", self.table())?;
        let unlike: usize = self.summary.iter().map(|summary| summary.unlike_lru).sum();
        let all: usize = self.summary.iter().map(|summary| summary.raw.requests).sum();
        let expected = match args.concurrency {
            1 => "must be 0",
            _ => "not 0 where requests overlap",
        };
        writeln!(f, "Requests whose cached tokens are not what LRU says: {unlike} of {all} ({expected}).")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome(cached: usize, first_touch: bool, ttft: f64) -> Outcome {
        Outcome {
            kind: 0,
            worker: 0,
            first_touch,
            prompt_tokens: 100,
            cached_tokens: cached,
            lru_cached_tokens: cached,
            ttft_ms: Some(ttft),
        }
    }

    #[test]
    fn the_rule_is_what_fits_of_what_there_is() {
        assert_eq!([2, 4, 8].map(|kinds| rule(4.0, kinds)), [1.0, 1.0, 0.5]);
        assert_eq!(rule(0.5, 2), 0.25);
    }

    #[test]
    fn first_touches_count_in_the_raw_ratios_only() {
        let outcomes =
            [outcome(0, true, 9.0), outcome(80, false, 1.0), outcome(20, false, 5.0), outcome(0, false, 7.0)];
        let summary = Summary::new(2, 2, 80, 1.0, &outcomes);
        assert_eq!(
            summary.raw,
            Ratios { requests: 4, tokens: 0.25, prefix_tokens: 0.3125, whole: 0.25, part: 0.25 }
        );
        assert_eq!((summary.warm.requests, summary.warm.whole), (3, 1.0 / 3.0));
        assert!((summary.off_rule() + 8.333).abs() < 0.01, "{}", summary.off_rule());
        assert_eq!((summary.hit_ttft_ms, summary.miss_ttft_ms), (Some(1.0), Some(8.0)));
        assert_eq!((summary.lru_warm, summary.unlike_lru), (summary.warm, 0));
    }

    #[test]
    fn nothing_measured_is_no_ratio() {
        let summary = Summary::new(1, 1, 80, 1.0, &[outcome(0, true, 1.0)]);
        assert_eq!((summary.warm, summary.uncertainty), (Ratios::default(), 0.0));
        assert_eq!(summary.hit_ttft_ms, None);
    }

    #[test]
    fn errors_shrink_with_the_root_of_the_count() {
        let values = |n: usize| (0..n).map(|i| (i % 2) as f64).collect::<Vec<_>>();
        assert!((standard_error(&values(100)) - 0.05).abs() < 1e-12);
        assert!((standard_error(&values(400)) - 0.025).abs() < 1e-12);
    }
}
