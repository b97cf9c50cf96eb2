//! The last minutes, second by second: what the status page shows.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

/// As far back as the page shows.
const SECONDS: usize = 300;

/// Times kept of one second; more are sampled by leaving out.
const MAX_TIMES: usize = 256;

/// Counts of the seconds just gone.
#[derive(Debug)]
pub struct Recent {
    started: Instant,
    seconds: Mutex<VecDeque<Second>>,
}

#[derive(Clone, Debug, Default)]
struct Second {
    number: u64,
    requests: u64,
    ttft_ms: Vec<f32>,
    prompt_tokens: u64,
    cached_tokens: u64,
    drift_tokens: i64,
}

/// One second, for the page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Point {
    /// Seconds ago.
    pub ago: u64,
    pub requests: u64,
    pub ttft_p50_ms: Option<f32>,
    pub ttft_p99_ms: Option<f32>,
    /// Cached tokens of prompt tokens.
    pub hit_rate: Option<f64>,
}

/// The whole window in a few numbers.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Totals {
    pub requests: u64,
    pub ttft_p50_ms: Option<f32>,
    pub ttft_p99_ms: Option<f32>,
    pub hit_rate: Option<f64>,
    /// Tokens that were predicted to be cached less those that were.
    pub drift_tokens: i64,
}

impl Default for Recent {
    fn default() -> Self {
        Self { started: Instant::now(), seconds: Mutex::default() }
    }
}

impl Recent {
    pub fn first_token(&self, ttft: Duration) {
        self.with(|second| {
            second.requests += 1;
            if second.ttft_ms.len() < MAX_TIMES {
                second.ttft_ms.push(ttft.as_secs_f32() * 1e3);
            }
        });
    }

    pub fn prompt(&self, tokens: u64, cached: u64) {
        self.with(|second| {
            second.prompt_tokens += tokens;
            second.cached_tokens += cached;
        });
    }

    pub fn drift(&self, tokens: i64) {
        self.with(|second| second.drift_tokens += tokens);
    }

    /// The seconds with requests, oldest first.
    pub fn points(&self) -> Vec<Point> {
        let now = self.now();
        let seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let live = seconds.iter().filter(|second| second.number + SECONDS as u64 > now);
        live.map(|second| {
            let (ttft_p50_ms, ttft_p99_ms) = percentiles(second.ttft_ms.clone());
            let hit_rate = share(second.cached_tokens, second.prompt_tokens);
            Point { ago: now - second.number, requests: second.requests, ttft_p50_ms, ttft_p99_ms, hit_rate }
        })
        .collect()
    }

    /// Over the last `window` seconds.
    pub fn totals(&self, window: u64) -> Totals {
        let now = self.now();
        let seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        let live: Vec<_> = seconds.iter().filter(|second| second.number + window > now).collect();
        let (ttft_p50_ms, ttft_p99_ms) =
            percentiles(live.iter().flat_map(|second| second.ttft_ms.iter().copied()).collect());
        let sum = |of: fn(&Second) -> u64| live.iter().map(|second| of(second)).sum::<u64>();
        Totals {
            requests: sum(|second| second.requests),
            ttft_p50_ms,
            ttft_p99_ms,
            hit_rate: share(sum(|second| second.cached_tokens), sum(|second| second.prompt_tokens)),
            drift_tokens: live.iter().map(|second| second.drift_tokens).sum(),
        }
    }

    fn now(&self) -> u64 {
        self.started.elapsed().as_secs()
    }

    fn with(&self, change: impl FnOnce(&mut Second)) {
        let now = self.now();
        let mut seconds = self.seconds.lock().unwrap_or_else(PoisonError::into_inner);
        if seconds.back().is_none_or(|second| second.number < now) {
            if seconds.len() == SECONDS {
                seconds.pop_front();
            }
            seconds.push_back(Second { number: now, ..Second::default() });
        }
        change(seconds.back_mut().expect("pushed above. This is a bug."));
    }
}

fn percentiles(mut values: Vec<f32>) -> (Option<f32>, Option<f32>) {
    if values.is_empty() {
        return (None, None);
    }
    values.sort_by(f32::total_cmp);
    let at = |share: f64| values[((values.len() - 1) as f64 * share).round() as usize];
    (Some(at(0.5)), Some(at(0.99)))
}

fn share(part: u64, whole: u64) -> Option<f64> {
    (whole > 0).then(|| part as f64 / whole as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_without_requests_has_no_ratios() {
        let recent = Recent::default();
        assert_eq!(recent.totals(60), Totals::default());
        assert!(recent.points().is_empty());
    }

    #[test]
    fn requests_of_a_second_are_one_point() {
        let recent = Recent::default();
        for ms in 1..=100 {
            recent.first_token(Duration::from_millis(ms));
        }
        recent.prompt(100, 25);
        recent.prompt(100, 75);
        recent.drift(-16);
        let totals = recent.totals(60);
        assert_eq!((totals.requests, totals.hit_rate, totals.drift_tokens), (100, Some(0.5), -16));
        assert!((49.0..52.0).contains(&totals.ttft_p50_ms.unwrap()), "{totals:?}");
        assert!((98.0..101.0).contains(&totals.ttft_p99_ms.unwrap()), "{totals:?}");
        assert_eq!(recent.points().iter().map(|point| point.requests).sum::<u64>(), 100);
    }
}
