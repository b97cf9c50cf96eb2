//! Which sampling parameters reach the engine.

use engine::api::SamplingParams;
use serde_json::{Value, json};

use crate::support::*;

async fn sampled(path: &str, request: Value) -> SamplingParams {
    let mut harness = start(Setup::default()).await;
    let reply = tokio::spawn(harness.request(path, request).send());
    let submission = harness.submission().await;
    answer(&submission, &[]);
    assert_eq!(soon(reply).await.unwrap().unwrap().status(), 200);
    submission.request.sampling
}

#[tokio::test]
async fn every_sampling_field_reaches_the_engine() {
    let fields = json!({
        "temperature": 0.7, "top_k": 40, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.2,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"7": -100, "8": 1.5},
        "min_tokens": 3, "seed": 11, "ignore_eos": true, "stop_token_ids": [5, 6], "max_tokens": 9,
    });
    let expected = SamplingParams {
        temperature: 0.7,
        top_k: Some(40),
        top_p: 0.9,
        min_p: 0.1,
        repetition_penalty: 1.2,
        presence_penalty: 0.5,
        frequency_penalty: -0.5,
        logit_bias: vec![(7, -100.0), (8, 1.5)],
        min_tokens: 3,
        logprobs: None,
        seed: Some(11),
        max_tokens: 9,
        ignore_eos: true,
        stop_token_ids: vec![5, 6],
    };
    assert_eq!(sampled("/v1/completions", completion("x", fields.clone())).await, expected);
    assert_eq!(sampled("/v1/chat/completions", chat("x", fields)).await, expected);
}

#[tokio::test]
async fn what_is_not_said_changes_nothing() {
    let bare = json!({"prompt": "x"});
    let expected = SamplingParams { temperature: 0.6, ..SamplingParams::default() };
    assert_eq!(sampled("/v1/completions", bare).await, expected);
}

/// A stop string within the least length ended the text.
#[tokio::test]
async fn stop_strings_wait_for_min_tokens() {
    let harness = answering("a b a b a b").await;
    let ids = harness.ids("a b a b a b").len();
    for (min_tokens, expected) in [(0, "a "), (ids - 2, "a b a b a ")] {
        let request = completion("x", json!({"stop": "b", "min_tokens": min_tokens}));
        let (_, answer) = harness.post("/v1/completions", request.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!((choice["text"].as_str(), choice["stop_reason"].as_str()), (Some(expected), Some("b")));
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() as usize >= min_tokens);
        let mut streamed = request;
        streamed["stream"] = true.into();
        assert_eq!(joined(&whole(harness.events("/v1/completions", streamed).await), 0), expected);
    }
}

/// Templates print a call's arguments as JSON: a string came out quoted.
#[tokio::test]
async fn arguments_of_tool_calls_may_be_strings() {
    let harness = answering("ok").await;
    let tokens = async |arguments: Value| {
        let call = json!({"type": "function", "function": {"name": "f", "arguments": arguments}});
        let messages = json!([
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": null, "tool_calls": [call]},
        ]);
        harness.post("/tokenize", json!({"messages": messages})).await.1["tokens"].clone()
    };
    let parsed = tokens(json!({"z": 1, "a": "é"})).await;
    assert!(parsed.is_array());
    assert_eq!(tokens(json!("{\"z\": 1, \"a\": \"é\"}")).await, parsed);
}
