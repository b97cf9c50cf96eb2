//! The workers of a frontend: where they are, what they said of themselves, how they stand.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use axum::http::Uri;
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use super::sample::WorkerSample;
use super::standing::{BreakerConfig, Reach, Standing};
use crate::config::PeerUrl;
use crate::discovery::WorkerRecord;
use crate::openai::Api;
use crate::router::{Condition, WorkerId, WorkerRole};

/// One worker: an address, and what is known of the process there.
pub struct Worker {
    pub url: PeerUrl,
    /// The address as text: the worker's name in logs, labels and headers.
    pub name: String,
    pub role: WorkerRole,
    /// Given on the command line: it stays, whatever becomes of its process. Others leave with their record.
    pub fixed: bool,
    life: RwLock<Option<Arc<Life>>>,
    standing: Mutex<Standing>,
    sample: Mutex<WorkerSample>,
    /// What the router was last told.
    told: Mutex<Option<(WorkerId, Condition)>>,
    /// Lives of a server that does not say when it restarts.
    lives: AtomicU64,
    /// Woken when a request found the worker unreachable: it is probed at once.
    pub wake: Notify,
    /// Wakes requests that wait for a worker that is found to hang.
    pub hung: Notify,
    uris: Uris,
}

/// One process at a worker's address.
#[derive(Debug)]
pub struct Life {
    pub id: WorkerId,
    pub record: WorkerRecord,
    /// Models that it serves; of a `serve` the one in the record.
    pub models: Vec<ModelCard>,
    /// One of ours: it takes our headers and moves KV by handoff.
    pub ours: bool,
}

/// A model as `/v1/models` has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelCard {
    pub id: String,
    pub max_model_len: Option<u64>,
}

#[derive(Debug)]
struct Uris {
    chat: Uri,
    completions: Uri,
    base: String,
}

impl Worker {
    pub fn new(url: PeerUrl, role: WorkerRole, fixed: bool, breaker: BreakerConfig) -> Self {
        let name = url.to_string();
        let uri = |path: &str| -> Uri {
            format!("{name}{path}").parse().expect("a checked URL with a path is a URI. This is a bug.")
        };
        let uris = Uris {
            chat: uri("/v1/chat/completions"),
            completions: uri("/v1/completions"),
            base: name.clone(),
        };
        Self {
            url,
            role,
            fixed,
            life: RwLock::new(None),
            standing: Mutex::new(Standing::new(breaker)),
            sample: Mutex::default(),
            told: Mutex::default(),
            lives: AtomicU64::new(0),
            wake: Notify::new(),
            hung: Notify::new(),
            uris,
            name,
        }
    }

    /// Where requests to an API go.
    pub fn api_uri(&self, api: Api) -> Uri {
        match api {
            Api::Chat => self.uris.chat.clone(),
            Api::Completions => self.uris.completions.clone(),
        }
    }

    /// Any other path on the worker; `None` if it is no path.
    pub fn uri(&self, path: &str) -> Option<Uri> {
        format!("{}{path}", self.uris.base).parse().ok()
    }

    /// What is known of its process; `None` before it has said anything.
    pub fn life(&self) -> Option<Arc<Life>> {
        self.life.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Takes over what a process said; the one before it, if it was another one.
    pub fn live(&self, life: Life) -> Option<Arc<Life>> {
        let mut current = self.life.write().unwrap_or_else(PoisonError::into_inner);
        let before = current.replace(Arc::new(life));
        before.filter(|before| Some(before.id) != current.as_ref().map(|life| life.id))
    }

    /// A name for the process of a server that has none of its own: changes with [`Self::restarted`].
    pub fn made_up_id(&self) -> WorkerId {
        let life = self.lives.load(Ordering::Relaxed);
        WorkerId(xxh3_64(format!("{} {life}", self.name).as_bytes()))
    }

    /// Connections were refused, so that what comes up is taken for a new process.
    pub fn restarted(&self) {
        self.lives.fetch_add(1, Ordering::Relaxed);
    }

    /// Nobody answers any more; the process that did.
    pub fn dead(&self) -> Option<Arc<Life>> {
        self.life.write().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// True if the router does not know yet that this process is in this condition.
    pub fn note_condition(&self, id: WorkerId, condition: Condition) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        told.replace((id, condition)) != Some((id, condition))
    }

    pub fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was last read of its metrics.
    pub fn sample(&self) -> MutexGuard<'_, WorkerSample> {
        self.sample.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it may get a request now; else why not, as a label.
    pub fn usable(&self, now: Instant) -> Result<(), &'static str> {
        self.standing().obstacle(now).map_or(Ok(()), |obstacle| Err(obstacle.label()))
    }

    /// A request found nobody there, or lost its connection: nobody else needs to try before a probe has succeeded.
    pub fn quarantine(&self, reason: &str) {
        self.standing().quarantine(reason.to_owned(), Instant::now());
        tracing::warn!(worker = self.name, reason, "worker quarantined until it answers again");
        self.wake.notify_one();
    }

    pub fn busy(&self, retry_after: Option<Duration>) {
        self.standing().busy(retry_after, Instant::now());
    }

    /// What a probe found.
    pub fn probed(&self, reach: Reach) -> bool {
        let mut standing = self.standing();
        if *standing.reach() != reach {
            match &reach {
                Reach::Up => tracing::info!(worker = self.name, role = self.role.as_str(), "worker is up"),
                Reach::Refusing(reason) => {
                    tracing::warn!(worker = self.name, reason, "worker takes no requests")
                }
                Reach::Down(reason) => tracing::warn!(worker = self.name, reason, "worker is down"),
                Reach::Unknown => {}
            }
        }
        standing.probed(reach)
    }
}

impl fmt::Debug for Worker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Worker").field("name", &self.name).field("role", &self.role).finish_non_exhaustive()
    }
}

/// All workers, in the order in which they came.
#[derive(Debug, Default)]
pub struct Fleet {
    workers: RwLock<Arc<Vec<Arc<Worker>>>>,
}

impl Fleet {
    /// The workers there are now.
    pub fn all(&self) -> Arc<Vec<Arc<Worker>>> {
        self.workers.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// False if one of this address is there already.
    pub fn add(&self, worker: Arc<Worker>) -> bool {
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        if workers.iter().any(|other| other.url == worker.url) {
            return false;
        }
        *workers = Arc::new(workers.iter().cloned().chain([worker]).collect());
        true
    }

    pub fn remove(&self, url: &PeerUrl) -> Option<Arc<Worker>> {
        let mut workers = self.workers.write().unwrap_or_else(PoisonError::into_inner);
        let removed = workers.iter().find(|worker| worker.url == *url).cloned()?;
        *workers = Arc::new(workers.iter().filter(|worker| worker.url != *url).cloned().collect());
        Some(removed)
    }

    pub fn find(&self, id: WorkerId) -> Option<Arc<Worker>> {
        let is = |worker: &&Arc<Worker>| worker.life().is_some_and(|life| life.id == id);
        self.all().iter().find(is).cloned()
    }

    pub fn at(&self, url: &PeerUrl) -> Option<Arc<Worker>> {
        self.all().iter().find(|worker| worker.url == *url).cloned()
    }
}
