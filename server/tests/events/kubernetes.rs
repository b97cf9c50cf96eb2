//! Discovery through an API server that answers as Kubernetes 1.31 does (objects recorded from one, shortened).

use std::collections::VecDeque;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::{Query, State};
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use server::discovery::kubernetes::KubernetesDiscovery;
use server::discovery::{Change, Discovery, WorkerRecord};
use server::router::WorkerRole;
use tokio::sync::mpsc::{Receiver, UnboundedReceiver, UnboundedSender, unbounded_channel};

use crate::support::until;

type Params = std::collections::HashMap<String, String>;

#[derive(Default)]
struct Api {
    /// Answers to lists, in order; the last one again and again.
    lists: Mutex<VecDeque<Value>>,
    /// The open watches' ends.
    watches: Mutex<Vec<UnboundedSender<String>>>,
    asked: Mutex<Vec<Params>>,
    forbidden: AtomicBool,
}

impl Api {
    fn say(&self, kind: &str, object: Value) {
        let line = json!({ "type": kind, "object": object }).to_string() + "\n";
        let watches = self.watches.lock().unwrap();
        watches.last().expect("nobody watches").send(line).unwrap();
    }

    fn watching(&self) -> usize {
        self.watches.lock().unwrap().len()
    }
}

async fn slices(State(api): State<Arc<Api>>, Query(params): Query<Params>, headers: HeaderMap) -> Response {
    let forbidden = api.forbidden.load(Ordering::Relaxed);
    if forbidden || headers.get("authorization").is_none_or(|value| value != "Bearer secret") {
        let said = failure(403, "Forbidden", "endpointslices is forbidden");
        return (StatusCode::FORBIDDEN, said.to_string()).into_response();
    }
    api.asked.lock().unwrap().push(params.clone());
    if !params.contains_key("watch") {
        let mut lists = api.lists.lock().unwrap();
        let list = if lists.len() > 1 { lists.pop_front().unwrap() } else { lists[0].clone() };
        return list.to_string().into_response();
    }
    let (sender, receiver): (_, UnboundedReceiver<String>) = unbounded_channel();
    api.watches.lock().unwrap().push(sender);
    let stream = futures_util::stream::unfold(receiver, async |mut receiver| {
        let line = receiver.recv().await?;
        Some((Ok::<_, std::io::Error>(line), receiver))
    });
    axum::body::Body::from_stream(stream).into_response()
}

/// What the server says when it refuses.
fn failure(code: u16, reason: &str, message: &str) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "reason": reason, "message": message, "code": code,
    })
}

fn slice(name: &str, role: &str, endpoints: Value) -> Value {
    json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "addressType": "IPv4",
        "metadata": {
            "name": name, "namespace": "llm", "resourceVersion": "8123",
            "labels": { "kubernetes.io/service-name": "workers", "kvferry.io/role": role },
        },
        "endpoints": endpoints,
        "ports": [
            { "name": "metrics", "protocol": "TCP", "port": 9000 },
            { "name": "http", "protocol": "TCP", "port": 8000, "appProtocol": "http" },
        ],
    })
}

fn endpoint(address: &str, pod: &str, ready: bool, terminating: bool) -> Value {
    json!({
        "addresses": [address],
        "conditions": { "ready": ready, "serving": ready || terminating, "terminating": terminating },
        "nodeName": "node-1",
        "targetRef": { "kind": "Pod", "namespace": "llm", "name": pod, "uid": format!("uid-of-{pod}") },
    })
}

fn list(version: &str, items: Value) -> Value {
    json!({
        "kind": "EndpointSliceList", "apiVersion": "discovery.k8s.io/v1",
        "metadata": { "resourceVersion": version }, "items": items,
    })
}

/// Where `api` answers, to whoever has the token in the file.
async fn server(api: &Arc<Api>, token: &Path) -> kube::Config {
    let mut config = kube::Config::new(serve(api.clone()).await.parse().unwrap());
    config.auth_info.token_file = Some(token.display().to_string());
    config
}

async fn serve(api: Arc<Api>) -> String {
    let path = "/apis/discovery.k8s.io/v1/namespaces/llm/endpointslices";
    let routes = axum::Router::new().route(path, axum::routing::get(slices)).with_state(api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move { axum::serve(listener, routes).await });
    url
}

/// The next change, which comes soon or never.
async fn next(changes: &mut Receiver<Change>) -> Option<Change> {
    tokio::time::timeout(Duration::from_secs(20), changes.recv()).await.expect("no change came")
}

fn joined(change: Option<Change>) -> WorkerRecord {
    match change {
        Some(Change::Joined(record)) => record,
        other => panic!("{other:?}"),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ready_endpoints_are_workers() {
    let api = Arc::new(Api::default());
    let pods = json!([endpoint("10.0.0.1", "w-1", true, false), endpoint("10.0.0.2", "w-2", false, false)]);
    api.lists.lock().unwrap().push_back(list("100", json!([slice("s1", "decode", pods)])));
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "secret").unwrap();
    let selector = "kubernetes.io/service-name=workers".to_owned();
    let server = server(&api, &token).await;
    let discovery = KubernetesDiscovery::new(Some(server), Some("llm".into()), selector.clone());
    let mut changes = discovery.watch().await.unwrap();

    let first = joined(next(&mut changes).await);
    assert_eq!((first.worker_id.as_str(), first.url.as_str()), ("w-1", "http://10.0.0.1:8000"));
    assert_eq!((first.role, first.draining), (WorkerRole::Decode, false));
    until("it watches", || api.watching() == 1).await;
    let asked = api.asked.lock().unwrap().clone();
    assert_eq!((asked[1]["resourceVersion"].as_str(), &asked[1]["labelSelector"]), ("100", &selector));

    // The second becomes ready, the first terminates and drains, then is gone.
    let pods = json!([endpoint("10.0.0.1", "w-1", true, false), endpoint("10.0.0.2", "w-2", true, false)]);
    api.say("MODIFIED", slice("s1", "decode", pods));
    assert_eq!(joined(next(&mut changes).await).worker_id, "w-2");
    let pods = json!([endpoint("10.0.0.1", "w-1", false, true), endpoint("10.0.0.2", "w-2", true, false)]);
    api.say("MODIFIED", slice("s1", "decode", pods));
    let Some(Change::Changed(draining)) = next(&mut changes).await else { panic!("it does not drain") };
    assert_eq!((draining.incarnation, draining.draining), (first.incarnation, true));
    api.say("BOOKMARK", json!({
        "kind": "EndpointSlice", "apiVersion": "discovery.k8s.io/v1", "metadata": { "resourceVersion": "200" },
    }));
    api.say("MODIFIED", slice("s1", "decode", json!([endpoint("10.0.0.2", "w-2", true, false)])));
    assert!(
        matches!(next(&mut changes).await, Some(Change::Left { worker, .. }) if worker == first.incarnation)
    );

    // Something that is no slice is counted; the others stay as they are.
    api.say("ADDED", json!({ "metadata": { "name": "s9", "resourceVersion": "201" }, "endpoints": "none" }));
    // Null lists are empty ones, an IPv6 address gets its brackets, another role its own.
    api.say("ADDED", slice("s2", "prefill", Value::Null));
    api.say("MODIFIED", slice("s2", "prefill", json!([{ "addresses": ["fd00::1"] }])));
    let third = joined(next(&mut changes).await);
    assert_eq!((third.url.as_str(), third.role), ("http://[fd00::1]:8000", WorkerRole::Prefill));
    assert_eq!(discovery.invalid_records(), 1);
    api.say("DELETED", slice("s2", "prefill", Value::Null));
    assert!(
        matches!(next(&mut changes).await, Some(Change::Left { worker, .. }) if worker == third.incarnation)
    );

    // The server has forgotten the version: list again. A pod of the same name at another address is another worker.
    let pods = json!([endpoint("10.0.0.3", "w-2", true, false)]);
    *api.lists.lock().unwrap() = VecDeque::from([list("300", json!([slice("s1", "decode", pods)]))]);
    api.say("ERROR", failure(410, "Expired", "too old resource version"));
    assert!(matches!(next(&mut changes).await, Some(Change::Left { .. })));
    assert_eq!(joined(next(&mut changes).await).url, "http://10.0.0.3:8000");
}

/// Without the right to list, the reason is in the log, and the watch goes on trying.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refusal_is_no_end() {
    let api = Arc::new(Api::default());
    let pods = json!([endpoint("10.0.0.1", "w-1", true, false)]);
    api.lists.lock().unwrap().push_back(list("1", json!([slice("s1", "both", pods)])));
    let dir = tempfile::tempdir().unwrap();
    let token = dir.path().join("token");
    std::fs::write(&token, "secret").unwrap();
    api.forbidden.store(true, Ordering::Relaxed);
    // The namespace is that of the configuration.
    let mut server = server(&api, &token).await;
    server.default_namespace = "llm".into();
    let discovery = KubernetesDiscovery::new(Some(server), None, String::new());
    let mut changes = discovery.watch().await.unwrap();
    assert!(tokio::time::timeout(Duration::from_millis(300), changes.recv()).await.is_err());
    // A role is bound to the account.
    api.forbidden.store(false, Ordering::Relaxed);
    assert_eq!(joined(next(&mut changes).await).worker_id, "w-1");
}
