//! The line that vLLM logs about its KV transfers, in its format, so that what reads one reads the other. Pure.
//!
//! MB are 2^20 bytes. Throughput is all bytes over the sum of all transfers' times: transfers at the same time make it
//! less than what the wire carried.

use std::fmt;
use std::time::Duration;

/// Transfers since the last line.
#[derive(Clone, Debug, Default)]
pub struct Summary {
    transfers: Vec<Transfer>,
    failed: u64,
    expired: u64,
    after_expiry: u64,
}

/// One transfer that went well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Transfer {
    pub bytes: u64,
    pub descriptors: u64,
    pub xfer: Duration,
    pub post: Duration,
}

/// Transfers kept for one line; more than a busy worker makes in the ten seconds between two.
const KEPT: usize = 100_000;

impl Summary {
    pub fn add(&mut self, transfer: Transfer) {
        if self.transfers.len() < KEPT {
            self.transfers.push(transfer);
        }
    }

    pub fn add_failed(&mut self, count: u64) {
        self.failed += count;
    }

    pub fn add_expired(&mut self, count: u64) {
        self.expired += count;
    }

    pub fn add_after_expiry(&mut self, count: u64) {
        self.after_expiry += count;
    }

    /// What was added since the last call; `None` if nothing was.
    pub fn take(&mut self) -> Option<Self> {
        let taken = std::mem::take(self);
        let empty = taken.transfers.is_empty() && taken.failed + taken.expired + taken.after_expiry == 0;
        (!empty).then_some(taken)
    }

    fn mean(&self, value: impl Fn(&Transfer) -> f64) -> f64 {
        // An empty sum is -0.0.
        self.transfers.iter().map(value).fold(0.0, |sum, value| sum + value)
            / self.transfers.len().max(1) as f64
    }

    /// The 90th percentile, interpolated between neighbours.
    fn p90(&self, value: impl Fn(&Transfer) -> f64) -> f64 {
        let mut values: Vec<f64> = self.transfers.iter().map(value).collect();
        values.sort_by(f64::total_cmp);
        let Some(last) = values.len().checked_sub(1) else { return 0.0 };
        let at = 0.9 * last as f64;
        let (low, high) = (values[at.floor() as usize], values[at.ceil() as usize]);
        low + (high - low) * at.fract()
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
        let seconds: f64 = self.transfers.iter().map(|t| t.xfer.as_secs_f64()).sum();
        let all = mb(self.transfers.iter().map(|t| t.bytes).sum());
        let throughput = if seconds > 0.0 { all / seconds } else { 0.0 };
        write!(
            f,
            "KV Transfer metrics: Num successful transfers={}, Avg xfer time (ms)={}, P90 xfer time (ms)={}, \
             Avg post time (ms)={}, P90 post time (ms)={}, Avg MB per transfer={}, Throughput (MB/s)={}, \
             Avg number of descriptors={}, Num failed transfers={}, Num KV expired reqs={}, Num notifs after expiry={}",
            self.transfers.len(),
            Rounded(self.mean(|t| ms(t.xfer)), 3),
            Rounded(self.p90(|t| ms(t.xfer)), 3),
            Rounded(self.mean(|t| ms(t.post)), 3),
            Rounded(self.p90(|t| ms(t.post)), 3),
            Rounded(self.mean(|t| mb(t.bytes)), 3),
            Rounded(throughput, 3),
            Rounded(self.mean(|t| t.descriptors as f64), 1),
            self.failed,
            self.expired,
            self.after_expiry,
        )
    }
}

/// A number as Python prints it after rounding: no trailing zeros, but one decimal at least.
struct Rounded(f64, usize);

impl fmt::Display for Rounded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = format!("{:.*}", self.1, self.0);
        let short = text.trim_end_matches('0');
        if short.ends_with('.') { write!(f, "{short}0") } else { f.write_str(short) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_line_is_vllms() {
        let mut summary = Summary::default();
        for (mib, ms) in [(100, 50), (200, 100)] {
            summary.add(Transfer {
                bytes: mib << 20,
                descriptors: mib / 10,
                xfer: Duration::from_millis(ms),
                post: Duration::from_micros(1500),
            });
        }
        summary.add_failed(1);
        assert_eq!(
            summary.take().unwrap().to_string(),
            "KV Transfer metrics: Num successful transfers=2, Avg xfer time (ms)=75.0, P90 xfer time (ms)=95.0, \
             Avg post time (ms)=1.5, P90 post time (ms)=1.5, Avg MB per transfer=150.0, Throughput (MB/s)=2000.0, \
             Avg number of descriptors=15.0, Num failed transfers=1, Num KV expired reqs=0, Num notifs after expiry=0"
        );
        assert!(summary.take().is_none(), "a line says what is new");
    }

    #[test]
    fn a_line_without_transfers_has_no_nonsense_in_it() {
        let mut summary = Summary::default();
        summary.add_expired(2);
        let line = summary.take().unwrap().to_string();
        assert!(
            line.contains("transfers=0, Avg xfer time (ms)=0.0") && line.contains("expired reqs=2"),
            "{line}"
        );
        assert!(!line.contains("NaN") && !line.contains("inf"), "{line}");
    }
}
