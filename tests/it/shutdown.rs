//! Workers that are told to leave do it without cutting anybody off.

use tests::{Answer, Ask, Deployment, prompts};

/// The answers do not depend on who computes the prompts while the prefill worker goes away.
#[tokio::test]
async fn sigterm_of_the_prefill_worker_under_load_fails_no_request() {
    let asks = prompts::random(60, 200, 24, 5);
    let expected = Deployment::both().start().await.client().answers(&asks).await;
    let mut cluster = Deployment::split("socket").start().await;
    let client = cluster.client();
    let (early, late) = asks.split_at(30);
    let terminate = async {
        cluster.prefill().client().metrics_when("tickets run", |m| m.in_progress()[0] > 0).await;
        cluster.prefill().terminate();
        client.answers(late).await
    };
    let (early, late): (Vec<Answer>, Vec<Answer>) = tokio::join!(client.answers(early), terminate);
    for (answer, expected) in early.iter().chain(&late).zip(&expected) {
        assert_eq!(answer.content(), expected.content());
    }
    let status = cluster.prefill_mut().exited().await;
    assert!(status.success(), "the prefill worker ended with {status}");
    client.settled().await;
    cluster.front().health_is("degraded").await;
}

#[tokio::test]
async fn sigterm_of_the_decode_worker_lets_its_streams_finish() {
    let mut cluster = Deployment::split("socket").start().await;
    let client = cluster.client();
    let ask = Ask::completion(prompts::ids(50, 6)).tokens(150);
    let expected = client.answer(&ask).await;
    let mut stream = client.open(&ask.clone().salted("again").streamed()).await.expect("served");
    stream.more_text().await.expect("text comes");
    cluster.front().terminate();
    cluster.front().health_is("draining").await;
    let refused = client.ask(&ask).await.expect_err("it takes no more requests");
    assert_eq!(refused.status(), Some(503), "{refused:?}");
    assert_eq!(stream.finish().await.expect("it may finish").content(), expected.content());
    let status = cluster.front_mut().exited().await;
    assert!(status.success(), "the decode worker ended with {status}");
    cluster.prefill().client().settled().await;
}
