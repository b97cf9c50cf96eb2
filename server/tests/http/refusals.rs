//! Requests that are refused: status, OpenAI's error shape, a message that names what is wrong.

use reqwest::Method;
use serde_json::{Value, json};
use server::args::Role;

use crate::support::*;

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn check(status: u16, answer: &Value, expected: u16, message: &str) {
    assert_eq!(status, expected, "{answer}");
    let error = &answer["error"];
    assert_eq!(error["code"], expected);
    assert!(error["type"].as_str().is_some_and(|kind| kind.ends_with("Error")), "{answer}");
    assert!(error.get("param").is_some());
    let found = error["message"].as_str().unwrap();
    assert!(found.starts_with(message), "{found:?} does not start with {message:?}");
}

#[tokio::test]
async fn bad_fields_are_named() {
    let harness = answering("ok").await;
    let cases = [
        (COMPLETIONS, completion("x", json!({"prompt": null})), "prompt is missing"),
        (COMPLETIONS, completion("x", json!({"prompt": ""})), "prompt is empty"),
        (COMPLETIONS, completion("x", json!({"prompt": [VOCAB_SIZE]})), "token id 4160 is out of range"),
        (COMPLETIONS, completion("x", json!({"prompt": [-1]})), "prompt.0 is -1, expected"),
        (COMPLETIONS, completion("x", json!({"echo": true})), "echo is true, expected false"),
        (COMPLETIONS, completion("x", json!({"logprobs": 21})), "logprobs is 21, expected a whole number in"),
        (COMPLETIONS, completion("x", json!({"logit_bias": {"4160": 1}})), "logit_bias has the key \"4160\""),
        (COMPLETIONS, completion("x", json!({"logit_bias": {"1": true}})), "logit_bias.1 is true, expected"),
        (
            COMPLETIONS,
            completion("x", json!({"min_tokens": 65})),
            "min_tokens is 65, expected at most max_tok",
        ),
        (
            COMPLETIONS,
            completion("x", json!({"min_tokens": 17, "max_tokens": null})),
            "min_tokens is 17, expected at most max_tokens",
        ),
        (COMPLETIONS, completion("x", json!({"repetition_penalty": 0})), "repetition_penalty is 0, expected"),
        (COMPLETIONS, completion("x", json!({"return_timeline": 1})), "return_timeline is 1, expected true"),
        (COMPLETIONS, completion("x", json!({"suffix": "s"})), "suffix is \"s\", expected null"),
        (COMPLETIONS, completion("x", json!({"best_of": 2})), "best_of is 2, expected 1"),
        (COMPLETIONS, completion("x", json!({"max_tokens": 0})), "max_tokens is 0, expected"),
        (COMPLETIONS, completion("x", json!({"max_tokens": "5"})), "max_tokens is \"5\", expected"),
        (COMPLETIONS, completion("x", json!({"n": 2})), "n is 2, expected 1 with greedy"),
        (COMPLETIONS, completion("x", json!({"stop": ["", "a"]})), "stop is [\"\",\"a\"], expected"),
        (COMPLETIONS, completion("x", json!({"stream_options": {}})), "stream_options is {}, expected"),
        (COMPLETIONS, completion("x", json!({"truncate_prompt_tokens": 10})), "truncate_prompt_tokens is 10"),
        (COMPLETIONS, completion("x", json!({"model": 5})), "model is 5, expected a string"),
        (CHAT, chat("x", json!({"messages": []})), "messages is an empty list"),
        (CHAT, chat("x", json!({"messages": "hi"})), "messages is \"hi\", expected"),
        (CHAT, chat("x", json!({"messages": [{"role": "user"}]})), "messages.0.content is missing"),
        (CHAT, chat("x", json!({"top_logprobs": 3})), "top_logprobs is 3, expected 0 unless logprobs"),
        (CHAT, chat("x", json!({"presence_penalty": 5})), "presence_penalty is 5, expected a number"),
        (CHAT, chat("x", json!({"tool_choice": "required"})), "tool_choice is \"required\", expected"),
        (CHAT, chat("x", json!({"response_format": {"type": "json_object"}})), "response_format is {"),
        (
            CHAT,
            chat("x", json!({"chat_template_kwargs": {"messages": []}})),
            "chat_template_kwargs may not set messages",
        ),
        (CHAT, chat("x", json!({"cache_salt": ""})), "cache_salt is \"\", expected"),
    ];
    for (path, request, message) in cases {
        for stream in [false, true] {
            let mut request = request.clone();
            if stream && request.get("stream_options").is_none() {
                request["stream"] = true.into();
            }
            let (status, answer) = harness.post(path, request).await;
            check(status, &answer, 400, message);
            let param = answer["error"]["param"].as_str().unwrap_or("chat_template_kwargs");
            assert!(param == "prompt" || message.starts_with(param), "{param} in {message}");
        }
    }
    assert_eq!(harness.post(COMPLETIONS, completion("x", json!({}))).await.0, 200);
}

#[tokio::test]
async fn unknown_models_are_404_and_add_no_metrics() {
    let harness = answering("ok").await;
    for path in [COMPLETIONS, CHAT, "/tokenize"] {
        let request = json!({"model": "no-such-model", "prompt": "x", "messages": []});
        let (status, answer) = harness.post(path, request).await;
        check(status, &answer, 404, "the model \"no-such-model\" does not exist; this server has \"demo\"");
        assert_eq!(answer["error"]["param"], "model");
    }
    let lines = || async {
        let response = harness.client.get(format!("{}/metrics", harness.url)).send().await.unwrap();
        response.text().await.unwrap().lines().count()
    };
    lines().await;
    let before = lines().await;
    for i in 0..50 {
        let model = format!("m{i}\n\"{}", "🫠".repeat(1000));
        let request = harness.request(COMPLETIONS, json!({"model": model, "prompt": "x"}));
        assert_eq!(request.header("x-request-id", format!("id-{i}")).send().await.unwrap().status(), 404);
        let method = Method::from_bytes(format!("M{i}").as_bytes()).unwrap();
        let response =
            harness.client.request(method, format!("{}/path/{i}", harness.url)).send().await.unwrap();
        assert_eq!(response.status(), 404);
    }
    assert!(lines().await < before + 5);
}

#[tokio::test]
async fn bodies_that_are_no_request() {
    let harness = answering("ok").await;
    let send = |body: Vec<u8>, kind: &'static str| {
        let request =
            harness.client.post(format!("{}{CHAT}", harness.url)).header("content-type", kind).body(body);
        async { json_of(soon(request.send()).await.unwrap()).await }
    };
    let json = "application/json";
    let cases = [
        (b"".to_vec(), json, "the body is empty"),
        (b"[]".to_vec(), json, "the body is [], expected a JSON object"),
        (b"{\"m\":\"\xc4\xe3\xba\xc3\"}".to_vec(), json, "the body is not UTF-8"),
        (
            b"{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]".to_vec(),
            json,
            "the body is not valid JSON",
        ),
        (
            br#"{"messages":[{"role":"user","content":"\ud800"}]}"#.to_vec(),
            json,
            "the body is not valid JSON",
        ),
        ("[".repeat(100_000).into_bytes(), json, "the body is not valid JSON"),
        (b"{}".to_vec(), "text/plain", "the content type is \"text/plain\", expected application/json"),
    ];
    for (body, kind, message) in cases {
        let (status, answer) = send(body, kind).await;
        check(status, &answer, 400, message);
    }
    let (status, answer) = send(vec![b' '; (32 << 20) + 1], json).await;
    check(status, &answer, 413, "the body is larger than 32 MiB");
    assert_eq!(harness.post(CHAT, chat("x", json!({}))).await.0, 200);
}

#[tokio::test]
async fn unknown_paths_and_methods() {
    let harness = answering("ok").await;
    let (status, answer) = harness.get("/nothing/here").await;
    check(status, &answer, 404, "there is no \"GET\" \"/nothing/here\"");
    let response = harness.client.get(format!("{}{COMPLETIONS}", harness.url)).send().await.unwrap();
    assert_eq!(response.headers()["allow"], "POST");
    let (status, answer) = json_of(response).await;
    check(status, &answer, 405, "\"/v1/completions\" does not take \"GET\"");
    let (status, answer) = harness.get("/v1/models/other").await;
    check(status, &answer, 404, "the model \"other\" does not exist");
}

#[tokio::test]
async fn a_prefill_worker_answers_no_completions() {
    let mut harness = start(Setup { role: Role::Prefill, ..Setup::default() }).await;
    harness.answer_all("ok");
    for path in [COMPLETIONS, CHAT] {
        let (status, answer) = harness.post(path, completion("x", json!({}))).await;
        check(status, &answer, 404, "this is a prefill worker (--role prefill)");
        assert!(answer["error"]["message"].as_str().unwrap().contains("--role decode"));
    }
    assert_eq!(
        harness.get("/health").await,
        (200, json!({"status": "ready", "reason": null, "role": "prefill"}))
    );
    assert_eq!(harness.get("/v1/models").await.1["data"][0]["id"], MODEL);
}

#[tokio::test]
async fn a_panic_in_a_handler_is_500_and_the_server_goes_on() {
    let harness = answering("ok").await;
    let (status, answer) = harness.get("/bug").await;
    check(status, &answer, 500, "the server has a bug");
    assert_eq!(harness.post(COMPLETIONS, completion("x", json!({}))).await.0, 200);
}

#[tokio::test]
async fn a_request_that_alone_overfills_the_queue() {
    let harness = answering("ok").await;
    let request = completion("", json!({"prompt": vec![[1]; 1025]}));
    let (status, answer) = harness.post(COMPLETIONS, request).await;
    check(status, &answer, 400, "prompt and n ask for 1025 answers, expected at most 1024");
}
