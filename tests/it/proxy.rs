//! A proxy that knows nothing of us: it speaks vLLM's `kv_transfer_params` protocol (prefill first, then decode with the
//! parameters that came back) and drives our two workers, which are not told of each other.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tests::process::Worker;
use tests::{Answer, Ask, Client, Deployment, prompts};
use tokio::net::TcpListener;

/// Where the proxy sends its two requests.
struct Backends {
    prefill: String,
    decode: String,
    http: reqwest::Client,
}

/// The first leg, as vLLM's example proxy makes it: one token, not streamed, whichever name the limit has.
fn for_prefill(body: &Value) -> Value {
    let mut first = body.clone();
    first["kv_transfer_params"] = json!({
        "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
        "remote_block_ids": null, "remote_host": null, "remote_port": null,
    });
    first["stream"] = false.into();
    first["max_tokens"] = 1.into();
    let fields = first.as_object_mut().expect("a request is an object");
    if fields.contains_key("max_completion_tokens") {
        fields.insert("max_completion_tokens".into(), 1.into());
    }
    fields.remove("stream_options");
    fields.remove("min_tokens");
    first
}

async fn forward(
    State(backends): State<Arc<Backends>>,
    uri: Uri,
    headers: HeaderMap,
    axum::Json(mut body): axum::Json<Value>,
) -> Response {
    let id = headers.get("x-request-id").and_then(|id| id.to_str().ok()).unwrap_or("proxied").to_owned();
    let post = |base: &str, body: &Value| {
        let request = backends.http.post(format!("{base}{}", uri.path())).header("X-Request-Id", &id);
        request.header("Authorization", "Bearer none").json(body).send()
    };
    let gateway = |error: reqwest::Error| (StatusCode::BAD_GATEWAY, error.to_string()).into_response();
    let first = match post(&backends.prefill, &for_prefill(&body)).await {
        Ok(first) if first.status() == 200 => {
            first.json::<Value>().await.expect("the prefill worker sends JSON")
        }
        Ok(first) => return relay(first),
        Err(error) => return gateway(error),
    };
    let params = &first["kv_transfer_params"];
    if params.as_object().is_some_and(|params| !params.is_empty()) {
        body["kv_transfer_params"] = params.clone();
    }
    match post(&backends.decode, &body).await {
        Ok(second) => relay(second),
        Err(error) => gateway(error),
    }
}

fn relay(response: reqwest::Response) -> Response {
    let status = response.status().as_u16();
    let kind = response.headers().get("content-type").cloned();
    let mut relayed = Response::new(Body::from_stream(response.bytes_stream()));
    *relayed.status_mut() = StatusCode::from_u16(status).expect("a status");
    relayed.headers_mut().extend(kind.map(|kind| (axum::http::header::CONTENT_TYPE, kind)));
    relayed
}

/// Two workers that know nothing of each other, and a proxy before them.
struct Pair {
    prefill: Worker,
    decode: Worker,
    proxy: Client,
    _dir: tempfile::TempDir,
}

impl Pair {
    async fn start(deployment: Deployment) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let prefill = deployment.start_prefill(dir.path()).await;
        let decode = deployment.start_decode(dir.path(), "").await;
        decode.health_is("ready").await;
        let backends = Backends {
            prefill: prefill.client().url().to_owned(),
            decode: decode.client().url().to_owned(),
            http: reqwest::Client::builder().no_proxy().build().expect("a client"),
        };
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
        let proxy = Client::new(listener.local_addr().expect("it is bound").port());
        let router = Router::new().fallback(forward).with_state(Arc::new(backends));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { prefill, decode, proxy, _dir: dir }
    }

    async fn settled(&self) {
        self.decode.client().settled().await;
        self.prefill.client().settled().await;
    }

    /// What the prefill worker answers to the proxy's first leg.
    async fn keep(&self, ask: &Ask) -> Value {
        let (status, first) =
            self.prefill.client().post(ask.path(), &for_prefill(&ask.json())).await.expect("an answer");
        assert_eq!(status, 200, "{first}");
        first["kv_transfer_params"].clone()
    }

    /// Status and body of the second leg.
    async fn fetch(&self, ask: &Ask, params: &Value) -> (u16, Value) {
        let body = ask.clone().with("kv_transfer_params", params.clone()).json();
        self.decode.client().post(ask.path(), &body).await.expect("an answer")
    }
}

/// The same text, and the same counts: what a cache did is another matter.
fn same(answers: &[Answer], expected: &[Answer]) {
    for (index, (answer, expected)) in answers.iter().zip(expected).enumerate() {
        assert_eq!(answer.content(), expected.content(), "request {index}");
    }
}

async fn drives_our_workers(transport: &str) {
    if !tests::cluster::can_test(transport) {
        return;
    }
    let plain = prompts::varied();
    let streamed: Vec<_> = plain.iter().map(|ask| ask.clone().streamed().salted("streamed")).collect();
    let asks = [plain, streamed].concat();
    let expected = Deployment::both().start().await.client().answers(&asks).await;
    let pair = Pair::start(Deployment::split(transport).decode_flags("--kv-checksum")).await;
    same(&pair.proxy.answers(&asks).await, &expected);

    pair.settled().await;
    let (prefill, decode) = (pair.prefill.client().metrics().await, pair.decode.client().metrics().await);
    let prompt: u64 = expected.iter().map(|answer| answer.usage.prompt).sum();
    let count = asks.len() as u64;
    assert_eq!(prefill.prompt_tokens("local_compute") + prefill.prompt_tokens("local_cache_hit"), prompt);
    assert_eq!(prefill.value("vllm:generation_tokens_total") as u64, count, "one token each");
    // One prompt token each is computed for the first token of the answer; all others were read or found.
    assert_eq!(decode.prompt_tokens("local_compute"), count);
    let had = decode.prompt_tokens("external_kv_transfer") + decode.prompt_tokens("local_cache_hit");
    assert_eq!(had, prompt - count);
    assert_eq!(decode.value("kvferry:tickets_failed_total"), 0.0);
    assert_eq!(decode.value("kvferry:kv_checksum_mismatches_total"), 0.0);
    assert_eq!(prefill.value("vllm:nixl_num_kv_expired_reqs_total"), 0.0);
}

#[tokio::test]
async fn a_proxy_of_vllms_kind_drives_our_workers_over_sockets() {
    drives_our_workers("socket").await;
}

#[tokio::test]
async fn a_proxy_of_vllms_kind_drives_our_workers_over_nixl_tcp() {
    drives_our_workers("tcp").await;
}

#[tokio::test]
async fn a_proxy_of_vllms_kind_drives_our_workers_over_nixl_shm() {
    drives_our_workers("shm").await;
}

/// A proxy that clamps only one of the two names must not have the prefill worker run the whole answer.
#[tokio::test]
async fn the_prefill_worker_makes_one_token_whatever_the_limit_is_called() {
    let pair = Pair::start(Deployment::split("socket")).await;
    let params = json!({ "do_remote_decode": true });
    for (index, field) in ["max_tokens", "max_completion_tokens"].into_iter().enumerate() {
        let body = json!({
            "model": "demo", "messages": [{ "role": "user", "content": "Count." }], field: 500, "min_tokens": 400,
            "ignore_eos": true, "stop": ["never"], "temperature": 0, "kv_transfer_params": params,
        });
        let (status, answer) =
            pair.prefill.client().post("/v1/chat/completions", &body).await.expect("an answer");
        assert_eq!((status, answer["usage"]["completion_tokens"].as_u64()), (200, Some(1)), "{answer}");
        assert_eq!(answer["kv_transfer_params"]["do_remote_prefill"], true);
        let generated = |metrics: &tests::Metrics| metrics.value("vllm:generation_tokens_total");
        let expected = index as f64 + 1.0;
        let metrics = pair.prefill.client().metrics_when("one token", |m| generated(m) >= expected).await;
        assert_eq!(generated(&metrics), expected);
    }
}

/// The answer has every field that vLLM's has, with its type.
#[tokio::test]
async fn the_parameters_have_vllms_fields() {
    let pair = Pair::start(Deployment::split("socket")).await;
    let params = pair.keep(&Ask::completion(prompts::ids(100, 1))).await;
    assert_eq!(params["remote_block_ids"][0].as_array().map(Vec::len), Some(7));
    assert_eq!(params["remote_num_tokens"], 100);
    assert_eq!(params["remote_port"], pair.prefill.port());
    assert_eq!((&params["remote_host"], &params["transfer_mode"]), (&json!("127.0.0.1"), &json!("pull")));
    for field in ["remote_engine_id", "remote_request_id"] {
        assert!(params[field].as_str().is_some_and(|text| !text.is_empty()), "{params}");
    }
    assert!(params["remote_blocks_expiry_time"].as_f64().is_some_and(|time| time > 1e9));
}

/// vllm#27083: what cannot be fetched is never computed again in silence.
#[tokio::test]
async fn parameters_that_cannot_be_obeyed_are_loud() {
    let pair = Pair::start(Deployment::split("socket")).await;
    let ask = Ask::completion(prompts::ids(100, 1));
    let params = pair.keep(&ask).await;
    let with = |field: &str, value: Value| {
        let mut params = params.clone();
        params[field] = value;
        params
    };
    for field in ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
        let (status, body) = pair.fetch(&ask, &with(field, Value::Null)).await;
        assert_eq!(status, 400, "{body}");
        assert_eq!(body["error"]["param"], format!("kv_transfer_params.{field}"));
    }
    // Another process at the address, or one that is no prefill worker.
    let (status, body) = pair.fetch(&ask, &with("remote_engine_id", "nope".into())).await;
    assert!(status == 503 && body["error"]["message"].as_str().is_some_and(|m| m.contains("nope")), "{body}");
    let mut decode = with("remote_engine_id", "nope".into());
    decode["remote_port"] = pair.decode.port().into();
    let (status, body) = pair.fetch(&ask, &decode).await;
    assert!(
        status == 503 && body["error"]["message"].as_str().is_some_and(|m| m.contains("role is decode")),
        "{body}"
    );
    // A role that has no part in it.
    for worker in [&pair.prefill, &pair.decode] {
        let wrong = if worker.port() == pair.prefill.port() {
            params.clone()
        } else {
            json!({ "do_remote_decode": true })
        };
        let body = ask.clone().with("kv_transfer_params", wrong).json();
        let (status, answer) = worker.client().post(ask.path(), &body).await.expect("an answer");
        assert_eq!(status, 400, "{answer}");
    }
    // Another prompt, and the right one; then it is gone.
    let other = Ask::completion(prompts::ids(100, 2));
    let (status, body) = pair.fetch(&other, &params).await;
    assert_eq!((status, &body["kv_transfer_params"]), (200, &json!({ "recomputed": "refused" })), "{body}");
    let (status, body) = pair.fetch(&ask, &params).await;
    assert_eq!((status, &body["kv_transfer_params"]), (200, &Value::Null), "{body}");
    let (status, body) = pair.fetch(&ask, &params).await;
    assert_eq!((status, &body["kv_transfer_params"]), (200, &json!({ "recomputed": "refused" })), "{body}");
    let metrics = pair.decode.client().metrics().await;
    assert_eq!(metrics.labelled("kvferry:ticket_faults_total", "reason=\"refused\""), 2.0);
    pair.settled().await;
}

/// What nobody fetches within the lease is given up; fetching it then is an error or computed here, as the flag says.
#[tokio::test]
async fn a_prompt_that_nobody_fetches_is_kept_for_the_lease_only() {
    for (rule, status) in [("recompute", 200), ("fail", 503)] {
        let deployment = Deployment::split("socket").prefill_flags("--kv-lease-secs 0.2");
        let pair = Pair::start(deployment.decode_flags(&format!("--kv-failure {rule}"))).await;
        let ask = Ask::completion(prompts::ids(100, 1));
        let params = pair.keep(&ask).await;
        let expired = |m: &tests::Metrics| m.value("vllm:nixl_num_kv_expired_reqs_total") == 1.0;
        pair.prefill.client().metrics_when("the lease to run out", expired).await;
        let (found, body) = pair.fetch(&ask, &params).await;
        assert_eq!(found, status, "{body}");
        assert!(body.to_string().contains(if status == 200 { "refused" } else { "lease ran out" }), "{body}");
        pair.settled().await;
    }
}

/// A prefill worker that died between the two legs: its successor at the address is another engine.
#[tokio::test]
async fn a_prefill_worker_that_restarted_is_not_taken_for_the_one_that_kept_the_kv() {
    let mut pair = Pair::start(Deployment::split("socket")).await;
    let ask = Ask::completion(prompts::ids(100, 1));
    let params = pair.keep(&ask).await;
    pair.prefill.kill();
    let (status, body) = pair.fetch(&ask, &params).await;
    assert_eq!((status, &body["kv_transfer_params"]["recomputed"]), (200, &json!("link_lost")), "{body}");
    pair.prefill.restart().await;
    pair.prefill.health_is("ready").await;
    let (status, body) = pair.fetch(&ask, &params).await;
    assert!(
        status == 503 && body["error"]["message"].as_str().is_some_and(|m| m.contains("the engine at")),
        "{body}"
    );
    let params = pair.keep(&ask).await;
    let (status, body) = pair.fetch(&ask, &params).await;
    assert_eq!((status, &body["kv_transfer_params"]), (200, &Value::Null), "{body}");
    pair.settled().await;
}
