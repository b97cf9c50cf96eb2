//! How others find this worker, and what its prefix cache holds.

use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;

use anyhow::Context;
use clap::Args;
use engine::kv_events::KvEventSink;
use tokio::runtime::Handle;

use crate::config::{Config, ConfigError, bad};
use crate::discovery::options::{DiscoveryArgs, DiscoveryOptions};
use crate::discovery::record::{HASH_SCHEME, RECORD_VERSION};
use crate::discovery::{DiscoveryError, Registration, WorkerRecord, is_worker_id};
use crate::events::options::PublishOptions;
use crate::events::publisher::Publisher;
use crate::events::snapshot::SNAPSHOT_PATH;
use crate::router::{WorkerId, WorkerRole};

const DISCOVERY: &str = "Discovery";
const KV_CACHE: &str = "KV cache";

/// An address of a documentation network: which of our own addresses leads out is asked with it, and nothing is sent.
const ELSEWHERE: &str = "192.0.2.1:9";

/// What a worker says of itself to others.
#[derive(Clone, Debug, Args)]
pub struct PresenceArgs {
    #[command(flatten)]
    pub discovery: DiscoveryArgs,
    /// The name under which this worker registers, which no other living one may have; a random one when not given.
    #[arg(long, value_name = "NAME", help_heading = DISCOVERY)]
    pub worker_id: Option<String>,
    /// The host under which others reach this worker; --host, or the address that leads out, when not given.
    #[arg(long, env = "KVFERRY_ADVERTISE_HOST", value_name = "HOST", help_heading = DISCOVERY)]
    pub advertise_host: Option<String>,
    /// Say over ZMQ what happens in the prefix cache, so that routers know it exactly (on by default).
    #[arg(long, overrides_with = "no_kv_events", help_heading = KV_CACHE)]
    pub kv_events: bool,
    /// Say nothing; routers have to guess.
    #[arg(long, overrides_with = "kv_events", help_heading = KV_CACHE)]
    pub no_kv_events: bool,
    /// The same as in vLLM, such as '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557"}'; without it, any free
    /// ports of --host.
    #[arg(long, value_name = "JSON", conflicts_with_all = ["kv_events", "no_kv_events"], help_heading = KV_CACHE)]
    pub kv_events_config: Option<String>,
}

/// The checked flags.
#[derive(Clone, Debug)]
pub struct PresenceConfig {
    pub discovery: Option<DiscoveryOptions>,
    pub worker_id: Option<String>,
    pub advertise_host: Option<String>,
    pub events: Option<PublishOptions>,
}

impl PresenceConfig {
    pub fn from_args(args: PresenceArgs, listen: SocketAddr) -> Result<Self, ConfigError> {
        if let Some(id) = args.worker_id.as_ref().filter(|id| !is_worker_id(id)) {
            return Err(bad(
                "worker-id",
                id,
                "letters, digits, '.', '_' and '-', not beginning with '.'".into(),
            ));
        }
        let events = match &args.kv_events_config {
            Some(json) => PublishOptions::from_json(json)
                .map_err(|reason| bad("kv-events-config", json, format!("vLLM's JSON: {reason}")))?,
            None => (!args.no_kv_events).then(|| PublishOptions::on_host(&listen.ip().to_string())),
        };
        let discovery = DiscoveryOptions::from_args(&args.discovery)?;
        Ok(Self { discovery, worker_id: args.worker_id, advertise_host: args.advertise_host, events })
    }
}

/// What a worker is, apart from where.
pub struct Facts {
    pub incarnation: u64,
    pub num_blocks: usize,
    pub max_model_len: usize,
    pub kv_bytes_per_token: u64,
    pub kv_transport: Option<String>,
}

/// This worker as others see it. Blocks; must run within a tokio runtime.
pub struct Presence {
    pub record: WorkerRecord,
    publisher: Option<Publisher>,
    registration: Option<Arc<dyn Registration>>,
    discovery: Option<DiscoveryOptions>,
}

impl Presence {
    /// Opens the sockets for KV events; returns the engine's end, too. `address` is where this worker listens.
    pub fn open(
        config: &Config,
        address: SocketAddr,
        facts: Facts,
    ) -> anyhow::Result<(Self, Option<KvEventSink>)> {
        let host = config.presence.advertise_host.clone().unwrap_or_else(|| own_host(address.ip()));
        let bracketed = if host.contains(':') { format!("[{host}]") } else { host.clone() };
        let url = format!("http://{bracketed}:{}", address.port());
        let opened = match &config.presence.events {
            Some(options) => {
                Some(Handle::current().block_on(Publisher::open(options, config.block_size as u32))?)
            }
            None => None,
        };
        let (publisher, sink) =
            opened.map_or((None, None), |(publisher, sink)| (Some(publisher), Some(sink)));
        let snapshot_url = format!("{url}{SNAPSHOT_PATH}");
        let id = config.presence.worker_id.clone().unwrap_or_else(|| format!("{:016x}", facts.incarnation));
        let record = WorkerRecord {
            version: RECORD_VERSION,
            worker_id: id,
            incarnation: WorkerId(facts.incarnation),
            role: match config.role {
                crate::args::Role::Prefill => WorkerRole::Prefill,
                crate::args::Role::Decode => WorkerRole::Decode,
                crate::args::Role::Both | crate::args::Role::Frontend => WorkerRole::Both,
            },
            model: config.served_model_name.clone(),
            url,
            block_size: Some(config.block_size as u32),
            capacity_blocks: Some(facts.num_blocks as u64),
            max_model_len: Some(facts.max_model_len as u64),
            events: publisher.as_ref().map(|publisher| publisher.endpoints(&host, Some(snapshot_url))),
            hash_scheme: Some(HASH_SCHEME.to_owned()),
            prefill_tokens_per_sec: None,
            kv_bytes_per_token: Some(facts.kv_bytes_per_token),
            kv_transport: facts.kv_transport,
            draining: false,
            labels: Default::default(),
        };
        let discovery = config.presence.discovery.clone();
        Ok((Self { record, publisher, registration: None, discovery }, sink))
    }

    /// Registers with discovery. That a default backend cannot be used is no error: nobody may be looking.
    pub fn register(&mut self) -> anyhow::Result<()> {
        let Some(options) = &self.discovery else { return Ok(()) };
        let register = || -> Result<_, DiscoveryError> {
            let discovery = options.open()?;
            let registered = Handle::current().block_on(discovery.register(self.record.clone()))?;
            tracing::info!(backend = discovery.name(), worker_id = self.record.worker_id, "registered");
            Ok(Arc::from(registered))
        };
        match register() {
            Ok(registration) => self.registration = Some(registration),
            Err(error @ DiscoveryError::Taken { .. }) => return Err(error).context("--worker-id"),
            Err(error) if options.explicit => return Err(error.into()),
            Err(error) => {
                tracing::warn!(%error, "this worker is not registered: frontends find it only by its URL")
            }
        }
        Ok(())
    }

    /// Takes the registration back: from here on nobody finds this worker.
    pub fn registration(&self) -> Option<Arc<dyn Registration>> {
        self.registration.clone()
    }

    /// Ends the publisher, after the engine.
    pub fn close(self) {
        if let Some(publisher) = self.publisher {
            publisher.join();
        }
    }
}

/// The address under which others most likely reach what listens on `listen`.
fn own_host(listen: IpAddr) -> String {
    if !listen.is_unspecified() {
        return listen.to_string();
    }
    let leads_out = || {
        let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
        socket.connect(ELSEWHERE).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    leads_out().unwrap_or_else(|| "127.0.0.1".into())
}
