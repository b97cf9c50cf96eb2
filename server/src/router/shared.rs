//! The router as request tasks use it: workers, index and bookings behind one lock, held for microseconds.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::bookings::{BookingId, Bookings, Order};
use super::index::{ExactIndex, RecentIndex, recent::Used};
use super::policy::{Choice, Draw, NoWorker, RoutePolicy};
use super::prompt::Prompt;
use super::source::{Expectation, Source, SourceCode};
use super::view::{ClusterView, IndexSource, Load, WorkerView};
use super::worker::{Condition, WorkerId};
use crate::discovery::WorkerRecord;

/// What the router is told at start.
#[derive(Debug)]
pub struct RouterConfig {
    pub policy: Box<dyn RoutePolicy>,
    /// The model that is served; workers of another one are refused.
    pub model: String,
    /// Tokens in a block; `None` takes the first worker's.
    pub block_size: Option<usize>,
    /// `--router-kv-events`
    pub kv_events: bool,
    /// `--router-kv-degrade`: a worker without events is indexed by our own decisions.
    pub kv_degrade: bool,
    /// `--router-kv-events-required`: a worker without events gets no request.
    pub kv_events_required: bool,
    /// How long an event that is due may take.
    pub kv_events_patience: Duration,
    /// `--router-ttl-secs`
    pub ttl: Duration,
    /// `--router-predicted-ttl-secs`
    pub predicted_ttl: Option<Duration>,
    /// Bytes for each of the two indexes.
    pub index_bytes: usize,
    /// A booking that nobody ends is given up after this long without a sign of life.
    pub booking_lease: Duration,
}

/// Until a worker says otherwise.
const DEFAULT_BLOCK_SIZE: usize = 16;

#[derive(Debug)]
struct Entry {
    record: Arc<WorkerRecord>,
    condition: Condition,
    /// Why it cannot be used at all.
    misfit: Option<String>,
    source: Source,
    /// What the index could not follow, since it joined.
    orphans: u64,
    requests: u64,
}

#[derive(Debug)]
struct State {
    workers: BTreeMap<WorkerId, Entry>,
    /// The first worker's, where none is configured.
    block_size: Option<usize>,
    exact: ExactIndex,
    recent: RecentIndex,
    bookings: Bookings,
    turn: u64,
    expired_bookings: u64,
}

/// Picks workers; one for the process.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    started: Instant,
    state: Mutex<State>,
}

/// What happened to the blocks of a worker, in the names of the index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum IndexChange {
    Store { parent: Option<super::policy::BlockKey>, keys: Vec<super::policy::BlockKey> },
    Remove(Vec<super::policy::BlockKey>),
    Clear,
}

/// What the changes of one batch did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    pub stored: usize,
    pub removed: usize,
    /// Blocks whose parent the worker is not known to hold: something was missed.
    pub orphans: usize,
}

/// An alarm of one worker's index that must be shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Alarm {
    pub worker: WorkerId,
    pub worker_id: String,
    pub url: String,
    pub code: SourceCode,
}

/// One worker, for `/health`, the status page and metrics.
#[derive(Clone, Debug, Serialize)]
pub struct WorkerStatus {
    pub record: Arc<WorkerRecord>,
    pub condition: Condition,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub misfit: Option<String>,
    pub index: IndexSource,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alarm: Option<SourceCode>,
    pub load: Load,
    /// Blocks that the index in use knows of it.
    pub cached_blocks: u64,
    pub orphan_blocks: u64,
    pub requests: u64,
}

/// A dry run: what a request would see.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    pub mode: &'static str,
    pub num_tokens: usize,
    pub num_blocks: usize,
    pub block_size: usize,
    pub cluster: ClusterView,
    pub choice: Option<Choice>,
    pub error: Option<String>,
}

/// Sizes of the router's state, for gauges: all bounded, and bookings 0 when nothing runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Sizes {
    pub exact_blocks: usize,
    pub exact_bytes: usize,
    pub recent_blocks: usize,
    pub recent_bytes: usize,
    pub open_bookings: usize,
    pub expired_bookings: u64,
}

impl Router {
    pub fn new(config: RouterConfig) -> Arc<Self> {
        let state = State {
            workers: BTreeMap::new(),
            block_size: config.block_size,
            exact: ExactIndex::new(config.index_bytes),
            recent: RecentIndex::new(config.ttl, config.index_bytes),
            bookings: Bookings::new(config.booking_lease),
            turn: 0,
            expired_bookings: 0,
        };
        Arc::new(Self { config, started: Instant::now(), state: Mutex::new(state) })
    }

    pub fn mode(&self) -> &'static str {
        self.config.policy.name()
    }

    /// False if nobody looks at overlap: prompts need not be hashed.
    pub fn uses_overlap(&self) -> bool {
        self.config.policy.uses_overlap()
    }

    /// Tokens in a block of the cluster.
    pub fn block_size(&self) -> usize {
        self.lock().block_size.unwrap_or(DEFAULT_BLOCK_SIZE)
    }

    /// A worker is there, or says something new of itself. Another life of the same worker, or at the same address,
    /// is forgotten. Errors: it does not fit, in words with both values; it is kept, as refused, so that it shows.
    pub fn join(&self, record: WorkerRecord) -> Result<(), String> {
        let now = self.now();
        let mut state = self.lock();
        let id = record.incarnation;
        let old = |(other, entry): (&WorkerId, &Entry)| {
            let same = entry.record.worker_id == record.worker_id || entry.record.url == record.url;
            (*other != id && same).then_some(*other)
        };
        let old: Vec<_> = state.workers.iter().filter_map(old).collect();
        old.into_iter().for_each(|other| state.forget(other));
        let misfit = self.misfit(&state, &record);
        let publishes = record.events.is_some();
        let known = state.workers.get(&id);
        let source = match known.filter(|entry| entry.record.events.is_some() == publishes) {
            Some(entry) => entry.source.clone(),
            None => {
                let (source, code) = Source::new(self.expectation(), publishes, now);
                let alarm = code.map(|code| alarm(id, &record, code));
                alarm.iter().for_each(|alarm| self.raise(alarm));
                source
            }
        };
        let condition = match (&misfit, record.draining, known.map(|entry| entry.condition)) {
            (Some(_), ..) => Condition::Refused,
            (None, true, _) => Condition::Draining,
            (None, false, Some(Condition::Overloaded)) => Condition::Overloaded,
            (None, false, Some(Condition::Quarantined)) => Condition::Quarantined,
            (None, false, _) => Condition::Ready,
        };
        let (orphans, requests) = known.map_or((0, 0), |entry| (entry.orphans, entry.requests));
        let known_misfit = known.and_then(|entry| entry.misfit.clone());
        if misfit.is_none() && state.block_size.is_none() {
            state.block_size = record.block_size.map(|size| size as usize);
        }
        state.recent.set_capacity(id, record.capacity_blocks);
        let outcome = misfit.clone().map_or(Ok(()), Err);
        if let Some(reason) = misfit.as_ref().filter(|_| known_misfit != misfit) {
            tracing::error!(worker = %id, url = record.url, reason, "a worker does not fit and gets no requests");
        }
        let record = Arc::new(record);
        state.workers.insert(id, Entry { record, condition, misfit, source, orphans, requests });
        outcome
    }

    /// A worker is gone: it is in no view any more, and nothing of it is in the index.
    pub fn leave(&self, worker: WorkerId) {
        let mut state = self.lock();
        state.forget(worker);
        let fitting = |entry: &Entry| entry.misfit.is_none() && entry.record.block_size.is_some();
        if state.workers.values().any(fitting) || self.config.block_size.is_some() {
            return;
        }
        // Nobody is left who had this block size: those refused for theirs may set it.
        state.block_size = None;
        let refused: Vec<_> = state.workers.values().map(|entry| (*entry.record).clone()).collect();
        drop(state);
        refused.into_iter().for_each(|record| drop(self.join(record)));
    }

    /// Changes whether a worker takes requests. One that does not fit stays refused, one that drains draining.
    pub fn set_condition(&self, worker: WorkerId, condition: Condition) {
        if let Some(entry) = self.lock().workers.get_mut(&worker)
            && entry.misfit.is_none()
            && !entry.record.draining
        {
            entry.condition = condition;
        }
    }

    pub fn record(&self, worker: WorkerId) -> Option<Arc<WorkerRecord>> {
        self.lock().workers.get(&worker).map(|entry| entry.record.clone())
    }

    /// All workers, in a fixed order.
    pub fn workers(&self) -> Vec<WorkerStatus> {
        let state = self.lock();
        let status = |(id, entry): (&WorkerId, &Entry)| WorkerStatus {
            record: entry.record.clone(),
            condition: entry.condition,
            misfit: entry.misfit.clone(),
            index: entry.source.current(),
            alarm: entry.source.alarm(),
            load: state.bookings.load(*id),
            cached_blocks: state.cached_blocks(*id, entry.source.current()),
            orphan_blocks: entry.orphans,
            requests: entry.requests,
        };
        state.workers.iter().map(status).collect()
    }

    pub fn sizes(&self) -> Sizes {
        let state = self.lock();
        Sizes {
            exact_blocks: state.exact.len(),
            exact_bytes: state.exact.bytes(),
            recent_blocks: state.recent.len(),
            recent_bytes: state.recent.bytes(),
            open_bookings: state.bookings.num_open(),
            expired_bookings: state.expired_bookings,
        }
    }

    /// What would be decided for `prompt` now, and why; changes nothing.
    pub fn explain(&self, prompt: &Prompt) -> Explanation {
        let mut state = self.lock();
        let cluster = self.view(&mut state, prompt, &[]);
        let draw = Draw { turn: state.turn + 1, seed: rand::random() };
        drop(state);
        let choice = self.config.policy.choose(&prompt.blocks(), &cluster, draw);
        Explanation {
            mode: self.mode(),
            num_tokens: prompt.num_tokens,
            num_blocks: prompt.blocks().num_blocks(),
            block_size: prompt.block_size,
            cluster,
            error: choice.as_ref().err().map(NoWorker::to_string),
            choice: choice.ok(),
        }
    }

    /// Picks the workers for a request, leaving out those it failed on already, and books it there. The load is given up
    /// when the booking is dropped.
    pub fn route(self: &Arc<Self>, prompt: &Prompt, without: &[WorkerId]) -> Result<Booking, NoWorker> {
        let now = self.now();
        let mut state = self.lock();
        let cluster = self.view(&mut state, prompt, without);
        state.turn += 1;
        let draw = Draw { turn: state.turn, seed: rand::random() };
        let choice = self.config.policy.choose(&prompt.blocks(), &cluster, draw)?;
        let (serve, prefill) = (choice.serve, choice.prefill);
        let computing = cluster.get(prefill.unwrap_or(serve)).expect("chosen from it. This is a bug.");
        let usable = prompt.num_tokens.saturating_sub(1) / prompt.block_size;
        let overlap = (computing.overlap_blocks as usize).min(usable);
        let order = Order {
            serve,
            prefill,
            keys: prompt.keys.clone(),
            num_tokens: prompt.num_tokens,
            block_size: prompt.block_size,
            uncached_tokens: prompt.num_tokens.saturating_sub(overlap * prompt.block_size),
        };
        let index = computing.index;
        let turn = state.turn;
        let id = state.bookings.book(order, turn, now);
        let mut used = Vec::new();
        for worker in std::iter::once(serve).chain(prefill) {
            if let Some(entry) = state.workers.get_mut(&worker) {
                entry.requests += 1;
            }
            if self.uses_overlap() {
                let touched = state.recent.touch(worker, &prompt.keys, now);
                used.push((worker, touched));
            }
        }
        drop(state);
        let predicted_tokens = overlap * prompt.block_size;
        Ok(Booking { router: self.clone(), id, prompt: prompt.clone(), choice, index, predicted_tokens, used, open: true })
    }

    /// Takes what a worker's events say, in order. Workers that are not there (any more) are ignored.
    pub fn apply(&self, worker: WorkerId, changes: &[IndexChange]) -> Applied {
        let mut applied = Applied::default();
        for change in changes {
            // One change at a time, so that decisions do not wait for a long batch.
            let mut state = self.lock();
            let State { workers, exact, recent, .. } = &mut *state;
            let Some(entry) = workers.get_mut(&worker) else { return applied };
            match change {
                IndexChange::Store { parent, keys } => {
                    let stored = exact.store(worker, *parent, keys);
                    applied.stored += stored.new;
                    if stored.orphan {
                        applied.orphans += keys.len();
                        entry.orphans += keys.len() as u64;
                    }
                }
                IndexChange::Remove(keys) => applied.removed += exact.remove(worker, keys),
                IndexChange::Clear => {
                    exact.clear(worker);
                    recent.clear(worker);
                }
            }
        }
        applied
    }

    /// Blocks of a worker that could not be placed because their parent is unknown.
    pub fn count_orphans(&self, worker: WorkerId, blocks: usize) {
        if let Some(entry) = self.lock().workers.get_mut(&worker) {
            entry.orphans += blocks as u64;
        }
    }

    /// Events of the worker came, or its snapshot was taken: its index is exact.
    pub fn observed(&self, worker: WorkerId) {
        let now = self.now();
        self.with_source(worker, |source| source.observed(now));
    }

    /// Events of the worker were lost for good: nothing that they said is believed any more.
    pub fn lost(&self, worker: WorkerId) {
        self.lock().exact.clear(worker);
        self.with_source(worker, |source| {
            source.lost();
            None
        });
    }

    /// What must be looked at now and then: once a second is enough. Returns the alarms raised, which are logged already.
    pub fn tick(&self) -> Vec<Alarm> {
        let now = self.now();
        let mut state = self.lock();
        let expired = state.bookings.expire(now);
        state.expired_bookings += expired as u64;
        state.recent.expire(now);
        let raise = |(id, entry): (&WorkerId, &mut Entry)| {
            entry.source.tick(now).map(|code| alarm(*id, &entry.record, code))
        };
        let alarms: Vec<_> = state.workers.iter_mut().filter_map(raise).collect();
        drop(state);
        if expired > 0 {
            tracing::error!(expired, "bookings were given up: their requests never ended. This is a bug.");
        }
        alarms.iter().for_each(|alarm| self.raise(alarm));
        alarms
    }

    /// Workers whose index is not fed as expected: the value of `router_kv_event_source_mismatch_workers`.
    pub fn mismatches(&self) -> usize {
        self.lock().workers.values().filter(|entry| entry.source.alarm().is_some()).count()
    }

    /// Names that the exact index has of a worker, for audits against what it really holds.
    pub fn indexed_keys(&self, worker: WorkerId) -> Vec<super::policy::BlockKey> {
        self.lock().exact.keys_of(worker).to_vec()
    }

    fn with_source(&self, worker: WorkerId, act: impl FnOnce(&mut Source) -> Option<SourceCode>) {
        let mut state = self.lock();
        let Some(entry) = state.workers.get_mut(&worker) else { return };
        let alarm = act(&mut entry.source).map(|code| alarm(worker, &entry.record, code));
        drop(state);
        alarm.iter().for_each(|alarm| self.raise(alarm));
    }

    fn raise(&self, alarm: &Alarm) {
        let (worker, url, code) = (&alarm.worker_id, &alarm.url, alarm.code.as_str());
        let fallback = match (self.config.kv_events_required, self.config.kv_degrade) {
            (true, _) => "it gets no requests (--router-kv-events-required)",
            (false, true) => "its index is approximate until then",
            (false, false) => "it has no overlap until then (--router-kv-degrade off)",
        };
        match alarm.code {
            SourceCode::Recovered => tracing::info!(worker, url, code, "KV events come again"),
            SourceCode::PublisherDisabled => tracing::error!(
                worker, url, code, fallback,
                "a worker publishes no KV events: start it with --kv-events, or the router with --no-router-kv-events"
            ),
            SourceCode::NotObserved => tracing::error!(
                worker, url, code, fallback,
                "no KV events come from a worker that says it publishes them: check that its event port can be reached"
            ),
        }
    }

    fn view(&self, state: &mut State, prompt: &Prompt, without: &[WorkerId]) -> ClusterView {
        let now = self.now();
        let keys = &prompt.keys;
        let (exact, recent) = match self.uses_overlap() {
            true => (state.exact.matches(keys), state.recent.matches(keys, now)),
            false => Default::default(),
        };
        let mut workers = Vec::with_capacity(state.workers.len());
        for (id, entry) in state.workers.iter().filter(|(id, _)| !without.contains(id)) {
            let source = entry.source.current();
            let overlap_blocks = match source {
                IndexSource::Events => {
                    let predicted = self.config.predicted_ttl.map_or(0, |ttl| {
                        state.recent.used_since(*id, keys, recent.get(*id), now.saturating_sub(ttl))
                    });
                    exact.get(*id).max(predicted)
                }
                IndexSource::Approximate => recent.get(*id),
                IndexSource::None => 0,
            };
            let barred = self.config.kv_events_required && entry.source.alarm().is_some();
            workers.push(WorkerView {
                id: *id,
                role: entry.record.role,
                condition: if barred { Condition::Refused } else { entry.condition },
                load: state.bookings.load(*id),
                capacity_blocks: entry.record.capacity_blocks,
                cached_blocks: state.cached_blocks(*id, source),
                overlap_blocks,
                active_blocks: state.bookings.active_blocks(*id, keys),
                last_turn: state.bookings.last_turn(*id),
                index: source,
            });
        }
        ClusterView { workers }
    }

    /// Why a worker cannot be used, with both values.
    fn misfit(&self, state: &State, record: &WorkerRecord) -> Option<String> {
        if record.model != self.config.model {
            return Some(format!("it serves model {:?}, this router {:?}", record.model, self.config.model));
        }
        let (theirs, ours) = (record.block_size? as usize, state.block_size?);
        (theirs != ours).then(|| match self.config.block_size {
            Some(_) => format!("its blocks have {theirs} tokens, this router's {ours} (--kv-cache-block-size)"),
            None => format!("its blocks have {theirs} tokens, those of the other workers {ours}"),
        })
    }

    fn expectation(&self) -> Expectation {
        Expectation {
            overlap: self.uses_overlap(),
            events: self.config.kv_events,
            degrade: self.config.kv_degrade,
            patience: self.config.kv_events_patience,
        }
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn forget(&mut self, worker: WorkerId) {
        self.workers.remove(&worker);
        self.exact.remove_worker(worker);
        self.recent.remove_worker(worker);
        self.bookings.remove_worker(worker);
    }

    fn cached_blocks(&self, worker: WorkerId, source: IndexSource) -> u64 {
        match source {
            IndexSource::Events => self.exact.blocks_of(worker) as u64,
            IndexSource::Approximate => self.recent.blocks_of(worker) as u64,
            IndexSource::None => 0,
        }
    }
}

fn alarm(worker: WorkerId, record: &WorkerRecord, code: SourceCode) -> Alarm {
    Alarm { worker, worker_id: record.worker_id.clone(), url: record.url.clone(), code }
}

/// A request's place on its workers, given up when dropped.
pub struct Booking {
    router: Arc<Router>,
    id: BookingId,
    prompt: Prompt,
    choice: Choice,
    index: IndexSource,
    predicted_tokens: usize,
    used: Vec<(WorkerId, Used)>,
    open: bool,
}

impl fmt::Debug for Booking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Booking").field("id", &self.id).field("choice", &self.choice).finish_non_exhaustive()
    }
}

impl Booking {
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Where the overlap with the worker that computes the prompt came from: the `x-kv-index` header.
    pub fn index(&self) -> IndexSource {
        self.index
    }

    /// Prompt tokens that the worker should have cached, to be compared with what it says.
    pub fn predicted_tokens(&self) -> usize {
        self.predicted_tokens
    }

    /// The first token came.
    pub fn first_token(&self) {
        let now = self.router.now();
        let mut state = self.router.lock();
        state.bookings.first_token(self.id, now);
        // Blocks that the worker did not have are stored there by now, and their event is due.
        let full = self.prompt.num_tokens / self.prompt.block_size;
        if self.predicted_tokens / self.prompt.block_size + 1 < full {
            let computing = self.choice.prefill.unwrap_or(self.choice.serve);
            if let Some(entry) = state.workers.get_mut(&computing) {
                entry.source.expect_event(now);
            }
        }
    }

    /// The answer has `tokens` tokens by now. Cheap, but not needed for each: once a block is enough.
    pub fn generated(&self, tokens: usize) {
        let now = self.router.now();
        self.router.lock().bookings.generated(self.id, tokens, now);
    }

    /// The request never reached the worker: its load goes, and what the approximate index learnt from it.
    pub fn undo(mut self) {
        self.open = false;
        let mut state = self.router.lock();
        state.bookings.finish(self.id);
        for (worker, used) in &self.used {
            state.recent.untouch(*worker, &self.prompt.keys, *used);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.open {
            self.router.lock().bookings.finish(self.id);
        }
    }
}
