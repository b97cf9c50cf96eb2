//! What a frontend reads from a worker's `/metrics`: the figures of the status page, and the speeds that decide who
//! computes a prompt. vLLM's names, so that vLLM's servers have them too.

use std::time::Instant;

use crate::router::disagg::Speeds;

/// One scrape, and what changed since the one before.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct WorkerSample {
    /// Share of KV blocks in use, 0 to 1.
    pub kv_usage: Option<f64>,
    pub block_size: Option<u64>,
    pub num_blocks: Option<u64>,
    pub running: Option<f64>,
    pub waiting: Option<f64>,
    /// Prefix cache hit rate since the last scrape, in tokens.
    pub hit_rate: Option<f64>,
    /// Prompt tokens computed in a second of prefill, over the process's life.
    pub prefill_tokens_per_sec: Option<f64>,
    /// Bytes moved in a second on the wire, over the process's life.
    pub link_bytes_per_sec: Option<f64>,
    pub kv_bytes_per_token: Option<f64>,
    /// Bytes moved in a second of time, since the last scrape.
    pub transferred_per_sec: Option<f64>,
    totals: Totals,
    at: Option<Instant>,
}

/// Sums that only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Totals {
    queries: f64,
    hits: f64,
    bytes: f64,
    wire_seconds: f64,
    computed: f64,
    prefill_seconds: f64,
    transferred_tokens: f64,
}

impl WorkerSample {
    /// What decides who computes a prompt.
    pub fn speeds(&self) -> Speeds {
        Speeds {
            prefill_tokens_per_sec: self.prefill_tokens_per_sec,
            link_bytes_per_sec: self.link_bytes_per_sec,
            kv_bytes_per_token: self.kv_bytes_per_token,
        }
    }

    /// Reads a scrape taken at `now`, after this one.
    pub fn next(&self, text: &str, now: Instant) -> Self {
        let mut next = Self { at: Some(now), ..Self::default() };
        let mut totals = Totals::default();
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let Ok(value) = value.parse::<f64>() else { continue };
            let (name, labels) = series.split_once('{').unwrap_or((series, ""));
            match name {
                "vllm:kv_cache_usage_perc" => next.kv_usage = Some(value),
                "vllm:num_requests_running" => *next.running.get_or_insert(0.0) += value,
                "vllm:num_requests_waiting" => *next.waiting.get_or_insert(0.0) += value,
                "vllm:cache_config_info" => {
                    next.block_size = label(labels, "block_size");
                    next.num_blocks = label(labels, "num_gpu_blocks");
                }
                "vllm:prefix_cache_queries_total" => totals.queries += value,
                "vllm:prefix_cache_hits_total" => totals.hits += value,
                "vllm:nixl_bytes_transferred_sum" => totals.bytes += value,
                "vllm:nixl_xfer_time_seconds_sum" => totals.wire_seconds += value,
                "kvferry:kv_transfer_seconds_sum" if labels.contains("stage=\"wire\"") => {
                    totals.wire_seconds += value;
                }
                "vllm:prompt_tokens_by_source_total" if labels.contains("source=\"local_compute\"") => {
                    totals.computed += value;
                }
                "vllm:prompt_tokens_by_source_total"
                    if labels.contains("source=\"external_kv_transfer\"") =>
                {
                    totals.transferred_tokens += value;
                }
                "vllm:request_prefill_time_seconds_sum" => totals.prefill_seconds += value,
                _ => {}
            }
        }
        next.totals = totals;
        let rate = |part: f64, whole: f64| (whole > 0.0 && part >= 0.0).then(|| part / whole);
        next.prefill_tokens_per_sec =
            rate(totals.computed, totals.prefill_seconds).filter(|rate| *rate > 0.0);
        next.link_bytes_per_sec = rate(totals.bytes, totals.wire_seconds).filter(|rate| *rate > 0.0);
        next.kv_bytes_per_token = rate(totals.bytes, totals.transferred_tokens).filter(|rate| *rate > 0.0);
        // A restarted process counts from 0: no difference to speak of.
        if let Some(at) = self.at.filter(|_| totals.queries >= self.totals.queries) {
            let seconds = now.duration_since(at).as_secs_f64();
            next.hit_rate = rate(totals.hits - self.totals.hits, totals.queries - self.totals.queries);
            next.transferred_per_sec = rate(totals.bytes - self.totals.bytes, seconds);
        }
        next
    }
}

/// The number that a label holds.
fn label(labels: &str, name: &str) -> Option<u64> {
    let start = labels.find(&format!("{name}=\""))? + name.len() + 2;
    labels[start..].split('"').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn scrape(hits: u32, queries: u32, bytes: u64) -> String {
        format!(
            "# HELP x y\nvllm:kv_cache_usage_perc{{engine=\"0\"}} 0.25\n\
             vllm:cache_config_info{{block_size=\"16\",num_gpu_blocks=\"585\"}} 1\n\
             vllm:prefix_cache_queries_total{{engine=\"0\"}} {queries}\nvllm:prefix_cache_hits_total {hits}\n\
             vllm:nixl_bytes_transferred_sum {bytes}\nkvferry:kv_transfer_seconds_sum{{stage=\"wire\"}} 0.5\n\
             kvferry:kv_transfer_seconds_sum{{stage=\"queue\"}} 100\n\
             vllm:prompt_tokens_by_source_total{{source=\"local_compute\"}} 900\n\
             vllm:request_prefill_time_seconds_sum 3\nbroken line\n"
        )
    }

    #[test]
    fn figures_are_read_and_compared_with_the_scrape_before() {
        let now = Instant::now();
        let first = WorkerSample::default().next(&scrape(0, 100, 1_000), now);
        assert_eq!((first.kv_usage, first.block_size, first.num_blocks), (Some(0.25), Some(16), Some(585)));
        assert_eq!((first.hit_rate, first.transferred_per_sec), (None, None));
        assert_eq!((first.prefill_tokens_per_sec, first.link_bytes_per_sec), (Some(300.0), Some(2_000.0)));
        let second = first.next(&scrape(30, 200, 5_000), now + Duration::from_secs(2));
        assert_eq!((second.hit_rate, second.transferred_per_sec), (Some(0.3), Some(2_000.0)));
        let restarted = second.next(&scrape(0, 0, 0), now + Duration::from_secs(4));
        assert_eq!((restarted.hit_rate, restarted.transferred_per_sec), (None, None));
    }
}
