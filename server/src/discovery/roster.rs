//! The set of workers, and what changed in it.

use std::collections::BTreeMap;

use super::{Change, WorkerRecord};
use crate::router::WorkerId;

/// The workers there are, by incarnation.
#[derive(Debug, Default)]
pub struct Roster {
    workers: BTreeMap<WorkerId, WorkerRecord>,
}

impl Roster {
    /// Takes the set as it is now; what is different from before: first who left (for `reason`), then the others.
    pub fn replace(&mut self, now: impl IntoIterator<Item = WorkerRecord>, reason: &str) -> Vec<Change> {
        let now: BTreeMap<_, _> = now.into_iter().map(|record| (record.incarnation, record)).collect();
        let before = std::mem::replace(&mut self.workers, now);
        let left = before.keys().filter(|id| !self.workers.contains_key(id));
        let mut changes: Vec<_> =
            left.map(|worker| Change::Left { worker: *worker, reason: reason.to_owned() }).collect();
        for (id, record) in &self.workers {
            match before.get(id) {
                None => changes.push(Change::Joined(record.clone())),
                Some(old) if old != record => changes.push(Change::Changed(record.clone())),
                Some(_) => {}
            }
        }
        changes
    }
}
