//! Pairs of workers that do not fit, and addresses where no prefill worker is: refused or done without, never wrong.

use std::path::Path;

use tests::process::Worker;
use tests::serve_binary::repository;
use tests::{Ask, Deployment, Metrics, prompts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

/// Starts a pair that must not work together; `words` have to be in the reason.
async fn refused(deployment: Deployment, words: &[&str]) {
    let cluster = deployment.start_unready().await;
    cluster.front().health_says("unavailable", words).await;
    let (status, _, _) = cluster.client().health().await.expect("the worker answers");
    assert_eq!(status, 503);
    for ask in [Ask::chat("What is kvferry?"), Ask::completion("A").streamed()] {
        let failure = cluster.client().ask(&ask).await.expect_err("the pair does not fit");
        assert_eq!(failure.status(), Some(503), "{failure:?}");
        assert!(failure.message().contains(words[0]), "{failure:?}");
    }
    assert!(cluster.prefill().log().contains("refused a decode worker"));
    let metrics = cluster.prefill().client().settled().await;
    assert_eq!(metrics.prompt_tokens("local_compute"), 0);
}

#[tokio::test]
async fn another_block_size_is_refused_with_both_values() {
    refused(Deployment::split("socket").decode_flags("--block-size 32"), &["block size", "16", "32"]).await;
}

#[tokio::test]
async fn another_kv_dtype_is_refused_with_both_values() {
    let deployment = Deployment::split("socket").decode_flags("--kv-cache-dtype bf16");
    refused(deployment, &["KV dtype", "f32", "bf16"]).await;
}

#[tokio::test]
async fn another_transport_family_is_refused_with_both_values() {
    if tests::cluster::can_test("tcp") {
        let deployment = Deployment::split("tcp").prefill_flags("--kv-transport socket");
        refused(deployment, &["KV transport", "tcp", "socket"]).await;
    }
}

#[tokio::test]
async fn another_model_is_refused() {
    let tiny = repository().join("tests/fixtures/tiny-random");
    let flags = format!("--model {} --served-model-name demo", tiny.display());
    refused(Deployment::split("socket").decode_flags(&flags), &["model differs"]).await;
}

/// A copy of the demo model that differs in one number of its configuration, or in one bit of its weights.
fn altered(dir: &Path, alter: impl Fn(&str, Vec<u8>) -> Vec<u8>) {
    for file in std::fs::read_dir(repository().join("models/demo")).expect("the demo model is there") {
        let file = file.expect("its folder can be read");
        if file.file_type().expect("it has a type").is_file() {
            let name = file.file_name().into_string().expect("an ASCII name");
            let bytes = std::fs::read(file.path()).expect("its files can be read");
            std::fs::write(dir.join(&name), alter(&name, bytes)).expect("the copy can be written");
        }
    }
}

#[tokio::test]
async fn the_same_shape_with_another_rope_theta_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    altered(dir.path(), |name, bytes| match name {
        "config.json" => {
            let mut config: serde_json::Value = serde_json::from_slice(&bytes).expect("JSON");
            config["rope_theta"] = 20_000.into();
            serde_json::to_vec(&config).expect("JSON")
        }
        _ => bytes,
    });
    let flags = format!("--model {} --served-model-name demo", dir.path().display());
    refused(Deployment::split("socket").decode_flags(&flags), &["model differs"]).await;
}

#[tokio::test]
async fn the_same_shape_with_other_weights_is_refused() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    altered(dir.path(), |name, mut bytes| {
        if name == "model.safetensors" {
            // Another checkpoint of the same training differs everywhere.
            let data = 8 + u64::from_le_bytes(bytes[..8].try_into().expect("8 bytes")) as usize;
            bytes[data..].iter_mut().step_by(2).for_each(|byte| *byte ^= 1);
        }
        bytes
    });
    let flags = format!("--model {} --served-model-name demo", dir.path().display());
    refused(Deployment::split("socket").decode_flags(&flags), &["model differs"]).await;
}

/// Starts a decode worker that has no prefill worker at its `--prefill`: it must say so and answer by itself.
async fn without_prefill(url: &str, port: u16, reason: &str) {
    let expected = Deployment::both().start().await.client().answer(&ask()).await;
    let dir = tempfile::tempdir().expect("a temporary folder");
    let flags = format!("--role decode --prefill {url} --port {port}");
    let worker = Worker::start(dir.path(), Deployment::split("socket").launch("decode", &flags, &[])).await;
    worker.health_says("degraded", &[url, reason]).await;
    assert_eq!(worker.client().health().await.expect("the worker answers").0, 200);
    let answer = worker.client().answer(&ask()).await;
    assert_eq!(answer.content(), expected.content());
    let metrics = worker.client().settled().await;
    assert_eq!(metrics.value("kvferry:tickets_opened_total"), 0.0);
}

fn ask() -> Ask {
    Ask::completion(prompts::ids(100, 4))
}

/// A port that was free a moment ago.
async fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
    listener.local_addr().expect("it is bound").port()
}

/// A worker of ours that is no prefill worker is a mistake in the deployment: as with any other misfit nothing is served.
async fn wrong_role(url: &str, port: u16, reason: &str) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let flags = format!("--role decode --prefill {url} --port {port}");
    let worker = Worker::start(dir.path(), Deployment::split("socket").launch("decode", &flags, &[])).await;
    worker.health_says("unavailable", &[url, reason]).await;
    let failure = worker.client().ask(&ask()).await.expect_err("it serves nothing");
    assert_eq!(failure.status(), Some(503));
    assert!(failure.message().contains(reason), "{failure:?}");
}

#[tokio::test]
async fn decode_worker_that_is_its_own_prefill_worker_is_refused() {
    let port = free_port().await;
    wrong_role(&format!("http://127.0.0.1:{port}"), port, "role is decode").await;
}

#[tokio::test]
async fn decode_worker_pointed_at_a_worker_of_role_both_is_refused() {
    let both = Deployment::both().start().await;
    wrong_role(both.client().url(), 0, "role is both").await;
}

/// pd-08, pd-12: a prefill worker that takes shorter prompts is used for those, and says so; longer ones are computed here,
/// or refused at once where KV failures are errors.
#[tokio::test]
async fn prompts_that_the_prefill_worker_does_not_take_are_not_sent_there() {
    let (short, long) = (Ask::completion(prompts::ids(100, 4)), Ask::completion(prompts::ids(300, 5)));
    let expected = Deployment::both().start().await.client().answers(&[short.clone(), long.clone()]).await;
    for rule in ["recompute", "fail"] {
        let deployment = Deployment::split("socket").prefill_flags("--max-model-len 256");
        let cluster = deployment.decode_flags(&format!("--kv-failure {rule}")).start().await;
        let (_, health) = cluster.client().get("/health").await.expect("the worker answers");
        assert!(health.contains("\"max_prompt_tokens\":255"), "{health}");
        assert_eq!(cluster.client().answer(&short).await.content(), expected[0].content());
        for ask in [long.clone(), long.clone().streamed()] {
            match (rule, cluster.client().ask(&ask).await) {
                ("recompute", Ok(answer)) => assert_eq!(answer.content(), expected[1].content()),
                ("fail", Err(failure)) => {
                    assert_eq!(failure.status(), Some(503));
                    assert!(failure.message().contains("300 tokens"), "{failure:?}");
                }
                other => panic!("{other:?}"),
            }
        }
        let metrics = cluster.client().settled().await;
        assert_eq!(metrics.transfers(), 1);
        // What is counted is exported a moment after the answer.
        let counted = |metrics: &Metrics| metrics.value("kvferry:prompts_too_long_for_prefill_total") >= 1.0;
        cluster.client().metrics_when("the prompt is counted", counted).await;
        assert_eq!(metrics.value("kvferry:tickets_failed_total"), 0.0);
        cluster.settled().await;
    }
}

#[tokio::test]
async fn decode_worker_pointed_at_a_closed_port_computes_prompts_itself() {
    let url = format!("http://127.0.0.1:{}", free_port().await);
    without_prefill(&url, 0, "refused").await;
}

#[tokio::test]
async fn decode_worker_pointed_at_another_web_server_computes_prompts_itself() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
    let url = format!("http://{}", listener.local_addr().expect("it is bound"));
    let server = tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.expect("the listener lives");
            // What it asks for does not matter to a server that has nothing.
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream
                .write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
                .await;
        }
    });
    without_prefill(&url, 0, "404").await;
    server.abort();
}

#[tokio::test]
async fn a_prefill_worker_answers_no_completions_and_says_where_to_ask() {
    let cluster = Deployment::split("socket").start().await;
    let failure = cluster.prefill().client().ask(&ask()).await.expect_err("not its job");
    assert_eq!(failure.status(), Some(404));
    assert!(failure.message().contains("--role decode"), "{failure:?}");
}
