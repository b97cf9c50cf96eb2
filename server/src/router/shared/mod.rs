//! The router as request tasks use it: workers, index and bookings behind one lock, held for microseconds.

mod booking;
mod feed;
mod status;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use self::feed::alarm;
use super::bookings::{Bookings, Order};
use super::disagg::{self, DisaggPolicy, Estimate, Side, Speeds};
use super::index::{ExactIndex, RecentIndex};
use super::policy::{Choice, Draw, NoWorker, RoutePolicy};
use super::prompt::Prompt;
use super::source::{Expectation, Source};
use super::view::{ClusterView, IndexSource, Load, WorkerView};
use super::worker::{Condition, WorkerId};
use crate::discovery::WorkerRecord;

pub use booking::Booking;
pub use status::{Alarm, Applied, Explanation, IndexChange, Sizes, WorkerStatus};

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
    /// `--disagg-policy`
    pub disagg: DisaggPolicy,
    /// `--active-decode-blocks-threshold`: share of its blocks above which a worker gets no further requests.
    pub max_decode_share: Option<f64>,
    /// `--active-prefill-tokens-threshold`: prompt tokens above which a worker gets no further requests.
    pub max_prefill_tokens: Option<u64>,
}

/// Until a worker says otherwise.
const DEFAULT_BLOCK_SIZE: usize = 16;

#[derive(Debug)]
struct Entry {
    record: Arc<WorkerRecord>,
    condition: Condition,
    /// Why it cannot be used at all.
    misfit: Option<String>,
    /// The same, by what its events said: its record cannot mend that.
    refused: Option<String>,
    source: Source,
    /// What the index could not follow, since it joined.
    orphans: u64,
    requests: u64,
    speeds: Speeds,
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
    gaps: u64,
}

/// What decides who computes a prompt: measured, and where nothing was, the worker's own word. It knows its KV's size.
fn own_speeds(record: &WorkerRecord, measured: Speeds) -> Speeds {
    let own = record.prefill_tokens_per_sec.map(f64::from);
    Speeds {
        prefill_tokens_per_sec: measured.prefill_tokens_per_sec.or(own),
        link_bytes_per_sec: measured.link_bytes_per_sec,
        kv_bytes_per_token: record
            .kv_bytes_per_token
            .map(|bytes| bytes as f64)
            .or(measured.kv_bytes_per_token),
    }
}

/// Picks workers; one for the process.
#[derive(Debug)]
pub struct Router {
    config: RouterConfig,
    started: Instant,
    state: Mutex<State>,
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
            gaps: 0,
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

    /// True if workers' events should be followed.
    pub fn wants_events(&self) -> bool {
        self.uses_overlap() && self.config.kv_events
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
        let publishes = record.events.is_some();
        let known = state.workers.get(&id);
        let refused = known.and_then(|entry| entry.refused.clone());
        let misfit = refused.clone().or_else(|| self.misfit(&state, &record));
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
        let speeds = own_speeds(&record, known.map(|entry| entry.speeds).unwrap_or_default());
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
        state
            .workers
            .insert(id, Entry { record, condition, misfit, refused, source, orphans, requests, speeds });
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

    /// What was guessed of a worker's cache is not so any more.
    pub fn forget_guesses(&self, worker: WorkerId) {
        self.lock().recent.clear(worker);
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

    /// What was measured of a worker, for who computes prompts.
    pub fn set_speeds(&self, worker: WorkerId, speeds: Speeds) {
        if let Some(entry) = self.lock().workers.get_mut(&worker) {
            entry.speeds = own_speeds(&entry.record, speeds);
        }
    }

    /// The load that is booked on a worker.
    pub fn load(&self, worker: WorkerId) -> Load {
        self.lock().bookings.load(worker)
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
            event_gaps: state.gaps,
        }
    }

    /// What would be decided for `prompt` now, and why; changes nothing.
    pub fn explain(&self, prompt: &Prompt) -> Explanation {
        let mut state = self.lock();
        let cluster = self.view(&mut state, prompt, &[]);
        let draw = Draw { turn: state.turn + 1, seed: rand::random() };
        let mut choice = self.config.policy.choose(&prompt.blocks(), &cluster, draw);
        let disagg =
            choice.as_mut().ok().and_then(|choice| self.place_prefill(&state, &cluster, prompt, choice));
        drop(state);
        Explanation {
            mode: self.mode(),
            num_tokens: prompt.num_tokens,
            num_blocks: prompt.blocks().num_blocks(),
            block_size: prompt.block_size,
            cluster,
            error: choice.as_ref().err().map(NoWorker::to_string),
            choice: choice.ok(),
            disagg,
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
        let mut choice = self.config.policy.choose(&prompt.blocks(), &cluster, draw)?;
        let estimate = self.place_prefill(&state, &cluster, prompt, &mut choice);
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
            let overlap = cluster.get(worker).map_or(0, |view| view.overlap_blocks as usize);
            state.exact.reuse(worker, &prompt.keys[..overlap.min(prompt.keys.len())]);
            // What a worker says of itself is better, and need not be guessed beside; but for what it has not said yet.
            let guessed = self.config.predicted_ttl.is_some()
                || cluster.get(worker).is_some_and(|view| view.index != IndexSource::Events);
            if self.uses_overlap() && guessed {
                let touched = state.recent.touch(worker, &prompt.keys, now);
                used.push((worker, touched));
            }
        }
        drop(state);
        let predicted_tokens = overlap * prompt.block_size;
        Ok(Booking {
            router: self.clone(),
            id,
            prompt: prompt.clone(),
            choice,
            estimate,
            index,
            predicted_tokens,
            used,
            open: true,
        })
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
            let load = state.bookings.load(*id);
            let full =
                entry.condition == Condition::Ready && self.is_full(load, entry.record.capacity_blocks);
            let condition = match (barred, full) {
                (true, _) => Condition::Refused,
                (false, true) => Condition::Overloaded,
                (false, false) => entry.condition,
            };
            workers.push(WorkerView {
                id: *id,
                role: entry.record.role,
                condition,
                load,
                capacity_blocks: entry.record.capacity_blocks,
                cached_blocks: state.cached_blocks(*id, source),
                reused_blocks: state.reused_blocks(*id, source),
                overlap_blocks,
                active_blocks: state.bookings.active_blocks(*id, keys),
                last_turn: state.bookings.last_turn(*id),
                index: source,
            });
        }
        ClusterView { workers }
    }

    /// Leaves the prompt to the decode worker where that is better than the chosen prefill worker.
    fn place_prefill(
        &self,
        state: &State,
        cluster: &ClusterView,
        prompt: &Prompt,
        choice: &mut Choice,
    ) -> Option<Estimate> {
        let side = |id: WorkerId| {
            let view = cluster.get(id)?;
            let cached =
                (view.overlap_blocks as usize * prompt.block_size).min(prompt.num_tokens.saturating_sub(1));
            Some(Side {
                uncached_tokens: prompt.num_tokens - cached,
                queued_tokens: view.load.prefill_tokens,
                active_requests: view.load.active_requests,
                speeds: state.workers.get(&id)?.speeds,
            })
        };
        let estimate = disagg::decide(self.config.disagg, side(choice.serve)?, side(choice.prefill?)?);
        if !estimate.remote {
            choice.prefill = None;
            choice.prefill_reason = None;
        }
        Some(estimate)
    }

    /// Above one of the limits, so that it gets no further requests.
    fn is_full(&self, load: Load, capacity_blocks: Option<u64>) -> bool {
        let share = |capacity: u64| load.decode_blocks as f64 / capacity.max(1) as f64;
        let decode = self.config.max_decode_share.zip(capacity_blocks);
        decode.is_some_and(|(most, capacity)| share(capacity) > most)
            || self.config.max_prefill_tokens.is_some_and(|most| load.prefill_tokens > most)
    }

    /// Why a worker cannot be used, with both values.
    fn misfit(&self, state: &State, record: &WorkerRecord) -> Option<String> {
        if record.model != self.config.model {
            return Some(format!("it serves model {:?}, this router {:?}", record.model, self.config.model));
        }
        let (theirs, ours) = (record.block_size? as usize, state.block_size?);
        (theirs != ours).then(|| match self.config.block_size {
            Some(_) => {
                format!("its blocks have {theirs} tokens, this router's {ours} (--kv-cache-block-size)")
            }
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

    fn reused_blocks(&self, worker: WorkerId, source: IndexSource) -> u64 {
        match source {
            IndexSource::Events => self.exact.reused_of(worker) as u64,
            IndexSource::Approximate | IndexSource::None => self.cached_blocks(worker, source),
        }
    }

    fn cached_blocks(&self, worker: WorkerId, source: IndexSource) -> u64 {
        match source {
            IndexSource::Events => self.exact.blocks_of(worker) as u64,
            IndexSource::Approximate => self.recent.blocks_of(worker) as u64,
            IndexSource::None => 0,
        }
    }
}
