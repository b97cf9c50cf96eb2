//! The checked configuration of one `serve` process: what every other part is built from.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs};
use std::path::PathBuf;
use std::time::Duration;

use axum::http::Uri;
use kernels::cpu::Isa;
use models::{ModelError, SourceOptions};
use transfer::TransportConfig;
use transfer::faulty::Faults;

use crate::args::{Args, DType, DeviceKind, KvDirection, KvFailure, Quantization, Role};
use crate::size::ByteSize;
use crate::worker::presence::PresenceConfig;

/// Used when neither `--num-kv-blocks` nor `--kv-cache-memory-bytes` is given: 9,362 tokens of Qwen3-0.6B in
/// bf16, small enough for any machine that holds the weights.
pub const DEFAULT_KV_CACHE: ByteSize = ByteSize(1 << 30);

/// `--cpu-nice` of a decode worker: beside a prefill worker that computes it gets about a tenth of the cores they share, and
/// tokens that come slower are computed more at a time.
const DECODE_NICE: u8 = 10;

/// Blocks are numbered within a step and hashed whole; beyond this a block is longer than most prompts.
const MAX_BLOCK_SIZE: usize = 1024;

/// Everything `serve` was told, checked.
#[derive(Clone, Debug)]
pub struct Config {
    pub role: Role,
    /// A folder, `demo` or a hub id, for [`models::resolve`].
    pub model: String,
    pub model_source: SourceOptions,
    /// The name clients use in `model`.
    pub served_model_name: String,
    pub listen: SocketAddr,
    pub presence: PresenceConfig,
    pub port_file: Option<PathBuf>,
    /// Empty unless `role` is decode.
    pub prefill: Vec<PeerUrl>,
    pub dtype: DType,
    pub kv_cache_dtype: DType,
    pub quantization: Quantization,
    pub block_size: usize,
    pub kv_cache: KvCacheSize,
    pub max_model_len: Option<usize>,
    pub max_num_batched_tokens: usize,
    pub max_num_seqs: usize,
    pub max_num_queued_reqs: usize,
    /// A name that the transfer layer knows.
    pub kv_transport: String,
    pub kv_transport_strict: bool,
    pub nixl_dir: Option<PathBuf>,
    pub kv_failure: KvFailure,
    pub kv_direction: KvDirection,
    /// `None`: all layers, after each chunk.
    pub kv_push_layers: Option<usize>,
    pub kv_lease: Duration,
    pub kv_link_timeout: Duration,
    pub kv_checksum: bool,
    pub kv_advertise_host: Option<String>,
    /// For tests: what goes wrong with transfers.
    pub kv_faults: Option<Faults>,
    /// For tests: the version of the KV layout that is told to others.
    pub kv_layout_version: Option<u32>,
    pub request_timeout: Duration,
    pub shutdown_grace: Duration,
    pub threads: usize,
    /// Instructions to compute with; `None` for the best that the CPU has.
    pub cpu_isa: Option<Isa>,
    /// Cores for the threads that compute and move KV; `None` leaves them as they are.
    pub cpu_affinity: Option<Vec<usize>>,
    /// How much they give way to other processes, as nice(1).
    pub cpu_nice: u8,
    pub device: DeviceKind,
    /// The library that stands in for a CUDA device.
    pub cuda_emulator: Option<PathBuf>,
    pub enforce_eager: bool,
    /// A built-in profile's name or a file, for the simulated device.
    pub sim_profile: String,
    pub sim_speed: f64,
    pub check_invariants: bool,
}

/// How large the KV pool is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvCacheSize {
    Blocks(usize),
    Bytes(ByteSize),
    /// Nothing was said: [`DEFAULT_KV_CACHE`], or less where a GPU has less.
    Default,
    /// What the process does not use yet of this share of the machine's memory.
    Share(f64),
}

/// The address of another worker's HTTP server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PeerUrl {
    /// A name or an address; an IPv6 address has no brackets here.
    pub host: String,
    pub port: u16,
}

/// A flag with a value that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("--{flag} is {value:?}, expected {expected}")]
    BadValue { flag: &'static str, value: String, expected: String },
    #[error("--model is {value:?}: {source}")]
    Model { value: String, source: ModelError },
    #[error("--kv-transport (KV_TRANSPORT): {0}")]
    Transport(transfer::TransferError),
    #[error("--prefill is {value:?}, but --role is {}: only --role decode and frontend take prefill workers", role.as_str())]
    PrefillNeedsDecode { value: String, role: Role },
    #[error("--{flag} is {value:?}, but --role is {}: only --role frontend takes it", role.as_str())]
    NeedsFrontend { flag: &'static str, value: String, role: Role },
    #[error(
        "--model is missing, expected a folder, a Hugging Face id or demo: only --role frontend does without"
    )]
    NoModel,
    #[error("KV events need --model: they name blocks of tokens, which only the model's tokenizer can make")]
    EventsNeedModel,
}

impl Config {
    /// Checks what the command line's grammar cannot. `var` reads the environment, for where models come from.
    pub fn from_args(args: Args, var: impl Fn(&str) -> Option<String>) -> Result<Self, ConfigError> {
        let model_source = SourceOptions::from_vars(var);
        let model = args.model.clone().ok_or(ConfigError::NoModel)?;
        check_model(&model, &model_source)?;
        for (flag, urls) in [("worker-url", &args.frontend.worker_url), ("decode", &args.frontend.decode)] {
            if let Some(value) = urls.first().cloned() {
                return Err(ConfigError::NeedsFrontend { flag, value, role: args.role });
            }
        }
        let kv_cache = match (args.num_kv_blocks, args.kv_cache_memory_bytes) {
            (Some(blocks), _) => KvCacheSize::Blocks(blocks),
            (None, Some(bytes)) => KvCacheSize::Bytes(bytes),
            (None, None) => args.gpu_memory_utilization.map_or(KvCacheSize::Default, KvCacheSize::Share),
        };
        if args.block_size > MAX_BLOCK_SIZE {
            return Err(bad("block-size", args.block_size, format!("at most {MAX_BLOCK_SIZE} tokens")));
        }
        if let Some(dir) = args.nixl_dir.as_ref().filter(|dir| !dir.is_dir()) {
            return Err(bad("nixl-dir", dir.display(), "an existing folder".into()));
        }
        check_transport(&args)?;
        if args.quantization == Quantization::Int8 && args.dtype == DType::F32 {
            return Err(bad("quantization", "int8", "none with --dtype f32".into()));
        }
        let cpu_affinity = args.cpu_affinity.map(|cpus| cpus.0);
        let default_threads = || match &cpu_affinity {
            Some(cpus) => cpus.len(),
            None => std::thread::available_parallelism().map_or(1, usize::from),
        };
        let listen = listen_address(&args.host, args.port)?;
        Ok(Self {
            role: args.role,
            served_model_name: served_name(args.served_model_name, &model)?,
            model,
            model_source,
            listen,
            presence: PresenceConfig::from_args(args.presence, listen)?,
            port_file: args.port_file,
            prefill: prefill_peers(args.role, &args.prefill)?,
            dtype: args.dtype,
            kv_cache_dtype: args.kv_cache_dtype,
            quantization: args.quantization,
            block_size: args.block_size,
            kv_cache,
            max_model_len: args.max_model_len,
            max_num_batched_tokens: args.max_num_batched_tokens,
            max_num_seqs: args.max_num_seqs,
            max_num_queued_reqs: args.max_num_queued_reqs,
            kv_transport: args.kv_transport,
            kv_transport_strict: args.kv_transport_strict,
            nixl_dir: args.nixl_dir,
            kv_failure: args.kv_failure,
            kv_direction: args.kv_direction,
            kv_push_layers: args.kv_push_layers.0,
            kv_lease: Duration::from_secs_f64(args.kv_lease_secs),
            kv_link_timeout: Duration::from_secs_f64(args.kv_link_timeout_secs),
            kv_checksum: args.kv_checksum,
            kv_advertise_host: args.kv_advertise_host,
            kv_faults: args.kv_faults,
            kv_layout_version: args.kv_layout_version,
            request_timeout: Duration::from_secs_f64(args.request_timeout_secs),
            shutdown_grace: Duration::from_secs_f64(args.shutdown_grace_secs),
            threads: args.threads.unwrap_or_else(default_threads),
            cpu_isa: args.cpu_isa,
            cpu_affinity,
            cpu_nice: args.cpu_nice.unwrap_or(if args.role == Role::Decode { DECODE_NICE } else { 0 }),
            device: args.device,
            cuda_emulator: args.cuda_emulator,
            enforce_eager: args.enforce_eager,
            sim_profile: args.sim_profile,
            sim_speed: args.sim_speed,
            check_invariants: args.check_invariants,
        })
    }
}

pub(crate) fn bad(flag: &'static str, value: impl fmt::Display, expected: String) -> ConfigError {
    ConfigError::BadValue { flag, value: value.to_string(), expected }
}

/// The error lists the valid names, and why those that cannot be used here are so.
fn check_transport(args: &Args) -> Result<(), ConfigError> {
    let asked = TransportConfig {
        name: args.kv_transport.clone(),
        nixl_dir: args.nixl_dir.clone(),
        ..Default::default()
    };
    transfer::registry::check_name(&asked).map_err(ConfigError::Transport)
}

pub(crate) fn served_name(given: Option<String>, model: &str) -> Result<String, ConfigError> {
    match given {
        Some(name) if name.trim().is_empty() => Err(bad("served-model-name", name, "a name".into())),
        Some(name) => Ok(name),
        None => Ok(model.to_owned()),
    }
}

/// Finds a name that can never be a model before anything is started. What is not in the hub's cache may still be
/// downloaded, which is not tried here.
pub(crate) fn check_model(model: &str, source: &SourceOptions) -> Result<(), ConfigError> {
    let mut offline = source.clone();
    offline.hub.offline = true;
    match models::resolve(model, &offline) {
        Ok(_) | Err(ModelError::NotInCache { .. } | ModelError::Hub { .. }) => Ok(()),
        Err(source) => Err(ConfigError::Model { value: model.to_owned(), source }),
    }
}

pub(crate) fn listen_address(host: &str, port: u16) -> Result<SocketAddr, ConfigError> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let found = (bare, port).to_socket_addrs().ok().and_then(|mut addresses| addresses.next());
    found.ok_or_else(|| bad("host", host, "an IP address or a host name that resolves".into()))
}

fn prefill_peers(role: Role, urls: &[String]) -> Result<Vec<PeerUrl>, ConfigError> {
    if let Some(url) = urls.first().filter(|_| role != Role::Decode) {
        return Err(ConfigError::PrefillNeedsDecode { value: url.clone(), role });
    }
    let mut peers = Vec::new();
    for url in urls {
        let peer = peer_url("prefill", url)?;
        if peers.contains(&peer) {
            return Err(bad("prefill", url, "each prefill worker once".into()));
        }
        peers.push(peer);
    }
    Ok(peers)
}

pub(crate) fn peer_url(flag: &'static str, url: &str) -> Result<PeerUrl, ConfigError> {
    let parse = || {
        let uri: Uri = url.parse().ok()?;
        let plain = uri.scheme_str() == Some("http") && uri.path() == "/" && uri.query().is_none();
        let host = uri.host()?.trim_matches(['[', ']']).to_owned();
        let port = uri.port_u16().filter(|&port| port > 0)?;
        plain.then_some(PeerUrl { host, port })
    };
    parse().ok_or_else(|| bad(flag, url, "a URL with host and port, such as http://127.0.0.1:8001".into()))
}

impl fmt::Display for PeerUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.host.contains(':') {
            true => write!(f, "http://[{}]:{}", self.host, self.port),
            false => write!(f, "http://{}:{}", self.host, self.port),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn config(flags: &[&str]) -> Result<Config, String> {
        let args = ["serve"].iter().chain(flags.iter());
        Config::from_args(Args::try_parse_from(args).unwrap(), |_| None).map_err(|error| error.to_string())
    }

    #[test]
    fn defaults_are_those_of_the_help() {
        let config = config(&["--model", "demo"]).unwrap();
        assert_eq!(config.role, Role::Both);
        assert_eq!(config.listen, "127.0.0.1:8000".parse().unwrap());
        assert_eq!(config.served_model_name, "demo");
        assert_eq!(config.kv_cache, KvCacheSize::Default);
        assert_eq!((config.block_size, config.max_num_batched_tokens, config.max_num_seqs), (16, 512, 64));
        assert_eq!(config.shutdown_grace, Duration::from_secs(30));
    }

    #[test]
    fn only_a_decode_worker_gives_way_unasked() {
        let nice = |flags: &[&str]| config(&[&["--model", "demo"], flags].concat()).unwrap().cpu_nice;
        assert_eq!(["both", "prefill", "decode"].map(|role| nice(&["--role", role])), [0, 0, DECODE_NICE]);
        assert_eq!(["both", "decode"].map(|role| nice(&["--role", role, "--cpu-nice", "3"])), [3, 3]);
    }

    #[test]
    fn peers_are_urls_of_a_decode_worker() {
        let decode = |url| config(&["--model", "demo", "--role", "decode", "--prefill", url]);
        let peers = decode("http://[::1]:8001").unwrap().prefill;
        assert_eq!(peers, [PeerUrl { host: "::1".into(), port: 8001 }]);
        assert_eq!(peers[0].to_string(), "http://[::1]:8001");
        for url in
            ["127.0.0.1:8001", "https://a:1", "http://a", "http://a:0", "http://a:1/x", "http://", "::"]
        {
            let message = decode(url).unwrap_err();
            assert!(message.starts_with(&format!("--prefill is {url:?}, expected a URL")), "{message}");
        }
    }

    #[test]
    fn contradictions_name_flag_value_and_what_was_expected() {
        let cases: &[(&[&str], &str)] = &[
            (
                &["--model", "demo", "--prefill", "http://a:1"],
                "--prefill is \"http://a:1\", but --role is both: only --role decode and frontend take prefill workers",
            ),
            (
                &["--model", "/no/such/dir"],
                "--model is \"/no/such/dir\": model path /no/such/dir does not exist",
            ),
            (&["--model", "/"], "--model is \"/\": no config.json in /"),
            (&["--model", "demo", "--host", "no host"], "--host is \"no host\", expected an IP address"),
            (&["--model", "demo", "--block-size", "2000"], "--block-size is \"2000\", expected at most 1024"),
            (&["--model", "demo", "--nixl-dir", "/no"], "--nixl-dir is \"/no\", expected an existing folder"),
            (
                &["--model", "demo", "--kv-transport", "pigeon"],
                "--kv-transport (KV_TRANSPORT): KV transport \"pigeon\" is not known; valid: auto, ",
            ),
            (&["--model", "demo", "--served-model-name", ""], "--served-model-name is \"\", expected a name"),
        ];
        for (flags, expected) in cases {
            let message = config(flags).unwrap_err();
            assert!(message.starts_with(expected), "{flags:?}: {message}");
        }
    }
}
