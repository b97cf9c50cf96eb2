//! Errors before and within streams, and clients that go away.

use engine::api::{FinishReason, RequestError};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::*;

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn an_error_before_the_first_token_has_its_status() {
    let cases = [
        (RequestError::RemotePrefill("peer is gone".into()), 503),
        (RequestError::QueueFull { queued: 8, limit: 8 }, 429),
        (RequestError::DeadlineExceeded(std::time::Duration::from_secs(1)), 504),
        (RequestError::Internal("bad block".into()), 500),
    ];
    let mut harness = start(Setup::default()).await;
    for (error, expected) in cases {
        for stream in [false, true] {
            let reply =
                tokio::spawn(harness.request(PATH, completion("x", json!({"stream": stream}))).send());
            fail(&harness.submission().await, error.clone());
            let response = soon(reply).await.unwrap().unwrap();
            let retry = response.headers().get("retry-after").map(|value| value.to_str().unwrap().to_owned());
            let (status, answer) = json_of(response).await;
            assert_eq!(status, expected);
            assert_eq!(answer["error"]["message"], error.to_string());
            assert_eq!(retry.as_deref(), matches!(expected, 429 | 503).then_some("1"));
        }
    }
}

#[tokio::test]
async fn an_error_within_a_stream_is_an_event_and_no_normal_end() {
    let mut harness = start(Setup::default()).await;
    let reply = tokio::spawn(harness.request(PATH, completion("x", json!({"stream": true}))).send());
    let submission = harness.submission().await;
    submission.outputs.send(token(harness.ids("a")[0])).unwrap();
    let response = soon(reply).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    fail(&submission, RequestError::RemotePrefill("peer is gone".into()));
    let events = split_events(&soon(response.text()).await.unwrap());
    let last: Value = serde_json::from_str(events.last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], 503);
    assert_eq!(last["error"]["message"], "remote prefill failed: peer is gone");
    assert!(!events.iter().any(|event| event == "[DONE]" || event.contains("\"finish_reason\":\"")));
}

#[tokio::test]
async fn an_error_after_some_tokens_fails_a_whole_answer() {
    let mut harness = start(Setup::default()).await;
    let reply = tokio::spawn(harness.request(PATH, completion("x", json!({}))).send());
    let submission = harness.submission().await;
    submission.outputs.send(token(harness.ids("a")[0])).unwrap();
    fail(&submission, RequestError::Internal("bad block".into()));
    let (status, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
    assert_eq!((status, answer.get("choices")), (500, None));
}

#[tokio::test]
async fn one_failed_answer_of_several_aborts_the_others() {
    let mut harness = start(Setup::default()).await;
    let request = completion("x", json!({"n": 2, "temperature": 1}));
    let reply = tokio::spawn(harness.request(PATH, request).send());
    let (first, second) = (harness.submission().await, harness.submission().await);
    fail(&second, RequestError::Internal("bad block".into()));
    assert_eq!(harness.abort().await, first.id);
    assert_eq!(soon(reply).await.unwrap().unwrap().status(), 500);
}

#[tokio::test]
async fn a_prompt_of_a_list_that_is_refused_aborts_those_before_it() {
    let mut harness = start(Setup::default()).await;
    let (status, _) = harness.post(PATH, completion("", json!({"prompt": [[1], [VOCAB_SIZE]]}))).await;
    assert_eq!(status, 400);
    let first = harness.submission().await;
    assert_eq!(harness.abort().await, first.id);
}

async fn connect(harness: &Harness, request: Value) -> TcpStream {
    let body = request.to_string();
    let mut stream = TcpStream::connect(harness.address).await.unwrap();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_leaves_before_the_first_token_aborts() {
    let mut harness = start(Setup::default()).await;
    for stream in [false, true] {
        let connection = connect(&harness, completion("x", json!({"stream": stream}))).await;
        let submission = harness.submission().await;
        drop(connection);
        assert_eq!(harness.abort().await, submission.id);
    }
    assert_eq!(harness.state.drain.running(), 0);
}

#[tokio::test]
async fn a_client_that_leaves_a_stream_aborts_without_another_token() {
    let mut harness = start(Setup::default()).await;
    let mut connection = connect(&harness, completion("x", json!({"stream": true}))).await;
    let submission = harness.submission().await;
    submission.outputs.send(token(harness.ids("a")[0])).unwrap();
    let mut seen = String::new();
    while !seen.contains("data: ") {
        let mut buffer = [0; 1024];
        let read = soon(connection.read(&mut buffer)).await.unwrap();
        assert!(read > 0, "the stream ended: {seen}");
        seen.push_str(&String::from_utf8_lossy(&buffer[..read]));
    }
    drop(connection);
    assert_eq!(harness.abort().await, submission.id);
}

#[tokio::test]
async fn an_engine_that_dies_is_an_error() {
    let mut harness = start(Setup::default()).await;
    let reply = tokio::spawn(harness.request(PATH, completion("x", json!({"stream": true}))).send());
    drop(harness.submission().await);
    assert_eq!(soon(reply).await.unwrap().unwrap().status(), 500);
}

#[tokio::test]
async fn outputs_that_are_ready_share_an_event() {
    let harness = answering("many tokens that are all there before the first one is read by anybody").await;
    let request = completion("x", json!({"stream": true}));
    let chunks = whole(harness.events(PATH, request).await);
    assert!(chunks.len() < 10, "{} events", chunks.len());
}

/// An extra event with no text looks like a token to clients that measure the time between events.
#[tokio::test]
async fn the_end_by_length_comes_with_the_last_token() {
    let mut harness = start(Setup::default()).await;
    let request = completion("x", json!({"stream": true, "max_tokens": 1}));
    let reply = tokio::spawn(harness.request(PATH, request).send());
    let submission = harness.submission().await;
    submission.outputs.send(token(harness.ids("a")[0])).unwrap();
    tokio::task::yield_now().await;
    submission.outputs.send(finished(&submission.request, 1, FinishReason::Length)).unwrap();
    let body = soon(soon(reply).await.unwrap().unwrap().text()).await.unwrap();
    let chunks = whole(split_events(&body));
    assert_eq!(chunks.len(), 1, "{body}");
    assert_eq!(
        (&chunks[0]["choices"][0]["text"], &chunks[0]["choices"][0]["finish_reason"]),
        (&json!("a"), &json!("length"))
    );
}
