//! Workers that discovery finds: in the fleet as long as their record lives.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc::Receiver;
use tokio::task::JoinHandle;

use super::fleet::Worker;
use super::probe;
use super::state::Front;
use crate::config::{PeerUrl, peer_url};
use crate::discovery::{Change, Discovery, WorkerRecord};
use crate::router::WorkerId;

/// A worker that was found, with its probes; they end when it is dropped.
struct Found {
    /// Whose record it is: a new process at the same address has a record of its own.
    owner: WorkerId,
    worker: Arc<Worker>,
    probes: JoinHandle<()>,
}

impl Drop for Found {
    fn drop(&mut self) {
        self.probes.abort();
    }
}

/// Carries discovery's changes into the fleet until the task is aborted.
pub async fn keep(front: Arc<Front>, discovery: Arc<dyn Discovery>, mut changes: Receiver<Change>) {
    let mut found: HashMap<PeerUrl, Found> = HashMap::new();
    let mut interval = tokio::time::interval(Duration::from_secs(1));
    loop {
        let change = tokio::select! {
            change = changes.recv() => change,
            _ = interval.tick() => {
                front.metrics.invalid_records.set(discovery.invalid_records() as i64);
                front.discovery_says(discovery.trouble());
                continue;
            }
        };
        let Some(change) = change else { return };
        match change {
            Change::Joined(record) | Change::Changed(record) => meet(&front, record, &mut found),
            Change::Left { worker, reason } => {
                let gone = found.iter().find(|(_, found)| found.owner == worker).map(|(url, _)| url.clone());
                if let Some(found) = gone.and_then(|url| found.remove(&url)) {
                    tracing::info!(worker = found.worker.name, reason, "a worker left");
                    front.fleet.remove(&found.worker.url);
                    front.dies(&found.worker);
                    // Requests that wait for it need wait no longer, if it is dead; one that drains goes on answering.
                    front.standing_changed();
                }
            }
        }
    }
}

fn meet(front: &Arc<Front>, record: WorkerRecord, found: &mut HashMap<PeerUrl, Found>) {
    let Ok(url) = peer_url("url", &record.url) else {
        return tracing::warn!(
            url = record.url,
            worker_id = record.worker_id,
            "a worker's URL cannot be used"
        );
    };
    // A folder or an etcd may have other deployments' workers, too.
    if let Some(ours) = front.model().filter(|ours| !record.model.is_empty() && *ours != record.model) {
        return tracing::info!(
            url = record.url,
            model = record.model,
            ours,
            "a worker of another model is left alone"
        );
    }
    if let Some(known) = found.get_mut(&url).filter(|known| known.worker.role == record.role) {
        known.owner = record.incarnation;
        // Whatever is new, it says at its address.
        return known.worker.wake.notify_one();
    }
    if let Some(old) = found.remove(&url) {
        front.fleet.remove(&old.worker.url);
        front.dies(&old.worker);
    }
    let worker = Arc::new(Worker::new(url.clone(), record.role, false, front.config.breaker));
    if !front.fleet.add(worker.clone()) {
        // It is on the command line, too.
        return;
    }
    tracing::info!(
        worker = worker.name,
        role = record.role.as_str(),
        worker_id = record.worker_id,
        "a worker joined"
    );
    let probes = tokio::spawn(probe::keep(front.clone(), worker.clone()));
    found.insert(url, Found { owner: record.incarnation, worker, probes });
}
