//! What a worker publishes, as told by flags or by vLLM's `--kv-events-config`.

use serde::Deserialize;

/// vLLM's default for `buffer_steps`.
const BUFFER_STEPS: usize = 10_000;

/// Ours are fewer: what is older is in a snapshot.
const OWN_BUFFER_STEPS: usize = 1000;

/// Batches between the engine and the publisher: vLLM's default is 100,000, but each of ours is a whole step.
const QUEUE: usize = 10_000;

/// The library's own limit for each subscriber's queue, and vLLM's default for `hwm`.
const HWM: usize = 100_000;

/// Where and how events are published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublishOptions {
    /// `tcp://host:port`; port 0 takes any free one.
    pub endpoint: String,
    /// Waits for subscribers, rather than connecting to one.
    pub bind: bool,
    /// Where missed batches can be asked for.
    pub replay_endpoint: Option<String>,
    /// Batches that are kept for that.
    pub buffer_steps: usize,
    /// Batches that wait for the publisher; beyond it they are lost, and subscribers see the gap.
    pub max_queue: usize,
    pub topic: String,
}

impl PublishOptions {
    /// What `--kv-events` does: any free ports of `host`.
    pub fn on_host(host: &str) -> Self {
        let any_port =
            if host.contains(':') { format!("tcp://[{host}]:0") } else { format!("tcp://{host}:0") };
        Self {
            endpoint: any_port.clone(),
            bind: true,
            replay_endpoint: Some(any_port),
            buffer_steps: OWN_BUFFER_STEPS,
            max_queue: QUEUE,
            topic: String::new(),
        }
    }

    /// Reads `--kv-events-config`; `None` if it turns events off. Errors: what is wrong with it, in words.
    pub fn from_json(json: &str) -> Result<Option<Self>, String> {
        let config: Json = serde_json::from_str(json).map_err(|error| error.to_string())?;
        let publisher = config.publisher.as_deref().unwrap_or("zmq");
        if !["zmq", "null"].contains(&publisher) {
            return Err(format!("publisher is {publisher:?}, expected \"zmq\" or \"null\""));
        }
        if config.hwm.is_some_and(|hwm| hwm != HWM) {
            return Err(format!(
                "hwm is {}, expected {HWM}: it cannot be changed",
                config.hwm.unwrap_or_default()
            ));
        }
        if config.max_queue_size == Some(0) || config.buffer_steps == Some(0) {
            return Err("max_queue_size and buffer_steps must be at least 1".into());
        }
        let endpoint = config.endpoint.unwrap_or_else(|| "tcp://*:5557".into());
        for endpoint in [Some(&endpoint), config.replay_endpoint.as_ref()].into_iter().flatten() {
            if !is_tcp(endpoint) {
                return Err(format!("endpoint is {endpoint:?}, expected tcp://host:port"));
            }
        }
        // vLLM's rule: a wildcard waits for subscribers, an address is one to connect to.
        let bind = endpoint.contains('*') || endpoint.contains("::");
        Ok((config.enable_kv_cache_events && publisher == "zmq").then(|| Self {
            endpoint: wildcard(&endpoint),
            bind,
            replay_endpoint: config.replay_endpoint.as_deref().map(wildcard),
            buffer_steps: config.buffer_steps.unwrap_or(BUFFER_STEPS),
            max_queue: config.max_queue_size.unwrap_or(QUEUE),
            topic: config.topic.unwrap_or_default(),
        }))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Json {
    #[serde(default)]
    enable_kv_cache_events: bool,
    publisher: Option<String>,
    endpoint: Option<String>,
    replay_endpoint: Option<String>,
    buffer_steps: Option<usize>,
    hwm: Option<usize>,
    max_queue_size: Option<usize>,
    topic: Option<String>,
}

fn is_tcp(endpoint: &str) -> bool {
    let port = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
    port.is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
}

fn wildcard(endpoint: &str) -> String {
    endpoint.replace('*', "0.0.0.0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllm_s_config_is_read() {
        let json = r#"{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5557",
            "replay_endpoint":"tcp://*:5558","buffer_steps":100,"hwm":100000,"max_queue_size":7,"topic":"kv-events"}"#;
        let options = PublishOptions::from_json(json).unwrap().unwrap();
        assert_eq!((options.endpoint.as_str(), options.bind), ("tcp://0.0.0.0:5557", true));
        assert_eq!(options.replay_endpoint.as_deref(), Some("tcp://0.0.0.0:5558"));
        assert_eq!((options.buffer_steps, options.max_queue, options.topic.as_str()), (100, 7, "kv-events"));
        let connects = r#"{"enable_kv_cache_events":true,"endpoint":"tcp://10.0.0.1:5557"}"#;
        assert!(!PublishOptions::from_json(connects).unwrap().unwrap().bind);
        for off in ["{}", r#"{"enable_kv_cache_events":true,"publisher":"null"}"#] {
            assert_eq!(PublishOptions::from_json(off).unwrap(), None);
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused() {
        for (json, expected) in [
            ("", "EOF"),
            (r#"{"enable_kv_cache_event":true}"#, "unknown field `enable_kv_cache_event`"),
            (r#"{"publisher":"kafka"}"#, "publisher is \"kafka\""),
            (r#"{"endpoint":"ipc:///a"}"#, "endpoint is \"ipc:///a\""),
            (r#"{"endpoint":"tcp://*"}"#, "endpoint is \"tcp://*\""),
            (r#"{"hwm":5}"#, "hwm is 5"),
            (r#"{"buffer_steps":0}"#, "at least 1"),
        ] {
            let error = PublishOptions::from_json(json).unwrap_err();
            assert!(error.contains(expected), "{json}: {error}");
        }
    }
}
