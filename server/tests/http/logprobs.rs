//! Log-probabilities: their shapes, and that text which is held back loses and moves none.

use engine::api::{FinishReason, TokenId};
use serde_json::{Value, json};

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
const EMOJI: &str = "a🫠 b🥹";

/// The answer to a streamed request, one chunk for each token that the engine sends.
async fn stepwise(path: &str, mut request: Value, ids: &[TokenId], reason: FinishReason) -> Vec<Value> {
    let mut harness = start(Setup::default()).await;
    request["stream"] = true.into();
    let mut reply = Some(tokio::spawn(harness.request(path, request).send()));
    let submission = harness.submission().await;
    let mut response = None;
    for &id in ids {
        // After a stop string nobody listens.
        let _ = submission.outputs.send(scored_token(&submission.request, id));
        if let Some(reply) = reply.take() {
            response = Some(soon(reply).await.unwrap().unwrap());
        }
        tokio::task::yield_now().await;
    }
    let _ = submission.outputs.send(finished(&submission.request, ids.len(), reason));
    whole(split_events(&soon(response.unwrap().text()).await.unwrap()))
}

/// The lists of all chunks, joined.
fn joined_lists(chunks: &[Value], name: &str) -> Vec<Value> {
    let lists = chunks.iter().filter_map(|chunk| chunk["choices"][0]["logprobs"][name].as_array());
    lists.flatten().cloned().collect()
}

fn list(choice: &Value, name: &str) -> Vec<Value> {
    choice["logprobs"][name].as_array().unwrap().clone()
}

#[tokio::test]
async fn completions_have_their_shape() {
    let harness = answering("Hello world").await;
    let ids = harness.ids("Hello world");
    let request = |count: usize| completion("x", json!({"logprobs": count, "max_tokens": ids.len()}));
    let (status, answer) = harness.post(COMPLETIONS, request(2)).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(answer["usage"]["completion_tokens"], ids.len());
    let names: Vec<_> = choice["logprobs"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["text_offset", "token_logprobs", "tokens", "top_logprobs"]);
    let tokens: Vec<_> = ids.iter().map(|&id| harness.tokenizer.decode(&[id], false)).collect();
    assert_eq!(choice["logprobs"]["tokens"], json!(tokens));
    let mut offset = 0;
    for (i, token) in tokens.iter().enumerate() {
        let (logprob, top) =
            (&choice["logprobs"]["token_logprobs"][i], &choice["logprobs"]["top_logprobs"][i]);
        assert_eq!(choice["logprobs"]["text_offset"][i], offset);
        assert_eq!(logprob, -0.25 - f64::from(ids[i] % 64));
        assert_eq!((top.as_object().unwrap().len(), &top[token]), (2, logprob));
        offset += token.chars().count();
    }
    let (_, answer) = harness.post(COMPLETIONS, request(0)).await;
    let top = &answer["choices"][0]["logprobs"]["top_logprobs"][0];
    assert_eq!(top.as_object().unwrap().keys().collect::<Vec<_>>(), [&tokens[0]]);
}

#[tokio::test]
async fn chat_has_its_shape() {
    let harness = answering("Hi").await;
    let ids = harness.ids("Hi");
    let (_, answer) = harness.post(CHAT, chat("x", json!({"logprobs": true, "top_logprobs": 2}))).await;
    let content = list(&answer["choices"][0], "content");
    // The end-of-sequence token counts, but is not in the text and has no entry.
    assert_eq!((content.len(), &answer["usage"]["completion_tokens"]), (ids.len(), &json!(ids.len() + 1)));
    let names: Vec<_> = content[0].as_object().unwrap().keys().collect();
    assert_eq!(names, ["token", "logprob", "bytes", "top_logprobs"]);
    let top = content[0]["top_logprobs"].as_array().unwrap();
    assert_eq!(
        (top.len(), &top[0]["token"], &top[0]["bytes"]),
        (2, &content[0]["token"], &content[0]["bytes"])
    );
    assert!(top[0]["logprob"].as_f64() > top[1]["logprob"].as_f64());
    let (_, answer) = harness.post(CHAT, chat("x", json!({"logprobs": true}))).await;
    assert_eq!(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"], json!([]));
    let (_, answer) = harness.post(CHAT, chat("x", json!({}))).await;
    assert_eq!(answer["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn an_answer_without_tokens_has_empty_lists() {
    let harness = answering("").await;
    let (_, answer) = harness.post(CHAT, chat("x", json!({"logprobs": true}))).await;
    assert_eq!(answer["choices"][0]["logprobs"], json!({"content": []}));
    let chunks = whole(harness.events(CHAT, chat("x", json!({"logprobs": true, "stream": true}))).await);
    assert!(chunks.iter().all(|chunk| chunk["choices"][0]["logprobs"].is_null()));
}

/// Parts of characters had empty texts and null bytes.
#[tokio::test]
async fn bytes_of_all_entries_are_the_text() {
    let harness = answering(EMOJI).await;
    let request = chat("x", json!({"logprobs": true, "top_logprobs": 3}));
    let (_, answer) = harness.post(CHAT, request.clone()).await;
    let content = list(&answer["choices"][0], "content");
    let bytes = content.iter().flat_map(|entry| entry["bytes"].as_array().unwrap());
    let bytes: Vec<u8> = bytes.map(|byte| byte.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), EMOJI);
    let chunks = stepwise(CHAT, request, &harness.ids(EMOJI), FinishReason::Stop).await;
    assert_eq!(joined_lists(&chunks, "content"), content);
}

#[tokio::test]
async fn streamed_lists_are_the_whole_lists() {
    let harness = answering(EMOJI).await;
    let ids = harness.ids(EMOJI);
    assert!(ids.len() > EMOJI.chars().count(), "the tokenizer splits these characters");
    // Held back by the detokenizer; by the matcher as well; cut by it.
    for (stop, end) in [(json!(null), None), (json!("b🥹!"), None), (json!(" b"), Some(" b"))] {
        let request = completion("x", json!({"logprobs": 2, "stop": stop, "max_tokens": ids.len()}));
        let (_, answer) = harness.post(COMPLETIONS, request.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["stop_reason"], json!(end));
        let count = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
        assert_eq!(list(choice, "tokens").len(), count);
        let chunks = stepwise(COMPLETIONS, request, &ids, FinishReason::Length).await;
        for name in ["text_offset", "token_logprobs", "tokens", "top_logprobs"] {
            assert_eq!(joined_lists(&chunks, name), list(choice, name), "{name}, stop {end:?}");
        }
        assert_eq!(joined(&chunks, 0), choice["text"].as_str().unwrap());
    }
}

#[tokio::test]
async fn an_entry_comes_with_the_text_its_token_completes() {
    let harness = start(Setup::default()).await;
    let ids = harness.ids("a🫠");
    let request = completion("x", json!({"logprobs": 0, "max_tokens": ids.len()}));
    let chunks = stepwise(COMPLETIONS, request, &ids, FinishReason::Length).await;
    let first = &chunks[0]["choices"][0];
    assert_eq!((first["text"].as_str(), list(first, "tokens")), (Some("a"), vec![json!("a")]));
    let second = &chunks[1]["choices"][0];
    assert_eq!((second["text"].as_str(), list(second, "tokens").len()), (Some("🫠"), ids.len() - 1));
    assert!(list(second, "text_offset").iter().all(|offset| offset == 1));
    let keys = list(second, "tokens");
    assert!(keys.iter().all(|key| key.as_str().unwrap().starts_with("bytes:\\x")), "{keys:?}");
}
