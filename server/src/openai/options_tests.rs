use serde_json::json;

use super::*;

const DEFAULTS: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.6),
    top_k: Some(20),
    top_p: Some(0.95),
    min_p: None,
    repetition_penalty: None,
};

fn info() -> EngineInfo {
    EngineInfo {
        model_name: "m".into(),
        max_model_len: 512,
        vocab_size: 1000,
        block_size: 16,
        num_blocks: 64,
        max_queued: 8,
    }
}

fn parse(request: Value) -> Result<Options, ApiError> {
    Options::parse(&Fields::new(request.as_object().unwrap().clone()), &DEFAULTS, &info())
}

fn sampling(request: Value) -> SamplingParams {
    parse(request).unwrap().sampling_for(0, 12, 16, 512)
}

#[test]
fn what_a_request_leaves_out_comes_from_the_model() {
    let params = sampling(json!({}));
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.6, Some(20), 0.95));
    assert_eq!((params.max_tokens, params.seed, params.ignore_eos), (16, None, false));
    let bare = Options::parse(&Fields::default(), &SamplingDefaults::default(), &info()).unwrap();
    let params = bare.sampling_for(0, 1, 1, 512);
    assert_eq!((params.temperature, params.top_k, params.top_p), (1.0, None, 1.0));
}

#[test]
fn what_a_request_says_wins() {
    let params = sampling(json!({
        "temperature": 0, "top_k": -1, "top_p": 1, "seed": 7, "ignore_eos": true,
        "stop_token_ids": [1, 999], "max_tokens": 9,
    }));
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.0, None, 1.0));
    assert_eq!((params.seed, params.ignore_eos, params.max_tokens), (Some(7), true, 9));
    assert_eq!(params.stop_token_ids, [1, 999]);
    assert_eq!(sampling(json!({"seed": -1})).seed, None);
    assert_eq!(sampling(json!({"seed": u64::MAX})).seed, Some(u64::MAX));
    assert!(sampling(json!({"temperature": 1e-60})).temperature > 0.0);
}

#[test]
fn max_completion_tokens_wins_and_the_model_length_limits() {
    assert_eq!(sampling(json!({"max_tokens": 7, "max_completion_tokens": 3})).max_tokens, 3);
    assert_eq!(sampling(json!({"max_tokens": 512})).max_tokens, 500);
    assert_eq!(sampling(json!({"max_tokens": null})).max_tokens, 16);
}

#[test]
fn answers_to_one_prompt_get_different_seeds() {
    let options = parse(json!({"n": 3, "seed": u64::MAX})).unwrap();
    let seeds: Vec<_> = (0..3).map(|index| options.sampling_for(index, 1, 1, 9).seed).collect();
    assert_eq!(seeds, [Some(u64::MAX), Some(0), Some(1)]);
}

#[test]
fn bad_values_are_refused_by_name() {
    let cases = [
        (json!({"max_tokens": -1}), "max_tokens is -1, expected a whole number of at least 1"),
        (json!({"max_tokens": 0}), "max_tokens is 0, expected a whole number of at least 1"),
        (json!({"max_tokens": 1.5}), "max_tokens is 1.5, expected a whole number of at least 1"),
        (json!({"max_tokens": "5"}), "max_tokens is \"5\", expected a whole number of at least 1"),
        (
            json!({"max_tokens": 1u64 << 32}),
            "max_tokens is 4294967296, expected at most the model's maximum length",
        ),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens is 0, expected"),
        (json!({"temperature": 3}), "temperature is 3, expected a number in [0, 2]"),
        (json!({"temperature": -1.0}), "temperature is -1.0, expected a number in [0, 2]"),
        (json!({"temperature": "hot"}), "temperature is \"hot\", expected a number in [0, 2]"),
        (json!({"top_p": 0}), "top_p is 0, expected a number in (0, 1]"),
        (json!({"top_p": 2}), "top_p is 2, expected a number in (0, 1]"),
        (json!({"top_k": -2}), "top_k is -2, expected 0 or -1 (off), or at least 1"),
        (json!({"seed": "x"}), "seed is \"x\", expected a whole number in"),
        (json!({"n": 0}), "n is 0, expected a whole number in [1, 128]"),
        (json!({"n": 2, "temperature": 0}), "n is 2, expected 1 with greedy sampling"),
        (json!({"stop": 5}), "stop is 5, expected a string or a list of up to 16 strings"),
        (json!({"stop": ""}), "stop is \"\", expected a string or a list"),
        (json!({"stop": ["", "a"]}), "stop is [\"\",\"a\"], expected a string or a list"),
        (
            json!({"stop": vec!["a"; 17]}),
            "stop is a list of 17 items, expected a string or a list of up to 16",
        ),
        (
            json!({"stop_token_ids": [1000]}),
            "stop_token_ids is [1000], expected a list of token ids below 1000",
        ),
        (json!({"stop_token_ids": 5}), "stop_token_ids is 5, expected a list"),
        (json!({"cache_salt": ""}), "cache_salt is \"\", expected a string that is not empty"),
        (json!({"cache_salt": 5}), "cache_salt is 5, expected a string"),
        (json!({"stream": "maybe"}), "stream is \"maybe\", expected true or false"),
        (json!({"stream_options": {}}), "stream_options is {}, expected no such field unless stream is true"),
        (json!({"stream": true, "stream_options": 1}), "stream_options is 1, expected an object"),
        (json!({"ignore_eos": 1}), "ignore_eos is 1, expected true or false"),
        (json!({"min_tokens": 30, "max_tokens": 20}), "min_tokens is 30, expected at most max_tokens"),
    ];
    for (request, expected) in cases {
        let error = parse(request.clone()).unwrap_err();
        assert!(error.message.starts_with(expected), "{request}: {}", error.message);
        assert_eq!(error.status, 400);
    }
}

#[test]
fn usage_is_streamed_only_when_asked_for() {
    let stream = |request| parse(request).unwrap().stream;
    assert_eq!(stream(json!({})), None);
    assert_eq!(stream(json!({"stream": true})), Some(StreamOptions::default()));
    assert_eq!(stream(json!({"stream": true, "stream_options": {}})), Some(StreamOptions::default()));
    assert_eq!(stream(json!({"stream": true, "stream_options": null})), Some(StreamOptions::default()));
    let both =
        json!({"stream": true, "stream_options": {"include_usage": true, "continuous_usage_stats": true}});
    assert_eq!(stream(both), Some(StreamOptions { include_usage: true, continuous_usage_stats: true }));
    let without = json!({"stream": true, "stream_options": {"continuous_usage_stats": true}});
    assert_eq!(stream(without), Some(StreamOptions::default()));
}
