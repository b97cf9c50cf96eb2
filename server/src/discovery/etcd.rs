//! `--discovery-backend etcd`: one key a worker, under a lease, over etcd's JSON gateway.
//!
//! The gateway (`/v3/...`, on by default) speaks the same API as gRPC does; with it no gRPC stack is needed for four
//! calls. Numbers of 64 bits are strings there, keys and values base64.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use serde_json::{Value, json};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::sleep;

use super::lines::Lines;
use super::roster::Roster;
use super::{Change, Discovery, DiscoveryError, Registration, Trouble, WorkerRecord};

/// An answer of etcd takes milliseconds; longer is an outage.
const ANSWER: Duration = Duration::from_secs(3);

/// Pause after a failure.
const RETRY: Duration = Duration::from_millis(500);

/// Changes that wait for the reader.
const QUEUE: usize = 256;

/// Workers as keys in etcd.
#[derive(Clone, Debug)]
pub struct EtcdDiscovery {
    client: Client,
    lease: Duration,
    invalid: Arc<AtomicU64>,
    trouble: Trouble,
}

/// Some member of the cluster, and another one when that fails.
#[derive(Clone, Debug)]
struct Client {
    http: reqwest::Client,
    endpoints: Arc<[String]>,
    at: Arc<AtomicUsize>,
    /// Ends with a slash; a worker's key is this and its id.
    prefix: String,
}

impl EtcdDiscovery {
    /// Keys under `/kvferry/<namespace>/workers/` of the cluster at `endpoints` (`http://host:port`). Leases are whole
    /// seconds, at least 1.
    pub fn new(http: reqwest::Client, endpoints: Vec<String>, namespace: &str, lease: Duration) -> Self {
        let client = Client {
            http,
            endpoints: endpoints.iter().map(|endpoint| endpoint.trim_end_matches('/').to_owned()).collect(),
            at: Arc::default(),
            prefix: format!("/kvferry/{namespace}/workers/"),
        };
        let lease = Duration::from_secs(lease.as_secs().max(1));
        Self { client, lease, invalid: Arc::default(), trouble: Trouble::default() }
    }
}

impl Discovery for EtcdDiscovery {
    fn name(&self) -> &'static str {
        "etcd"
    }

    fn register(&self, record: WorkerRecord) -> BoxFuture<'_, Result<Box<dyn Registration>, DiscoveryError>> {
        async move {
            let lease = self.client.claim(&record, self.lease).await?;
            let (sender, wanted) = watch::channel(record);
            let (lease_sender, held) = watch::channel(lease);
            let keeper = tokio::spawn(keep(self.client.clone(), wanted, lease_sender, self.lease));
            Ok(Box::new(Etcd { client: self.client.clone(), wanted: sender, held, keeper })
                as Box<dyn Registration>)
        }
        .boxed()
    }

    fn watch(&self) -> BoxFuture<'_, Result<Receiver<Change>, DiscoveryError>> {
        async move {
            let (sender, changes) = channel(QUEUE);
            tokio::spawn(self.clone().follow(sender));
            Ok(changes)
        }
        .boxed()
    }

    fn invalid_records(&self) -> u64 {
        self.invalid.load(Ordering::Relaxed)
    }

    fn trouble(&self) -> Option<String> {
        self.trouble.get()
    }
}

impl EtcdDiscovery {
    async fn follow(self, sender: Sender<Change>) {
        let mut roster = Roster::default();
        loop {
            let outcome = tokio::select! {
                outcome = self.follow_once(&sender, &mut roster) => outcome,
                () = sender.closed() => return,
            };
            // What is known stays known: etcd being away says nothing about workers.
            if let Err(error) = outcome {
                self.trouble.begins(error.to_string());
            }
            sleep(RETRY).await;
        }
    }

    /// Lists, then follows changes until something breaks.
    async fn follow_once(&self, sender: &Sender<Change>, roster: &mut Roster) -> Result<(), DiscoveryError> {
        let (mut records, revision) = self.list().await?;
        self.trouble.ends("etcd");
        let mut stream = self.client.watch(revision + 1).await?;
        loop {
            for change in roster.replace(records.values().cloned(), "its key is gone") {
                if sender.send(change).await.is_err() {
                    return Ok(());
                }
            }
            let next: Option<Value> = stream.next().await.map_err(|error| fault("watch", error))?;
            let Some(message) = next else { return Ok(()) };
            let result = &message["result"];
            if result["canceled"].as_bool() == Some(true) || !message["error"].is_null() {
                // Its revision was compacted away, for example: list again.
                return Ok(());
            }
            for event in result["events"].as_array().into_iter().flatten() {
                let key = event["kv"]["key"].as_str().unwrap_or_default().to_owned();
                match event["type"].as_str() {
                    Some("DELETE") => drop(records.remove(&key)),
                    _ => drop(self.read(&event["kv"]).map(|record| records.insert(key, record))),
                }
            }
        }
    }

    /// All records by key, and the revision they are of.
    async fn list(&self) -> Result<(BTreeMap<String, WorkerRecord>, u64), DiscoveryError> {
        let answer = self.client.call("kv/range", &self.client.range()).await?;
        let revision = number(&answer["header"]["revision"])
            .ok_or_else(|| fault("range", "no revision in the answer"))?;
        let kvs = answer["kvs"].as_array().into_iter().flatten();
        let records = kvs.filter_map(|kv| Some((kv["key"].as_str()?.to_owned(), self.read(kv)?)));
        Ok((records.collect(), revision))
    }

    /// A value as a record; what is none is counted. A key that turned bad keeps its last record until its lease ends.
    fn read(&self, kv: &Value) -> Option<WorkerRecord> {
        let bytes = STANDARD.decode(kv["value"].as_str().unwrap_or_default()).unwrap_or_default();
        let key = STANDARD.decode(kv["key"].as_str().unwrap_or_default()).unwrap_or_default();
        match serde_json::from_slice(&bytes) {
            Ok(record) => Some(record),
            Err(error) => {
                self.invalid.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(key = %String::from_utf8_lossy(&key), %error, "not a worker's record, skipped");
                None
            }
        }
    }
}

impl Client {
    async fn call(&self, path: &str, body: &Value) -> Result<Value, DiscoveryError> {
        let mut last = fault(path, "no endpoint");
        for _ in 0..self.endpoints.len() {
            let at = self.at.load(Ordering::Relaxed) % self.endpoints.len();
            let url = format!("{}/v3/{path}", self.endpoints[at]);
            let sent = self.http.post(&url).json(body).timeout(ANSWER).send().await;
            match sent {
                Ok(response) => {
                    let status = response.status();
                    let answer: Value =
                        response.json().await.map_err(|error| fault(&url, error.without_url()))?;
                    if status.is_success() {
                        return Ok(answer);
                    }
                    let said =
                        answer["message"].as_str().or(answer["error"].as_str()).unwrap_or("no message");
                    return Err(fault(&url, format!("{status}: {said}")));
                }
                Err(error) => {
                    last = fault(&url, error.without_url());
                    self.at.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
        Err(last)
    }

    fn key(&self, worker_id: &str) -> String {
        STANDARD.encode(format!("{}{worker_id}", self.prefix))
    }

    fn range(&self) -> Value {
        // The end of the range is the prefix with its last byte, '/', one up.
        let end = format!("{}0", self.prefix.trim_end_matches('/'));
        json!({ "key": STANDARD.encode(&self.prefix), "range_end": STANDARD.encode(end) })
    }

    /// A new lease with the record's key under it, unless another worker has the key.
    async fn claim(&self, record: &WorkerRecord, ttl: Duration) -> Result<String, DiscoveryError> {
        let grant = self.call("lease/grant", &json!({ "TTL": ttl.as_secs().to_string(), "ID": "0" })).await?;
        let lease =
            grant["ID"].as_str().ok_or_else(|| fault("lease/grant", "no ID in the answer"))?.to_owned();
        let key = self.key(&record.worker_id);
        let put = self.put_request(record, &lease);
        let claim = json!({
            "compare": [{ "key": key, "target": "CREATE", "result": "EQUAL", "create_revision": "0" }],
            "success": [{ "request_put": put }],
            "failure": [{ "request_range": { "key": key } }],
        });
        let answer = self.call("kv/txn", &claim).await?;
        if answer["succeeded"].as_bool() == Some(true) {
            return Ok(lease);
        }
        let kv = &answer["responses"][0]["response_range"]["kvs"][0];
        let value = STANDARD.decode(kv["value"].as_str().unwrap_or_default()).unwrap_or_default();
        let owner: Option<WorkerRecord> = serde_json::from_slice(&value).ok();
        if owner.as_ref().is_some_and(|owner| owner.incarnation == record.incarnation) {
            // Our own, under a lease that we lost sight of. If the key changed meanwhile, it is not ours to write.
            let revision = kv["mod_revision"].clone();
            let again = json!({
                "compare": [{ "key": key, "target": "MOD", "result": "EQUAL", "mod_revision": revision }],
                "success": [{ "request_put": put }],
            });
            if self.call("kv/txn", &again).await?["succeeded"].as_bool() == Some(true) {
                return Ok(lease);
            }
        }
        self.revoke(&lease).await;
        let left = self.call("lease/timetolive", &json!({ "ID": kv["lease"] })).await;
        Err(DiscoveryError::Taken {
            id: record.worker_id.clone(),
            owner: owner.map_or("something else".into(), |owner| {
                format!("worker {} at {}", owner.incarnation, owner.url)
            }),
            remaining_secs: left.ok().and_then(|left| number(&left["TTL"])).unwrap_or_default() as f64,
        })
    }

    fn put_request(&self, record: &WorkerRecord, lease: &str) -> Value {
        let value = serde_json::to_vec(record).expect("records are plain data. This is a bug.");
        json!({ "key": self.key(&record.worker_id), "value": STANDARD.encode(value), "lease": lease })
    }

    /// False if the lease is over.
    async fn renew(&self, lease: &str) -> Result<bool, DiscoveryError> {
        let answer = self.call("lease/keepalive", &json!({ "ID": lease })).await?;
        Ok(number(&answer["result"]["TTL"]).is_some_and(|ttl| ttl > 0))
    }

    /// Ends a lease, and the key with it. One that is over already is no trouble.
    async fn revoke(&self, lease: &str) {
        let revoked =
            self.call("lease/revoke", &json!({ "ID": lease })).await.map_err(|error| error.to_string());
        if let Err(reason) = revoked
            && !reason.contains("not found")
        {
            tracing::warn!(reason, "this worker's key stays until its lease is over");
        }
    }

    async fn watch(
        &self,
        revision: u64,
    ) -> Result<Lines<impl futures_util::Stream<Item = reqwest::Result<bytes::Bytes>> + Unpin>, DiscoveryError>
    {
        let at = self.at.load(Ordering::Relaxed) % self.endpoints.len();
        let url = format!("{}/v3/watch", self.endpoints[at]);
        let mut create = self.range();
        create["start_revision"] = revision.to_string().into();
        let sent = self.http.post(&url).json(&json!({ "create_request": create })).send();
        let response = tokio::time::timeout(ANSWER, sent).await.map_err(|_| fault(&url, "no answer"))?;
        let response = response.and_then(reqwest::Response::error_for_status);
        let response = response.map_err(|error| fault(&url, error.without_url()))?;
        Ok(Lines::new(response.bytes_stream().boxed()))
    }
}

fn number(value: &Value) -> Option<u64> {
    value.as_str().map_or_else(|| value.as_u64(), |text| text.parse().ok())
}

fn fault(what: &str, reason: impl ToString) -> DiscoveryError {
    DiscoveryError::Backend { backend: "etcd", what: what.to_owned(), reason: reason.to_string() }
}

#[derive(Debug)]
struct Etcd {
    client: Client,
    wanted: watch::Sender<WorkerRecord>,
    held: watch::Receiver<String>,
    keeper: JoinHandle<()>,
}

impl Registration for Etcd {
    fn update(&self, record: WorkerRecord) -> BoxFuture<'_, Result<(), DiscoveryError>> {
        self.wanted.send_replace(record.clone());
        async move {
            let put = self.client.put_request(&record, &self.held.borrow().clone());
            self.client.call("kv/put", &put).await.map(drop)
        }
        .boxed()
    }

    fn withdraw(&self) -> BoxFuture<'_, ()> {
        self.keeper.abort();
        async move {
            let lease = self.held.borrow().clone();
            self.client.revoke(&lease).await;
        }
        .boxed()
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// Renews the lease, and registers anew when it is lost.
async fn keep(
    client: Client,
    wanted: watch::Receiver<WorkerRecord>,
    held: watch::Sender<String>,
    ttl: Duration,
) {
    let mut trouble: Option<String> = None;
    loop {
        sleep(ttl / 3).await;
        let (lease, record) = (held.borrow().clone(), wanted.borrow().clone());
        let outcome = match client.renew(&lease).await {
            Ok(true) => Ok(()),
            Ok(false) => client.claim(&record, ttl).await.map(|lease| {
                tracing::warn!("this worker's lease was lost; it is registered anew");
                held.send_replace(lease);
            }),
            Err(error) => Err(error),
        };
        match outcome.map_err(|error| error.to_string()) {
            Ok(()) if trouble.take().is_some() => tracing::info!("etcd answers again"),
            Ok(()) => {}
            Err(reason) => {
                if trouble.as_ref() != Some(&reason) {
                    tracing::error!(reason, "this worker may not be found: its lease is not renewed");
                }
                trouble = Some(reason);
                sleep(RETRY).await;
            }
        }
    }
}
