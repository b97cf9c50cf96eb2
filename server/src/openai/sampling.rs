//! How to pick tokens: a request's sampling fields, over what the model's `generation_config.json` recommends.

use engine::api::{SamplingParams, TokenId};
use engine::handle::{EngineInfo, MAX_LOGPROBS};
use models::SamplingDefaults;
use serde_json::Value;

use super::fields::{Fields, integer};
use super::response::Api;
use crate::error::ApiError;

/// What vLLM samples with when neither the request nor the model's files say.
const DEFAULT_TEMPERATURE: f32 = 1.0;
/// OpenAI's range. Numbers beyond are taken as its ends, as vLLM does: those forbid or force a token already.
const MAX_BIAS: f64 = 100.0;

/// Everything but `max_tokens`, which depends on the prompt and is left 0.
pub fn sampling(
    api: Api,
    fields: &Fields,
    defaults: &SamplingDefaults,
    info: &EngineInfo,
) -> Result<SamplingParams, ApiError> {
    let share = |name| fields.number_within(name, "a number in [0, 1]", |p| (0.0..=1.0).contains(&p));
    let temperature =
        fields.number_within("temperature", "a number in [0, 2]", |t| (0.0..=2.0).contains(&t))?;
    let top_p = fields.number_within("top_p", "a number in (0, 1]", |p| p > 0.0 && p <= 1.0)?;
    let repetition_penalty = fields.number_within("repetition_penalty", "a number above 0", |penalty| {
        penalty > 0.0 && penalty <= f64::from(f32::MAX)
    })?;
    Ok(SamplingParams {
        temperature: temperature.map_or(defaults.temperature.unwrap_or(DEFAULT_TEMPERATURE), narrow),
        top_k: top_k(fields)?.unwrap_or(defaults.top_k),
        top_p: top_p.map_or(defaults.top_p.unwrap_or(1.0), narrow),
        min_p: share("min_p")?.map_or(defaults.min_p.unwrap_or(0.0), narrow),
        repetition_penalty: repetition_penalty.map_or(defaults.repetition_penalty.unwrap_or(1.0), narrow),
        presence_penalty: penalty(fields, "presence_penalty")?,
        frequency_penalty: penalty(fields, "frequency_penalty")?,
        logit_bias: logit_bias(fields, info.vocab_size)?,
        min_tokens: min_tokens(fields)?,
        logprobs: logprobs(api, fields)?,
        seed: seed(fields)?,
        max_tokens: 0,
        ignore_eos: fields.bool("ignore_eos")?.unwrap_or(false),
        stop_token_ids: stop_token_ids(fields, info.vocab_size)?,
    })
}

/// Below the smallest f32 positive numbers would become 0, which means something else.
fn narrow(wide: f64) -> f32 {
    if wide > 0.0 { (wide as f32).max(f32::MIN_POSITIVE) } else { 0.0 }
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

fn penalty(fields: &Fields, name: &str) -> Result<f32, ApiError> {
    let number = fields.number_within(name, "a number in [-2, 2]", |p| (-2.0..=2.0).contains(&p))?;
    Ok(number.unwrap_or(0.0) as f32)
}

/// OpenAI's form: ids as the keys of an object.
fn logit_bias(fields: &Fields, vocab_size: usize) -> Result<Vec<(TokenId, f32)>, ApiError> {
    let Some(biases) = fields.get("logit_bias") else { return Ok(Vec::new()) };
    let expected = "an object with token ids as keys and numbers as values";
    let biases = biases.as_object().ok_or_else(|| fields.unexpected("logit_bias", expected))?;
    biases.iter().map(|(key, bias)| one_bias(key, bias, vocab_size)).collect()
}

fn one_bias(key: &str, bias: &Value, vocab_size: usize) -> Result<(TokenId, f32), ApiError> {
    // One spelling for each id, so that no id is there twice.
    let id = key.parse::<TokenId>().ok().filter(|id| (*id as usize) < vocab_size && id.to_string() == key);
    let id = id.ok_or_else(|| {
        let key = crate::error::shown(&key.into());
        let message = format!("logit_bias has the key {key}, expected token ids below {vocab_size}");
        ApiError::bad_field("logit_bias", message)
    })?;
    match bias.as_f64() {
        Some(bias) => Ok((id, bias.clamp(-MAX_BIAS, MAX_BIAS) as f32)),
        None => Err(ApiError::bad_value(format!("logit_bias.{key}"), bias, "a number in [-100, 100]")),
    }
}

fn min_tokens(fields: &Fields) -> Result<usize, ApiError> {
    let number = fields.integer_within("min_tokens", 0, i128::MAX)?.unwrap_or(0);
    Ok(usize::try_from(number).unwrap_or(usize::MAX))
}

/// How many alternatives to report with each token; `None`: no log-probabilities at all. Completions say a number,
/// chat says whether, and how many apart from it.
fn logprobs(api: Api, fields: &Fields) -> Result<Option<u32>, ApiError> {
    let count = |name| Ok(fields.integer_within(name, 0, MAX_LOGPROBS.into())?.map(|count| count as u32));
    if api == Api::Completions {
        return count("logprobs");
    }
    match (fields.bool("logprobs")?.unwrap_or(false), count("top_logprobs")?) {
        (true, top) => Ok(Some(top.unwrap_or(0))),
        (false, None | Some(0)) => Ok(None),
        (false, Some(_)) => Err(fields.unexpected("top_logprobs", "0 unless logprobs is true")),
    }
}

/// Any 64-bit number, signed or not; -1 means none, as in vLLM.
fn seed(fields: &Fields) -> Result<Option<u64>, ApiError> {
    let seed = fields.integer_within("seed", i64::MIN.into(), u64::MAX.into())?;
    Ok(seed.filter(|&seed| seed != -1).map(|seed| seed as u64))
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
