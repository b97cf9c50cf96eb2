//! What workers' events and the clock do to the router.

use super::{Alarm, Applied, Entry, IndexChange, Router, State};
use crate::discovery::WorkerRecord;
use crate::router::policy::BlockKey;
use crate::router::source::{Source, SourceCode};
use crate::router::worker::{Condition, WorkerId};

impl Router {
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
        let state = self.lock();
        let capacity = state.workers.get(&worker).and_then(|entry| entry.record.capacity_blocks);
        applied.overfull = capacity.is_some_and(|most| state.exact.blocks_of(worker) as u64 > most);
        applied
    }

    /// A worker turned out not to fit after it had joined.
    pub fn refuse(&self, worker: WorkerId, reason: String) {
        let mut state = self.lock();
        let Some(entry) = state.workers.get_mut(&worker) else { return };
        tracing::error!(%worker, url = entry.record.url, reason, "a worker does not fit and gets no requests");
        entry.misfit = Some(reason.clone());
        entry.refused = Some(reason);
        entry.condition = Condition::Refused;
        state.exact.clear(worker);
    }

    /// Batches of events that were missed and had to be asked for again, of all workers.
    pub fn count_gap(&self) {
        self.lock().gaps += 1;
    }

    /// Blocks that the worker's events could not place so far.
    pub fn orphans(&self, worker: WorkerId) -> u64 {
        self.lock().workers.get(&worker).map_or(0, |entry| entry.orphans)
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
    pub fn indexed_keys(&self, worker: WorkerId) -> Vec<BlockKey> {
        self.lock().exact.keys_of(worker).to_vec()
    }

    fn with_source(&self, worker: WorkerId, act: impl FnOnce(&mut Source) -> Option<SourceCode>) {
        let mut state = self.lock();
        let Some(entry) = state.workers.get_mut(&worker) else { return };
        let alarm = act(&mut entry.source).map(|code| alarm(worker, &entry.record, code));
        drop(state);
        alarm.iter().for_each(|alarm| self.raise(alarm));
    }

    pub(super) fn raise(&self, alarm: &Alarm) {
        let (worker, url, code) = (&alarm.worker_id, &alarm.url, alarm.code.as_str());
        let fallback = match (self.config.kv_events_required, self.config.kv_degrade) {
            (true, _) => "it gets no requests (--router-kv-events-required)",
            (false, true) => "its index is approximate until then",
            (false, false) => "it has no overlap until then (--router-kv-degrade off)",
        };
        match alarm.code {
            SourceCode::Recovered => tracing::info!(worker, url, code, "KV events come again"),
            SourceCode::PublisherDisabled => tracing::error!(
                worker,
                url,
                code,
                fallback,
                "a worker publishes no KV events: start it with --kv-events, or the router with --no-router-kv-events"
            ),
            SourceCode::NotObserved => tracing::error!(
                worker,
                url,
                code,
                fallback,
                "no KV events come from a worker that says it publishes them: check that its event port can be reached"
            ),
        }
    }
}

pub(super) fn alarm(worker: WorkerId, record: &WorkerRecord, code: SourceCode) -> Alarm {
    Alarm { worker, worker_id: record.worker_id.clone(), url: record.url.clone(), code }
}
