//! The text of answers: streamed and whole, stop strings, characters that span tokens.

use engine::event::Event;
use serde_json::json;

use crate::support::*;

const EMOJI: &str = "🫠🥹龜𠮷 👨‍👩‍👧‍👦 T́ fin";

#[tokio::test]
async fn streamed_text_is_the_whole_text() {
    let text = "January, February, März, \"April\"\n\tMay 🫠";
    let harness = answering(text).await;
    for (path, request) in [
        ("/v1/completions", completion("Months:", json!({}))),
        ("/v1/chat/completions", chat("Months?", json!({}))),
    ] {
        let (status, whole_answer) = harness.post(path, request.clone()).await;
        assert_eq!(status, 200);
        let choice = &whole_answer["choices"][0];
        let said = choice.get("text").unwrap_or(&choice["message"]["content"]);
        assert_eq!(said, text);
        let mut streamed = request;
        streamed["stream"] = true.into();
        let chunks = whole(harness.events(path, streamed).await);
        assert_eq!(joined(&chunks, 0), text);
        assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], choice["finish_reason"]);
    }
}

/// A character whose bytes are spread over tokens came out as replacement characters.
#[tokio::test]
async fn characters_that_span_tokens_stay_whole() {
    let mut harness = start(Setup::default()).await;
    let ids = harness.ids(EMOJI);
    assert!(ids.len() > EMOJI.chars().count(), "the tokenizer splits these characters");
    let request = harness.request("/v1/completions", completion("x", json!({"stream": true})));
    let reply = tokio::spawn(request.send());
    let submission = harness.submission().await;
    let mut response = None;
    let mut reply = Some(reply);
    // One token at a time, so that nothing is coalesced.
    for &id in &ids {
        submission.outputs.send(token(id)).unwrap();
        if let Some(reply) = reply.take() {
            response = Some(soon(reply).await.unwrap().unwrap());
        }
        tokio::task::yield_now().await;
    }
    answer(&submission, &[]);
    let body = soon(response.unwrap().text()).await.unwrap();
    let chunks = whole(split_events(&body));
    assert_eq!(joined(&chunks, 0), EMOJI);
    assert!(!body.contains('\u{fffd}'));
}

#[tokio::test]
async fn a_cut_character_at_the_end_is_replaced_in_both_forms() {
    let harness = answering("a🫠").await;
    let full = harness.ids("a🫠").len();
    let request = completion("x", json!({"max_tokens": full - 1}));
    let (_, answer) = harness.post("/v1/completions", request.clone()).await;
    let said = answer["choices"][0]["text"].as_str().unwrap();
    assert!(said.starts_with('a') && said.ends_with('\u{fffd}'), "{said}");
    let mut streamed = request;
    streamed["stream"] = true.into();
    assert_eq!(joined(&whole(harness.events("/v1/completions", streamed).await), 0), said);
}

/// The start of a stop string was sent before it was known to match; or was held back and never sent.
#[tokio::test]
async fn stop_strings_across_token_borders() {
    let text = "January, February, March, April";
    let harness = answering(text).await;
    let crossing = &text[6..15];
    for stop in [json!(crossing), json!([crossing]), json!(["nowhere", crossing])] {
        let request = completion("Months:", json!({"stop": stop}));
        let (status, answer) = harness.post("/v1/completions", request.clone()).await;
        let choice = &answer["choices"][0];
        assert_eq!((status, choice["text"].as_str()), (200, Some(&text[..6])));
        assert_eq!(
            (choice["finish_reason"].as_str(), &choice["stop_reason"]),
            (Some("stop"), &json!(crossing))
        );
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < harness.ids(text).len() as u64);

        let mut streamed = request;
        streamed["stream"] = true.into();
        let chunks = whole(harness.events("/v1/completions", streamed).await);
        assert_eq!(joined(&chunks, 0), text[..6]);
        let last = &chunks.last().unwrap()["choices"][0];
        assert_eq!((last["finish_reason"].as_str(), &last["stop_reason"]), (Some("stop"), &json!(crossing)));
    }
    let never = format!("{}ZZZZZ", &text[text.len() - 4..]);
    for stream in [false, true] {
        let limit = harness.ids(text).len();
        let request = completion("Months:", json!({"stop": never, "stream": stream, "max_tokens": limit}));
        let (said, reason) = match stream {
            true => {
                let chunks = whole(harness.events("/v1/completions", request).await);
                (joined(&chunks, 0), chunks.last().unwrap()["choices"][0]["finish_reason"].clone())
            }
            false => {
                let (_, answer) = harness.post("/v1/completions", request).await;
                let choice = &answer["choices"][0];
                (choice["text"].as_str().unwrap().to_owned(), choice["finish_reason"].clone())
            }
        };
        assert_eq!((said.as_str(), reason.as_str()), (text, Some("length")));
    }
}

/// A worker that makes the text must also tell the engine to stop.
#[tokio::test]
async fn a_stop_string_ends_the_sequence_and_usage_counts_up_to_it() {
    let mut harness = start(Setup::default()).await;
    let request =
        harness.request("/v1/completions", completion("Count:", json!({"stop": "b", "ignore_eos": true})));
    let reply = tokio::spawn(request.send());
    let submission = harness.submission().await;
    for id in harness.ids("a b c d") {
        submission.outputs.send(token(id)).unwrap();
    }
    assert!(matches!(harness.event().await, Event::Finish(id) if id == submission.id));
    let (status, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
    assert_eq!((status, answer["choices"][0]["text"].as_str()), (200, Some("a ")));
    let counted = answer["usage"]["completion_tokens"].as_u64().unwrap() as usize;
    assert!(counted >= harness.ids("a b").len() - 1 && counted < harness.ids("a b c d").len(), "{counted}");
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], CACHED);
}

#[tokio::test]
async fn the_first_token_may_be_the_last() {
    let harness = answering("").await;
    let (status, answer) = harness.post("/v1/completions", completion("x", json!({}))).await;
    assert_eq!((status, &answer["choices"][0]["text"]), (200, &json!("")));
    assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    let chunks = whole(harness.events("/v1/chat/completions", chat("x", json!({"stream": true}))).await);
    assert_eq!(joined(&chunks, 0), "");
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "stop");
}
