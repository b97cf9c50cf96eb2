//! Both workers on one core: transfers make progress although only one of the processes runs at a time.

use tests::cluster::can_test;
use tests::process::first_core;
use tests::{Deployment, prompts};

async fn transfers_complete(transport: &str) {
    if !can_test(transport) {
        return;
    }
    let asks = prompts::random(40, 200, 12, 8);
    let expected = Deployment::both().start().await.client().answers(&asks).await;
    let cluster = Deployment::split(transport).on_core(first_core()).start().await;
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
    transfers_complete("socket").await;
}

#[tokio::test]
async fn nixl_tcp_transfers_complete_on_one_core() {
    transfers_complete("tcp").await;
}

#[tokio::test]
async fn nixl_shm_transfers_complete_on_one_core() {
    transfers_complete("shm").await;
}
