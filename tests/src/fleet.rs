//! A frontend with workers behind it.

use std::path::Path;

use serde_json::Value;
use tempfile::TempDir;

use crate::client::Client;
use crate::cluster::Deployment;
use crate::process::Worker;
use crate::wait::until;

/// Flags of workers that only pretend to compute, a hundred times as fast as an H100.
pub const SIM: &str = "--device sim --sim-speed 100 --dtype auto --kv-cache-dtype auto";

/// How long a frontend may take to give back everything after its last request.
const IDLE: std::time::Duration = std::time::Duration::from_secs(20);

/// A frontend and its workers; killed when dropped.
#[derive(Debug)]
pub struct Fleet {
    pub front: Worker,
    pub workers: Vec<Worker>,
    dir: TempDir,
}

impl Fleet {
    /// Starts simulated workers, one for each of `flags`, and a frontend with `front` as its flags; waits until it is
    /// ready.
    pub async fn start(flags: &[&str], front: &str) -> Self {
        let fleet = Self::start_unready(flags, front).await;
        fleet.front.health_is("ready").await;
        fleet
    }

    pub async fn start_unready(flags: &[&str], front: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let mut workers = Vec::new();
        for (index, flags) in flags.iter().enumerate() {
            let worker = start_worker(dir.path(), &format!("worker{index}"), flags).await;
            worker.health_is("ready").await;
            workers.push(worker);
        }
        let urls: Vec<_> = workers.iter().map(|worker| worker.client().url().to_owned()).collect();
        let front = start_front(dir.path(), &format!("--worker-url {} {front}", urls.join(","))).await;
        Self { front, workers, dir }
    }

    pub fn client(&self) -> Client {
        self.front.client()
    }

    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// How many requests each worker has answered.
    pub async fn answered(&self) -> Vec<u64> {
        let mut answered = Vec::new();
        for worker in &self.workers {
            let metrics = worker.client().metrics().await;
            answered.push(metrics.value("vllm:e2e_request_latency_seconds_count") as u64);
        }
        answered
    }

    /// Waits until nothing is booked, and no worker has a request or holds a block for one.
    pub async fn settled(&self) {
        idle(&self.client()).await;
        for worker in &self.workers {
            worker.client().settled().await;
        }
    }
}

/// Waits until a frontend has no request under way and nothing booked.
pub async fn idle(front: &Client) {
    until(IDLE, "nothing under way or booked", || async {
        let metrics = front.try_metrics().await?;
        let left = ["dynamo_frontend_inflight_requests", "kvferry_frontend_open_bookings"]
            .map(|name| metrics.value(name));
        (left == [0.0, 0.0]).then_some(()).ok_or(format!("{left:?}"))
    })
    .await;
    let (_, text) = front.get("/metrics").await.expect("/metrics answers");
    for line in text.lines().filter(|line| line.starts_with("kvferry_frontend_worker_active")) {
        assert!(line.ends_with(" 0"), "{line}");
    }
}

/// A simulated worker.
pub async fn start_worker(dir: &Path, name: &str, flags: &str) -> Worker {
    let launch = Deployment::both().flags(SIM).launch(name, &format!("--role both {flags}"), &[]);
    Worker::start(dir, launch).await
}

/// A frontend alone; the workers are in `flags`.
pub async fn start_front(dir: &Path, flags: &str) -> Worker {
    Worker::start(dir, Deployment::both().launch("front", &format!("--role frontend {flags}"), &[])).await
}

/// The value of a header that the frontend adds.
pub fn header(headers: &[(String, String)], name: &str) -> Option<String> {
    headers.iter().find(|(header, _)| header == name).map(|(_, value)| value.clone())
}

/// The state of each worker in `/health`, in the order in which they were given.
pub async fn states(front: &Client) -> Vec<(String, String)> {
    let (_, text) = front.get("/health").await.expect("/health answers");
    let body: Value = serde_json::from_str(&text).expect("/health is JSON");
    let word = |worker: &Value, field: &str| worker[field].as_str().unwrap_or_default().to_owned();
    let workers = body["workers"].as_array().expect("a list of workers");
    workers.iter().map(|worker| (word(worker, "state"), word(worker, "reason"))).collect()
}
