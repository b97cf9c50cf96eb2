//! Both workers on the same cores, under load: transfers make progress although the workers compete with each other, and
//! neither starves.

use tests::cluster::can_test;
use tests::process::first_cores;
use tests::{Ask, Deployment, prompts};

/// Streams go on while prompts are computed and moved: everything is asked at the same time.
async fn transfers_complete(transport: &str, direction: &str, cores: usize) {
    if !can_test(transport) {
        return;
    }
    let short = prompts::random(40, 200, 12, 8);
    let long = (0..4).map(|seed| Ask::completion(prompts::ids(700, 900 + seed)).tokens(100).streamed());
    let asks: Vec<_> = short.into_iter().chain(long).collect();
    // Texts do not depend on the threads that compute them.
    let threads = format!("--threads {cores} --num-kv-blocks 1024");
    let expected = Deployment::both().flags(&threads).start().await.client().answers(&asks).await;
    let deployment = Deployment::split(transport).flags(&threads).on_cores(&first_cores(cores));
    let cluster = deployment.decode_flags(&format!("--kv-direction {direction}")).start().await;
    let client = cluster.client();
    let answers = client.answers(&asks).await;
    for (answer, expected) in answers.iter().zip(&expected) {
        assert_eq!(answer.content(), expected.content());
    }
    cluster.settled().await;
    let metrics = client.metrics().await;
    let needed =
        asks.len() as u64 - answers.iter().filter(|answer| answer.usage.completion == 1).count() as u64;
    assert_eq!(metrics.transfers(), needed, "every prompt's KV came from the prefill worker");
    assert_eq!(metrics.value("kvferry:tickets_failed_total"), 0.0);
}

#[tokio::test]
async fn socket_transfers_complete_on_one_core() {
    transfers_complete("socket", "push", 1).await;
}

#[tokio::test]
async fn mmap_transfers_complete_on_one_core() {
    transfers_complete("mmap", "push", 1).await;
    transfers_complete("mmap", "pull", 1).await;
}

#[tokio::test]
async fn nixl_tcp_transfers_complete_on_one_core() {
    transfers_complete("tcp", "push", 1).await;
}

#[tokio::test]
async fn nixl_shm_transfers_complete_on_one_core() {
    transfers_complete("shm", "push", 1).await;
}

#[tokio::test]
async fn nixl_tcp_reads_complete_on_one_core() {
    transfers_complete("tcp", "pull", 1).await;
}

#[tokio::test]
async fn nixl_transfers_complete_on_two_shared_cores() {
    transfers_complete("tcp", "push", 2).await;
    transfers_complete("shm", "pull", 2).await;
}
