//! The fields that completions and chat share: sampling, limits, stops, streaming, timeline.

use std::time::Duration;

use engine::api::SamplingParams;
use engine::handle::EngineInfo;
use models::SamplingDefaults;
use serde_json::Value;

use super::fields::Fields;
use super::response::Api;
use super::sampling::sampling;
use crate::error::ApiError;

/// OpenAI takes 4 stop strings and vLLM 4; each is looked for in every token's text, so there is a limit.
const MAX_STOPS: usize = 16;
/// Each answer of `n` takes a place in the queue.
const MAX_N: usize = 128;

/// How to generate; the same for every prompt and answer of a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Options {
    /// Answers for each prompt.
    pub n: usize,
    /// `None`: the API's default.
    pub max_tokens: Option<usize>,
    /// `max_tokens` in here is set by [`Options::sampling_for`].
    sampling: SamplingParams,
    pub stop: Vec<String>,
    /// Leave control tokens such as `<|im_end|>` out of the text.
    pub skip_special_tokens: bool,
    pub cache_salt: Option<String>,
    /// Say where the time went.
    pub return_timeline: bool,
    /// The request fails after this long; `None`: after the server's own limit, which also bounds this one.
    pub timeout: Option<Duration>,
    /// `None`: one JSON answer.
    pub stream: Option<StreamOptions>,
}

/// What a stream tells beside the text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// One last chunk with the usage.
    pub include_usage: bool,
    /// Usage so far in every chunk.
    pub continuous_usage_stats: bool,
}

impl Options {
    pub fn parse(
        api: Api,
        fields: &Fields,
        defaults: &SamplingDefaults,
        info: &EngineInfo,
    ) -> Result<Self, ApiError> {
        let sampling = sampling(api, fields, defaults, info)?;
        let max_tokens = max_tokens(fields, info.max_model_len)?;
        // With the API's default as limit, the engine checks.
        if let Some(max_tokens) = max_tokens.filter(|&max_tokens| sampling.min_tokens > max_tokens) {
            return Err(fields.unexpected("min_tokens", format!("at most max_tokens, which is {max_tokens}")));
        }
        Ok(Self {
            n: count(fields, sampling.temperature)?,
            max_tokens,
            sampling,
            stop: stop(fields)?,
            skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
            cache_salt: cache_salt(fields)?,
            return_timeline: fields.bool("return_timeline")?.unwrap_or(false),
            timeout: timeout(fields)?,
            stream: stream(fields)?,
        })
    }

    /// The answer is one token, whatever was asked for, and ends with it.
    pub fn only_first_token(&mut self) {
        self.max_tokens = Some(1);
        self.sampling.min_tokens = 0;
        self.stop.clear();
    }

    /// Whether each token's log-probability was asked for.
    pub fn with_logprobs(&self) -> bool {
        self.sampling.logprobs.is_some()
    }

    /// Parameters of answer number `index` to a prompt of `prompt_tokens`: `max_tokens`, else `default`, as far
    /// as the model's length allows. The prompt must be shorter than that.
    pub fn sampling_for(
        &self,
        index: usize,
        prompt_tokens: usize,
        default: usize,
        max_len: usize,
    ) -> SamplingParams {
        let room = max_len.saturating_sub(prompt_tokens);
        let seed = self.sampling.seed.map(|seed| seed.wrapping_add(index as u64));
        SamplingParams {
            max_tokens: self.max_tokens.unwrap_or(default).min(room),
            seed,
            ..self.sampling.clone()
        }
    }
}

fn count(fields: &Fields, temperature: f32) -> Result<usize, ApiError> {
    let n = fields.integer_within("n", 1, MAX_N as i128)?.unwrap_or(1) as usize;
    match n > 1 && temperature == 0.0 {
        true => {
            Err(fields.unexpected("n", "1 with greedy sampling (temperature 0), where all answers are equal"))
        }
        false => Ok(n),
    }
}

/// `max_completion_tokens` wins over `max_tokens`, its older name.
fn max_tokens(fields: &Fields, max_model_len: usize) -> Result<Option<usize>, ApiError> {
    let older = limit(fields, "max_tokens", max_model_len)?;
    Ok(limit(fields, "max_completion_tokens", max_model_len)?.or(older))
}

fn limit(fields: &Fields, name: &str, max_model_len: usize) -> Result<Option<usize>, ApiError> {
    let limit = fields.integer_within(name, 1, i128::MAX)?;
    match limit {
        Some(limit) if limit > max_model_len as i128 => {
            Err(fields
                .unexpected(name, format!("at most the model's maximum length, {max_model_len} tokens")))
        }
        _ => Ok(limit.map(|limit| limit as usize)),
    }
}

fn stop(fields: &Fields) -> Result<Vec<String>, ApiError> {
    let expected = format!("a string or a list of up to {MAX_STOPS} strings, none of them empty");
    let string = |value: &Value| value.as_str().filter(|text| !text.is_empty()).map(str::to_owned);
    let stops = match fields.get("stop") {
        None => Some(Vec::new()),
        Some(Value::Array(list)) if list.len() <= MAX_STOPS => list.iter().map(string).collect(),
        Some(value) => string(value).map(|stop| vec![stop]),
    };
    stops.ok_or_else(|| fields.unexpected("stop", expected))
}

fn cache_salt(fields: &Fields) -> Result<Option<String>, ApiError> {
    match fields.str("cache_salt")? {
        Some("") => Err(fields.unexpected("cache_salt", "a string that is not empty")),
        salt => Ok(salt.map(str::to_owned)),
    }
}

/// `timeout_secs`, an extension.
fn timeout(fields: &Fields) -> Result<Option<Duration>, ApiError> {
    let positive = |secs: f64| secs > 0.0 && Duration::try_from_secs_f64(secs).is_ok();
    let secs = fields.number_within("timeout_secs", "a number of seconds above 0", positive)?;
    Ok(secs.map(Duration::from_secs_f64))
}

fn stream(fields: &Fields) -> Result<Option<StreamOptions>, ApiError> {
    let streams = fields.bool("stream")?.unwrap_or(false);
    let Some(options) = fields.object("stream_options")? else {
        return Ok(streams.then(StreamOptions::default));
    };
    if !streams {
        return Err(fields.unexpected("stream_options", "no such field unless stream is true"));
    }
    let include_usage = options.bool("include_usage")?.unwrap_or(false);
    let continuous = options.bool("continuous_usage_stats")?.unwrap_or(false);
    Ok(Some(StreamOptions { include_usage, continuous_usage_stats: include_usage && continuous }))
}

#[cfg(test)]
#[path = "options_tests.rs"]
mod tests;
