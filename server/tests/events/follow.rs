//! An index follows what a worker says, whatever is lost on the way.

use std::sync::Arc;

use engine::kv_events::KvEvent;
use server::events::options::PublishOptions;
use server::events::subscriber::follow;
use server::router::{IndexSource, Router, WorkerId};

use crate::support::*;

struct Following {
    router: Arc<Router>,
    task: tokio::task::JoinHandle<()>,
}

fn start(worker: &FakeWorker) -> Following {
    let router = router();
    router.join(worker.record()).unwrap();
    let task = tokio::spawn(follow(router.clone(), Arc::new(worker.record()), reqwest::Client::new()));
    Following { router, task }
}

impl Drop for Following {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// rt-04: what a worker holds before the router starts is known at once, from its snapshot; then events go on from there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_starts_late_knows_what_is_cached() {
    let worker = FakeWorker::start(1, &PublishOptions::on_host("127.0.0.1")).await;
    let prompt = tokens(1, 20 * BLOCK);
    worker.store(&prompt, 0);
    let following = start(&worker);
    until("the snapshot is taken", || overlap(&following.router, 1, &prompt) == 20).await;
    assert_eq!(following.router.workers()[0].index, IndexSource::Events);
    let longer = tokens(1, 24 * BLOCK);
    worker.store(&longer, 20);
    until("events go on", || overlap(&following.router, 1, &longer) == 24).await;
    assert_eq!(following.router.orphans(WorkerId(1)), 0);
    // rt-06: after the cache was cleared nothing is predicted.
    worker.clear();
    until("cleared", || overlap(&following.router, 1, &longer) == 0).await;
    assert_eq!(following.router.sizes().exact_blocks, 0);
}

/// A full queue loses batches; the gap is seen, and the index is what the worker holds again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_batches_are_noticed_and_made_good() {
    let options = PublishOptions { max_queue: 1, ..PublishOptions::on_host("127.0.0.1") };
    let worker = FakeWorker::start(1, &options).await;
    let following = start(&worker);
    until("the first snapshot", || following.router.workers()[0].index == IndexSource::Events).await;
    for family in 0..500 {
        worker.store(&tokens(family, 4 * BLOCK), 0);
    }
    // Whatever was lost of the burst, a later batch shows the gap.
    until("all of it is known", || {
        worker.publish(vec![KvEvent::Removed(vec![engine::hash::BlockHash(1)])]);
        (0..500).all(|family| overlap(&following.router, 1, &tokens(family, 4 * BLOCK)) == 4)
    })
    .await;
    assert!(following.router.sizes().event_gaps > 0, "nothing was lost: the test is void");
}

/// Orphans: an event whose parent is not known makes the router read what the worker really holds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_parent_is_counted_and_made_good() {
    let worker = FakeWorker::start(1, &PublishOptions::on_host("127.0.0.1")).await;
    let following = start(&worker);
    until("the first snapshot", || following.router.workers()[0].index == IndexSource::Events).await;
    let prompt = tokens(3, 12 * BLOCK);
    worker.hold(&prompt, 10);
    worker.store(&prompt, 10);
    until("the head is known, too", || overlap(&following.router, 1, &prompt) == 12).await;
    assert_eq!(following.router.orphans(WorkerId(1)), 2);
}

/// The worker's port answers again after a while (a new process, or a network that came back): the index is anew.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_publisher_that_comes_back_is_followed_again() {
    let options = PublishOptions::on_host("127.0.0.1");
    let worker = FakeWorker::start(1, &options).await;
    let prompt = tokens(1, 8 * BLOCK);
    worker.store(&prompt, 0);
    let following = start(&worker);
    until("known", || overlap(&following.router, 1, &prompt) == 8).await;
    worker.stop().await;
    until("not believed while nobody answers", || following.router.sizes().exact_blocks == 0).await;
    assert_ne!(following.router.workers()[0].index, IndexSource::Events);
}

/// kv-04: blocks of one salt are no overlap for another one, nor for none.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn salted_blocks_are_overlap_for_their_salt_only() {
    let worker = FakeWorker::start(1, &PublishOptions::on_host("127.0.0.1")).await;
    let following = start(&worker);
    let prompt = tokens(1, 4 * BLOCK);
    let mut hashes = vec![engine::hash::root(Some("t1"))];
    for block in prompt.chunks(BLOCK) {
        hashes.push(engine::hash::chain(*hashes.last().unwrap(), block));
    }
    let event = KvEvent::Stored {
        parent: None,
        hashes: hashes[1..].to_vec(),
        tokens: prompt.clone(),
        cache_salt: Some("t1".into()),
    };
    until("the first snapshot", || following.router.workers()[0].index == IndexSource::Events).await;
    worker.publish(vec![event]);
    let overlap = |salt: Option<&str>| {
        let prompt = server::router::Prompt::from_tokens(&prompt, salt, BLOCK);
        following.router.explain(&prompt).cluster.workers[0].overlap_blocks
    };
    until("stored", || overlap(Some("t1")) == 4).await;
    assert_eq!([None, Some(""), Some("t2")].map(overlap), [0, 0, 0]);
}
