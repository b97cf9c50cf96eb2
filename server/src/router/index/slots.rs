//! Small numbers for workers, so that an index entry has room for them.

use rustc_hash::FxHashMap;

use crate::router::worker::WorkerId;

/// A worker within one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Slot(pub u16);

/// Workers that an index can tell apart: what fits beside the other fields of a word.
pub(super) const MAX_WORKERS: usize = 1 << 15;

/// Worker <-> slot, with what is kept for each worker. Slots of workers that left are given to others.
#[derive(Debug)]
pub(super) struct Slots<T> {
    by_worker: FxHashMap<WorkerId, Slot>,
    entries: Vec<Option<(WorkerId, T)>>,
}

impl<T> Default for Slots<T> {
    fn default() -> Self {
        Self { by_worker: FxHashMap::default(), entries: Vec::new() }
    }
}

impl<T: Default> Slots<T> {
    pub fn find(&self, worker: WorkerId) -> Option<Slot> {
        self.by_worker.get(&worker).copied()
    }

    /// The worker's slot, a new one if need be; `None` if there are too many workers.
    pub fn find_or_add(&mut self, worker: WorkerId) -> Option<Slot> {
        if let Some(slot) = self.find(worker) {
            return Some(slot);
        }
        let free = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len());
        if free == MAX_WORKERS {
            return None;
        }
        if free == self.entries.len() {
            self.entries.push(None);
        }
        self.entries[free] = Some((worker, T::default()));
        let slot = Slot(free as u16);
        self.by_worker.insert(worker, slot);
        Some(slot)
    }

    pub fn remove(&mut self, worker: WorkerId) -> Option<(Slot, T)> {
        let slot = self.by_worker.remove(&worker)?;
        self.entries[usize::from(slot.0)].take().map(|(_, kept)| (slot, kept))
    }

    pub fn worker(&self, slot: Slot) -> WorkerId {
        self.entries[usize::from(slot.0)].as_ref().expect("entries name living workers. This is a bug.").0
    }

    pub fn get(&self, slot: Slot) -> &T {
        &self.entries[usize::from(slot.0)].as_ref().expect("entries name living workers. This is a bug.").1
    }

    pub fn get_mut(&mut self, slot: Slot) -> &mut T {
        &mut self.entries[usize::from(slot.0)]
            .as_mut()
            .expect("entries name living workers. This is a bug.")
            .1
    }

    pub fn iter(&self) -> impl Iterator<Item = (Slot, WorkerId, &T)> {
        let entries = self.entries.iter().enumerate();
        entries
            .filter_map(|(at, entry)| entry.as_ref().map(|(worker, kept)| (Slot(at as u16), *worker, kept)))
    }
}
