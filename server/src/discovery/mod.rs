//! Who is there: workers say so themselves, frontends listen.
//!
//! * [`record`]: what a worker says of itself.
//! * backends: [`file`] (a folder), [`etcd`], [`kubernetes`] (EndpointSlices). Workers given by flags need none.
//!
//! Invariants: a record lives as long as its lease is renewed; a bad record is skipped and counted and changes nothing
//! for the others; a worker removes nothing but its own record.

pub mod etcd;
pub mod file;
pub mod kubernetes;
mod lines;
pub mod options;
pub mod record;
mod roster;
mod scan;
mod store;
#[cfg(test)]
pub(crate) mod tests;

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

use futures_util::future::BoxFuture;
use tokio::sync::mpsc::Receiver;

use crate::router::WorkerId;
pub use record::{EventEndpoints, WorkerRecord};
pub use store::is_worker_id;

/// Something that happened to the set of workers.
#[derive(Clone, Debug, PartialEq)]
pub enum Change {
    Joined(WorkerRecord),
    /// Same incarnation, other content: it drains, for example.
    Changed(WorkerRecord),
    Left {
        worker: WorkerId,
        reason: String,
    },
}

/// Why the discovery backend cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DiscoveryError {
    /// A living worker has the id.
    #[error("worker id {id:?} is taken by {owner}, whose lease runs for another {remaining_secs:.0} s")]
    Taken { id: String, owner: String, remaining_secs: f64 },
    #[error("{backend} discovery: {what}: {reason}")]
    Backend { backend: &'static str, what: String, reason: String },
}

/// A worker's entry; kept alive until it is withdrawn or dropped.
pub trait Registration: Send + Sync {
    /// Changes what the entry says. Errors: the backend cannot be reached; the renewal tries again.
    fn update(&self, record: WorkerRecord) -> BoxFuture<'_, Result<(), DiscoveryError>>;

    /// Takes the entry back, if it is still ours.
    fn withdraw(&self) -> BoxFuture<'_, ()>;
}

/// A place where workers meet frontends.
pub trait Discovery: Debug + Send + Sync {
    /// The value of `--discovery-backend`.
    fn name(&self) -> &'static str;

    /// Publishes `record` and renews its lease until the registration is withdrawn or dropped. A lost lease is
    /// registered anew. Errors: another living worker has the id, or the backend refuses.
    fn register(&self, record: WorkerRecord) -> BoxFuture<'_, Result<Box<dyn Registration>, DiscoveryError>>;

    /// The workers there are, as `Joined`, then every change. The stream outlives faults of the backend: it ends only
    /// when the receiver is dropped. Errors: the backend can never work as configured.
    fn watch(&self) -> BoxFuture<'_, Result<Receiver<Change>, DiscoveryError>>;

    /// Records that could not be read, since the start.
    fn invalid_records(&self) -> u64;

    /// Why nothing new is heard of workers now, if that is so.
    fn trouble(&self) -> Option<String> {
        None
    }
}

/// Why a watch does not get on, if it does not; shared by those who see it and those who ask.
#[derive(Clone, Debug, Default)]
pub(crate) struct Trouble(Arc<Mutex<Option<String>>>);

impl Trouble {
    /// Something failed; logged when it is news.
    pub fn begins(&self, reason: String) {
        let mut trouble = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if trouble.as_ref() != Some(&reason) {
            tracing::warn!(reason, "workers cannot be watched; trying again");
        }
        *trouble = Some(reason);
    }

    /// The backend answers; logged when it did not before.
    pub fn ends(&self, backend: &str) {
        if self.0.lock().unwrap_or_else(PoisonError::into_inner).take().is_some() {
            tracing::info!("{backend} answers again");
        }
    }

    pub fn get(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
