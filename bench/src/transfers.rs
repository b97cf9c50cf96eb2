//! What a decode worker's metrics say about the handoffs between two scrapes.

use serde::Serialize;

use crate::prometheus::Scrape;

/// Means over the handoffs of a stretch of time. Stages are of the prefill worker, in milliseconds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Transfers {
    pub handoffs: u64,
    pub bytes: f64,
    pub descriptors: f64,
    /// From the ticket's arrival to its first step.
    pub queue_ms: f64,
    /// From its first step to its first token.
    pub compute_ms: f64,
    /// Sum over writes: handing over to the transport.
    pub post_ms: f64,
    /// Time during which a write was under way; most of it overlaps with compute.
    pub wire_ms: f64,
    /// From the first token to the last write's arrival: what overlap did not hide.
    pub exposed_ms: f64,
    pub failed_tickets: u64,
    /// Prompts that the decode worker computed itself after a failed handoff.
    pub recomputed: u64,
}

impl Transfers {
    /// `None` if nothing was handed off, nor failed to be.
    pub fn between(before: &Scrape, after: &Scrape) -> Option<Self> {
        let grown = |name: &str, labels: &[(&str, &str)]| after.sum(name, labels) - before.sum(name, labels);
        let handoffs = grown("vllm:nixl_bytes_transferred_count", &[]);
        let failed = grown("kvferry:tickets_failed_total", &[]);
        let recomputed = grown("kvferry:prompts_recomputed_total", &[]);
        if handoffs + failed + recomputed <= 0.0 {
            return None;
        }
        let mean = |total: f64| if handoffs > 0.0 { total / handoffs } else { 0.0 };
        let stage = |stage| mean(grown("kvferry:kv_transfer_seconds_sum", &[("stage", stage)])) * 1000.0;
        Some(Self {
            handoffs: handoffs as u64,
            bytes: mean(grown("vllm:nixl_bytes_transferred_sum", &[])),
            descriptors: mean(grown("vllm:nixl_num_descriptors_sum", &[])),
            queue_ms: stage("queue"),
            compute_ms: stage("compute"),
            post_ms: stage("post"),
            wire_ms: stage("wire"),
            exposed_ms: stage("exposed"),
            failed_tickets: failed as u64,
            recomputed: recomputed as u64,
        })
    }
}

/// Gigabytes (10^9) a second.
pub fn gb_per_s(bytes: f64, wire_ms: f64) -> Option<f64> {
    (wire_ms > 0.0).then(|| bytes / (wire_ms * 1e6))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scrape(handoffs: f64, bytes: f64, wire_secs: f64) -> Scrape {
        let text = format!(
            "vllm:nixl_bytes_transferred_count{{model_name=\"m\"}} {handoffs}\n\
             vllm:nixl_bytes_transferred_sum {bytes}\nvllm:nixl_num_descriptors_sum {handoffs}\n\
             kvferry:kv_transfer_seconds_sum{{stage=\"wire\"}} {wire_secs}\nkvferry:tickets_failed_total 1\n"
        );
        Scrape::parse(&text).unwrap()
    }

    #[test]
    fn means_are_of_what_came_between() {
        let transfers = Transfers::between(&scrape(2.0, 100.0, 0.5), &scrape(4.0, 4100.0, 0.504)).unwrap();
        assert_eq!((transfers.handoffs, transfers.bytes, transfers.descriptors), (2, 2000.0, 1.0));
        assert!((transfers.wire_ms - 2.0).abs() < 1e-9, "{transfers:?}");
        assert!(
            (gb_per_s(transfers.bytes, transfers.wire_ms).unwrap() - 0.001).abs() < 1e-9,
            "{transfers:?}"
        );
        assert_eq!(gb_per_s(1.0, 0.0), None);
        assert_eq!((transfers.failed_tickets, transfers.recomputed, transfers.post_ms), (0, 0, 0.0));
    }

    #[test]
    fn nothing_between_is_none() {
        assert_eq!(Transfers::between(&Scrape::default(), &Scrape::default()), None);
        assert_eq!(Transfers::between(&scrape(2.0, 1.0, 1.0), &scrape(2.0, 1.0, 1.0)), None);
    }
}
