//! `kv_transfer_params`: handoffs that an outside proxy arranges, in vLLM's words.
//!
//! The proxy sends the request to a prefill worker with `do_remote_decode`; that computes the prompt and one token, keeps
//! the KV under a lease and answers with parameters. The proxy sends them along with the request to a decode worker, which
//! fetches the KV. `remote_host` and `remote_port` name the prefill worker's HTTP server, where the link between workers
//! is too; `remote_engine_id` the process, so that another one at its address is not taken for it.
//!
//! What cannot be meant (fields missing, a role that has no part in handoffs) is 400, another engine at the address or one
//! that does not fit 503. KV that cannot be had any more is computed again or an error, as `--kv-failure` says; then the
//! answer says `{"recomputed": "<reason>"}` in `kv_transfer_params`.

use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use engine::api::KeptKv;
use engine::core::Fetch;
use serde_json::{Map, Value, json};

use super::choice::Share;
use super::fields::Fields;
use super::options::Options;
use super::timeline;
use crate::config::PeerUrl;
use crate::error::ApiError;
use crate::link::demand::Refusal;
use crate::state::{AppState, Handoffs};

/// What a request says about its KV.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum KvTransfer {
    #[default]
    None,
    /// Compute the prompt and keep its KV.
    Keep,
    /// The prompt's KV is kept elsewhere.
    Fetch(Remote),
}

/// Who keeps a prompt's KV, under which name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Remote {
    engine_id: String,
    request_id: String,
    url: PeerUrl,
    cached_tokens: usize,
}

impl KvTransfer {
    /// Errors: 400 naming the field, 404 for anything but `do_remote_decode` on a prefill worker.
    pub fn parse(fields: &Fields, state: &AppState) -> Result<Self, ApiError> {
        let parsed = match fields.object("kv_transfer_params")? {
            None => Self::None,
            Some(params) => Self::read(&params)?,
        };
        let role = state.role.as_str();
        let misplaced = |field: &str, wanted: &str| {
            let name = format!("kv_transfer_params.{field}");
            let message = format!("{name} is true, but this worker's role is {role}: send it to a worker with {wanted}");
            ApiError::bad_field(name, message)
        };
        match (&parsed, state.kv.get()) {
            (Self::None, _) if !state.role.serves_completions() => Err(ApiError::not_found(
                "this is a prefill worker (--role prefill), which answers no completions but those with \
                 kv_transfer_params.do_remote_decode; send the request to a worker with --role decode or --role both",
            )),
            (Self::None, _) | (Self::Keep, Some(Handoffs::Keeps { .. })) => Ok(parsed),
            (Self::Fetch(_), Some(Handoffs::Fetches { .. })) => Ok(parsed),
            (Self::Keep, _) => Err(misplaced("do_remote_decode", "--role prefill")),
            (Self::Fetch(_), _) => Err(misplaced("do_remote_prefill", "--role decode")),
        }
    }

    fn read(params: &Fields) -> Result<Self, ApiError> {
        let keep = params.bool("do_remote_decode")?.unwrap_or(false);
        let fetch = params.bool("do_remote_prefill")?.unwrap_or(false);
        match (keep, fetch) {
            (false, false) => Ok(Self::None),
            (true, true) => Err(params.unexpected("do_remote_prefill", "false when do_remote_decode is true")),
            (true, false) => Ok(Self::Keep),
            (false, true) => {
                for (size, one) in [("tp_size", 1), ("pp_size", 1), ("dcp_size", 1)] {
                    params.integer_within(size, one, one)?;
                }
                if params.str("transfer_mode")?.is_some_and(|mode| mode != "pull") {
                    return Err(params.unexpected("transfer_mode", "\"pull\""));
                }
                let text = |name| match params.str(name)?.filter(|text| !text.is_empty()) {
                    Some(text) => Ok(text.to_owned()),
                    None => Err(params.unexpected(name, "a string, with do_remote_prefill")),
                };
                let port = params.integer_within("remote_port", 1, u16::MAX.into())?;
                let port =
                    port.ok_or_else(|| params.unexpected("remote_port", "a port number, with do_remote_prefill"))?;
                let host = text("remote_host")?.trim_matches(['[', ']']).to_owned();
                let cached = params.integer_within("remote_prefill_cached_tokens", 0, i128::from(u32::MAX))?;
                Ok(Self::Fetch(Remote {
                    engine_id: text("remote_engine_id")?,
                    request_id: text("remote_request_id")?,
                    url: PeerUrl { host, port: port as u16 },
                    cached_tokens: cached.unwrap_or(0) as usize,
                }))
            }
        }
    }

    /// Makes the request's options fit: one prompt, one answer; a kept prompt needs one token whatever the client wanted.
    pub fn restrict(&self, prompts: usize, options: &mut Options) -> Result<(), ApiError> {
        if *self == Self::None {
            return Ok(());
        }
        for (field, count) in [("prompt", prompts), ("n", options.n)] {
            if count != 1 {
                let message = format!("{field} asks for {count} answers, expected 1 with kv_transfer_params");
                return Err(ApiError::bad_field(field, message));
            }
        }
        if *self == Self::Keep {
            options.only_first_token();
        }
        Ok(())
    }

    /// The link to whoever keeps the KV, and what to ask it for.
    pub async fn fetch(&self, state: &AppState) -> Result<Option<Fetch>, ApiError> {
        let (Self::Fetch(remote), Some(Handoffs::Fetches { demand, .. })) = (self, state.kv.get()) else {
            return Ok(None);
        };
        let peer = match demand.link(&remote.url, &remote.engine_id).await {
            Ok(peer) => Some(peer),
            Err(Refusal::Misfit(reason)) => {
                return Err(ApiError::unavailable(format!("kv_transfer_params: {reason}")));
            }
            Err(Refusal::Unreachable(reason)) => {
                tracing::warn!(reason, "the worker that keeps the KV cannot be reached");
                None
            }
        };
        let (kept, cached_tokens) = (remote.request_id.clone(), remote.cached_tokens);
        Ok(Some(Fetch { peer, kept, cached_tokens }))
    }
}

/// Fields of an answer beside OpenAI's.
#[derive(Clone, Debug, Default)]
pub struct Extras {
    pub return_timeline: bool,
    /// The request had `kv_transfer_params` that mean something.
    pub with_kv: bool,
    /// Filled when a kept prompt's request ends.
    pub kept: Arc<OnceLock<Value>>,
}

impl Extras {
    /// The fields to add, once all choices are at their end.
    pub fn fields(&self, shares: &[Share]) -> Map<String, Value> {
        let mut fields = timeline::fields(self.return_timeline, shares);
        if self.with_kv {
            let recomputed = shares.iter().find_map(|share| share.report?.recomputed());
            let params = match (self.kept.get(), recomputed) {
                (Some(kept), _) => kept.clone(),
                (None, Some(fault)) => json!({ "recomputed": fault.label() }),
                (None, None) => Value::Null,
            };
            fields.insert("kv_transfer_params".into(), params);
        }
        fields
    }
}

/// The parameters that let a decode worker fetch what is kept here.
pub fn params_of(kept: &KeptKv, state: &AppState) -> Value {
    let Some(Handoffs::Keeps { engine_id, host }) = state.kv.get() else { return Value::Null };
    let expires = SystemTime::now() + kept.lease;
    json!({
        "do_remote_prefill": true,
        "do_remote_decode": false,
        "remote_block_ids": [kept.blocks],
        "remote_engine_id": engine_id,
        "remote_request_id": kept.name,
        "remote_host": host,
        "remote_port": state.port.get(),
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": kept.tokens,
        "remote_blocks_expiry_time": expires.duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64()),
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": kept.cached_tokens,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(params: Value) -> Result<KvTransfer, ApiError> {
        KvTransfer::read(&Fields::new(json!({ "p": params }).as_object().unwrap().clone()).object("p").unwrap().unwrap())
    }

    #[test]
    fn what_vllms_proxy_sends_to_a_prefill_worker_is_understood() {
        let sent = json!({
            "do_remote_decode": true, "do_remote_prefill": false, "remote_engine_id": null,
            "remote_block_ids": null, "remote_host": null, "remote_port": null,
        });
        assert_eq!(read(sent).unwrap(), KvTransfer::Keep);
        assert_eq!(read(json!({})).unwrap(), KvTransfer::None);
        assert_eq!(read(json!({ "do_remote_prefill": false })).unwrap(), KvTransfer::None);
    }

    #[test]
    fn a_fetch_names_worker_address_and_request_or_is_refused_by_field() {
        let full = json!({
            "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[12, 13]],
            "remote_engine_id": "85c6", "remote_request_id": "cmpl-1", "remote_host": "127.0.0.1",
            "remote_port": 5600, "tp_size": 1, "dcp_size": 1, "pp_size": 1, "remote_num_tokens": 1500,
            "remote_blocks_expiry_time": null, "transfer_mode": "pull", "remote_prefill_cached_tokens": 1408,
        });
        let KvTransfer::Fetch(remote) = read(full.clone()).unwrap() else { panic!() };
        assert_eq!((remote.request_id.as_str(), remote.cached_tokens), ("cmpl-1", 1408));
        let mut changes = vec![
            ("tp_size", json!(2)),
            ("transfer_mode", json!("push")),
            ("do_remote_decode", json!(true)),
            ("remote_port", json!(70_000)),
            ("do_remote_prefill", json!("yes")),
        ];
        for field in ["remote_engine_id", "remote_request_id", "remote_host", "remote_port"] {
            changes.push((field, Value::Null));
        }
        for (field, value) in changes {
            let mut params = full.clone();
            params[field] = value;
            let error = read(params).unwrap_err();
            let named = if field == "do_remote_decode" { "do_remote_prefill" } else { field };
            assert_eq!(error.param, Some(format!("p.{named}")), "{}", error.message);
        }
    }
}
