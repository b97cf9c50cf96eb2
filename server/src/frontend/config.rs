//! The checked configuration of a frontend.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use models::SourceOptions;

use super::args::{FrontendArgs, OnOff, RouterMode};
use super::standing::BreakerConfig;
use crate::args::Args;
use crate::config::{ConfigError, PeerUrl, bad, check_model, listen_address, peer_url, served_name};
use crate::discovery::options::DiscoveryOptions;
use crate::router::WorkerRole;
use crate::router::disagg::DisaggPolicy;

/// Where a worker's KV events are to be had, by the command line.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EventSource {
    pub publisher: Option<String>,
    pub replay: Option<String>,
}

/// Everything a frontend was told, checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub listen: SocketAddr,
    pub port_file: Option<PathBuf>,
    pub request_timeout: Duration,
    pub shutdown_grace: Duration,
    /// Whose tokenizer names the blocks of prompts; without, their text does.
    pub model: Option<String>,
    pub model_source: SourceOptions,
    pub served_model_name: Option<String>,
    /// Where to look for workers that are not on the command line.
    pub discovery: Option<DiscoveryOptions>,
    pub router: FrontendConfig,
}

impl Config {
    /// Checks what the command line's grammar cannot. `var` reads the environment, for where models come from.
    pub fn from_args(args: Args, var: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let model_source = SourceOptions::from_vars(var);
        if let Some(model) = &args.model {
            check_model(model, &model_source)?;
        }
        let router = FrontendConfig::from_args(args.frontend, &args.prefill)?;
        // Blocks in events are of tokens, and only a tokenizer can name them.
        if args.model.is_none() && (router.kv_events_required || !router.event_sources.is_empty()) {
            return Err(ConfigError::EventsNeedModel);
        }
        let discovery = DiscoveryOptions::from_args(&args.presence.discovery)?;
        let served = args.served_model_name.clone();
        Ok(Self {
            // Who names workers means those, unless told to look for more.
            discovery: discovery.filter(|options| options.named || router.workers.is_empty()),
            served_model_name: args.model.as_ref().map(|model| served_name(served, model)).transpose()?,
            listen: listen_address(&args.host, args.port)?,
            port_file: args.port_file,
            request_timeout: Duration::from_secs_f64(args.request_timeout_secs),
            shutdown_grace: Duration::from_secs_f64(args.shutdown_grace_secs),
            model: args.model,
            model_source,
            router,
        })
    }
}

/// How a frontend routes.
#[derive(Clone, Debug)]
pub struct FrontendConfig {
    /// Workers given on the command line.
    pub workers: Vec<(PeerUrl, WorkerRole)>,
    pub mode: RouterMode,
    pub kv_events: bool,
    pub kv_events_required: bool,
    pub kv_degrade: bool,
    pub overlap_score_credit: f64,
    pub prefill_load_scale: f64,
    pub eviction_weight: f64,
    pub active_request_weight: f64,
    pub temperature: f64,
    pub ttl: Duration,
    pub predicted_ttl: Option<Duration>,
    pub index_bytes: u64,
    pub disagg: DisaggPolicy,
    pub decode_blocks_threshold: Option<f64>,
    pub prefill_tokens_threshold: Option<usize>,
    /// By worker's address.
    pub event_sources: HashMap<PeerUrl, EventSource>,
    /// 0: no limit.
    pub max_concurrent: usize,
    pub max_retries: usize,
    pub breaker: BreakerConfig,
    pub probe_interval: Duration,
    pub probe_timeout: Duration,
}

impl FrontendConfig {
    /// `prefill` are the values of `--prefill`.
    pub fn from_args(args: FrontendArgs, prefill: &[String]) -> Result<Self, ConfigError> {
        let mut workers = Vec::new();
        for (flag, role, urls) in [
            ("worker-url", WorkerRole::Both, &args.worker_url[..]),
            ("prefill", WorkerRole::Prefill, prefill),
            ("decode", WorkerRole::Decode, &args.decode[..]),
        ] {
            for url in urls.iter().flat_map(|urls| urls.split(',')).filter(|url| !url.is_empty()) {
                let peer = peer_url(flag, url)?;
                if workers.iter().any(|(other, _)| *other == peer) {
                    return Err(bad(flag, url, "each worker once".into()));
                }
                workers.push((peer, role));
            }
        }
        if !prefill.is_empty() && args.decode.is_empty() && args.worker_url.is_empty() {
            return Err(bad("prefill", &prefill[0], "--decode beside it: nobody would answer".into()));
        }
        let event_sources = event_sources(&args.kv_event_source, &args.kv_event_replay_source, &workers)?;
        Ok(Self {
            workers,
            mode: args.router_mode,
            kv_events: !args.no_router_kv_events,
            kv_events_required: args.router_kv_events_required,
            kv_degrade: args.router_kv_degrade == OnOff::On,
            overlap_score_credit: args.router_kv_overlap_score_credit,
            prefill_load_scale: args.router_prefill_load_scale,
            eviction_weight: args.router_eviction_weight,
            active_request_weight: args.router_decode_active_request_weight,
            temperature: args.router_temperature,
            ttl: Duration::from_secs_f64(args.router_ttl_secs),
            predicted_ttl: args.router_predicted_ttl_secs.map(Duration::from_secs_f64),
            index_bytes: args.router_index_memory_bytes.0,
            disagg: disagg_policy(&args.disagg_policy)?,
            decode_blocks_threshold: args.active_decode_blocks_threshold,
            prefill_tokens_threshold: args.active_prefill_tokens_threshold,
            event_sources,
            max_concurrent: args.max_concurrent_requests,
            max_retries: args.retry_max_retries,
            breaker: BreakerConfig {
                failures: args.cb_failure_threshold,
                successes: args.cb_success_threshold,
                open: Duration::from_secs_f64(args.cb_timeout_duration_secs),
            },
            probe_interval: Duration::from_secs_f64(args.health_check_interval_secs),
            probe_timeout: Duration::from_secs_f64(args.health_check_timeout_secs),
        })
    }
}

fn disagg_policy(text: &str) -> Result<DisaggPolicy, ConfigError> {
    match text {
        "auto" => Ok(DisaggPolicy::Auto),
        "always" => Ok(DisaggPolicy::Always),
        "never" => Ok(DisaggPolicy::Never),
        _ => {
            let tokens = text.strip_prefix("threshold:").and_then(|tokens| tokens.parse().ok());
            let expected = "auto, always, never or threshold:N with a number of tokens";
            tokens.map(DisaggPolicy::Threshold).ok_or_else(|| bad("disagg-policy", text, expected.into()))
        }
    }
}

fn event_sources(
    publishers: &[String],
    replays: &[String],
    workers: &[(PeerUrl, WorkerRole)],
) -> Result<HashMap<PeerUrl, EventSource>, ConfigError> {
    let mut sources: HashMap<PeerUrl, EventSource> = HashMap::new();
    for (flag, texts) in [("kv-event-source", publishers), ("kv-event-replay-source", replays)] {
        for text in texts {
            let expected = || "WORKER=ENDPOINT, such as http://a:8000=tcp://a:5557".to_owned();
            let (url, endpoint) = text.split_once('=').ok_or_else(|| bad(flag, text, expected()))?;
            let peer = peer_url(flag, url)?;
            if !endpoint.starts_with("tcp://") && !endpoint.starts_with("ipc://") {
                return Err(bad(flag, text, expected()));
            }
            if !workers.iter().any(|(other, _)| *other == peer) {
                return Err(bad(flag, text, format!("the address of a worker, which {url} is not")));
            }
            let entry = sources.entry(peer).or_default();
            match flag {
                "kv-event-source" => entry.publisher = Some(endpoint.to_owned()),
                _ => entry.replay = Some(endpoint.to_owned()),
            }
        }
    }
    Ok(sources)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        args: FrontendArgs,
        #[arg(long)]
        prefill: Vec<String>,
    }

    fn config(flags: &str) -> Result<FrontendConfig, String> {
        let line = Line::try_parse_from(["x"].into_iter().chain(flags.split_whitespace()));
        let line = line.map_err(|error| error.to_string())?;
        FrontendConfig::from_args(line.args, &line.prefill).map_err(|error| error.to_string())
    }

    #[test]
    fn workers_are_given_one_by_one_or_as_a_list() {
        let workers = |flags| -> Vec<String> {
            let config = config(flags).unwrap();
            config.workers.iter().map(|(url, role)| format!("{url} {}", role.as_str())).collect()
        };
        assert_eq!(workers("--worker-url http://a:1 --worker-url http://b:2").len(), 2);
        assert_eq!(workers("--worker-urls http://a:1 http://b:2").len(), 2);
        assert_eq!(
            workers("--prefill http://a:1 --decode http://b:2,http://c:3"),
            ["http://a:1 prefill", "http://b:2 decode", "http://c:3 decode"]
        );
    }

    #[test]
    fn events_are_expected_unless_told_otherwise() {
        assert!(config("").unwrap().kv_events);
        assert!(!config("--no-router-kv-events").unwrap().kv_events);
        assert!(config("--no-router-kv-events --router-kv-events").unwrap().kv_events);
        assert!(config("--no-router-kv-events --router-kv-events-required").is_err());
    }

    #[test]
    fn bad_values_are_named_with_what_was_expected() {
        for (flags, expected) in [
            ("--worker-url a:1", "--worker-url is \"a:1\", expected a URL"),
            (
                "--worker-url http://a:1 --decode http://a:1",
                "--decode is \"http://a:1\", expected each worker once",
            ),
            ("--prefill http://a:1", "--prefill is \"http://a:1\", expected --decode"),
            ("--disagg-policy threshold:x", "--disagg-policy is \"threshold:x\", expected auto"),
            ("--router-temperature=-1", "expected a finite number of at least 0"),
            ("--router-temperature NaN", "expected a finite number of at least 0"),
            ("--router-ttl-secs 0", "expected a number above 0"),
            ("--router-mode best", "round-robin"),
            ("--kv-event-source http://a:1=tcp://a:5", "which http://a:1 is not"),
            ("--worker-url http://a:1 --kv-event-source http://a:1", "expected WORKER=ENDPOINT"),
        ] {
            let message = config(flags).unwrap_err();
            assert!(message.contains(expected), "{flags}: {message}");
        }
        assert_eq!(config("--disagg-policy threshold:512").unwrap().disagg, DisaggPolicy::Threshold(512));
    }
}
