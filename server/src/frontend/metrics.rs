//! Metrics of a frontend: Dynamo's names where its users graph them, ours for the rest.
//!
//! Labels have few values whatever clients send: models that are served (others share `unknown`), endpoints, workers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use prometheus::core::Collector;
use prometheus::{
    Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts, Registry,
};

/// Of models that no worker serves.
pub const UNKNOWN_MODEL: &str = "unknown";

const SECONDS: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0,
];
const TOKENS: &[f64] =
    &[0.0, 1.0, 10.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0, 100000.0];
/// Milliseconds of our own work on a request.
const OVERHEAD: &[f64] = &[0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 50.0];
/// Tokens that were cached but not predicted, and the other way round.
const DRIFT: &[f64] = &[0.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0];

/// All of a frontend's metrics beside the HTTP layer's.
#[derive(Debug)]
pub struct FrontMetrics {
    requests: IntCounterVec,
    ttft: HistogramVec,
    itl: HistogramVec,
    duration: HistogramVec,
    cached: HistogramVec,
    input: HistogramVec,
    output: HistogramVec,
    pub inflight: IntGauge,
    pub disconnected: IntCounter,
    pub retries: IntCounterVec,
    pub rejected: IntCounterVec,
    pub broken_streams: IntCounter,
    pub worker_failures: IntCounterVec,
    pub prefill_unlinked: IntCounterVec,
    pub worker_up: IntGaugeVec,
    pub worker_active: IntGaugeVec,
    pub worker_blocks: IntGaugeVec,
    pub worker_prefill_tokens: IntGaugeVec,
    pub worker_index_blocks: IntGaugeVec,
    pub event_mismatch: IntGauge,
    pub invalid_records: IntGauge,
    pub open_bookings: IntGauge,
    pub index_bytes: IntGauge,
    pub hit_rate: Histogram,
    pub drift: HistogramVec,
    pub decisions: IntCounterVec,
    pub prefill_decisions: IntCounterVec,
    pub hashing_ms: Histogram,
    pub scheduling_ms: Histogram,
    pub total_ms: Histogram,
    models: Mutex<HashMap<(String, &'static str), Arc<ModelMetrics>>>,
}

/// The series of one model and endpoint, looked up once.
#[derive(Debug)]
pub struct ModelMetrics {
    pub ok: IntCounter,
    pub failed: IntCounter,
    pub ttft: Histogram,
    pub itl: Histogram,
    pub duration: Histogram,
    pub cached: Histogram,
    pub input: Histogram,
    pub output: Histogram,
}

impl FrontMetrics {
    /// Fails only if `registry` has one of the names already.
    pub fn register(registry: &Registry) -> prometheus::Result<Self> {
        let metrics = Self::all(&Registrar(registry))?;
        // Both are there from the start: a series that is missing is not 0.
        for direction in ["over", "under"] {
            metrics.drift.with_label_values(&[direction]);
        }
        Ok(metrics)
    }

    fn all(r: &Registrar<'_>) -> prometheus::Result<Self> {
        let model = &["model"][..];
        Ok(Self {
            requests: r.counters(
                "dynamo_frontend_requests_total",
                "Requests by model, endpoint and outcome.",
                &["model", "endpoint", "status"],
            )?,
            ttft: r.histograms(
                "dynamo_frontend_time_to_first_token_seconds",
                "Arrival to first byte.",
                SECONDS,
                model,
            )?,
            itl: r.histograms(
                "dynamo_frontend_inter_token_latency_seconds",
                "Between events.",
                SECONDS,
                model,
            )?,
            duration: r.histograms(
                "dynamo_frontend_request_duration_seconds",
                "Arrival to end.",
                SECONDS,
                model,
            )?,
            cached: r.histograms(
                "dynamo_frontend_cached_tokens",
                "Prompt tokens found in a cache.",
                TOKENS,
                model,
            )?,
            input: r.histograms("dynamo_frontend_input_sequence_tokens", "Prompt tokens.", TOKENS, model)?,
            output: r.histograms(
                "dynamo_frontend_output_sequence_tokens",
                "Answer tokens.",
                TOKENS,
                model,
            )?,
            inflight: r.gauge("dynamo_frontend_inflight_requests", "Requests under way.")?,
            disconnected: r.counter("dynamo_frontend_disconnected_clients", "Clients that left early.")?,
            retries: r.counters(
                "kvferry_frontend_retries_total",
                "Requests sent to another worker, by what was wrong with the first.",
                &["reason"],
            )?,
            rejected: r.counters(
                "kvferry_frontend_rejected_total",
                "Requests that no worker could take.",
                &["reason"],
            )?,
            broken_streams: r
                .counter("kvferry_frontend_broken_streams_total", "Streams that a worker broke off.")?,
            worker_failures: r.counters(
                "kvferry_frontend_worker_failures_total",
                "Requests that a worker failed.",
                &["worker", "reason"],
            )?,
            prefill_unlinked: r.counters(
                "kvferry_frontend_prefill_unlinked_total",
                "Requests whose decode worker has no link to the prefill worker chosen for them: it did without, or failed them.",
                &["worker", "prefill_worker"],
            )?,
            worker_up: r.gauges(
                "kvferry_frontend_worker_up",
                "1 if the worker gets requests.",
                &["worker", "role"],
            )?,
            worker_active: r.gauges(
                "kvferry_frontend_worker_active_requests",
                "Requests booked.",
                &["worker"],
            )?,
            worker_blocks: r.gauges(
                "kvferry_frontend_worker_active_decode_blocks",
                "Blocks booked.",
                &["worker"],
            )?,
            worker_prefill_tokens: r.gauges(
                "kvferry_frontend_worker_active_prefill_tokens",
                "Prompt tokens booked that still wait for their first token.",
                &["worker"],
            )?,
            worker_index_blocks: r.gauges(
                "kvferry_frontend_worker_index_blocks",
                "Blocks the index knows of each worker.",
                &["worker", "index"],
            )?,
            event_mismatch: r.gauge(
                "dynamo_component_router_kv_event_source_mismatch_workers",
                "Workers without KV events although they are expected.",
            )?,
            invalid_records: r.gauge(
                "kvferry_frontend_discovery_invalid_records",
                "Records that discovery found and could not read, since the start.",
            )?,
            open_bookings: r
                .gauge("kvferry_frontend_open_bookings", "Requests whose load is booked on a worker.")?,
            index_bytes: r.gauge("kvferry_frontend_index_bytes", "Memory of the index of cached blocks.")?,
            hit_rate: r.histogram(
                "dynamo_component_router_kv_hit_rate",
                "Share of a prompt's blocks that the index found on the chosen worker.",
                &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0],
            )?,
            drift: r.histograms(
                "kvferry_frontend_cached_tokens_drift",
                "Cached tokens that the worker reported beside those predicted: how far off, by direction.",
                DRIFT,
                &["direction"],
            )?,
            decisions: r.counters("kvferry_frontend_decisions_total", "Decisions.", &["reason", "index"])?,
            prefill_decisions: r.counters(
                "kvferry_frontend_prefill_decisions_total",
                "Where prompts were computed, with prefill workers there.",
                &["where", "reason"],
            )?,
            hashing_ms: r.histogram(
                "dynamo_router_overhead_block_hashing_ms",
                "Text to block names.",
                OVERHEAD,
            )?,
            scheduling_ms: r.histogram("dynamo_router_overhead_scheduling_ms", "The decision.", OVERHEAD)?,
            total_ms: r.histogram(
                "dynamo_router_overhead_total_ms",
                "Body read to request sent.",
                OVERHEAD,
            )?,
            models: Mutex::default(),
        })
    }

    /// The series of a model that is served, or of [`UNKNOWN_MODEL`].
    pub fn model(&self, model: &str, endpoint: &'static str) -> Arc<ModelMetrics> {
        let mut models = self.models.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(found) = models.get(&(model.to_owned(), endpoint)) {
            return found.clone();
        }
        let of = |histograms: &HistogramVec| histograms.with_label_values(&[model]);
        let made = Arc::new(ModelMetrics {
            ok: self.requests.with_label_values(&[model, endpoint, "success"]),
            failed: self.requests.with_label_values(&[model, endpoint, "error"]),
            ttft: of(&self.ttft),
            itl: of(&self.itl),
            duration: of(&self.duration),
            cached: of(&self.cached),
            input: of(&self.input),
            output: of(&self.output),
        });
        models.insert((model.to_owned(), endpoint), made.clone());
        made
    }

    /// What a worker that left had must not be graphed for ever.
    pub fn forget_worker(&self, name: &str, role: &str) {
        let _ = self.worker_up.remove_label_values(&[name, role]);
        for gauges in [&self.worker_active, &self.worker_blocks, &self.worker_prefill_tokens] {
            let _ = gauges.remove_label_values(&[name]);
        }
        for index in ["events", "approximate", "none"] {
            let _ = self.worker_index_blocks.remove_label_values(&[name, index]);
        }
    }
}

/// Milliseconds, for the histograms in them.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

struct Registrar<'a>(&'a Registry);

impl Registrar<'_> {
    fn add<C: Collector + Clone + 'static>(&self, metric: C) -> prometheus::Result<C> {
        self.0.register(Box::new(metric.clone()))?;
        Ok(metric)
    }

    fn counter(&self, name: &str, help: &str) -> prometheus::Result<IntCounter> {
        self.add(IntCounter::new(name, help)?)
    }

    fn counters(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntCounterVec> {
        self.add(IntCounterVec::new(Opts::new(name, help), labels)?)
    }

    fn gauge(&self, name: &str, help: &str) -> prometheus::Result<IntGauge> {
        self.add(IntGauge::new(name, help)?)
    }

    fn gauges(&self, name: &str, help: &str, labels: &[&str]) -> prometheus::Result<IntGaugeVec> {
        self.add(IntGaugeVec::new(Opts::new(name, help), labels)?)
    }

    fn histogram(&self, name: &str, help: &str, buckets: &[f64]) -> prometheus::Result<Histogram> {
        self.add(Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec()))?)
    }

    fn histograms(
        &self,
        name: &str,
        help: &str,
        buckets: &[f64],
        labels: &[&str],
    ) -> prometheus::Result<HistogramVec> {
        self.add(HistogramVec::new(HistogramOpts::new(name, help).buckets(buckets.to_vec()), labels)?)
    }
}
