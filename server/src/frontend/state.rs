//! What the frontend's handlers and tasks share.

use std::collections::{BTreeSet, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use tokio::task::AbortHandle;

use super::args::RouterMode;
use super::config::FrontendConfig;
use super::fleet::{Fleet, Life, ModelCard, Worker};
use super::metrics::{FrontMetrics, UNKNOWN_MODEL};
use super::recent::Recent;
use super::request::Naming;
use super::standing::Reach;
use super::upstream::Upstream;
use crate::discovery::WorkerRecord;
use crate::error::ApiError;
use crate::events::subscriber::follow;
use crate::readiness::State;
use crate::router::policies::{KvPolicy, KvWeights, LeastLoaded, PowerOfTwo, Random, RoundRobin};
use crate::router::prompt::TEXT_BLOCK_TOKENS;
use crate::router::shared::{Router, RouterConfig, WorkerStatus};
use crate::router::{RoutePolicy, WorkerId, WorkerRole};
use crate::state::AppState;
use crate::text::Text;

/// A frontend.
pub struct Front {
    /// What all roles have: readiness, drain, the HTTP layer's metrics.
    pub app: Arc<AppState>,
    pub config: FrontendConfig,
    pub fleet: Fleet,
    pub upstream: Upstream,
    /// For what is not on the way of requests: snapshots, discovery.
    pub http: reqwest::Client,
    pub metrics: Arc<FrontMetrics>,
    pub recent: Arc<Recent>,
    pub router: Arc<Router>,
    /// What each worker's index follows, ended with the process it follows.
    followers: Mutex<HashMap<WorkerId, AbortHandle>>,
    /// The model that requests must name; without, whatever the workers have.
    model: Option<String>,
    /// Tokenizer and template, once they are loaded; without --model never, and prompts are named by their text.
    pub text: OnceLock<Arc<Text>>,
    pub started: Instant,
    /// The tokenizer is not there yet.
    loading: AtomicBool,
    /// Why discovery hears nothing of workers.
    discovery_trouble: Mutex<Option<String>>,
}

impl Front {
    /// Fails only if the registry has a metric of ours already.
    pub fn new(
        app: Arc<AppState>,
        config: FrontendConfig,
        model: Option<String>,
    ) -> prometheus::Result<Arc<Self>> {
        let metrics = Arc::new(FrontMetrics::register(&app.registry)?);
        Ok(Arc::new(Self {
            app,
            fleet: Fleet::default(),
            upstream: Upstream::new(),
            http: http_client(),
            metrics,
            recent: Arc::default(),
            router: Router::new(router_config(&config, model.clone())),
            followers: Mutex::default(),
            model,
            text: OnceLock::new(),
            started: Instant::now(),
            loading: AtomicBool::new(true),
            discovery_trouble: Mutex::default(),
            config,
        }))
    }

    /// How this frontend names the blocks of prompts.
    pub fn naming(&self) -> Naming {
        match (self.text.get(), self.router.uses_overlap()) {
            (_, false) => Naming::None { block_size: self.router.block_size() },
            (None, true) => Naming::Text,
            (Some(text), true) => Naming::Tokens { text: text.clone(), block_size: self.router.block_size() },
        }
    }

    /// The model that requests must name, if one was given.
    pub fn model(&self) -> Option<&str> {
        self.model.as_deref()
    }

    /// Models that some worker in service has, each once.
    pub fn models(&self) -> Vec<ModelCard> {
        let now = Instant::now();
        let mut seen = BTreeSet::new();
        let workers = self.fleet.all();
        let serving = workers.iter().filter(|worker| worker.role.serves() && worker.usable(now).is_ok());
        let lives: Vec<_> = serving.filter_map(|worker| worker.life()).collect();
        lives
            .iter()
            .flat_map(|life| &life.models)
            .filter(|model| seen.insert(model.id.clone()))
            .cloned()
            .collect()
    }

    /// Whether some worker has a model of this name, in service or not.
    fn knows(&self, model: &str) -> bool {
        let has = |worker: &Arc<Worker>| {
            worker.life().is_some_and(|life| life.models.iter().any(|card| card.id == model))
        };
        self.fleet.all().iter().any(has)
    }

    /// 404 for a model that nobody has. `None` is whichever there is.
    pub fn check_model(&self, model: Option<&str>) -> Result<(), ApiError> {
        match model {
            Some(name) if !self.knows(name) => {
                let there: Vec<_> = self.models().into_iter().map(|model| model.id).collect();
                let name = crate::error::shown(&name.into());
                let message = format!("the model {name} does not exist; the workers have {there:?}");
                Err(ApiError { param: Some("model".into()), ..ApiError::not_found(message) })
            }
            _ => Ok(()),
        }
    }

    /// The model's name for labels: only names that workers have.
    pub fn model_label(&self, model: Option<&str>) -> String {
        let named = model.filter(|name| self.knows(name)).map(str::to_owned);
        let only = || self.models().into_iter().next().map(|model| model.id).filter(|_| model.is_none());
        named.or_else(only).unwrap_or_else(|| UNKNOWN_MODEL.to_owned())
    }

    /// Readiness says what the workers' standings add up to.
    pub fn standing_changed(&self) {
        if !self.loading.load(Ordering::Relaxed) && !self.is_undecided() {
            self.app.readiness.set(self.service());
        }
    }

    /// Whether a request sent now would be served. Looked at anew: a worker may have broken a stream since the last
    /// probe.
    pub fn readiness(&self) -> State {
        self.standing_changed();
        self.app.readiness.get()
    }

    /// Nobody can serve yet, and somebody has not been asked yet: it is too early to say that nobody will.
    fn is_undecided(&self) -> bool {
        let now = Instant::now();
        let workers = self.fleet.all();
        let unknown = |worker: &Arc<Worker>| *worker.standing().reach() == Reach::Unknown;
        let serves = |worker: &Arc<Worker>| worker.role.serves() && worker.usable(now).is_ok();
        workers.iter().any(unknown) && !workers.iter().any(serves)
    }

    /// The tokenizer is there, or none is needed: from here on the workers decide about readiness.
    pub fn loaded(&self, text: Option<Arc<Text>>) {
        if let Some(text) = text {
            let first = self.text.set(text).is_ok();
            assert!(first, "a frontend loads one tokenizer. This is a bug.");
        }
        self.loading.store(false, Ordering::Relaxed);
        self.standing_changed();
    }

    /// How discovery is.
    pub fn discovery_says(&self, trouble: Option<String>) {
        *self.discovery_trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
    }

    /// Brings the gauges up to date, before a scrape.
    pub fn export(&self) {
        let now = Instant::now();
        for worker in self.fleet.all().iter() {
            let up = worker.usable(now).is_ok();
            let labels = [worker.name.as_str(), worker.role.as_str()];
            self.metrics.worker_up.with_label_values(&labels).set(up.into());
            let Some(life) = worker.life() else { continue };
            let load = self.router.load(life.id);
            let name = [worker.name.as_str()];
            self.metrics.worker_active.with_label_values(&name).set(load.active_requests as i64);
            self.metrics.worker_blocks.with_label_values(&name).set(load.decode_blocks as i64);
            self.metrics.worker_prefill_tokens.with_label_values(&name).set(load.prefill_tokens as i64);
        }
        for status in self.router.workers() {
            let name = status.record.url.as_str();
            for index in ["events", "approximate", "none"] {
                let gauge = self.metrics.worker_index_blocks.with_label_values(&[name, index]);
                let here = index == status.index.as_str();
                gauge.set(if here { status.cached_blocks as i64 } else { 0 });
            }
        }
        self.metrics.event_mismatch.set(self.router.mismatches() as i64);
        let sizes = self.router.sizes();
        self.metrics.open_bookings.set(sizes.open_bookings as i64);
        self.metrics.index_bytes.set((sizes.exact_bytes + sizes.recent_bytes) as i64);
    }

    fn service(&self) -> State {
        let now = Instant::now();
        let workers = self.fleet.all();
        if workers.is_empty() {
            let trouble = self.discovery_trouble.lock().unwrap_or_else(PoisonError::into_inner);
            let why = trouble.as_ref().map_or_else(String::new, |trouble| format!(" ({trouble})"));
            return State::Unavailable(format!("no worker is known{why}"));
        }
        let out: Vec<String> = workers
            .iter()
            .filter_map(|worker| {
                let standing = worker.standing();
                let obstacle = standing.obstacle(now)?;
                Some(format!("{} worker {}: {}", worker.role.as_str(), worker.name, obstacle.reason()))
            })
            .collect();
        let statuses = self.router.workers();
        let alarms = statuses.iter().filter_map(|status| {
            let code = status.alarm?.as_str();
            let then = match self.config.kv_events_required {
                true => "it gets no requests (--router-kv-events-required)".to_owned(),
                false => format!("its index is {}", status.index.as_str()),
            };
            Some(format!("worker {}: {code}, {then}", status.record.url))
        });
        let all: Vec<_> = out.iter().cloned().chain(alarms).collect();
        let barred = |worker: &Worker| {
            let alarmed = |status: &WorkerStatus| status.record.url == worker.name && status.alarm.is_some();
            self.config.kv_events_required && statuses.iter().any(alarmed)
        };
        let usable = |role: &dyn Fn(WorkerRole) -> bool| {
            let takes = |worker: &Arc<Worker>| worker.usable(now).is_ok() && !barred(worker);
            workers.iter().any(|worker| role(worker.role) && takes(worker))
        };
        if !usable(&|role| role.serves()) {
            return State::Unavailable(all.join("; "));
        }
        let prefill = workers.iter().any(|worker| worker.role == WorkerRole::Prefill);
        if prefill && !usable(&|role| role == WorkerRole::Prefill) {
            return State::Degraded(format!("no prefill worker takes requests ({})", out.join("; ")));
        }
        match all.is_empty() {
            true => State::Ready,
            false => State::Degraded(all.join("; ")),
        }
    }

    /// A process answers at a worker's address. Errors: why it gets no requests.
    pub fn lives(&self, worker: &Worker, life: Life) -> Result<(), String> {
        let id = life.id;
        let mut record = life.record.clone();
        // Where it is reached from here, whatever it thinks of itself.
        record.url = worker.name.clone();
        let has = |name: &str| life.models.iter().any(|model| model.id == name);
        match &self.model {
            Some(expected) if has(expected) => record.model = expected.clone(),
            Some(_) => {}
            // Each request goes to a worker that has its model.
            None => record.model = String::new(),
        }
        let sample = *worker.sample();
        record.capacity_blocks = record.capacity_blocks.or(sample.num_blocks);
        record.block_size = record.block_size.or(sample.block_size.map(|size| size as u32));
        if self.model.is_none() {
            // Blocks of text are the same for every worker; a capacity in blocks of unknown size is of no use.
            let size = record.block_size.take().map(u64::from);
            let blocks = |(blocks, size): (u64, u64)| blocks * size / TEXT_BLOCK_TOKENS as u64;
            record.capacity_blocks = record.capacity_blocks.zip(size).map(blocks);
        }
        if worker.life().is_none_or(|before| before.id != id) {
            tracing::info!(worker = worker.name, id = %id, "a worker's process was met for the first time");
            worker.standing().reborn();
        }
        if let Some(before) = worker.live(life) {
            self.forget(before.id);
        }
        let events = record.events.is_some();
        let shared = Arc::new(record.clone());
        self.router.join(record)?;
        self.router.set_speeds(id, worker.sample().speeds());
        if events && self.follows_events() {
            self.follow(id, shared);
        }
        Ok(())
    }

    /// Nobody answers at a worker's address any more: nothing that was cached there is left.
    pub fn dies(&self, worker: &Worker) {
        if let Some(life) = worker.dead() {
            self.forget(life.id);
        }
    }

    /// Events are of use here: the mode looks at overlap, they were not turned off, and blocks are of tokens.
    fn follows_events(&self) -> bool {
        self.config.kv_events && self.model.is_some() && self.router.uses_overlap()
    }

    fn forget(&self, id: WorkerId) {
        self.router.leave(id);
        if let Some(follower) = self.followers().remove(&id) {
            follower.abort();
        }
    }

    /// Follows a process's events from now on, unless they are followed already.
    fn follow(&self, id: WorkerId, record: Arc<WorkerRecord>) {
        let mut followers = self.followers();
        if followers.get(&id).is_none_or(AbortHandle::is_finished) {
            let task = tokio::spawn(follow(self.router.clone(), record, self.http.clone()));
            followers.insert(id, task.abort_handle());
        }
    }

    fn followers(&self) -> MutexGuard<'_, HashMap<WorkerId, AbortHandle>> {
        self.followers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn http_client() -> reqwest::Client {
    let client = reqwest::Client::builder().no_proxy().build();
    client.expect("a client without proxies and TLS needs nothing from the system. This is a bug.")
}

/// How long after a booking's last sign of life it is given up; above any gap between two tokens.
const LEASE: Duration = Duration::from_secs(300);

/// A worker says what it stored within a step of the engine; a slow one takes some seconds for it.
const EVENTS_PATIENCE: Duration = Duration::from_secs(10);

fn router_config(config: &FrontendConfig, model: Option<String>) -> RouterConfig {
    let weights = KvWeights {
        overlap_score_credit: config.overlap_score_credit,
        overlap_score_credit_decay: 0.0,
        prefill_load_scale: config.prefill_load_scale,
        eviction_weight: config.eviction_weight,
        decode_active_request_weight: config.active_request_weight,
        temperature: config.temperature,
    };
    let policy: Box<dyn RoutePolicy> = match config.mode {
        RouterMode::RoundRobin => Box::new(RoundRobin),
        RouterMode::Random => Box::new(Random),
        RouterMode::LeastLoaded => Box::new(LeastLoaded),
        RouterMode::PowerOfTwo => Box::new(PowerOfTwo),
        RouterMode::Kv => Box::new(KvPolicy { weights }),
    };
    RouterConfig {
        policy,
        // Events name blocks of tokens, and without a tokenizer there are none here.
        kv_events: config.kv_events && model.is_some(),
        block_size: model.is_none().then_some(TEXT_BLOCK_TOKENS),
        model: model.unwrap_or_default(),
        kv_degrade: config.kv_degrade,
        kv_events_required: config.kv_events_required,
        kv_events_patience: EVENTS_PATIENCE,
        ttl: config.ttl,
        predicted_ttl: config.predicted_ttl,
        index_bytes: config.index_bytes as usize / 2,
        booking_lease: LEASE,
        disagg: config.disagg,
        max_decode_share: config.decode_blocks_threshold,
        max_prefill_tokens: config.prefill_tokens_threshold.map(|tokens| tokens as u64),
    }
}
