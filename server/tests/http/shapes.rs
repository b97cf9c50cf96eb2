//! The fields of answers, and which requests reach the engine as what.

use serde_json::{Value, json};

use crate::support::*;

#[tokio::test]
async fn a_completion_has_openai_fields() {
    let harness = answering("four words of text").await;
    let request = harness
        .request("/v1/completions", completion("Hello", json!({})))
        .header("x-request-id", "my-id-123");
    let response = request.send().await.unwrap();
    assert_eq!(response.headers()["x-request-id"], "my-id-123");
    let (status, answer) = json_of(response).await;
    assert_eq!(status, 200);
    assert_eq!(answer["id"], "cmpl-my-id-123");
    assert_eq!((&answer["object"], &answer["model"]), (&json!("text_completion"), &json!(MODEL)));
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    let (prompt, said) = (harness.ids("Hello").len(), harness.ids("four words of text").len() + 1);
    let usage = json!({
        "prompt_tokens": prompt, "total_tokens": prompt + said, "completion_tokens": said,
        "prompt_tokens_details": {"cached_tokens": CACHED},
    });
    assert_eq!(answer["usage"], usage);
    let choice = json!({
        "index": 0, "text": "four words of text", "logprobs": null, "finish_reason": "stop", "stop_reason": null,
    });
    assert_eq!(answer["choices"], json!([choice]));
}

#[tokio::test]
async fn a_chat_answer_has_openai_fields() {
    let harness = answering("hi").await;
    let (_, answer) = harness.post("/v1/chat/completions", chat("Hello", json!({"model": null}))).await;
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["message"]["role"], "assistant");
    assert_eq!(answer["choices"][0]["message"]["content"], "hi");
}

#[tokio::test]
async fn a_chat_prompt_is_what_the_template_renders() {
    let mut harness = start(Setup::default()).await;
    let reply = tokio::spawn(harness.request("/v1/chat/completions", chat("Hello", json!({}))).send());
    let submission = harness.submission().await;
    let rendered = harness.tokenizer.decode(&submission.request.prompt, false);
    assert_eq!(rendered, "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n");
    answer(&submission, &[]);
    assert_eq!(soon(reply).await.unwrap().unwrap().status(), 200);

    let going_on = json!({
        "messages": [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "The sky"}],
        "continue_final_message": true,
    });
    let reply = tokio::spawn(harness.request("/v1/chat/completions", going_on).send());
    let submission = harness.submission().await;
    let rendered = harness.tokenizer.decode(&submission.request.prompt, false);
    assert!(rendered.ends_with("The sky"), "{rendered}");
    assert_eq!(submission.request.sampling.max_tokens, MAX_MODEL_LEN - submission.request.prompt.len());
    answer(&submission, &[]);
    assert_eq!(soon(reply).await.unwrap().unwrap().status(), 200);
}

#[tokio::test]
async fn parts_give_the_same_prompt_as_the_joined_string() {
    let harness = answering("41").await;
    let parts = json!([{"type": "text", "text": "My number is 41."}, {"type": "text", "text": "Say it."}]);
    let of = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    let (_, first) = harness.post("/v1/chat/completions", of(parts)).await;
    let (_, second) = harness.post("/v1/chat/completions", of(json!("My number is 41.\nSay it."))).await;
    assert_eq!(first["usage"]["prompt_tokens"], second["usage"]["prompt_tokens"]);
    let (status, _) = harness.post("/v1/chat/completions", of(json!([]))).await;
    assert_eq!(status, 200);
}

#[tokio::test]
async fn lists_of_prompts_and_several_answers() {
    let mut harness = start(Setup::default()).await;
    let request = completion(
        "",
        json!({"prompt": [[1, 2], [3]], "n": 2, "seed": 5, "temperature": 1, "cache_salt": "s"}),
    );
    let reply = tokio::spawn(harness.request("/v1/completions", request).send());
    for (prompt, seed, text) in
        [(vec![1, 2], 5, "a"), (vec![1, 2], 6, "b"), (vec![3], 5, "c"), (vec![3], 6, "d")]
    {
        let submission = harness.submission().await;
        assert_eq!((&submission.request.prompt, submission.request.sampling.seed), (&prompt, Some(seed)));
        assert_eq!(submission.request.cache_salt.as_deref(), Some("s"));
        answer(&submission, &harness.ids(text));
    }
    let (status, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
    assert_eq!(status, 200);
    let texts: Vec<_> = answer["choices"].as_array().unwrap().iter().map(|choice| &choice["text"]).collect();
    assert_eq!(texts, ["a", "b", "c", "d"]);
    let indices: Vec<_> =
        answer["choices"].as_array().unwrap().iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(
        (&answer["usage"]["prompt_tokens"], &answer["usage"]["completion_tokens"]),
        (&json!(3), &json!(8))
    );
}

#[tokio::test]
async fn several_answers_are_streamed_by_index() {
    let harness = answering("abc").await;
    let request = chat(
        "x",
        json!({"n": 2, "temperature": 1, "stream": true, "stream_options": {"include_usage": true}}),
    );
    let chunks = whole(harness.events("/v1/chat/completions", request).await);
    assert_eq!((joined(&chunks, 0), joined(&chunks, 1)), ("abc".into(), "abc".into()));
    let openings = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["role"] == "assistant");
    assert_eq!(openings.count(), 2);
    let each = harness.ids("abc").len() + 1;
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 2 * each);
}

#[tokio::test]
async fn usage_in_streams_only_when_asked_for() {
    let harness = answering("some text").await;
    for options in [json!(null), json!({}), json!({"include_usage": false})] {
        let request = completion("x", json!({"stream": true, "stream_options": options}));
        let chunks = whole(harness.events("/v1/completions", request).await);
        assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    }
    let (_, answer) = harness.post("/v1/completions", completion("x", json!({}))).await;
    let asked = json!({"stream": true, "stream_options": {"include_usage": true}});
    let chunks = whole(harness.events("/v1/completions", completion("x", asked)).await);
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]), (&json!([]), &answer["usage"]));
    assert!(before.iter().all(|chunk| chunk.get("usage").is_none()));
    let asked =
        json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    let chunks = whole(harness.events("/v1/chat/completions", chat("x", asked)).await);
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_object()));
    assert_eq!(chunks[0]["usage"]["completion_tokens"], 0);
}

#[tokio::test]
async fn limits_at_the_model_length() {
    let harness = answering("a b c d e f g h i j k l m n o p q r s t u v w x y z").await;
    let ids = |n: usize| json!(vec![7; n]);
    let cases = [
        (MAX_MODEL_LEN - 1, json!(1), 200, 1),
        (MAX_MODEL_LEN - 2, json!(null), 200, 2),
        (MAX_MODEL_LEN - 1, json!(2), 200, 1),
        (MAX_MODEL_LEN, json!(1), 400, 0),
        (MAX_MODEL_LEN + 1, json!(null), 400, 0),
        (5, json!(null), 200, 16),
    ];
    for (prompt, max_tokens, expected, tokens) in cases {
        let request = completion("", json!({"prompt": ids(prompt), "max_tokens": max_tokens}));
        let (status, answer) = harness.post("/v1/completions", request).await;
        assert_eq!(status, expected, "{prompt} {max_tokens}: {answer}");
        if status == 200 {
            assert_eq!(answer["usage"]["completion_tokens"], tokens);
            assert_eq!(answer["choices"][0]["finish_reason"], "length");
        } else {
            let message = answer["error"]["message"].as_str().unwrap();
            assert!(
                message.contains(&prompt.to_string()) && message.contains(&MAX_MODEL_LEN.to_string()),
                "{message}"
            );
        }
    }
}

#[tokio::test]
async fn tokenize_and_detokenize() {
    let harness = answering("").await;
    let (_, answer) = harness.post("/tokenize", json!({"model": MODEL, "prompt": "Hello world"})).await;
    let ids = harness.ids("Hello world");
    let expected =
        json!({"count": ids.len(), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": null});
    assert_eq!(answer, expected);
    let (_, answer) = harness.post("/detokenize", json!({"model": MODEL, "tokens": ids})).await;
    assert_eq!(answer, json!({"prompt": "Hello world"}));
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let (_, answer) =
        harness.post("/tokenize", json!({"messages": messages, "return_token_strs": true})).await;
    assert_eq!(answer["token_strs"][0], "<|im_start|>");
    assert_eq!(harness.post("/detokenize", json!({"tokens": [VOCAB_SIZE]})).await.0, 400);
    assert_eq!(harness.post("/detokenize", json!({"tokens": "a"})).await.0, 400);
    assert_eq!(harness.post("/tokenize", json!({})).await.0, 400);
}
