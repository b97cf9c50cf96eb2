//! `--discovery-backend kubernetes`: the endpoints behind Services, as Kubernetes knows them.
//!
//! A list and a watch of EndpointSlices over the API server's HTTP API, with the pod's service account. Workers do not
//! register: a pod that is ready is an endpoint, one that terminates drains. What a worker is beyond its address (model,
//! block size, events) it says itself at its address.
//!
//! The crate `kube` does this, too, with 45 more crates (all of Kubernetes' types among them); two requests need none.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use serde::Deserialize;
use serde_json::Value;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::time::{sleep, timeout};
use xxhash_rust::xxh3::xxh3_64;

use super::lines::Lines;
use super::record::RECORD_VERSION;
use super::roster::Roster;
use super::{Change, Discovery, DiscoveryError, Registration, WorkerRecord};
use crate::router::{WorkerId, WorkerRole};

/// The label of a Service (and so of its slices) that says what its workers do: `both`, `prefill` or `decode`.
pub const ROLE_LABEL: &str = "kvferry.io/role";

/// The named port of a Service where workers' HTTP servers are; else its first.
const PORT_NAME: &str = "http";

const ANSWER: Duration = Duration::from_secs(10);
const RETRY: Duration = Duration::from_secs(1);
const QUEUE: usize = 256;

/// The server ends a watch after this long, so that a dead connection is noticed.
const WATCH_SECS: u64 = 300;

/// Where the API server is, and who we are to it.
#[derive(Clone, Debug)]
pub struct ApiServer {
    /// `https://host:port`
    pub url: String,
    /// Read again for each request: it is rotated.
    pub token_file: Option<PathBuf>,
}

/// Workers as endpoints of Services.
#[derive(Clone, Debug)]
pub struct KubernetesDiscovery {
    http: reqwest::Client,
    server: ApiServer,
    namespace: String,
    /// Label selector of the slices.
    selector: String,
    invalid: Arc<AtomicU64>,
}

impl KubernetesDiscovery {
    /// Slices in `namespace` that `selector` selects. `http` trusts the server's certificate.
    pub fn new(http: reqwest::Client, server: ApiServer, namespace: String, selector: String) -> Self {
        Self { http, server, namespace, selector, invalid: Arc::default() }
    }

    async fn get(&self, query: &[(&str, String)]) -> Result<reqwest::Response, DiscoveryError> {
        let url = format!(
            "{}/apis/discovery.k8s.io/v1/namespaces/{}/endpointslices",
            self.server.url.trim_end_matches('/'),
            self.namespace
        );
        let mut request = self.http.get(&url).query(query).query(&[("labelSelector", &self.selector)]);
        if let Some(path) = &self.server.token_file {
            let token = tokio::fs::read_to_string(path).await;
            request =
                request.bearer_auth(token.map_err(|error| fault(&path.display().to_string(), error))?.trim());
        }
        let response = timeout(ANSWER, request.send()).await.map_err(|_| fault(&url, "no answer"))?;
        let response = response.map_err(|error| fault(&url, error.without_url()))?;
        if response.status().is_success() {
            return Ok(response);
        }
        let status = response.status();
        let said: Value =
            timeout(ANSWER, response.json()).await.ok().and_then(Result::ok).unwrap_or_default();
        Err(fault(&url, format!("{status}: {}", said["message"].as_str().unwrap_or("no message"))))
    }

    async fn follow(self, sender: Sender<Change>) {
        let mut roster = Roster::default();
        let mut trouble: Option<String> = None;
        loop {
            let outcome = tokio::select! {
                outcome = self.follow_once(&sender, &mut roster, &mut trouble) => outcome,
                () = sender.closed() => return,
            };
            match outcome.map_err(|error| error.to_string()) {
                Ok(()) => {}
                Err(reason) => {
                    if trouble.as_ref() != Some(&reason) {
                        tracing::warn!(reason, "workers cannot be watched; trying again");
                    }
                    trouble = Some(reason);
                    sleep(RETRY).await;
                }
            }
        }
    }

    /// Lists, then follows changes until the watch ends.
    async fn follow_once(
        &self,
        sender: &Sender<Change>,
        roster: &mut Roster,
        trouble: &mut Option<String>,
    ) -> Result<(), DiscoveryError> {
        let list = self.get(&[]).await?;
        let list: SliceList = timeout(ANSWER, list.json())
            .await
            .map_err(|_| fault("list", "it broke off"))?
            .map_err(|error| fault("list", error.without_url()))?;
        let mut slices = BTreeMap::new();
        for item in list.items {
            slices.extend(self.read(item));
        }
        if trouble.take().is_some() {
            tracing::info!("the API server answers again");
        }
        let version = list.metadata.resource_version.unwrap_or_default();
        let query = [
            ("watch", "1".to_owned()),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true".to_owned()),
            ("timeoutSeconds", WATCH_SECS.to_string()),
        ];
        let mut stream = Lines::new(self.get(&query).await?.bytes_stream().boxed());
        loop {
            let records = slices.values().flat_map(records);
            for change in roster.replace(records, "it is no ready endpoint any more") {
                if sender.send(change).await.is_err() {
                    return Ok(());
                }
            }
            let limit = Duration::from_secs(WATCH_SECS) + ANSWER;
            let next = timeout(limit, stream.next::<WatchEvent>()).await;
            let Ok(next) = next else { return Ok(()) };
            let Some(event) = next.map_err(|error| fault("watch", error))? else { return Ok(()) };
            match event.kind.as_str() {
                "ADDED" | "MODIFIED" => slices.extend(self.read(event.object)),
                "DELETED" => {
                    if let Some((name, _)) = self.read(event.object) {
                        slices.remove(&name);
                    }
                }
                // A bookmark says only how far it is; after an error (410, "gone") a new list tells.
                "BOOKMARK" => {}
                _ => {
                    return Err(fault(
                        "watch",
                        event.object["message"].as_str().unwrap_or("it ended in an error"),
                    ));
                }
            }
        }
    }

    /// A slice by its name; what is none is counted.
    fn read(&self, object: Value) -> Option<(String, Slice)> {
        let name = object["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        match serde_json::from_value::<Slice>(object) {
            Ok(slice) => Some((name, slice)),
            Err(error) => {
                self.invalid.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(name, %error, "not an EndpointSlice, skipped");
                None
            }
        }
    }
}

impl Discovery for KubernetesDiscovery {
    fn name(&self) -> &'static str {
        "kubernetes"
    }

    /// Nothing to do: a pod that is ready is an endpoint.
    fn register(&self, _: WorkerRecord) -> BoxFuture<'_, Result<Box<dyn Registration>, DiscoveryError>> {
        async { Ok(Box::new(ByKubernetes) as Box<dyn Registration>) }.boxed()
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
}

/// Readiness probes see to it.
#[derive(Debug)]
struct ByKubernetes;

impl Registration for ByKubernetes {
    fn update(&self, _: WorkerRecord) -> BoxFuture<'_, Result<(), DiscoveryError>> {
        async { Ok(()) }.boxed()
    }

    fn withdraw(&self) -> BoxFuture<'_, ()> {
        async {}.boxed()
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SliceList {
    #[serde(default)]
    metadata: Metadata,
    /// Null when there is none.
    #[serde(default, deserialize_with = "or_empty")]
    items: Vec<Value>,
}

#[derive(Deserialize)]
struct WatchEvent {
    #[serde(rename = "type")]
    kind: String,
    object: Value,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Metadata {
    resource_version: Option<String>,
    #[serde(default)]
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
struct Slice {
    metadata: Metadata,
    #[serde(default, deserialize_with = "or_empty")]
    endpoints: Vec<Endpoint>,
    #[serde(default, deserialize_with = "or_empty")]
    ports: Vec<Port>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Endpoint {
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
    target_ref: Option<TargetRef>,
}

#[derive(Default, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    serving: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Default, Deserialize)]
struct TargetRef {
    name: Option<String>,
    uid: Option<String>,
}

#[derive(Deserialize)]
struct Port {
    name: Option<String>,
    port: Option<u16>,
}

fn or_empty<'de, D: serde::Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// The workers of a slice: those that are ready (not saying counts as ready), and those that finish what they have.
fn records(slice: &Slice) -> Vec<WorkerRecord> {
    let role = match slice.metadata.labels.get(ROLE_LABEL).map(String::as_str) {
        Some("prefill") => WorkerRole::Prefill,
        Some("decode") => WorkerRole::Decode,
        _ => WorkerRole::Both,
    };
    let named = slice.ports.iter().find(|port| port.name.as_deref() == Some(PORT_NAME));
    let Some(port) = named.or(slice.ports.first()).and_then(|port| port.port) else { return Vec::new() };
    let record = |endpoint: &Endpoint| {
        let conditions = &endpoint.conditions;
        let draining = conditions.terminating == Some(true) && conditions.serving != Some(false);
        if conditions.ready == Some(false) && !draining {
            return None;
        }
        let address = endpoint.addresses.first()?;
        let host = if address.contains(':') { format!("[{address}]") } else { address.clone() };
        let url = format!("http://{host}:{port}");
        let target = endpoint.target_ref.as_ref();
        let pod = target.and_then(|target| target.name.clone()).unwrap_or_else(|| address.clone());
        let uid = target.and_then(|target| target.uid.as_deref()).unwrap_or_default();
        Some(WorkerRecord {
            version: RECORD_VERSION,
            worker_id: pod,
            // A pod's own; a container that restarts in it says so at its address.
            incarnation: WorkerId(xxh3_64(format!("{uid} {url}").as_bytes())),
            role,
            model: String::new(),
            url,
            block_size: None,
            capacity_blocks: None,
            max_model_len: None,
            events: None,
            hash_scheme: None,
            prefill_tokens_per_sec: None,
            kv_transport: None,
            draining,
            labels: BTreeMap::new(),
        })
    };
    slice.endpoints.iter().filter_map(record).collect()
}

fn fault(what: &str, reason: impl ToString) -> DiscoveryError {
    DiscoveryError::Backend { backend: "kubernetes", what: what.to_owned(), reason: reason.to_string() }
}
