//! The first token goes to the client before the KV is there: what happens when that is the last token, and when the
//! KV never comes.

use serde_json::json;
use tests::{Answer, Ask, Client, Cluster, Deployment, Failure, prompts};

/// Pool of a decode worker that one [`hog`] fills so far that no prompt of [`late`] finds room.
const TIGHT: &str = "--num-kv-blocks 100";

/// Takes 60 blocks at once and goes on for longer than any test waits.
fn hog() -> Ask {
    Ask::completion(prompts::ids(60 * 16 - 1, 1)).tokens(600).streamed()
}

/// Needs 45 blocks.
fn late() -> Ask {
    Ask::completion(prompts::ids(45 * 16 - 1, 2)).tokens(24).streamed()
}

/// A split deployment in which `late` has its first token and gets no blocks for its KV; and both streams.
async fn without_grant(deployment: &Deployment) -> (Cluster, tests::Stream, tests::Stream) {
    let cluster = deployment.clone().decode_flags(TIGHT).start().await;
    let client = cluster.client();
    let mut hog = client.open(&hog()).await.expect("served");
    hog.more_text().await.expect("the first stream runs");
    client.metrics_when("its KV is here", |m| m.account().running >= 60).await;
    let mut late = client.open(&late()).await.expect("its first token is there");
    late.more_text().await.expect("the first token went ahead of the KV");
    let account = client.metrics().await.account();
    assert_eq!(account.ticketed, 0, "no room for it yet: {account:?}");
    (cluster, hog, late)
}

async fn right(ask: &Ask) -> Answer {
    Deployment::both().start().await.client().answer(ask).await
}

#[tokio::test]
async fn prefill_worker_killed_after_the_first_token_and_the_text_goes_on_from_it() {
    let (mut cluster, hog, late) = without_grant(&Deployment::split("socket")).await;
    cluster.prefill_mut().kill();
    cluster.front().health_is("degraded").await;
    drop(hog);
    let answer = late.finish().await.expect("computed here");
    assert_eq!(answer.content(), right(&self::late()).await.content());
    let metrics = cluster.client().settled().await;
    assert_eq!(metrics.value("kvferry:prompts_recomputed_total"), 1.0);
}

#[tokio::test]
async fn kv_failure_fail_after_the_first_token_is_an_error_event_and_no_done() {
    let (mut cluster, hog, late) =
        without_grant(&Deployment::split("socket").decode_flags("--kv-failure fail")).await;
    cluster.prefill_mut().kill();
    match late.finish().await {
        Err(Failure::InStream { text, message }) => {
            assert!(
                !text.is_empty() && message.starts_with("remote prefill failed: "),
                "{text:?}, {message}"
            );
        }
        other => panic!("expected an error event, got {other:?}"),
    }
    hog.finish().await.expect("the other request does not depend on the prefill worker any more");
    cluster.client().settled().await;
}

#[tokio::test]
async fn a_client_leaves_after_the_first_token_and_the_prefill_worker_lets_go() {
    let (cluster, hog, late) = without_grant(&Deployment::split("socket")).await;
    let prefill = cluster.prefill().client();
    prefill.metrics_when("the prompt's KV to wait for a grant", |m| m.account().running > 0).await;
    drop(late);
    prefill.settled().await;
    drop(hog);
    cluster.settled().await;
}

#[tokio::test]
async fn kv_that_waited_for_room_on_the_decode_worker_is_used() {
    let (cluster, hog, late) = without_grant(&Deployment::split("socket")).await;
    drop(hog);
    let answer = late.finish().await.expect("granted once there is room");
    assert_eq!(answer.content(), right(&self::late()).await.content());
    let metrics = cluster.client().settled().await;
    assert_eq!((metrics.transfers(), metrics.value("kvferry:prompts_recomputed_total")), (2, 0.0));
}

/// A prompt whose greedy answer is empty: a question and the model's whole answer to it.
async fn answered(client: &Client) -> Vec<u32> {
    for question in ["What is kvferry?", "What is a ticket?", "What is a KV block?", "Who are you?", "Hello"]
    {
        let answer = client.answer(&Ask::chat(question).max_tokens(200)).await;
        let prompt = [client.tokenize_chat(question).await, client.tokenize(&answer.text).await].concat();
        let next = client.answer(&Ask::completion(prompt.clone())).await;
        if answer.finish == "stop" && next.text.is_empty() && next.finish == "stop" {
            return prompt;
        }
    }
    panic!("the model ends none of its answers where it ended them before");
}

#[tokio::test]
async fn a_first_token_that_ends_the_text_needs_no_kv() {
    let both = Deployment::both().start().await;
    let split = Deployment::split("socket").start().await;
    let (reference, client) = (both.client(), split.client());
    let question = Ask::completion(prompts::ids(200, 3));
    let first = reference.answer(&question.clone().max_tokens(1)).await;
    assert!(!first.text.trim().is_empty(), "the first token has text: {first:?}");
    let id = reference.tokenize(&first.text).await;
    assert_eq!(id.len(), 1, "{first:?} is one token");
    let ended = answered(&reference).await;
    let asks = [
        question.clone().max_tokens(1),
        question.clone().with("stop_token_ids", json!(id)),
        question.clone().with("stop", json!([first.text])),
        Ask::completion(ended),
    ];
    for ask in asks {
        let expected = reference.answer(&ask.clone().salted("plain")).await;
        assert!(expected.usage.completion <= 1, "{ask:?}: {expected:?}");
        for ask in [ask.clone().salted("plain"), ask.salted("streamed").streamed()] {
            assert_eq!(client.answer(&ask).await.content(), expected.content(), "{ask:?}");
        }
    }
    split.settled().await;
    let [decode, prefill] = [client.metrics().await, split.prefill().client().metrics().await];
    assert_eq!(decode.value("kvferry:tickets_opened_total"), 8.0);
    assert_eq!(decode.value("kvferry:tickets_failed_total"), 0.0);
    assert_eq!(decode.prompt_tokens("local_compute"), 0, "the decode worker had nothing to do");
    assert_eq!(prefill.account().held(), 0);
}
