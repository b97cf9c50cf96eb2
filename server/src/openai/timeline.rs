//! `return_timeline: true`, an addition to OpenAI's API: where the time of each answer went.
//!
//! The response, or the last chunk of a stream before `[DONE]` (the usage chunk if there is one), has at its top level
//! `timeline`; with several prompts or answers `timelines` instead, a list in the order of the choices.
//!
//! ```json
//! {
//!   "scheduled_ms": 0.412, "ticket_opened_ms": 0.5, "granted_ms": 3.1, "first_token_ms": 80.2,
//!   "kv_received_ms": 81.9, "last_token_ms": 412.7, "preemptions": 0, "transferred_tokens": 2000,
//!   "recomputed": null,
//!   "prefill": {"queue_ms": 2.4, "compute_ms": 74.0, "post_ms": 0.3, "wire_ms": 9.1, "exposed_ms": 1.2},
//!   "transfer": {"writes": 4, "blocks": 125, "bytes": 14336000, "descriptors": 56}
//! }
//! ```
//!
//! Times are milliseconds since the request's arrival, those in `prefill` durations; null is what did not happen.
//! `prefill` and `transfer` are null unless a prefill worker computed the prompt, `recomputed` unless that failed and why.
//! `exposed_ms` is the part of the transfer that the computation did not hide.

use std::time::Duration;

use engine::api::{KvFault, Timeline, Usage};
use engine::handoff::PrefillTiming;
use serde_json::{Map, Value, json};

use super::choice::Share;

/// The field to add to the response for its choices; none unless asked for.
pub fn fields(asked: bool, shares: &[Share]) -> Map<String, Value> {
    if !asked {
        return Map::new();
    }
    let (name, value) = match shares {
        [share] => ("timeline", of(share)),
        shares => ("timelines", shares.iter().map(of).collect()),
    };
    Map::from_iter([(name.to_owned(), value)])
}

/// What the engine says of a finished sequence.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Report {
    timeline: Timeline,
    transferred_tokens: usize,
}

impl Report {
    pub fn new(timeline: Timeline, usage: &Usage) -> Self {
        Self { timeline, transferred_tokens: usage.transferred_tokens }
    }

    /// Why the prompt was computed here although its KV was to come from elsewhere.
    pub fn recomputed(&self) -> Option<KvFault> {
        self.timeline.recomputed
    }
}

fn of(share: &Share) -> Value {
    let Some(Report { timeline, transferred_tokens }) = share.report else { return Value::Null };
    json!({
        "scheduled_ms": timeline.scheduled.map(ms),
        "ticket_opened_ms": timeline.ticket_opened.map(ms),
        "granted_ms": timeline.granted.map(ms),
        "first_token_ms": timeline.first_token.map(ms),
        "kv_received_ms": timeline.kv_received.map(ms),
        "last_token_ms": timeline.last_token.map(ms),
        "preemptions": timeline.preemptions,
        "transferred_tokens": transferred_tokens,
        "recomputed": timeline.recomputed.map(KvFault::label),
        "prefill": timeline.prefill.map(|timing| prefill(timing, timeline.transfer.is_some())),
        "transfer": timeline.transfer,
    })
}

/// What the prefill worker says. It says what moving the KV took at last, which may be after the end of a short answer.
fn prefill(timing: PrefillTiming, moved: bool) -> Value {
    let ms = |us| ms(Duration::from_micros(us));
    let of_transfer = |us| moved.then(|| ms(us));
    json!({
        "queue_ms": ms(timing.queue_us),
        "compute_ms": ms(timing.compute_us),
        "post_ms": of_transfer(timing.post_us),
        "wire_ms": of_transfer(timing.wire_us),
        "exposed_ms": of_transfer(timing.exposed_us),
    })
}

/// Milliseconds, to the microsecond.
fn ms(time: Duration) -> f64 {
    time.as_micros() as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use engine::handoff::Totals;

    use super::*;

    fn share(timeline: Timeline, transferred_tokens: usize) -> Share {
        Share { report: Some(Report { timeline, transferred_tokens }), ..Share::default() }
    }

    #[test]
    fn a_handoff_is_told_in_full() {
        let us = |us| Some(Duration::from_micros(us));
        let timeline = Timeline {
            scheduled: us(412),
            ticket_opened: us(500),
            granted: us(3_100),
            first_token: us(80_200),
            kv_received: us(81_900),
            last_token: us(412_700),
            preemptions: 1,
            recomputed: None,
            prefill: Some(PrefillTiming {
                queue_us: 2_400,
                compute_us: 74_000,
                post_us: 300,
                wire_us: 9_100,
                exposed_us: 1_200,
            }),
            transfer: Some(Totals { writes: 4, blocks: 125, bytes: 14_336_000, descriptors: 56 }),
        };
        let expected = json!({ "timeline": {
            "scheduled_ms": 0.412, "ticket_opened_ms": 0.5, "granted_ms": 3.1, "first_token_ms": 80.2,
            "kv_received_ms": 81.9, "last_token_ms": 412.7, "preemptions": 1, "transferred_tokens": 2000,
            "recomputed": null, "prefill": {
                "queue_ms": 2.4, "compute_ms": 74.0, "post_ms": 0.3, "wire_ms": 9.1, "exposed_ms": 1.2,
            },
            "transfer": {"writes": 4, "blocks": 125, "bytes": 14336000, "descriptors": 56},
        }});
        assert_eq!(Value::Object(fields(true, &[share(timeline, 2000)])), expected);
    }

    #[test]
    fn several_answers_make_a_list_and_what_did_not_happen_is_null() {
        let found = fields(true, &[share(Timeline::default(), 0), Share::default()]);
        let list = found["timelines"].as_array().unwrap();
        assert_eq!((list[0]["granted_ms"].is_null(), list[0]["prefill"].is_null()), (true, true));
        assert_eq!(list[0]["preemptions"], 0);
        assert_eq!((list.len(), list[1].is_null()), (2, true));
        assert!(fields(false, &[Share::default()]).is_empty());
    }
}
