//! Metrics under the names that vLLM's users graph. Registered once, at start.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use prometheus::{
    Gauge, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry,
};

use transfer::Summary;
use transfer::summary::Transfer;

use crate::api::{FinishReason, KvFault, RequestError, Timeline, Usage};
use crate::core::{Core, Counters};
use crate::handoff::{PrefillTiming, Totals};

/// vLLM's buckets for the time to the first token, in seconds.
const TTFT: &[f64] = &[
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
    80.0, 160.0, 640.0, 2560.0,
];
/// vLLM's buckets for the time between tokens, in seconds.
const ITL: &[f64] = &[
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
];
/// vLLM's buckets for whole requests, in seconds.
const LATENCY: &[f64] = &[
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0,
    960.0, 1920.0, 7680.0,
];
/// Transfers, in seconds.
const TRANSFER: &[f64] =
    &[0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0];
/// vLLM's buckets for the time of a transfer, in seconds.
const XFER_TIME: &[f64] = &[0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];
/// vLLM's buckets for posting one, in seconds.
const POST_TIME: &[f64] = &[0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0];
const DESCRIPTORS: &[f64] =
    &[10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1000.0, 2000.0, 4000.0, 10000.0, 20000.0, 50000.0];
/// Token counts: 1, 2, 5, 10 ... as vLLM builds them.
const TOKENS: &[f64] = &[
    1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0, 5000.0, 10000.0, 20000.0, 50000.0,
];

const COUNTS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0];

/// All of an engine's metrics.
pub struct Metrics {
    pub registry: Registry,
    running: IntGauge,
    waiting: IntGauge,
    waiting_by_reason: IntGaugeVec,
    kv_usage: Gauge,
    blocks: IntGaugeVec,
    counters: HashMap<&'static str, IntCounter>,
    prompt_by_source: IntCounterVec,
    success: IntCounterVec,
    failed: IntCounterVec,
    ttft: Histogram,
    itl: Histogram,
    e2e: Histogram,
    queue: Histogram,
    inference: Histogram,
    prefill: Histogram,
    decode: Histogram,
    time_per_output_token: Histogram,
    iteration_tokens: Histogram,
    params_max_tokens: Histogram,
    params_n: Histogram,
    prefill_kv_computed: Histogram,
    fetch_by_stage: IntGaugeVec,
    cached_by_source: IntCounterVec,
    prompt_tokens: Histogram,
    generation_tokens: Histogram,
    ticket_faults: IntCounterVec,
    stale: IntCounterVec,
    kept: IntGauge,
    writes_in_flight: IntGauge,
    transfer_seconds: HistogramVec,
    transfer_bytes: Histogram,
    transfer_descriptors: Histogram,
    xfer_time: Histogram,
    post_time: Histogram,
    summary: Mutex<Summary>,
    seen: Mutex<Counters>,
}

/// Counters that mirror [`Counters`], with vLLM's names where it has them.
const MIRRORED: &[(&str, &str)] = &[
    ("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
    ("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
    ("vllm:external_prefix_cache_queries_total", "Prompt tokens offered to prefill workers."),
    ("vllm:external_prefix_cache_hits_total", "Prompt tokens whose KV came from a prefill worker."),
    ("vllm:num_preemptions_total", "Requests whose blocks were taken and that started again."),
    ("vllm:prompt_tokens_total", "Prompt tokens computed, found or received."),
    ("vllm:prompt_tokens_cached_total", "Prompt tokens found in a cache, here or on the prefill worker."),
    ("vllm:generation_tokens_total", "Tokens sampled for clients."),
    ("kvferry:engine_steps_total", "Steps of the engine."),
    ("kvferry:tickets_opened_total", "Prompts handed to a prefill worker."),
    ("kvferry:tickets_failed_total", "Handoffs that brought no KV."),
    ("kvferry:prompts_recomputed_total", "Prompts computed here after a failed handoff."),
    ("kvferry:prompts_too_long_for_prefill_total", "Prompts longer than any prefill worker takes."),
    ("kvferry:kv_checksum_mismatches_total", "Transfers whose bytes did not have their checksums."),
    ("kvferry:prompts_kept_total", "Prompts whose KV was kept for a decode worker to claim."),
    ("vllm:nixl_num_kv_expired_reqs_total", "Tickets and kept prompts given up when their lease ran out."),
    (
        "vllm:nixl_num_notifications_after_expiry_total",
        "Claims and last messages about what had expired or was over.",
    ),
    ("vllm:nixl_num_failed_transfers_total", "KV transfers and handshakes of transports that failed."),
    (
        "vllm:nixl_num_failed_notifications_total",
        "Handoffs given up since a notification of the data path never came.",
    ),
];

impl Metrics {
    /// Registers everything; `model_name` labels each series as in vLLM.
    pub fn new(model_name: &str) -> Self {
        let labels = HashMap::from([
            ("model_name".to_owned(), model_name.to_owned()),
            ("engine".to_owned(), "0".to_owned()),
        ]);
        let registry =
            Registry::new_custom(None, Some(labels)).expect("a name and an engine are valid labels");
        let r = &registry;
        let counters =
            MIRRORED.iter().map(|(name, help)| (*name, register(r, IntCounter::new(*name, *help)))).collect();
        Self {
            running: register(
                r,
                IntGauge::new("vllm:num_requests_running", "Requests that hold a running slot."),
            ),
            waiting: register(r, IntGauge::new("vllm:num_requests_waiting", "Requests in the queue.")),
            waiting_by_reason: register(
                r,
                IntGaugeVec::new(
                    Opts::new(
                        "vllm:num_requests_waiting_by_reason",
                        "Queue by reason; deferred waits for remote KV.",
                    ),
                    &["reason"],
                ),
            ),
            kv_usage: register(
                r,
                Gauge::new("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1."),
            ),
            blocks: register(
                r,
                IntGaugeVec::new(Opts::new("kvferry:kv_blocks", "KV blocks by state."), &["state"]),
            ),
            counters,
            prompt_by_source: register(
                r,
                IntCounterVec::new(
                    Opts::new(
                        "vllm:prompt_tokens_by_source_total",
                        "Prompt tokens by where their KV came from.",
                    ),
                    &["source"],
                ),
            ),
            success: register(
                r,
                IntCounterVec::new(
                    Opts::new("vllm:request_success_total", "Requests that ended as they should."),
                    &["finished_reason"],
                ),
            ),
            failed: register(
                r,
                IntCounterVec::new(
                    Opts::new("kvferry:request_failure_total", "Requests refused or failed."),
                    &["error"],
                ),
            ),
            ttft: histogram(r, "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT),
            itl: histogram(r, "vllm:inter_token_latency_seconds", "Between two tokens of a request.", ITL),
            e2e: histogram(r, "vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY),
            queue: histogram(r, "vllm:request_queue_time_seconds", "Arrival to first step.", LATENCY),
            prefill: histogram(r, "vllm:request_prefill_time_seconds", "First step to first token.", LATENCY),
            inference: histogram(
                r,
                "vllm:request_inference_time_seconds",
                "First step to last token.",
                LATENCY,
            ),
            time_per_output_token: histogram(
                r,
                "vllm:request_time_per_output_token_seconds",
                "Mean time between a request's tokens.",
                ITL,
            ),
            iteration_tokens: histogram(r, "vllm:iteration_tokens_total", "Tokens of a step.", TOKENS),
            params_max_tokens: histogram(
                r,
                "vllm:request_params_max_tokens",
                "max_tokens of requests.",
                TOKENS,
            ),
            params_n: histogram(r, "vllm:request_params_n", "n of requests.", COUNTS),
            prefill_kv_computed: histogram(
                r,
                "vllm:request_prefill_kv_computed_tokens",
                "Prompt tokens of a request that were computed here, neither found nor received.",
                TOKENS,
            ),
            fetch_by_stage: register(
                r,
                IntGaugeVec::new(
                    Opts::new(
                        "vllm:num_requests_kv_fetch_by_stage",
                        "Requests whose KV comes from a prefill worker: without blocks yet, on the way, or here and \
                         without a running slot.",
                    ),
                    &["stage"],
                ),
            ),
            cached_by_source: register(
                r,
                IntCounterVec::new(
                    Opts::new(
                        "vllm:prompt_tokens_cached_by_source_total",
                        "Prompt tokens that were not computed here, by where their KV was.",
                    ),
                    &["source"],
                ),
            ),
            decode: histogram(r, "vllm:request_decode_time_seconds", "First to last token.", LATENCY),
            prompt_tokens: histogram(r, "vllm:request_prompt_tokens", "Prompt tokens of a request.", TOKENS),
            generation_tokens: histogram(r, "vllm:request_generation_tokens", "Tokens of an answer.", TOKENS),
            ticket_faults: register(
                r,
                IntCounterVec::new(
                    Opts::new("kvferry:ticket_faults_total", "Handoffs that brought no KV, by reason."),
                    &["reason"],
                ),
            ),
            stale: register(
                r,
                IntCounterVec::new(
                    Opts::new(
                        "kvferry:stale_messages_total",
                        "Messages about tickets that nothing waits for: come twice, over, or never known.",
                    ),
                    &["kind"],
                ),
            ),
            kept: register(
                r,
                IntGauge::new(
                    "kvferry:prompts_kept",
                    "Prompts whose KV waits for a decode worker to claim it.",
                ),
            ),
            writes_in_flight: register(
                r,
                IntGauge::new(
                    "kvferry:kv_writes_in_flight",
                    "KV writes that were posted and have not settled.",
                ),
            ),
            transfer_seconds: register(
                r,
                HistogramVec::new(
                    HistogramOpts::new("kvferry:kv_transfer_seconds", "Stages of a handoff.")
                        .buckets(TRANSFER.to_vec()),
                    &["stage"],
                ),
            ),
            transfer_bytes: histogram(
                r,
                "vllm:nixl_bytes_transferred",
                "Bytes of a handoff.",
                &bytes_buckets(),
            ),
            transfer_descriptors: histogram(
                r,
                "vllm:nixl_num_descriptors",
                "Descriptors of a handoff.",
                DESCRIPTORS,
            ),
            xfer_time: histogram(
                r,
                "vllm:nixl_xfer_time_seconds",
                "Transfer time of a handoff: the sum over its transfers, which overlap with computing.",
                XFER_TIME,
            ),
            post_time: histogram(
                r,
                "vllm:nixl_post_time_seconds",
                "Time of a handoff's calls that hand transfers to the transport.",
                POST_TIME,
            ),
            summary: Mutex::default(),
            seen: Mutex::new(Counters::default()),
            registry,
        }
    }

    /// Exports the sizes of the KV cache as labels, as vLLM does. Call once.
    pub fn cache_config(&self, block_size: usize, num_blocks: usize, dtype: &str) {
        let labels = ["block_size", "num_gpu_blocks", "cache_dtype"];
        let opts = Opts::new("vllm:cache_config_info", "Sizes of the KV cache.");
        let gauge = register(&self.registry, IntGaugeVec::new(opts, &labels));
        gauge.with_label_values(&[&block_size.to_string(), &num_blocks.to_string(), dtype]).set(1);
    }

    /// A request was not taken.
    pub fn refused(&self, error: &RequestError) {
        self.failed.with_label_values(&[error.label()]).inc();
    }

    /// A request was taken.
    pub fn submitted(&self, max_tokens: usize) {
        self.params_max_tokens.observe(max_tokens as f64);
    }

    /// A client asked for `n` choices in one request.
    pub fn asked(&self, n: usize) {
        self.params_n.observe(n as f64);
    }

    /// A step of this many tokens was computed.
    pub fn stepped(&self, tokens: usize) {
        self.iteration_tokens.observe(tokens as f64);
    }

    /// The first token of a request, `since` its arrival.
    pub fn first_token(&self, since: Duration) {
        self.ttft.observe(since.as_secs_f64());
    }

    /// A further token, `gap` after the one before it.
    pub fn next_token(&self, gap: Duration) {
        self.itl.observe(gap.as_secs_f64());
    }

    pub fn finished(&self, reason: FinishReason, usage: &Usage, timeline: &Timeline) {
        self.success.with_label_values(&[reason.as_str()]).inc();
        self.prompt_tokens.observe(usage.prompt_tokens as f64);
        let computed = match usage.transferred_tokens {
            0 => usage.prompt_tokens.saturating_sub(usage.cached_tokens),
            // Nothing of a prompt that came is computed here; some of it may have been cached on the other side.
            _ => 0,
        };
        self.prefill_kv_computed.observe(computed as f64);
        self.generation_tokens.observe(usage.completion_tokens as f64);
        let (first, last) =
            (timeline.first_token.unwrap_or_default(), timeline.last_token.unwrap_or_default());
        self.e2e.observe(last.as_secs_f64());
        self.decode.observe(last.saturating_sub(first).as_secs_f64());
        if usage.completion_tokens > 1 {
            let gaps = usage.completion_tokens as f64 - 1.0;
            self.time_per_output_token.observe(last.saturating_sub(first).as_secs_f64() / gaps);
        }
        // A prompt that was computed elsewhere is scheduled here only after its first token.
        if let Some(scheduled) = timeline.scheduled.filter(|scheduled| *scheduled <= first) {
            self.inference.observe(last.saturating_sub(scheduled).as_secs_f64());
            self.queue.observe(scheduled.as_secs_f64());
            self.prefill.observe(first.saturating_sub(scheduled).as_secs_f64());
        }
    }

    /// A prompt was computed here for a decode worker: its request ends there, but the prefill was here.
    pub fn computed_for_another(&self, timing: &PrefillTiming) {
        self.prefill.observe(Duration::from_micros(timing.compute_us).as_secs_f64());
    }

    /// Prompt tokens computed in a second of requests' prefill, since the start; `None` until there was any.
    pub fn prefill_tokens_per_sec(&self) -> Option<f64> {
        let tokens = self.prompt_by_source.with_label_values(&["local_compute"]).get() as f64;
        let seconds = self.prefill.get_sample_sum();
        (tokens > 0.0 && seconds > 0.0).then(|| tokens / seconds)
    }

    /// A ticket ended well, on either side.
    pub fn transferred(&self, totals: &Totals, timing: &PrefillTiming) {
        // Everything was in the decode worker's cache: that was no transfer.
        if totals.bytes == 0 {
            return;
        }
        let (xfer, post) = (Duration::from_micros(timing.wire_us), Duration::from_micros(timing.post_us));
        self.xfer_time.observe(xfer.as_secs_f64());
        self.post_time.observe(post.as_secs_f64());
        let (bytes, descriptors) = (totals.bytes, u64::from(totals.descriptors));
        self.summary().add(Transfer { bytes, descriptors, xfer, post });
        self.transfer_bytes.observe(totals.bytes as f64);
        self.transfer_descriptors.observe(f64::from(totals.descriptors));
        for (stage, micros) in [
            ("queue", timing.queue_us),
            ("compute", timing.compute_us),
            ("post", timing.post_us),
            ("wire", timing.wire_us),
            ("exposed", timing.exposed_us),
        ] {
            self.transfer_seconds.with_label_values(&[stage]).observe(micros as f64 / 1e6);
        }
    }

    /// One posted write failed.
    pub fn transfer_failed(&self) {
        self.summary().add_failed(1);
        self.counters["vllm:nixl_num_failed_transfers_total"].inc();
    }

    /// What was transferred since the last call, for the log.
    pub fn take_transfer_summary(&self) -> Option<Summary> {
        self.summary().take()
    }

    fn summary(&self) -> std::sync::MutexGuard<'_, Summary> {
        self.summary.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    /// A ticket of ours brought no KV.
    pub fn ticket_failed(&self, fault: KvFault) {
        self.ticket_faults.with_label_values(&[fault.label()]).inc();
        if fault == KvFault::NotificationLost {
            self.counters["vllm:nixl_num_failed_notifications_total"].inc();
        }
    }

    /// Takes over the core's counts after a step.
    pub fn sync(&self, core: &Core) {
        self.kept.set(core.num_kept() as i64);
        self.writes_in_flight.set(core.writes_in_flight() as i64);
        self.running.set(core.num_running() as i64);
        self.waiting.set(core.num_waiting() as i64);
        self.waiting_by_reason.with_label_values(&["capacity"]).set(core.num_waiting() as i64);
        self.waiting_by_reason.with_label_values(&["deferred"]).set(core.num_remote() as i64);
        let fetching = core.fetching();
        for (stage, count) in [
            ("waiting_to_start", fetching.without_blocks),
            ("in_progress", fetching.under_way),
            ("completed_waiting", fetching.without_slot),
        ] {
            self.fetch_by_stage.with_label_values(&[stage]).set(count as i64);
        }
        let account = core.account();
        let used = account.sum() - account.free - account.cached;
        self.kv_usage.set(used as f64 / account.sum().max(1) as f64);
        for (state, count) in [
            ("free", account.free),
            ("cached", account.cached),
            ("running", account.running),
            ("ticketed", account.ticketed),
            ("quarantined", account.quarantined),
        ] {
            self.blocks.with_label_values(&[state]).set(count as i64);
        }
        self.sync_counters(core.counters());
    }

    fn sync_counters(&self, now: Counters) {
        let seen =
            std::mem::replace(&mut *self.seen.lock().unwrap_or_else(|poisoned| poisoned.into_inner()), now);
        let prompt =
            |c: &Counters| c.prompt_tokens_computed + c.prompt_tokens_cached + c.prompt_tokens_transferred;
        self.summary().add_expired(now.kv_expired - seen.kv_expired);
        self.summary().add_after_expiry(now.notified_after_expiry - seen.notified_after_expiry);
        for (name, now, seen) in [
            ("vllm:prefix_cache_queries_total", now.prefix_queries, seen.prefix_queries),
            ("vllm:prefix_cache_hits_total", now.prefix_hits, seen.prefix_hits),
            (
                "vllm:external_prefix_cache_queries_total",
                now.prompt_tokens_offered,
                seen.prompt_tokens_offered,
            ),
            (
                "vllm:external_prefix_cache_hits_total",
                now.prompt_tokens_transferred,
                seen.prompt_tokens_transferred,
            ),
            ("vllm:num_preemptions_total", now.preemptions, seen.preemptions),
            ("vllm:prompt_tokens_total", prompt(&now), prompt(&seen)),
            ("vllm:prompt_tokens_cached_total", now.prompt_tokens_cached, seen.prompt_tokens_cached),
            ("vllm:generation_tokens_total", now.generated_tokens, seen.generated_tokens),
            ("kvferry:engine_steps_total", now.steps, seen.steps),
            ("kvferry:tickets_opened_total", now.tickets_opened, seen.tickets_opened),
            ("kvferry:tickets_failed_total", now.tickets_failed, seen.tickets_failed),
            ("kvferry:prompts_recomputed_total", now.recomputed, seen.recomputed),
            (
                "kvferry:prompts_too_long_for_prefill_total",
                now.prompts_too_long_for_prefill,
                seen.prompts_too_long_for_prefill,
            ),
            ("kvferry:kv_checksum_mismatches_total", now.checksum_mismatches, seen.checksum_mismatches),
            ("kvferry:prompts_kept_total", now.prompts_kept, seen.prompts_kept),
            ("vllm:nixl_num_kv_expired_reqs_total", now.kv_expired, seen.kv_expired),
            (
                "vllm:nixl_num_notifications_after_expiry_total",
                now.notified_after_expiry,
                seen.notified_after_expiry,
            ),
        ] {
            self.counters[name].inc_by(now - seen);
        }
        for (kind, now, seen) in [
            ("duplicate", now.stale_duplicate, seen.stale_duplicate),
            ("late", now.stale_late, seen.stale_late),
            ("unknown", now.stale_unknown, seen.stale_unknown),
        ] {
            self.stale.with_label_values(&[kind]).inc_by(now - seen);
        }
        for (source, now, seen) in [
            ("local_compute", now.prompt_tokens_computed, seen.prompt_tokens_computed),
            ("local_cache_hit", now.prompt_tokens_cached, seen.prompt_tokens_cached),
            ("external_kv_transfer", now.prompt_tokens_transferred, seen.prompt_tokens_transferred),
        ] {
            self.prompt_by_source.with_label_values(&[source]).inc_by(now - seen);
        }
        for (source, now, seen) in [
            ("device", now.prompt_tokens_cached, seen.prompt_tokens_cached),
            ("p2p", now.prompt_tokens_transferred, seen.prompt_tokens_transferred),
        ] {
            self.cached_by_source.with_label_values(&[source]).inc_by(now - seen);
        }
    }
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Metrics")
    }
}

/// vLLM's buckets for bytes: powers of two from 1 KiB to 16 GiB.
fn bytes_buckets() -> Vec<f64> {
    (10..=34).map(|power| f64::from(power).exp2()).collect()
}

fn histogram(registry: &Registry, name: &str, help: &str, buckets: &[f64]) -> Histogram {
    register(registry, Histogram::with_opts(HistogramOpts::new(name, help).buckets(buckets.to_vec())))
}

/// Registers a metric of ours; names are constants, so a clash is a bug.
fn register<C: prometheus::core::Collector + Clone + 'static>(
    registry: &Registry,
    metric: prometheus::Result<C>,
) -> C {
    let metric = metric.expect("metric names and labels are constants. This is a bug.");
    registry.register(Box::new(metric.clone())).expect("each metric is registered once. This is a bug.");
    metric
}
