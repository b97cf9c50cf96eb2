//! `return_timeline`.

use std::time::Duration;

use engine::api::{FinishReason, Output, Timeline};
use engine::event::Event;
use engine::handle::Submission;
use engine::handoff::{PrefillTiming, Totals};
use serde_json::{Value, json};

use crate::support::*;

const PATH: &str = "/v1/completions";

fn end(submission: &Submission, first_token_ms: u64) {
    let Output::Finished { reason, stop_token, mut usage, .. } =
        finished(&submission.request, 1, FinishReason::Stop)
    else {
        unreachable!()
    };
    usage.transferred_tokens = 2;
    let timeline = Timeline {
        scheduled: Some(Duration::from_micros(1_500)),
        first_token: Some(Duration::from_millis(first_token_ms)),
        prefill: Some(PrefillTiming { wire_us: 2_250, ..PrefillTiming::default() }),
        transfer: Some(Totals { writes: 1, blocks: 2, bytes: 3, descriptors: 4 }),
        ..Timeline::default()
    };
    submission.outputs.send(Output::Finished { reason, stop_token, usage, timeline, kept: None }).unwrap();
}

fn check(timeline: &Value, first_token_ms: f64) {
    assert_eq!(timeline["scheduled_ms"], 1.5, "{timeline}");
    assert_eq!(timeline["first_token_ms"], first_token_ms);
    assert_eq!((timeline["granted_ms"].is_null(), &timeline["preemptions"]), (true, &json!(0)));
    assert_eq!(
        (&timeline["prefill"]["wire_ms"], &timeline["prefill"]["queue_ms"]),
        (&json!(2.25), &json!(0.0))
    );
    assert_eq!(timeline["transfer"], json!({"writes": 1, "blocks": 2, "bytes": 3, "descriptors": 4}));
    assert_eq!(timeline["transferred_tokens"], 2);
}

#[tokio::test]
async fn one_answer_has_one_timeline_when_asked() {
    let mut harness = start(Setup::default()).await;
    for asked in [true, false] {
        let request = completion("x", json!({"return_timeline": asked}));
        let reply = tokio::spawn(harness.request(PATH, request).send());
        end(&harness.submission().await, 7);
        let (_, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
        assert_eq!(answer.get("timeline").is_some(), asked);
        assert_eq!(answer.get("timelines"), None);
        if asked {
            check(&answer["timeline"], 7.0);
        }
    }
}

#[tokio::test]
async fn several_answers_have_timelines_in_their_order() {
    let mut harness = start(Setup::default()).await;
    let request = completion("x", json!({"return_timeline": true, "n": 2, "temperature": 1}));
    let reply = tokio::spawn(harness.request(PATH, request).send());
    let (first, second) = (harness.submission().await, harness.submission().await);
    end(&second, 9);
    end(&first, 8);
    let (_, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
    assert_eq!((answer.get("timeline"), answer["timelines"].as_array().unwrap().len()), (None, 2));
    check(&answer["timelines"][0], 8.0);
    check(&answer["timelines"][1], 9.0);
}

#[tokio::test]
async fn a_stream_ends_with_it_in_the_usage_chunk_or_alone() {
    let mut harness = start(Setup::default()).await;
    for include_usage in [true, false] {
        let options = json!({"include_usage": include_usage});
        let request =
            completion("x", json!({"return_timeline": true, "stream": true, "stream_options": options}));
        let reply = tokio::spawn(harness.request(PATH, request).send());
        end(&harness.submission().await, 7);
        let body = soon(soon(reply).await.unwrap().unwrap().text()).await.unwrap();
        let chunks = whole(split_events(&body));
        let (last, before) = chunks.split_last().unwrap();
        check(&last["timeline"], 7.0);
        assert_eq!((&last["choices"], last.get("usage").is_some()), (&json!([]), include_usage));
        assert!(before.iter().all(|chunk| chunk.get("timeline").is_none()));
    }
}

/// The engine learns of the end from the server, and then says where the time went.
#[tokio::test]
async fn an_answer_that_a_stop_string_ended_has_a_timeline() {
    let mut harness = start(Setup::default()).await;
    let request = completion("x", json!({"return_timeline": true, "stop": "b"}));
    let reply = tokio::spawn(harness.request(PATH, request).send());
    let submission = harness.submission().await;
    for id in harness.ids("a b c") {
        submission.outputs.send(token(id)).unwrap();
    }
    assert!(matches!(harness.event().await, Event::Finish(id) if id == submission.id));
    end(&submission, 7);
    let (_, answer) = json_of(soon(reply).await.unwrap().unwrap()).await;
    assert_eq!(answer["choices"][0]["text"], "a ");
    check(&answer["timeline"], 7.0);
}
