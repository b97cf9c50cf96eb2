//! What the frontend's handlers and tasks share.

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::config::FrontendConfig;
use super::desk::Desk;
use super::fleet::{Fleet, Life, ModelCard, Worker};
use super::metrics::{FrontMetrics, UNKNOWN_MODEL};
use super::recent::Recent;
use super::request::Naming;
use super::upstream::Upstream;
use crate::error::ApiError;
use crate::readiness::State;
use crate::router::WorkerRole;
use crate::state::AppState;
use crate::text::Text;

/// A frontend.
pub struct Front {
    /// What all roles have: readiness, drain, the HTTP layer's metrics.
    pub app: Arc<AppState>,
    pub config: FrontendConfig,
    pub fleet: Fleet,
    pub upstream: Upstream,
    pub metrics: Arc<FrontMetrics>,
    pub recent: Arc<Recent>,
    pub desk: Arc<Desk>,
    /// Tokenizer and template, once they are loaded; without --model never, and prompts are named by their text.
    pub text: OnceLock<Arc<Text>>,
    pub started: Instant,
    /// The tokenizer is not there yet.
    loading: AtomicBool,
}

impl Front {
    /// Fails only if the registry has a metric of ours already.
    pub fn new(app: Arc<AppState>, config: FrontendConfig) -> prometheus::Result<Arc<Self>> {
        let metrics = Arc::new(FrontMetrics::register(&app.registry)?);
        Ok(Arc::new(Self {
            app,
            fleet: Fleet::default(),
            upstream: Upstream::new(),
            metrics,
            recent: Arc::default(),
            desk: Arc::new(Desk::new(&config)),
            text: OnceLock::new(),
            started: Instant::now(),
            loading: AtomicBool::new(true),
            config,
        }))
    }

    /// How this frontend names the blocks of prompts.
    pub fn naming(&self) -> Naming {
        match (self.text.get(), self.config.uses_overlap()) {
            (_, false) => Naming::None,
            (None, true) => Naming::Text,
            (Some(text), true) => Naming::Tokens { text: text.clone(), block_size: self.block_size() },
        }
    }

    /// Models that some worker in service has, each once.
    pub fn models(&self) -> Vec<ModelCard> {
        let now = Instant::now();
        let mut seen = BTreeSet::new();
        let workers = self.fleet.all();
        let serving = workers.iter().filter(|worker| worker.role.serves() && worker.usable(now).is_ok());
        let lives: Vec<_> = serving.filter_map(|worker| worker.life()).collect();
        lives.iter().flat_map(|life| &life.models).filter(|model| seen.insert(model.id.clone())).cloned().collect()
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
    pub fn model_label<'a>(&self, model: Option<&'a str>) -> &'a str {
        model.filter(|name| self.knows(name)).unwrap_or(UNKNOWN_MODEL)
    }

    /// Readiness says what the workers' standings add up to.
    pub fn standing_changed(&self) {
        if !self.loading.load(Ordering::Relaxed) {
            self.app.readiness.set(self.service());
        }
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

    /// Brings the gauges up to date, before a scrape.
    pub fn export(&self) {
        let now = Instant::now();
        for worker in self.fleet.all().iter() {
            let up = worker.usable(now).is_ok();
            let labels = [worker.name.as_str(), worker.role.as_str()];
            self.metrics.worker_up.with_label_values(&labels).set(up.into());
            let Some(life) = worker.life() else { continue };
            let load = self.desk.load(life.id);
            let name = [worker.name.as_str()];
            self.metrics.worker_active.with_label_values(&name).set(load.active_requests as i64);
            self.metrics.worker_blocks.with_label_values(&name).set(load.decode_blocks as i64);
            self.metrics.worker_prefill_tokens.with_label_values(&name).set(load.prefill_tokens as i64);
        }
    }

    fn service(&self) -> State {
        let now = Instant::now();
        let workers = self.fleet.all();
        if workers.is_empty() {
            return State::Unavailable("no worker is known".into());
        }
        let out: Vec<String> = workers
            .iter()
            .filter_map(|worker| {
                let standing = worker.standing();
                let obstacle = standing.obstacle(now)?;
                Some(format!("{} worker {}: {}", worker.role.as_str(), worker.name, obstacle.reason()))
            })
            .collect();
        let usable = |role: &dyn Fn(WorkerRole) -> bool| {
            workers.iter().any(|worker| role(worker.role) && worker.usable(now).is_ok())
        };
        if !usable(&|role| role.serves()) {
            return State::Unavailable(out.join("; "));
        }
        let prefill = workers.iter().any(|worker| worker.role == WorkerRole::Prefill);
        if prefill && !usable(&|role| role == WorkerRole::Prefill) {
            return State::Degraded(format!("no prefill worker takes requests ({})", out.join("; ")));
        }
        match out.is_empty() {
            true => State::Ready,
            false => State::Degraded(out.join("; ")),
        }
    }

    /// A process answers at a worker's address. Errors: why it gets no requests.
    pub fn lives(&self, worker: &Worker, life: Life) -> Result<(), String> {
        worker.live(life);
        Ok(())
    }

    /// Nobody answers at a worker's address any more.
    pub fn dies(&self, _worker: &Worker) {}

    pub fn block_size(&self) -> usize {
        16
    }

    /// Since the start.
    pub fn now(&self) -> Duration {
        self.started.elapsed()
    }
}
