use serde_json::json;

use super::*;

const DEFAULTS: SamplingDefaults = SamplingDefaults {
    temperature: Some(0.6),
    top_k: Some(20),
    top_p: Some(0.95),
    min_p: Some(0.05),
    repetition_penalty: Some(1.1),
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
    parse_for(Api::Completions, request)
}

fn parse_for(api: Api, request: Value) -> Result<Options, ApiError> {
    Options::parse(api, &Fields::new(request.as_object().unwrap().clone()), &DEFAULTS, &info())
}

fn sampling(request: Value) -> SamplingParams {
    parse(request).unwrap().sampling_for(0, 12, 16, 512)
}

#[test]
fn what_a_request_leaves_out_comes_from_the_model() {
    let params = sampling(json!({}));
    assert_eq!((params.temperature, params.top_k, params.top_p), (0.6, Some(20), 0.95));
    assert_eq!((params.min_p, params.repetition_penalty), (0.05, 1.1));
    assert_eq!((params.max_tokens, params.seed, params.ignore_eos), (16, None, false));
    let bare = Options::parse(Api::Chat, &Fields::default(), &SamplingDefaults::default(), &info()).unwrap();
    let params = bare.sampling_for(0, 1, 1, 512);
    assert_eq!(params, SamplingParams { temperature: 1.0, max_tokens: 1, ..SamplingParams::default() });
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
fn penalties_bias_and_least_length() {
    let params = sampling(json!({
        "min_p": 0, "repetition_penalty": 1, "presence_penalty": -2, "frequency_penalty": 0.5,
        "logit_bias": {"999": -100, "3": 250.5}, "min_tokens": 16,
    }));
    assert_eq!((params.min_p, params.repetition_penalty), (0.0, 1.0));
    assert_eq!((params.presence_penalty, params.frequency_penalty), (-2.0, 0.5));
    assert_eq!(params.logit_bias, [(999, -100.0), (3, 100.0)]);
    assert_eq!((params.min_tokens, params.logprobs), (16, None));
    params.check(1000).unwrap();
    assert!(sampling(json!({"min_p": 1e-60})).min_p > 0.0);
}

#[test]
fn completions_and_chat_ask_for_logprobs_in_their_own_words() {
    let asked = |api, request| parse_for(api, request).unwrap().sampling_for(0, 12, 16, 512).logprobs;
    for (request, expected) in [
        (json!({"logprobs": 0}), Some(0)),
        (json!({"logprobs": 20}), Some(20)),
        (json!({"logprobs": null}), None),
    ] {
        assert_eq!(asked(Api::Completions, request), expected);
    }
    for (request, expected) in [
        (json!({"logprobs": true}), Some(0)),
        (json!({"logprobs": true, "top_logprobs": 0}), Some(0)),
        (json!({"logprobs": true, "top_logprobs": 20}), Some(20)),
        (json!({"logprobs": false, "top_logprobs": 0}), None),
        (json!({}), None),
    ] {
        assert_eq!(asked(Api::Chat, request), expected);
    }
    for (api, request, expected) in [
        (Api::Completions, json!({"logprobs": 21}), "logprobs is 21, expected a whole number in [0, 20]"),
        (Api::Completions, json!({"logprobs": -1}), "logprobs is -1, expected a whole number in [0, 20]"),
        (Api::Completions, json!({"logprobs": true}), "logprobs is true, expected a whole number"),
        (Api::Chat, json!({"logprobs": 3}), "logprobs is 3, expected true or false"),
        (Api::Chat, json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs is 21, expected a whole"),
        (Api::Chat, json!({"top_logprobs": 3}), "top_logprobs is 3, expected 0 unless logprobs is true"),
        (
            Api::Chat,
            json!({"logprobs": false, "top_logprobs": 3}),
            "top_logprobs is 3, expected 0 unless logprobs is true",
        ),
    ] {
        let message = parse_for(api, request.clone()).unwrap_err().message;
        assert!(message.starts_with(expected), "{request}: {message}");
    }
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
        (
            json!({"min_tokens": 30, "max_tokens": 20}),
            "min_tokens is 30, expected at most max_tokens, which is 20",
        ),
        (json!({"min_tokens": -1}), "min_tokens is -1, expected a whole number of at least 0"),
        (json!({"min_p": 1.5}), "min_p is 1.5, expected a number in [0, 1]"),
        (json!({"min_p": "x"}), "min_p is \"x\", expected a number in [0, 1]"),
        (json!({"repetition_penalty": 0}), "repetition_penalty is 0, expected a number above 0"),
        (json!({"repetition_penalty": 1e300}), "repetition_penalty is 1e+300, expected a number above 0"),
        (json!({"presence_penalty": 5}), "presence_penalty is 5, expected a number in [-2, 2]"),
        (json!({"frequency_penalty": -5}), "frequency_penalty is -5, expected a number in [-2, 2]"),
        (json!({"logit_bias": [1]}), "logit_bias is [1], expected an object with token ids"),
        (
            json!({"logit_bias": {"1000": 1}}),
            "logit_bias has the key \"1000\", expected token ids below 1000",
        ),
        (json!({"logit_bias": {"-1": 1}}), "logit_bias has the key \"-1\", expected token ids"),
        (json!({"logit_bias": {"05": 1}}), "logit_bias has the key \"05\", expected token ids"),
        (json!({"logit_bias": {"the": 1}}), "logit_bias has the key \"the\", expected token ids"),
        (json!({"logit_bias": {"5": "x"}}), "logit_bias.5 is \"x\", expected a number in [-100, 100]"),
        (json!({"logit_bias": {"5": null}}), "logit_bias.5 is null, expected a number"),
        (json!({"return_timeline": "yes"}), "return_timeline is \"yes\", expected true or false"),
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

#[test]
fn a_request_sets_its_own_deadline() {
    let timeout = |value: Value| parse(json!({"timeout_secs": value})).map(|options| options.timeout);
    assert_eq!(timeout(json!(1.5)).unwrap(), Some(Duration::from_millis(1500)));
    assert_eq!(timeout(Value::Null).unwrap(), None);
    for wrong in [json!(0), json!(-1), json!(1e300), json!("5"), json!(true)] {
        let error = timeout(wrong.clone()).unwrap_err().message;
        assert!(error.contains("timeout_secs") && error.contains("number"), "{wrong}: {error}");
    }
}
