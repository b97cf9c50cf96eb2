//! The command line of `serve --role frontend`, beside what all roles have.

use clap::{Args, ValueEnum};

use crate::size::ByteSize;

pub(crate) const ROUTER: &str = "Frontend";

/// How `serve --role frontend` routes. Names follow Dynamo's and sglang-router's flags.
#[derive(Clone, Debug, Args)]
pub struct FrontendArgs {
    /// A worker that computes prompts and answers: `serve`, or any server with OpenAI's API such as vLLM. Repeat it, or
    /// give several.
    #[arg(long, alias = "worker-urls", value_name = "URL", num_args = 1.., help_heading = ROUTER)]
    pub worker_url: Vec<String>,
    /// A decode worker, to be paired with the workers of --prefill. Repeat it, or give several.
    #[arg(long, value_name = "URL", num_args = 1.., help_heading = ROUTER)]
    pub decode: Vec<String>,
    /// How a worker is chosen.
    #[arg(long, env = "KVFERRY_ROUTER_MODE", value_enum, default_value_t = RouterMode::Kv, help_heading = ROUTER)]
    pub router_mode: RouterMode,
    /// Learn what is cached from the workers' KV events (the default); a worker without events is guessed about.
    #[arg(long, overrides_with = "no_router_kv_events", help_heading = ROUTER)]
    pub router_kv_events: bool,
    /// Do without KV events: what is cached is guessed from where requests were sent.
    #[arg(long, overrides_with = "router_kv_events", help_heading = ROUTER)]
    pub no_router_kv_events: bool,
    /// A worker that publishes no KV events is not used.
    #[arg(long, conflicts_with = "no_router_kv_events", help_heading = ROUTER)]
    pub router_kv_events_required: bool,
    /// `off`: a worker without events counts as one that has cached nothing. It is what other routers do, and costs hits.
    #[arg(long, value_enum, default_value_t = OnOff::On, value_name = "on|off", help_heading = ROUTER)]
    pub router_kv_degrade: OnOff,
    /// How much of a cached block is taken off the cost of prefill.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = not_negative, help_heading = ROUTER)]
    pub router_kv_overlap_score_credit: f64,
    /// Weight of prefill (blocks to compute) against decode load (blocks held). With 1, as in Dynamo, a worker that answers
    /// one other request loses requests whose prefix it has to an idle one, and prefixes end up everywhere.
    #[arg(long, value_name = "FACTOR", default_value_t = 3.0, value_parser = not_negative, help_heading = ROUTER)]
    pub router_prefill_load_scale: f64,
    /// Cost of each cached block that would have to make room for a prompt; twice for one that some request has found since it
    /// was stored. Dynamo has no such cost (0): a prompt then leaves a busy worker that has it for one whose cache is full, and
    /// others lose their place in turn.
    #[arg(long, value_name = "FACTOR", default_value_t = 20.0, value_parser = not_negative, help_heading = ROUTER)]
    pub router_eviction_weight: f64,
    /// What one running request costs, in blocks.
    #[arg(long, value_name = "BLOCKS", default_value_t = 0.0, value_parser = not_negative, help_heading = ROUTER)]
    pub router_decode_active_request_weight: f64,
    /// 0 takes the cheapest worker; above that workers are drawn, the cheaper the likelier.
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = not_negative, help_heading = ROUTER)]
    pub router_temperature: f64,
    /// How long a guessed block is believed in.
    #[arg(long, value_name = "SECS", default_value_t = 120.0, value_parser = above_zero, help_heading = ROUTER)]
    pub router_ttl_secs: f64,
    /// With KV events: how long a block that a request was just sent for counts as cached before an event says so.
    #[arg(long, value_name = "SECS", value_parser = above_zero, help_heading = ROUTER)]
    pub router_predicted_ttl_secs: Option<f64>,
    /// Memory of the index of cached blocks, over all workers.
    #[arg(long, value_name = "SIZE", default_value = "64MiB", help_heading = ROUTER)]
    pub router_index_memory_bytes: ByteSize,
    /// Who computes prompts where there are prefill and decode workers: the cheaper by measurement, always a prefill
    /// worker, never, or one for prompts with at least N tokens that are not cached.
    #[arg(long, value_name = "auto|always|never|threshold:N", default_value = "auto", help_heading = ROUTER)]
    pub disagg_policy: String,
    /// A worker whose KV cache is booked beyond this share gets no further requests; 503 when all are.
    #[arg(long, value_name = "FRACTION", value_parser = fraction, help_heading = ROUTER)]
    pub active_decode_blocks_threshold: Option<f64>,
    /// A worker with more prompt tokens than this still to compute gets no further requests; 503 when all have.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, help_heading = ROUTER)]
    pub active_prefill_tokens_threshold: Option<usize>,
    /// Where a vLLM or SGLang worker publishes its KV events, such as http://a:8000=tcp://a:5557; repeat it.
    #[arg(long, value_name = "URL=ENDPOINT", help_heading = ROUTER)]
    pub kv_event_source: Vec<String>,
    /// Where events that were missed can be asked for, such as http://a:8000=tcp://a:5558; repeat it.
    #[arg(long, value_name = "URL=ENDPOINT", help_heading = ROUTER)]
    pub kv_event_replay_source: Vec<String>,

    /// Requests under way at the same time; further ones get 429. 0 is no limit.
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = ROUTER)]
    pub max_concurrent_requests: usize,
    /// How many other workers a request is tried on when one fails before the first byte of the answer.
    #[arg(long, value_name = "N", default_value_t = 3, help_heading = ROUTER)]
    pub retry_max_retries: usize,
    /// Failures in a row after which a worker gets no requests for a while.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = at_least_one, help_heading = ROUTER)]
    pub cb_failure_threshold: usize,
    /// Successes in a row after which a worker that had failed is trusted again.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = at_least_one, help_heading = ROUTER)]
    pub cb_success_threshold: usize,
    /// How long a worker that kept failing gets no requests.
    #[arg(long, value_name = "SECS", default_value_t = 60.0, value_parser = above_zero, help_heading = ROUTER)]
    pub cb_timeout_duration_secs: f64,
    /// How often each worker's health is asked for. One that fails is asked more often.
    #[arg(long, value_name = "SECS", default_value_t = 2.0, value_parser = above_zero, help_heading = ROUTER)]
    pub health_check_interval_secs: f64,
    /// A worker that accepts connections and says nothing for this long, twice in a row, is not used.
    #[arg(long, value_name = "SECS", default_value_t = 5.0, value_parser = above_zero, help_heading = ROUTER)]
    pub health_check_timeout_secs: f64,
}

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RouterMode {
    /// One after the other.
    RoundRobin,
    /// Any.
    Random,
    /// The one with the fewest requests under way.
    LeastLoaded,
    /// The less loaded of two drawn at random.
    PowerOfTwo,
    /// The one with the least left to do, given what each has cached.
    Kv,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    On,
    Off,
}

impl RouterMode {
    /// The name on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            RouterMode::RoundRobin => "round-robin",
            RouterMode::Random => "random",
            RouterMode::LeastLoaded => "least-loaded",
            RouterMode::PowerOfTwo => "power-of-two",
            RouterMode::Kv => "kv",
        }
    }
}

fn not_negative(text: &str) -> Result<f64, String> {
    number(text, |n| n >= 0.0).ok_or_else(|| "expected a finite number of at least 0".into())
}

fn above_zero(text: &str) -> Result<f64, String> {
    // A year: far below where Duration and Instant overflow.
    const MAX: f64 = 366.0 * 86_400.0;
    number(text, |n| n > 0.0 && n <= MAX).ok_or_else(|| format!("expected a number above 0, at most {MAX}"))
}

fn fraction(text: &str) -> Result<f64, String> {
    number(text, |n| n > 0.0 && n <= 1.0).ok_or_else(|| "expected a share in (0, 1]".into())
}

fn number(text: &str, valid: impl Fn(f64) -> bool) -> Option<f64> {
    text.parse().ok().filter(|n: &f64| n.is_finite() && valid(*n))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n >= 1).ok_or_else(|| "expected a whole number of at least 1".into())
}
