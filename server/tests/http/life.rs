//! From loading to draining.

use std::time::Duration;

use engine::event::Event;
use serde_json::{Value, json};
use server::args::Role;
use server::readiness::State;

use crate::support::*;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn before_ready_everything_says_503_and_nothing_is_listed() {
    let harness = start(Setup { loaded: false, ..Setup::default() }).await;
    let reason = "the model is being loaded";
    let (status, answer) = harness.get("/health").await;
    assert_eq!((status, answer), (503, json!({"status": "loading", "reason": reason, "role": "both"})));
    assert_eq!(harness.get("/v1/models").await, (200, json!({"object": "list", "data": []})));
    assert_eq!(harness.get("/v1/models/demo").await.0, 503);
    assert_eq!(harness.get("/live").await.0, 200);
    assert_eq!(harness.get("/ping").await.0, 200);
    assert_eq!(harness.get("/version").await.1, json!({"version": env!("CARGO_PKG_VERSION")}));
    for path in [PATH, "/v1/chat/completions", "/tokenize"] {
        let response = harness.request(path, completion("x", json!({}))).send().await.unwrap();
        assert_eq!(response.headers()["retry-after"], "1");
        let (status, answer) = json_of(response).await;
        assert_eq!((status, &answer["error"]["message"]), (503, &json!(reason)));
    }
}

#[tokio::test]
async fn health_follows_readiness() {
    let harness = answering("ok").await;
    let health = || harness.get("/health");
    assert_eq!(health().await, (200, json!({"status": "ready", "reason": null, "role": "both"})));
    harness.state.readiness.set(State::Degraded("no prefill worker answers".into()));
    let (status, answer) = health().await;
    assert_eq!((status, &answer["reason"]), (200, &json!("no prefill worker answers")));
    assert_eq!(harness.post(PATH, completion("x", json!({}))).await.0, 200);
    harness.state.readiness.set(State::Unavailable("block size is 16 here and 32 there".into()));
    let (status, answer) = health().await;
    assert_eq!((status, &answer["status"]), (503, &json!("unavailable")));
    let (status, answer) = harness.post(PATH, completion("x", json!({}))).await;
    assert_eq!((status, &answer["error"]["message"]), (503, &json!("block size is 16 here and 32 there")));
}

#[tokio::test]
async fn metrics_are_prometheus_text() {
    let harness = answering("ok").await;
    harness.post(PATH, completion("x", json!({}))).await;
    let response = harness.client.get(format!("{}/metrics", harness.url)).send().await.unwrap();
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4");
    let text = response.text().await.unwrap();
    let line = "http_requests_total{handler=\"/v1/completions\",method=\"POST\",status=\"200\"} 1";
    assert!(text.lines().any(|found| found == line), "{text}");
    assert!(text.contains("vllm:num_requests_running{"), "the engine's metrics are there too: {text}");
}

/// A running stream, with its submission; the first token is sent.
async fn running(harness: &mut Harness) -> (engine::handle::Submission, reqwest::Response) {
    let reply = tokio::spawn(harness.request(PATH, completion("x", json!({"stream": true}))).send());
    let submission = harness.submission().await;
    submission.outputs.send(token(harness.ids("a")[0])).unwrap();
    (submission, soon(reply).await.unwrap().unwrap())
}

#[tokio::test]
async fn a_drain_finishes_what_runs_and_refuses_what_is_new() {
    let mut harness = start(Setup::default()).await;
    let (submission, stream) = running(&mut harness).await;
    let whole_reply = tokio::spawn(harness.request(PATH, completion("y", json!({}))).send());
    let second = harness.submission().await;
    harness.signal();
    soon(async {
        while harness.get("/health").await.0 != 503 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(harness.get("/health").await.1["status"], "draining");
    let refused = harness.request(PATH, completion("z", json!({}))).send().await.unwrap();
    assert_eq!((refused.status().as_u16(), refused.headers()["retry-after"].to_str().unwrap()), (503, "1"));
    answer(&second, &harness.ids("done"));
    assert_eq!(soon(whole_reply).await.unwrap().unwrap().status(), 200);
    answer(&submission, &harness.ids("b"));
    let chunks = whole(split_events(&soon(stream.text()).await.unwrap()));
    assert_eq!(joined(&chunks, 0), "ab");
    harness.stopped().await;
}

#[tokio::test]
async fn what_outlives_the_grace_period_ends_with_an_error() {
    let mut harness = start(Setup { grace: Duration::from_millis(50), ..Setup::default() }).await;
    let (submission, stream) = running(&mut harness).await;
    let whole_reply = tokio::spawn(harness.request(PATH, completion("y", json!({}))).send());
    let second = harness.submission().await;
    harness.signal();
    let events = split_events(&soon(stream.text()).await.unwrap());
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], 503);
    let (status, _) = json_of(soon(whole_reply).await.unwrap().unwrap()).await;
    assert_eq!(status, 503);
    let mut aborted = [harness.abort().await, harness.abort().await];
    aborted.sort();
    assert_eq!(aborted, [submission.id, second.id]);
    harness.stopped().await;
}

#[tokio::test]
async fn an_idle_server_stops_at_once_even_with_open_connections() {
    let mut harness = answering("ok").await;
    assert_eq!(harness.post(PATH, completion("x", json!({}))).await.0, 200);
    harness.signal();
    harness.stopped().await;
}

#[tokio::test]
async fn every_role_resets_its_prefix_cache() {
    for role in [Role::Both, Role::Prefill, Role::Decode] {
        let mut harness = start(Setup { role, ..Setup::default() }).await;
        let response =
            harness.client.post(format!("{}/reset_prefix_cache", harness.url)).send().await.unwrap();
        assert_eq!(json_of(response).await, (200, json!({})));
        assert!(matches!(harness.event().await, Event::ResetPrefixCache));
    }
    let harness = start(Setup { loaded: false, ..Setup::default() }).await;
    assert_eq!(harness.post("/reset_prefix_cache", json!({})).await.0, 503);
    assert_eq!(harness.get("/reset_prefix_cache").await.0, 405);
}
