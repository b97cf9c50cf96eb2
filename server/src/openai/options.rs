//! The fields that completions and chat share: sampling, limits, stops, streaming.

use engine::api::{SamplingParams, TokenId};
use engine::handle::EngineInfo;
use models::SamplingDefaults;
use serde_json::Value;

use super::fields::{Fields, integer};
use super::unsupported::check_min_tokens;
use crate::error::ApiError;

/// OpenAI takes 4 stop strings and vLLM 4; each is looked for in every token's text, so there is a limit.
const MAX_STOPS: usize = 16;
/// Each answer of `n` takes a place in the queue.
const MAX_N: usize = 128;
/// What vLLM samples with when neither the request nor the model's files say.
const DEFAULT_TEMPERATURE: f32 = 1.0;

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
    pub fn parse(fields: &Fields, defaults: &SamplingDefaults, info: &EngineInfo) -> Result<Self, ApiError> {
        let sampling = sampling(fields, defaults, info)?;
        let options = Self {
            n: count(fields, sampling.temperature)?,
            max_tokens: max_tokens(fields, info.max_model_len)?,
            sampling,
            stop: stop(fields)?,
            skip_special_tokens: fields.bool("skip_special_tokens")?.unwrap_or(true),
            cache_salt: cache_salt(fields)?,
            stream: stream(fields)?,
        };
        let sampling = &options.sampling;
        let ends_early =
            !sampling.ignore_eos || !options.stop.is_empty() || !sampling.stop_token_ids.is_empty();
        check_min_tokens(fields, options.max_tokens.unwrap_or(info.max_model_len), ends_early)?;
        Ok(options)
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

fn sampling(
    fields: &Fields,
    defaults: &SamplingDefaults,
    info: &EngineInfo,
) -> Result<SamplingParams, ApiError> {
    let temperature =
        fields.number_within("temperature", "a number in [0, 2]", |t| (0.0..=2.0).contains(&t))?;
    let top_p = fields.number_within("top_p", "a number in (0, 1]", |p| p > 0.0 && p <= 1.0)?;
    // Below the smallest f32 these would become 0, which means something else.
    let narrow = |wide: f64| if wide > 0.0 { (wide as f32).max(f32::MIN_POSITIVE) } else { 0.0 };
    let default_temperature = defaults.temperature.unwrap_or(DEFAULT_TEMPERATURE);
    Ok(SamplingParams {
        temperature: temperature.map_or(default_temperature, narrow),
        top_k: top_k(fields)?.unwrap_or(defaults.top_k),
        top_p: top_p.map_or(defaults.top_p.unwrap_or(1.0), narrow),
        seed: seed(fields)?,
        max_tokens: 0,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        stop_token_ids: stop_token_ids(fields, info.vocab_size)?,
    })
}

/// Outer `None`: not given. Inner `None`: no limit.
fn top_k(fields: &Fields) -> Result<Option<Option<u32>>, ApiError> {
    let top_k = fields.integer("top_k")?;
    let read = |k: i128| match k {
        -1 | 0 => Ok(None),
        1.. => Ok(Some(u32::try_from(k).unwrap_or(u32::MAX))),
        _ => Err(fields.unexpected("top_k", "0 or -1 (off), or at least 1")),
    };
    top_k.map(read).transpose()
}

/// Any 64-bit number, signed or not; -1 means none, as in vLLM.
fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    let seed = fields.integer_within("seed", i64::MIN.into(), u64::MAX.into())?;
    Ok(seed.filter(|&seed| seed != -1).map(|seed| seed as u64))
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

fn stop_token_ids(fields: &Fields, vocab_size: usize) -> Result<Vec<TokenId>, ApiError> {
    let id = |value: &Value| {
        integer(value).filter(|id| (0..vocab_size as i128).contains(id)).map(|id| id as TokenId)
    };
    let ids = match fields.get("stop_token_ids") {
        None => Some(Vec::new()),
        Some(value) => value.as_array().and_then(|list| list.iter().map(id).collect()),
    };
    ids.ok_or_else(|| fields.unexpected("stop_token_ids", format!("a list of token ids below {vocab_size}")))
}

fn cache_salt(fields: &Fields) -> Result<Option<String>, ApiError> {
    match fields.str("cache_salt")? {
        Some("") => Err(fields.unexpected("cache_salt", "a string that is not empty")),
        salt => Ok(salt.map(str::to_owned)),
    }
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
