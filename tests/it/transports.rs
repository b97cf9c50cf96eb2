//! What is asked for with --kv-transport, what UCX is told by its own variables, and what is really used.

use std::time::Duration;

use serde_json::Value;
use tests::process::Worker;
use tests::{Ask, Cluster, Deployment, prompts};

async fn details(cluster: &Cluster) -> Value {
    let (_, text) = cluster.client().get("/health").await.expect("the worker answers");
    let health: Value = serde_json::from_str(&text).expect("health is JSON");
    health["kv_transport"].clone()
}

/// The link's self-test, as `/health` shows it.
fn only_link(details: &Value) -> &Value {
    let links = details["links"].as_object().expect("links by address");
    assert_eq!(links.len(), 1, "{details}");
    links.values().next().expect("one link")
}

async fn ends(deployment: Deployment, words: &[&str]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let launch = deployment.launch("prefill", "--role prefill", &[]);
    let (status, log) = Worker::run_to_end(dir.path(), launch).await;
    assert!(!status.success(), "{status}: {log}");
    for word in words {
        assert!(log.contains(word), "{word:?} is not in {log}");
    }
}

#[tokio::test]
async fn an_unknown_transport_ends_the_process_and_lists_those_there_are() {
    ends(
        Deployment::split("pigeon"),
        &["pigeon", "auto", "tcp", "shm", "cuda_ipc", "rdma", "ucx:tcp", "mmap", "socket"],
    )
    .await;
}

/// pd-13: lists that leave UCX without active messages.
#[tokio::test]
async fn pd_13_a_list_of_transports_without_active_messages_ends_the_process_and_says_what_to_add() {
    if !tests::cluster::can_test("tcp") {
        return;
    }
    for list in ["cuda_ipc", "cuda_ipc,cuda_copy", "nonsense"] {
        ends(Deployment::split("tcp").env("UCX_TLS", list), &[list, "active messages", "add tcp"]).await;
    }
}

/// pd-13: lists that work, and what is said of the lane when they leave out what was asked for.
#[tokio::test]
async fn pd_13_the_lane_that_is_used_is_named_and_a_wrong_one_is_warned_about() {
    if !tests::cluster::can_test("shm") {
        return;
    }
    for (asked, list, lane, complains) in [
        ("shm", "", "cma/", false),
        ("shm", "cuda_ipc,cuda_copy,tcp", "tcp/", true),
        ("tcp", "tcp", "tcp/", false),
        ("shm", "^cuda_ipc,sm", "tcp/", true),
    ] {
        let cluster = Deployment::split(asked).env("UCX_TLS", list).start().await;
        cluster.client().answer(&Ask::completion(prompts::ids(100, 1))).await;
        cluster.settled().await;
        assert_eq!(cluster.client().metrics().await.transfers(), 1, "UCX_TLS={list}");
        let details = details(&cluster).await;
        let link = only_link(&details);
        let used = link["write"]["lane"].as_str().expect("UCX says which");
        assert!(used.starts_with(lane), "{used} with UCX_TLS={list}");
        let complaints = link["complaints"].as_array().expect("a list");
        assert_eq!(!complaints.is_empty(), complains, "UCX_TLS={list}: {details}");
        let log = cluster.front().log();
        assert_eq!(log.contains("does not do what was asked"), complains, "{log}");
    }
}

#[tokio::test]
async fn a_lane_that_was_not_asked_for_is_an_error_when_strict() {
    if !tests::cluster::can_test("shm") {
        return;
    }
    let deployment = Deployment::split("shm").env("UCX_TLS", "tcp").decode_flags("--kv-transport-strict");
    let cluster = deployment.start_unready().await;
    let words = ["--kv-transport-strict", "shm was asked for", "tcp/"];
    cluster.front().health_says("unavailable", &words).await;
}

/// A worker whose pool cannot be mapped is served all the same, over what its lane says.
#[tokio::test]
async fn a_pool_that_cannot_be_mapped_gets_its_bytes_over_tcp_and_is_complained_about() {
    let deployment = || Deployment::split("socket").decode_flags("--kv-transport mmap");
    let cluster = deployment().start().await;
    cluster.client().answer(&Ask::completion(prompts::ids(100, 1))).await;
    cluster.settled().await;
    assert_eq!(cluster.client().metrics().await.transfers(), 1);
    let details = details(&cluster).await;
    let link = only_link(&details);
    assert_eq!(link["read"]["lane"], "tcp/socket (copy-in, copy-out)", "{details}");
    assert!(!link["complaints"].as_array().expect("a list").is_empty(), "{details}");
    assert!(cluster.front().log().contains("is not mapped: its bytes go over TCP"));
    drop(cluster);

    let strict = deployment().decode_flags("--kv-transport-strict").start_unready().await;
    strict.front().health_says("unavailable", &["--kv-transport-strict", "mmap was asked for", "tcp/"]).await;
}

#[tokio::test]
async fn mapped_pools_are_written_and_read_over_the_lane_that_was_asked_for() {
    for direction in ["push", "pull"] {
        let flags = format!("--kv-transport-strict --kv-direction {direction}");
        let cluster = Deployment::split("mmap").decode_flags(&flags).start().await;
        cluster.client().answer(&Ask::completion(prompts::ids(100, 1))).await;
        cluster.settled().await;
        assert_eq!(cluster.client().metrics().await.transfers(), 1, "{direction}");
        let details = details(&cluster).await;
        let link = only_link(&details);
        for way in ["write", "read"] {
            assert_eq!(link[way]["lane"], "mmap/memory (one copy)", "{details}");
        }
    }
}

#[tokio::test]
async fn the_self_test_of_a_link_and_each_transfer_are_exported() {
    let cluster = Deployment::split("socket").start().await;
    cluster.client().answer(&Ask::completion(prompts::ids(100, 1))).await;
    cluster.settled().await;
    let details = details(&cluster).await;
    assert_eq!((&details["asked"], &details["transport"]), (&"socket".into(), &"socket".into()));
    let link = only_link(&details);
    assert!(link["round_trip_us"].as_f64().expect("a number") > 0.0, "{details}");
    for direction in ["write", "read"] {
        let rate = link[direction]["rates"]["1_blocks_gb_per_s"].as_f64();
        assert!(rate.is_some_and(|rate| rate > 0.0), "{details}");
    }
    let decode = cluster.client().metrics().await;
    assert!(decode.value("kvferry:kv_probe_round_trip_seconds") > 0.0);
    assert!(decode.labelled("kvferry:kv_probe_gigabytes_per_second", "direction=\"read\"") > 0.0);
    let handoff = decode.value("vllm:nixl_bytes_transferred_sum");
    let prefill = cluster.prefill().client().metrics().await;
    assert!(handoff > 0.0);
    // The prefill worker posted exactly what came, and nothing of the self-test counts.
    assert_eq!(prefill.labelled("kvferry:kv_transferred_bytes_total", "direction=\"write\""), handoff);
    assert_eq!(prefill.value("vllm:nixl_bytes_transferred_sum"), handoff);
    assert_eq!(decode.value("vllm:nixl_xfer_time_seconds_count"), 1.0);
    assert_eq!(decode.value("vllm:nixl_post_time_seconds_count"), 1.0);
}

#[tokio::test]
async fn where_a_prompts_kv_came_from_is_exported_under_vllms_names() {
    let cluster = Deployment::split("socket").start().await;
    cluster
        .client()
        .answer(&Ask::completion(prompts::ids(100, 1)).with("n", 2).with("temperature", 1.0))
        .await;
    cluster.settled().await;
    let (decode, prefill) = (cluster.client().metrics().await, cluster.prefill().client().metrics().await);
    assert_eq!(
        (decode.value("vllm:request_params_n_count"), decode.value("vllm:request_params_n_sum")),
        (1.0, 2.0)
    );
    let cached = |source| {
        decode.labelled("vllm:prompt_tokens_cached_by_source_total", &format!("source=\"{source}\""))
    };
    assert_eq!(cached("p2p"), decode.prompt_tokens("external_kv_transfer") as f64);
    assert!(cached("p2p") >= 100.0, "both choices came, or the second found the first one's");
    assert_eq!(cached("p2p") + cached("device"), 200.0);
    assert_eq!(decode.value("vllm:request_prefill_kv_computed_tokens_sum"), 0.0);
    assert_eq!(decode.value("vllm:request_prefill_kv_computed_tokens_count"), 2.0);
    assert!(prefill.prompt_tokens("local_compute") >= 100);
    for stage in ["waiting_to_start", "in_progress", "completed_waiting"] {
        let label = format!("stage=\"{stage}\"");
        assert_eq!(decode.labelled("vllm:num_requests_kv_fetch_by_stage", &label), 0.0, "{stage}");
    }
}

#[tokio::test]
async fn a_prompt_that_is_cached_whole_is_no_transfer() {
    let cluster = Deployment::split("socket").start().await;
    let ask = Ask::completion(prompts::ids(100, 1));
    for _ in 0..2 {
        cluster.client().answer(&ask).await;
        cluster.settled().await;
    }
    assert_eq!(cluster.client().metrics().await.transfers(), 1);
    assert_eq!(cluster.prefill().client().metrics().await.transfers(), 1);
}

#[tokio::test]
async fn the_log_has_vllms_line() {
    let cluster = Deployment::split("socket").start().await;
    cluster.client().answer(&Ask::completion(prompts::ids(100, 1))).await;
    cluster.settled().await;
    let said = || {
        cluster.front().log().contains("KV Transfer metrics: Num successful transfers=1, Avg xfer time (ms)=")
    };
    let line = || async { said().then_some(()).ok_or_else(|| "no such line".to_owned()) };
    tests::wait::until(Duration::from_secs(30), "the line of every ten seconds", line).await;
}

/// The cost of NIXL beside UCX alone is `bench transfer`'s; that KV and text are the same is here.
#[tokio::test]
async fn ucx_without_nixl_serves_the_same_text() {
    if !tests::cluster::can_test("tcp") {
        return;
    }
    let ask = Ask::completion(prompts::ids(300, 5)).tokens(12);
    let expected = Deployment::both().start().await.client().answer(&ask).await;
    for (transport, direction) in
        [("ucx:tcp", "push"), ("ucx:shm", "push"), ("ucx:shm", "pull"), ("ucx", "auto")]
    {
        let flags = format!("--kv-direction {direction}");
        let cluster = Deployment::split(transport).decode_flags(&flags).start().await;
        let answer = cluster.client().answer(&ask).await;
        assert_eq!(answer.content(), expected.content(), "{transport} {direction}");
        cluster.settled().await;
        assert_eq!(cluster.client().metrics().await.transfers(), 1, "{transport} {direction}");
    }
}
