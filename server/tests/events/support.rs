//! A worker without a model: a prefix cache's events, published as a real one does.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::Mutex;
use std::time::Duration;

use axum::extract::State;
use axum::routing::get;
use engine::hash::{self, BlockHash};
use engine::kv_events::{KvChains, KvEvent, KvEventSink, KvSnapshot};
use server::discovery::record::{HASH_SCHEME, RECORD_VERSION};
use server::discovery::{EventEndpoints, WorkerRecord};
use server::events::options::PublishOptions;
use server::events::publisher::Publisher;
use server::events::snapshot;
use server::router::disagg::DisaggPolicy;
use server::router::policies::KvPolicy;
use server::router::{Prompt, Router, RouterConfig, WorkerId, WorkerRole};

pub const BLOCK: usize = 16;

pub fn router() -> Arc<Router> {
    Router::new(RouterConfig {
        policy: Box::new(KvPolicy::default()),
        model: "demo".into(),
        block_size: None,
        kv_events: true,
        kv_degrade: true,
        kv_events_required: false,
        kv_events_patience: Duration::from_secs(10),
        ttl: Duration::from_secs(120),
        predicted_ttl: None,
        index_bytes: 64 << 20,
        booking_lease: Duration::from_secs(300),
        disagg: DisaggPolicy::Auto,
        max_decode_share: None,
        max_prefill_tokens: None,
    })
}

pub fn record(incarnation: u64, events: Option<EventEndpoints>) -> WorkerRecord {
    WorkerRecord {
        version: RECORD_VERSION,
        worker_id: format!("{incarnation:016x}"),
        incarnation: WorkerId(incarnation),
        role: WorkerRole::Both,
        model: "demo".into(),
        url: format!("http://127.0.0.1:{}", 1024 + incarnation),
        block_size: Some(BLOCK as u32),
        capacity_blocks: Some(1000),
        max_model_len: None,
        events,
        hash_scheme: Some(HASH_SCHEME.into()),
        prefill_tokens_per_sec: None,
        kv_bytes_per_token: None,
        kv_transport: None,
        draining: false,
        labels: BTreeMap::new(),
    }
}

pub fn tokens(family: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| family * 10_000 + at).collect()
}

/// The part of a worker that publishes, with the snapshot served over HTTP.
pub struct FakeWorker {
    pub incarnation: u64,
    pub endpoints: EventEndpoints,
    sink: Mutex<Option<KvEventSink>>,
    held: Mutex<Vec<(BlockHash, BlockHash)>>,
    publisher: Mutex<Option<Publisher>>,
}

impl FakeWorker {
    pub async fn start(incarnation: u64, options: &PublishOptions) -> Arc<Self> {
        let (publisher, sink) = Publisher::open(options, BLOCK as u32).await.unwrap();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/kv_events/snapshot", listener.local_addr().unwrap());
        let worker = Arc::new(Self {
            incarnation,
            endpoints: publisher.endpoints("127.0.0.1", Some(url)),
            sink: Mutex::new(Some(sink)),
            held: Mutex::default(),
            publisher: Mutex::new(Some(publisher)),
        });
        let routes = axum::Router::new().route("/kv_events/snapshot", get(serve)).with_state(worker.clone());
        tokio::spawn(async move { axum::serve(listener, routes).await });
        worker
    }

    pub fn record(&self) -> WorkerRecord {
        record(self.incarnation, Some(self.endpoints.clone()))
    }

    /// Stores the blocks of a prompt from index `from` on.
    pub fn store(&self, tokens: &[u32], from: usize) {
        let mut chain = vec![hash::root(None)];
        for block in tokens.chunks_exact(BLOCK) {
            chain.push(hash::chain(*chain.last().unwrap(), block));
        }
        let new: Vec<_> = chain.windows(2).skip(from).map(|pair| (pair[1], pair[0])).collect();
        self.held.lock().unwrap().extend(&new);
        self.publish(vec![KvEvent::Stored {
            parent: (from > 0).then(|| chain[from]),
            hashes: new.iter().map(|(hash, _)| *hash).collect(),
            tokens: tokens[from * BLOCK..tokens.len() / BLOCK * BLOCK].to_vec(),
            cache_salt: None,
        }]);
    }

    /// Holds the first `blocks` blocks of a prompt without saying so.
    pub fn hold(&self, tokens: &[u32], blocks: usize) {
        let mut parent = hash::root(None);
        for block in tokens.chunks_exact(BLOCK).take(blocks) {
            let hash = hash::chain(parent, block);
            self.held.lock().unwrap().push((hash, parent));
            parent = hash;
        }
    }

    pub fn clear(&self) {
        self.held.lock().unwrap().clear();
        self.publish(vec![KvEvent::Cleared]);
    }

    pub fn publish(&self, events: Vec<KvEvent>) {
        self.sink.lock().unwrap().as_mut().unwrap().publish(events);
    }

    /// Ends the publisher; its ports are free afterwards.
    pub async fn stop(&self) {
        drop(self.sink.lock().unwrap().take());
        let publisher = self.publisher.lock().unwrap().take().unwrap();
        tokio::task::spawn_blocking(move || publisher.join()).await.unwrap();
    }

    async fn snapshot(&self) -> KvSnapshot {
        let (reply, answer) = tokio::sync::oneshot::channel();
        let chains: KvChains = engine::kv_events::chains(self.held.lock().unwrap().iter().copied());
        self.sink.lock().unwrap().as_mut().unwrap().snapshot(chains, reply);
        answer.await.unwrap()
    }
}

async fn serve(State(worker): State<Arc<FakeWorker>>) -> String {
    snapshot::lines(worker.snapshot().await, WorkerId(worker.incarnation), BLOCK as u32).collect()
}

/// Overlap of a prompt with a worker, as a request would see it.
pub fn overlap(router: &Arc<Router>, worker: u64, tokens: &[u32]) -> u32 {
    let explanation = router.explain(&Prompt::from_tokens(tokens, None, BLOCK));
    explanation.cluster.get(WorkerId(worker)).map_or(0, |view| view.overlap_blocks)
}

/// Waits until `what` holds.
pub async fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(tokio::time::Instant::now() < deadline, "not within 30 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
