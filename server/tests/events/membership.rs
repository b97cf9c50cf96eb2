//! Discovery, router and events together: workers come and go as records in a folder.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use engine::kv_events::KvEvent;
use server::discovery::file::FileDiscovery;
use server::discovery::{Change, Discovery};
use server::events::options::PublishOptions;
use server::events::subscriber::follow;
use server::router::{Condition, IndexSource, Prompt, Router, WorkerId};
use tokio::sync::mpsc::Receiver;

use crate::support::*;

/// What a frontend does, without its probes.
async fn keep(router: Arc<Router>, mut changes: Receiver<Change>) {
    let mut followers = HashMap::new();
    while let Some(change) = changes.recv().await {
        match change {
            Change::Joined(record) | Change::Changed(record) => {
                let worker = record.incarnation;
                if router.join(record.clone()).is_ok() && record.events.is_some() {
                    let task = follow(router.clone(), Arc::new(record), reqwest::Client::new());
                    followers.insert(worker, AbortOnDrop(tokio::spawn(task)));
                }
            }
            Change::Left { worker, .. } => {
                followers.remove(&worker);
                router.leave(worker);
            }
        }
    }
}

struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// rt-01, rt-02, rt-06: one worker with events, one without, one that does not fit; then the first dies.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_join_are_followed_and_leave() {
    let dir = tempfile::tempdir().unwrap();
    let discovery = FileDiscovery::new(dir.path().to_owned(), Duration::from_secs(2));
    let router = router();
    let running = tokio::spawn(keep(router.clone(), discovery.watch().await.unwrap()));
    let worker = FakeWorker::start(1, &PublishOptions::on_host("127.0.0.1")).await;
    let prompt = tokens(1, 20 * BLOCK);
    worker.store(&prompt, 0);
    let first = discovery.register(worker.record()).await.unwrap();
    until("its blocks are known", || overlap(&router, 1, &prompt) == 20).await;
    let silent = discovery.register(record(2, None)).await.unwrap();
    let other = server::discovery::WorkerRecord { block_size: Some(32), ..record(3, None) };
    let misfit = discovery.register(other).await.unwrap();
    until("all three are there", || router.workers().len() == 3).await;
    let statuses = router.workers();
    assert_eq!(statuses[1].index, IndexSource::Approximate);
    assert_eq!(statuses[1].alarm.unwrap().as_str(), "kv_event_publisher_disabled");
    assert_eq!(statuses[2].condition, Condition::Refused);
    let reason = statuses[2].misfit.as_deref().unwrap();
    assert_eq!(reason, "its blocks have 32 tokens, those of the other workers 16");
    assert_eq!(router.mismatches(), 2, "neither of the two publishes events");
    let booking = router.route(&Prompt::from_tokens(&prompt, None, BLOCK), &[]).unwrap();
    assert_eq!(
        (booking.choice().serve, booking.index(), booking.predicted_tokens()),
        (WorkerId(1), IndexSource::Events, 304)
    );
    drop(booking);
    // Dropped, not withdrawn: as if its process had died. Its lease ends.
    drop(first);
    until("the dead worker is gone", || router.workers().len() == 2).await;
    assert_eq!(router.sizes().exact_blocks, 0);
    let booking = router.route(&Prompt::from_tokens(&prompt, None, BLOCK), &[]).unwrap();
    assert_eq!((booking.choice().serve, booking.index()), (WorkerId(2), IndexSource::Approximate));
    drop(booking);
    worker.publish(vec![KvEvent::Cleared]);
    silent.withdraw().await;
    misfit.withdraw().await;
    until("nobody is left", || router.workers().is_empty()).await;
    assert_eq!(router.sizes().open_bookings, 0);
    running.abort();
}
