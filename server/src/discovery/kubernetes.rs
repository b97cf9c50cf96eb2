//! `--discovery-backend kubernetes`: the endpoints behind Services, as Kubernetes knows them.
//!
//! A watch of EndpointSlices through the crate `kube`, with the pod's service account or a kubeconfig. Workers do not
//! register: a pod that is ready is an endpoint, one that terminates drains. What a worker is beyond its address (model,
//! block size, events) it says itself at its address.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, StreamExt};
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use kube::api::{ApiResource, DynamicObject};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watcher};
use kube::{Api, Client};
use tokio::sync::mpsc::{Receiver, Sender, channel};
use xxhash_rust::xxh3::xxh3_64;

use super::record::RECORD_VERSION;
use super::roster::Roster;
use super::{Change, Discovery, DiscoveryError, Registration, Trouble, WorkerRecord};
use crate::error::with_causes;
use crate::router::{WorkerId, WorkerRole};

/// The label of a Service (and so of its slices) that says what its workers do: `both`, `prefill` or `decode`.
pub const ROLE_LABEL: &str = "kvferry.io/role";

/// The named port of a Service where workers' HTTP servers are; else its first.
const PORT_NAME: &str = "http";

const QUEUE: usize = 256;

/// Workers as endpoints of Services.
#[derive(Clone, Debug)]
pub struct KubernetesDiscovery {
    server: Option<kube::Config>,
    namespace: Option<String>,
    /// Label selector of the slices.
    selector: String,
    invalid: Arc<AtomicU64>,
    trouble: Trouble,
}

impl KubernetesDiscovery {
    /// Slices in `namespace` that `selector` selects. The server is that of a kubeconfig (`KUBECONFIG`, `~/.kube/config`) or
    /// the pod's own when not given; so is the namespace.
    pub fn new(server: Option<kube::Config>, namespace: Option<String>, selector: String) -> Self {
        Self { server, namespace, selector, invalid: Arc::default(), trouble: Trouble::default() }
    }

    /// Slices as they come: each is parsed by itself, so that a bad one does not hide the others.
    async fn slices(&self) -> Result<Api<DynamicObject>, DiscoveryError> {
        let config = match &self.server {
            Some(config) => config.clone(),
            None => kube::Config::infer().await.map_err(|error| {
                let hint = "outside of a pod give --kubernetes-api and --kubernetes-namespace";
                fault("configuration", format!("{}; {hint}", with_causes(&error)))
            })?,
        };
        let namespace = self.namespace.clone().unwrap_or_else(|| config.default_namespace.clone());
        let url = config.cluster_url.to_string();
        let client = Client::try_from(config).map_err(|error| fault(&url, with_causes(&error)))?;
        let resource = ApiResource::erase::<EndpointSlice>(&());
        Ok(Api::namespaced_with(client, &namespace, &resource))
    }

    /// The crate lists, watches, and lists again after errors.
    async fn follow(self, slices: Api<DynamicObject>, sender: Sender<Change>) {
        let config = match self.selector.is_empty() {
            true => watcher::Config::default(),
            false => watcher::Config::default().labels(&self.selector),
        };
        let mut events = pin!(watcher(slices, config).default_backoff());
        let (mut seen, mut roster) = (Seen::default(), Roster::default());
        loop {
            let event = tokio::select! {
                event = events.next() => event,
                () = sender.closed() => return,
            };
            match event {
                None => return,
                Some(Ok(event)) => {
                    if !matches!(event, watcher::Event::Init) {
                        self.trouble.ends("the API server");
                    }
                    if !self.note(event, &mut seen) {
                        continue;
                    }
                }
                Some(Err(error)) => {
                    self.trouble.begins(with_causes(&error));
                    continue;
                }
            }
            let records = seen.slices.values().flat_map(records);
            for change in roster.replace(records, "it is no ready endpoint any more") {
                if sender.send(change).await.is_err() {
                    return;
                }
            }
        }
    }

    /// True if the set of slices is whole, and may be another.
    fn note(&self, event: watcher::Event<DynamicObject>, seen: &mut Seen) -> bool {
        use watcher::Event::{Apply, Delete, Init, InitApply, InitDone};
        match event {
            Init => seen.listed.clear(),
            InitApply(object) => seen.listed.extend(self.read(object)),
            InitDone => seen.slices = std::mem::take(&mut seen.listed),
            Apply(object) => seen.slices.extend(self.read(object)),
            Delete(object) => drop(seen.slices.remove(&name(&object))),
        }
        seen.listed.is_empty()
    }

    /// A slice by its name; what is none is counted.
    fn read(&self, object: DynamicObject) -> Option<(String, EndpointSlice)> {
        let name = name(&object);
        match object.try_parse() {
            Ok(slice) => Some((name, slice)),
            Err(error) => {
                self.invalid.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(name, %error, "not an EndpointSlice, skipped");
                None
            }
        }
    }
}

/// Slices by name.
#[derive(Default)]
struct Seen {
    slices: BTreeMap<String, EndpointSlice>,
    /// Those of a list that is not whole yet.
    listed: BTreeMap<String, EndpointSlice>,
}

fn name(object: &DynamicObject) -> String {
    object.metadata.name.clone().unwrap_or_default()
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
            let slices = self.slices().await?;
            let (sender, changes) = channel(QUEUE);
            tokio::spawn(self.clone().follow(slices, sender));
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

/// The workers of a slice: those that are ready (not saying counts as ready), and those that finish what they have.
fn records(slice: &EndpointSlice) -> Vec<WorkerRecord> {
    let label = slice.metadata.labels.as_ref().and_then(|labels| labels.get(ROLE_LABEL));
    let role = match label.map(String::as_str) {
        Some("prefill") => WorkerRole::Prefill,
        Some("decode") => WorkerRole::Decode,
        _ => WorkerRole::Both,
    };
    let ports = slice.ports.as_deref().unwrap_or_default();
    let named = ports.iter().find(|port| port.name.as_deref() == Some(PORT_NAME));
    let Some(port) = named.or(ports.first()).and_then(|port| port.port) else { return Vec::new() };
    let record = |endpoint: &Endpoint| {
        let conditions = endpoint.conditions.clone().unwrap_or_default();
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
            kv_bytes_per_token: None,
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
