//! What is known of this worker's KV transport: every transfer by lane, and the self-tests of its links; for `/metrics`,
//! `/health` and the log.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use engine::metrics::Metrics;
use prometheus::{GaugeVec, HistogramOpts, HistogramVec, IntCounterVec, IntGaugeVec, Opts, Registry};
use serde_json::{Value, json};
use transfer::driver::{DriverEvent, TransportInfo};
use transfer::registry::{AUTO, MMAP};
use transfer::{Direction, ProbeReport};

/// How often the summary is logged, if anything was transferred; as in vLLM.
pub const SUMMARY: Duration = Duration::from_secs(10);

/// GB/s, from a slow network to memory.
const RATES: &[f64] =
    &[0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 6.0, 8.0, 12.0, 16.0, 25.0, 50.0, 100.0, 200.0, 400.0];

/// Seconds of one posted transfer.
const SECONDS: &[f64] = &[
    0.00001, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0,
    5.0,
];

/// Shared by the transfer thread, the links and the handlers.
pub struct Transfers {
    /// `--kv-transport`.
    asked: String,
    /// A lane that was not asked for is an error.
    strict: bool,
    info: OnceLock<TransportInfo>,
    rate: HistogramVec,
    seconds: HistogramVec,
    bytes: IntCounterVec,
    failed: IntCounterVec,
    probe_rate: GaugeVec,
    probe_round_trip: GaugeVec,
    lane: IntGaugeVec,
    probes: Mutex<BTreeMap<String, ProbeReport>>,
}

impl Transfers {
    /// Registers the metrics. Once for each registry.
    pub fn new(asked: &str, strict: bool, registry: &Registry) -> Self {
        let labels = ["transport", "lane", "direction"];
        Self {
            asked: asked.to_owned(),
            strict,
            info: OnceLock::new(),
            rate: register(registry, {
                let opts = HistogramOpts::new(
                    "kvferry:kv_transfer_gigabytes_per_second",
                    "Rate of posted transfers, from posting to settled.",
                );
                HistogramVec::new(opts.buckets(RATES.to_vec()), &labels)
            }),
            seconds: register(registry, {
                let opts = HistogramOpts::new(
                    "kvferry:kv_posted_transfer_seconds",
                    "Stages of posted transfers: waiting for the transfer thread, handing over, until settled.",
                );
                HistogramVec::new(opts.buckets(SECONDS.to_vec()), &["stage", "direction"])
            }),
            bytes: register(registry, {
                let opts = Opts::new("kvferry:kv_transferred_bytes_total", "Bytes of transfers posted here.");
                IntCounterVec::new(opts, &labels)
            }),
            failed: register(registry, {
                let opts = Opts::new(
                    "kvferry:kv_transfer_failures_total",
                    "Failed transfers posted here, by error.",
                );
                IntCounterVec::new(opts, &["error"])
            }),
            probe_rate: register(registry, {
                let opts = Opts::new(
                    "kvferry:kv_probe_gigabytes_per_second",
                    "Self-test of a link, by the number of blocks moved at once.",
                );
                GaugeVec::new(opts, &["peer", "direction", "blocks"])
            }),
            probe_round_trip: register(registry, {
                let opts =
                    Opts::new("kvferry:kv_probe_round_trip_seconds", "A notification there and one back.");
                GaugeVec::new(opts, &["peer"])
            }),
            lane: register(registry, {
                let opts = Opts::new(
                    "kvferry:kv_lane_info",
                    "1 for the lane that carries a link's bytes; as_asked says whether it is what was asked for.",
                );
                IntGaugeVec::new(opts, &["peer", "direction", "lane", "as_asked"])
            }),
            probes: Mutex::default(),
        }
    }

    /// The transport is open.
    pub fn opened(&self, info: TransportInfo) {
        // A process opens one transport.
        let _ = self.info.set(info);
    }

    fn transport(&self) -> &'static str {
        self.info.get().map_or("unknown", |info| info.name)
    }

    /// Counts a transfer that settled. Called on the transfer thread.
    pub fn observe(&self, event: &DriverEvent) {
        let DriverEvent::Settled { result, lane, .. } = event else { return };
        let stats = match result {
            Ok(stats) => stats,
            Err(error) => return self.failed.with_label_values(&[error.label()]).inc(),
        };
        let direction = stats.direction.as_str();
        let lane = lane.as_ref().map_or("unknown", |lane| lane.carrier.as_str());
        tracing::debug!(
            target: "kv_trace",
            direction,
            lane,
            bytes = stats.bytes,
            descriptors = stats.descriptors,
            queue_us = stats.queue.as_micros() as u64,
            post_us = stats.post.as_micros() as u64,
            wire_us = stats.wire.as_micros() as u64,
            "transfer"
        );
        let labels = [self.transport(), lane, direction];
        let wire = stats.wire.as_secs_f64();
        self.bytes.with_label_values(&labels).inc_by(stats.bytes);
        self.rate.with_label_values(&labels).observe(stats.bytes as f64 / wire.max(1e-9) / 1e9);
        for (stage, time) in [("queue", stats.queue), ("post", stats.post), ("wire", stats.wire)] {
            self.seconds.with_label_values(&[stage, direction]).observe(time.as_secs_f64());
        }
    }

    /// Takes a link's self-test. Errors, with `--kv-transport-strict`, when the bytes do not go as was asked.
    pub fn probed(&self, peer: &str, report: &ProbeReport) -> Result<(), String> {
        tracing::info!(peer, transport = self.transport(), %report, "KV transport probed");
        for measured in &report.measured {
            let blocks = if measured.blocks == 1 { "1" } else { "many" };
            let labels = [peer, measured.direction.as_str(), blocks];
            self.probe_rate.with_label_values(&labels).set(measured.gb_per_s());
        }
        self.probe_round_trip.with_label_values(&[peer]).set(report.round_trip.as_secs_f64());
        let complaints = match self.asked == AUTO && self.transport() == MMAP {
            // What was there in place of NIXL; nobody asked for it.
            true => Vec::new(),
            false => report.complaints(self.transport()),
        };
        self.export_lanes(peer, report, &complaints);
        self.probes().insert(peer.to_owned(), report.clone());
        for complaint in &complaints {
            tracing::warn!(peer, complaint, "the KV transport does not do what was asked");
        }
        match complaints.is_empty() || !self.strict {
            true => Ok(()),
            false => Err(format!("--kv-transport-strict: {}", complaints.join("; "))),
        }
    }

    fn export_lanes(&self, peer: &str, report: &ProbeReport, complaints: &[String]) {
        if let Some(before) = self.probes().get(peer) {
            for direction in [Direction::Write, Direction::Read] {
                let Some(lane) = before.lane(direction) else { continue };
                for as_asked in ["yes", "no"] {
                    // Fails when there is no such series.
                    let labels = [peer, direction.as_str(), &lane.carrier, as_asked];
                    let _ = self.lane.remove_label_values(&labels);
                }
            }
        }
        for direction in [Direction::Write, Direction::Read] {
            let Some(lane) = report.lane(direction) else { continue };
            let wrong = complaints.iter().any(|text| text.contains(&direction.as_str().to_uppercase()));
            let labels = [peer, direction.as_str(), &lane.carrier, if wrong { "no" } else { "yes" }];
            self.lane.with_label_values(&labels).set(1);
        }
    }

    fn probes(&self) -> MutexGuard<'_, BTreeMap<String, ProbeReport>> {
        self.probes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For `/health`.
    pub fn details(&self) -> Value {
        let settings: serde_json::Map<String, Value> =
            self.info.get().map_or_else(Default::default, |info| {
                info.settings
                    .iter()
                    .map(|s| (s.name.to_owned(), json!({ "value": s.value, "by_user": s.by_user })))
                    .collect()
            });
        let links: serde_json::Map<String, Value> =
            self.probes().iter().map(|(peer, report)| (peer.clone(), self.link(report))).collect();
        json!({ "asked": self.asked, "transport": self.transport(), "settings": settings, "links": links })
    }

    fn link(&self, report: &ProbeReport) -> Value {
        let one = |direction: Direction| {
            let rates: serde_json::Map<String, Value> = report
                .measured
                .iter()
                .filter(|m| m.direction == direction)
                .map(|m| (format!("{}_blocks_gb_per_s", m.blocks), json!(m.gb_per_s())))
                .collect();
            json!({ "lane": report.lane(direction).map(ToString::to_string), "rates": rates })
        };
        json!({
            "round_trip_us": report.round_trip.as_secs_f64() * 1e6,
            "connect_us": report.connect.as_secs_f64() * 1e6,
            "write": one(Direction::Write),
            "read": one(Direction::Read),
            "complaints": report.complaints(self.transport()),
        })
    }
}

/// Logs vLLM's line about KV transfers as long as the worker lives.
pub async fn log_summaries(metrics: std::sync::Arc<Metrics>) {
    let mut ticks = tokio::time::interval(SUMMARY);
    loop {
        ticks.tick().await;
        if let Some(summary) = metrics.take_transfer_summary() {
            tracing::info!("{summary}");
        }
    }
}

fn register<C: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    metric: prometheus::Result<C>,
) -> C {
    let metric = metric.expect("metric names and labels are constants. This is a bug.");
    registry.register(Box::new(metric.clone())).expect("each metric is registered once. This is a bug.");
    metric
}

#[cfg(test)]
mod tests {
    use transfer::Lane;

    use super::*;

    fn info(name: &'static str) -> TransportInfo {
        TransportInfo { name, settings: Vec::new() }
    }

    fn report(carrier: &str) -> ProbeReport {
        let lane = Some(Lane { carrier: carrier.into(), how: "zero-copy".into() });
        ProbeReport { write_lane: lane, ..Default::default() }
    }

    fn exported(registry: &Registry) -> String {
        prometheus::TextEncoder::new().encode_to_string(&registry.gather()).unwrap()
    }

    #[test]
    fn a_wrong_lane_is_seen_everywhere_and_refused_when_strict() {
        for strict in [false, true] {
            let registry = Registry::new();
            let transfers = Transfers::new("shm", strict, &registry);
            transfers.opened(info("shm"));
            assert_eq!(transfers.probed("p", &report("cma/memory")), Ok(()));
            let refused = transfers.probed("p", &report("tcp/lo"));
            assert_eq!(refused.is_err(), strict);
            let text = exported(&registry);
            assert!(text.contains("as_asked=\"no\"") && text.contains("tcp/lo"), "{text}");
            assert!(!text.contains("cma/memory"), "the lane of before is gone: {text}");
            let complaints = &transfers.details()["links"]["p"]["complaints"];
            assert!(complaints[0].as_str().unwrap().contains("WRITE goes over tcp/lo"), "{complaints}");
        }
    }

    #[test]
    fn failures_are_counted_by_error_and_are_no_transfers() {
        let registry = Registry::new();
        let transfers = Transfers::new("auto", false, &registry);
        transfers.opened(info("socket"));
        let event = |result| DriverEvent::Settled { tag: 1, peer: transfer::PeerId(1), result, lane: None };
        let error = transfer::TransferError::Wire("gone".into());
        transfers.observe(&event(Err(error)));
        transfers.observe(&event(Ok(transfer::XferStats { bytes: 5, ..Default::default() })));
        let text = exported(&registry);
        assert!(text.contains("kvferry:kv_transfer_failures_total{error=\"wire\"} 1"), "{text}");
        let bytes =
            "kvferry:kv_transferred_bytes_total{direction=\"write\",lane=\"unknown\",transport=\"socket\"} 5";
        assert!(text.contains(bytes), "{text}");
    }
}
