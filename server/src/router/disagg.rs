//! Who computes a prompt where there are prefill and decode workers: pure, from figures that were measured.
//!
//! Local costs the time of the prompts waiting there and of this one, once for this request and once for each request
//! that decodes there, since its tokens wait as long. Remote costs the same for the prefill worker, whose requests do not
//! wait for tokens, and the way of the KV. Where nothing was measured yet, both sides are taken for equally fast.

use serde::Serialize;

/// `--disagg-policy`
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DisaggPolicy {
    /// Whoever costs less.
    Auto,
    /// A prefill worker.
    Always,
    /// The decode worker.
    Never,
    /// A prefill worker, for prompts with at least so many tokens that the decode worker has not cached.
    Threshold(usize),
}

/// Until a worker has been measured.
const ASSUMED_PREFILL_TOKENS_PER_SEC: f64 = 10_000.0;
const ASSUMED_LINK_BYTES_PER_SEC: f64 = 2e9;
/// Qwen3-0.6B in bf16.
const ASSUMED_KV_BYTES_PER_TOKEN: f64 = 114_688.0;

/// Ticket, grant and first token, between two processes that are not busy.
const HANDOFF_SECS: f64 = 0.002;

/// What was measured of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Speeds {
    /// Prompt tokens computed in a second of prefill.
    pub prefill_tokens_per_sec: Option<f64>,
    /// KV bytes that reach it, or leave it, in a second on the wire.
    pub link_bytes_per_sec: Option<f64>,
    pub kv_bytes_per_token: Option<f64>,
}

/// One side of the comparison.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Side {
    /// Prompt tokens that it would have to compute.
    pub uncached_tokens: usize,
    /// Prompt tokens of other requests that it still has to compute.
    pub queued_tokens: u64,
    /// Requests under way there.
    pub active_requests: u64,
    pub speeds: Speeds,
}

/// What was decided, with the numbers that decided it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Estimate {
    pub policy: DisaggPolicy,
    /// The prompt goes to the prefill worker.
    pub remote: bool,
    /// A word for labels.
    pub reason: &'static str,
    pub uncached_tokens_here: usize,
    pub uncached_tokens_there: usize,
    pub queued_tokens_here: u64,
    pub queued_tokens_there: u64,
    pub decoding_here: u64,
    pub prefill_tokens_per_sec_here: f64,
    pub prefill_tokens_per_sec_there: f64,
    pub link_bytes_per_sec: f64,
    pub transfer_bytes: f64,
    /// None of the speeds is an assumption.
    pub measured: bool,
    pub local_cost_ms: f64,
    pub remote_cost_ms: f64,
}

/// Compares the decode worker (`here`) with the prefill worker that would do it (`there`).
pub fn decide(policy: DisaggPolicy, here: Side, there: Side) -> Estimate {
    let positive = |value: Option<f64>| value.filter(|value| value.is_finite() && *value > 0.0);
    let (speed_here, speed_there) =
        (positive(here.speeds.prefill_tokens_per_sec), positive(there.speeds.prefill_tokens_per_sec));
    // One measured side speaks for both: they are the same kind of machine more often than not.
    let assumed = speed_here.or(speed_there).unwrap_or(ASSUMED_PREFILL_TOKENS_PER_SEC);
    let here_rate = speed_here.unwrap_or(assumed);
    let there_rate = speed_there.unwrap_or(assumed);
    let link = positive(here.speeds.link_bytes_per_sec).or(positive(there.speeds.link_bytes_per_sec));
    let token_bytes = positive(here.speeds.kv_bytes_per_token).or(positive(there.speeds.kv_bytes_per_token));
    let link_rate = link.unwrap_or(ASSUMED_LINK_BYTES_PER_SEC);
    let transfer_bytes = here.uncached_tokens as f64 * token_bytes.unwrap_or(ASSUMED_KV_BYTES_PER_TOKEN);
    let tokens = |side: &Side| side.queued_tokens as f64 + side.uncached_tokens as f64;
    let local = tokens(&here) / here_rate * (1.0 + here.active_requests as f64);
    let remote = tokens(&there) / there_rate + transfer_bytes / link_rate + HANDOFF_SECS;
    let (goes, reason) = match policy {
        DisaggPolicy::Always => (true, "always"),
        DisaggPolicy::Never => (false, "never"),
        DisaggPolicy::Threshold(least) if here.uncached_tokens >= least => (true, "threshold"),
        DisaggPolicy::Threshold(_) => (false, "below_threshold"),
        DisaggPolicy::Auto if remote < local => (true, "cheaper"),
        DisaggPolicy::Auto => (false, "local_cheaper"),
    };
    Estimate {
        policy,
        remote: goes,
        reason,
        uncached_tokens_here: here.uncached_tokens,
        uncached_tokens_there: there.uncached_tokens,
        queued_tokens_here: here.queued_tokens,
        queued_tokens_there: there.queued_tokens,
        decoding_here: here.active_requests,
        prefill_tokens_per_sec_here: here_rate,
        prefill_tokens_per_sec_there: there_rate,
        link_bytes_per_sec: link_rate,
        transfer_bytes,
        measured: speed_here.is_some() && speed_there.is_some() && link.is_some() && token_bytes.is_some(),
        local_cost_ms: local * 1e3,
        remote_cost_ms: remote * 1e3,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn side(uncached_tokens: usize, queued_tokens: u64, active_requests: u64) -> Side {
        let speeds = Speeds {
            prefill_tokens_per_sec: Some(10_000.0),
            link_bytes_per_sec: Some(10e9),
            kv_bytes_per_token: Some(100_000.0),
        };
        Side { uncached_tokens, queued_tokens, active_requests, speeds }
    }

    fn auto(here: Side, there: Side) -> bool {
        decide(DisaggPolicy::Auto, here, there).remote
    }

    #[test]
    fn an_idle_decode_worker_computes_itself_and_a_busy_one_does_not() {
        assert!(!auto(side(2000, 0, 0), side(2000, 0, 0)));
        assert!(auto(side(2000, 0, 4), side(2000, 0, 0)));
        // A prefill worker with a long queue is worse than some requests that wait a little.
        assert!(!auto(side(2000, 0, 4), side(2000, 50_000, 9)));
        // What is left of the prompt is too little to be worth a handoff.
        assert!(!auto(side(16, 0, 1), side(16, 0, 0)));
        // The prefill worker has it cached.
        assert!(auto(side(4000, 0, 0), side(16, 0, 0)));
    }

    #[test]
    fn a_slow_link_keeps_prompts_local() {
        let slow = |mut side: Side| {
            side.speeds.link_bytes_per_sec = Some(50e6);
            side
        };
        assert!(!auto(slow(side(2000, 0, 4)), slow(side(2000, 0, 0))));
    }

    #[test]
    fn the_other_policies_do_as_they_say() {
        let decide = |policy, tokens| decide(policy, side(tokens, 0, 0), side(tokens, 0, 0)).remote;
        assert!(decide(DisaggPolicy::Always, 1) && !decide(DisaggPolicy::Never, 100_000));
        assert!(decide(DisaggPolicy::Threshold(512), 512) && !decide(DisaggPolicy::Threshold(512), 511));
    }

    #[test]
    fn nothing_measured_is_no_nan() {
        let blank = |tokens| Side { uncached_tokens: tokens, ..Side::default() };
        for tokens in [0, 1, 100_000] {
            let estimate = decide(DisaggPolicy::Auto, blank(tokens), blank(tokens));
            assert!(
                estimate.local_cost_ms.is_finite()
                    && estimate.remote_cost_ms.is_finite()
                    && !estimate.measured
            );
        }
        let mut odd = side(10, 0, 0);
        odd.speeds.prefill_tokens_per_sec = Some(0.0);
        assert!(decide(DisaggPolicy::Auto, odd, side(10, 0, 0)).local_cost_ms.is_finite());
    }
}
