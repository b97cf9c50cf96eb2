//! What the handlers share. It exists before the model is loaded, so that the port answers from the start.

use std::net::SocketAddr;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use engine::handle::EngineHandle;
use models::SamplingDefaults;
use prometheus::Registry;

use crate::args::Role;
use crate::config::Config;
use crate::discovery::WorkerRecord;
use crate::error::ApiError;
use crate::layers::HttpMetrics;
use crate::link::demand::Demand;
use crate::link::named::Named;
use crate::link::peers::Peers;
use crate::link::server::LinkServer;
use crate::link::transfers::Transfers;
use crate::readiness::Readiness;
use crate::shutdown::Drain;
use crate::text::Text;

/// Shared by all handlers.
pub struct AppState {
    pub role: Role,
    /// The name clients use in `model`.
    pub model_name: String,
    /// What was given as `--model`, for `/v1/models`.
    pub model_root: String,
    /// Unix time of the start, for `/v1/models`.
    pub created: u64,
    pub request_timeout: Duration,
    pub readiness: Readiness,
    pub drain: Drain,
    /// Metrics of the process; the engine has a registry of its own.
    pub registry: Registry,
    pub http_metrics: HttpMetrics,
    serving: OnceLock<Serving>,
    /// Takes links from decode workers; set on a prefill worker once it is loaded.
    pub link: OnceLock<Arc<LinkServer>>,
    /// Where this process listens; set before anything is loaded.
    pub address: OnceLock<SocketAddr>,
    /// What this worker says of itself to frontends; set once it is loaded.
    pub record: OnceLock<WorkerRecord>,
    /// What `kv_transfer_params` can mean here; set once the model of a prefill or decode worker is loaded.
    pub kv: OnceLock<Handoffs>,
    /// What is known of a prefill or decode worker's KV transport.
    pub transfers: OnceLock<Arc<Transfers>>,
}

/// A worker's part in handoffs that an outside proxy arranges.
#[expect(clippy::large_enum_variant, reason = "there is one in a process")]
pub enum Handoffs {
    /// It computes prompts and keeps their KV, under this name and address.
    Keeps { engine_id: String, host: String },
    /// It fetches KV from those that keep it.
    Fetches { demand: Demand, peers: Peers, named: Named },
}

/// What is there once the model is loaded.
pub struct Serving {
    pub engine: EngineHandle,
    pub text: Arc<Text>,
    /// For requests that leave a sampling parameter out.
    pub defaults: SamplingDefaults,
}

/// What [`AppState`] is made from.
pub struct Identity {
    pub role: Role,
    pub model_name: String,
    pub model_root: String,
    pub request_timeout: Duration,
}

impl Identity {
    pub fn of(config: &Config) -> Self {
        Self {
            role: config.role,
            model_name: config.served_model_name.clone(),
            model_root: config.model.clone(),
            request_timeout: config.request_timeout,
        }
    }
}

impl AppState {
    /// Fails only if `registry` already has the HTTP server's metrics.
    pub fn new(
        identity: Identity,
        readiness: Readiness,
        registry: Registry,
    ) -> prometheus::Result<Arc<Self>> {
        let http_metrics = HttpMetrics::register(&registry)?;
        Ok(Arc::new(Self {
            role: identity.role,
            model_name: identity.model_name,
            model_root: identity.model_root,
            created: unix_time(),
            request_timeout: identity.request_timeout,
            readiness,
            drain: Drain::default(),
            registry,
            http_metrics,
            serving: OnceLock::new(),
            link: OnceLock::new(),
            address: OnceLock::new(),
            record: OnceLock::new(),
            kv: OnceLock::new(),
            transfers: OnceLock::new(),
        }))
    }

    /// The model is loaded. Does not touch readiness, which may depend on more than the model.
    ///
    /// # Panics
    /// When called twice; that is a bug.
    pub fn serve(&self, serving: Serving) {
        let first = self.serving.set(serving).is_ok();
        assert!(first, "a process loads one model. This is a bug.");
    }

    /// The engine and its tokenizer, or 503 while they load.
    pub fn serving(&self) -> Result<&Serving, ApiError> {
        self.serving.get().ok_or_else(|| ApiError::unavailable("the model is being loaded"))
    }

    /// 503 with the reason unless a request would be served now.
    pub fn admit(&self) -> Result<(), ApiError> {
        let state = self.readiness.get();
        match state.serves() {
            true => Ok(()),
            false => Err(ApiError::unavailable(state.reason().unwrap_or(state.label()))),
        }
    }

    /// 404 unless `model` is the one that is served; `None` means that one.
    pub fn check_model(&self, model: Option<&str>) -> Result<(), ApiError> {
        match model {
            Some(name) if name != self.model_name => {
                let name = crate::error::shown(&name.into());
                let message =
                    format!("the model {name} does not exist; this server has {:?}", self.model_name);
                Err(ApiError { param: Some("model".into()), ..ApiError::not_found(message) })
            }
            _ => Ok(()),
        }
    }

    /// What a request gets that outlives the grace period of a shutdown.
    pub fn cut_error() -> ApiError {
        ApiError::unavailable("the server is shutting down and did not wait for this request to finish")
    }

    /// Whether `/v1/models` may name the model: only when a request for it would be served.
    pub fn lists_model(&self) -> bool {
        self.readiness.get().serves()
    }
}

/// Seconds since 1970.
pub fn unix_time() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs())
}
