//! Prefill and decode by vLLM's proxy protocol: the prefill worker computes the prompt and one token, and says in
//! `kv_transfer_params` where its KV is; those go into the request to the decode worker.

use std::time::Instant;

use axum::http::{HeaderMap, StatusCode};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::{BodyExt, Limited};
use serde_json::{Map, Value, json};

use super::deliver::{Blame, Failure, retry_after, unreachable};
use super::fleet::Worker;
use super::upstream::{SendError, Upstream};
use crate::error::ApiError;
use crate::openai::Api;

/// The answer to a prefill leg is one token and the transfer's parameters.
const MAX_ANSWER: usize = 16 << 20;

/// The prefill leg of one request.
pub struct Leg<'a> {
    pub upstream: &'a Upstream,
    pub prefill: &'a Worker,
    pub api: Api,
    pub headers: &'a HeaderMap,
}

impl Leg<'_> {
    /// Has the prompt of `body` computed; the body for the decode worker. Dropping the future tells the prefill worker.
    pub async fn prefill(&self, body: &Bytes) -> Result<Bytes, Failure> {
        let request: Map<String, Value> = serde_json::from_slice(body).map_err(|error| {
            gives_up(ApiError::bad_request(format!("the body is not valid JSON: {error}")))
        })?;
        let leg = serde_json::to_vec(&prefill_request(request.clone())).map_err(|error| {
            gives_up(ApiError::internal(format!("the prefill request cannot be written: {error}")))
        })?;
        let params = self.ask(leg.into()).await?;
        let decode = decode_request(request, params);
        Ok(serde_json::to_vec(&decode).expect("read as JSON above. This is a bug.").into())
    }

    async fn ask(&self, body: Bytes) -> Result<Value, Failure> {
        let worker = self.prefill;
        let sent = self.upstream.post(worker.api_uri(self.api), self.headers.clone(), body);
        let failed = |error: SendError| match unreachable(worker, &error) {
            // Our own lack of something: another worker would be reached no better.
            failure if failure.blame == Blame::Request => failure,
            failure => Failure { blame: Blame::Prefill, ..failure },
        };
        let response = tokio::select! {
            response = sent => response.map_err(failed)?,
            () = worker.hung.notified() => return Err(failed(SendError::Broken("the worker hangs".into()))),
        };
        let (head, body) = response.into_parts();
        let bytes = Limited::new(body, MAX_ANSWER).collect().await;
        let bytes = bytes.map_err(|error| failed(SendError::Broken(error.to_string())))?.to_bytes();
        if head.status != StatusCode::OK {
            return Err(self.refused(head.status, &head.headers, bytes));
        }
        worker.standing().succeeded(Instant::now());
        let answer: Value = serde_json::from_slice(&bytes).unwrap_or_default();
        let params = answer.get("kv_transfer_params").filter(|params| params.is_object());
        params.cloned().ok_or_else(|| {
            // Without them the decode worker would compute the prompt itself and nobody would know.
            worker.standing().failed(Instant::now());
            let message = format!(
                "prefill worker {} answered without kv_transfer_params: it has no KV connector (--kv-transfer-config)",
                worker.name
            );
            let error = ApiError::new(StatusCode::BAD_GATEWAY, message);
            Failure { reason: "no_kv_transfer_params", answer: error.into_response(), blame: Blame::Prefill }
        })
    }

    fn refused(&self, status: StatusCode, headers: &HeaderMap, bytes: Bytes) -> Failure {
        let worker = self.prefill;
        let (reason, blame) = match status {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                worker.busy(retry_after(headers));
                ("prefill_unavailable", Blame::Prefill)
            }
            _ if status.is_server_error() => {
                worker.standing().failed(Instant::now());
                ("prefill_failed", Blame::Prefill)
            }
            // The request is at fault.
            _ => ("refused", Blame::Request),
        };
        let mut answer = axum::http::Response::new(axum::body::Body::from(bytes));
        *answer.status_mut() = status;
        let json = axum::http::HeaderValue::from_static("application/json");
        answer.headers_mut().insert(axum::http::header::CONTENT_TYPE, json);
        Failure { reason, answer, blame }
    }
}

fn gives_up(error: ApiError) -> Failure {
    Failure { reason: "refused", answer: error.into_response(), blame: Blame::Request }
}

/// The request as the prefill worker gets it: one token, no stream, and nothing that asks for more than that.
pub fn prefill_request(mut request: Map<String, Value>) -> Map<String, Value> {
    request.insert("stream".into(), false.into());
    request.insert("max_tokens".into(), 1.into());
    // Clients that send this one would otherwise get their whole answer computed twice.
    if request.contains_key("max_completion_tokens") {
        request.insert("max_completion_tokens".into(), 1.into());
    }
    for field in ["stream_options", "min_tokens"] {
        request.remove(field);
    }
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    request.insert("kv_transfer_params".into(), params);
    request
}

/// The request as the decode worker gets it: the client's own, with where the KV is.
pub fn decode_request(mut request: Map<String, Value>, params: Value) -> Map<String, Value> {
    request.insert("kv_transfer_params".into(), params);
    request
}

#[cfg(test)]
mod tests {
    use super::*;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().expect("an object").clone()
    }

    #[test]
    fn the_prefill_worker_computes_one_token_however_the_limit_is_spelled() {
        let request = object(json!({
            "prompt": "a", "max_tokens": 50, "max_completion_tokens": 60, "min_tokens": 5, "stream": true,
            "stream_options": {"include_usage": true}, "temperature": 0.5,
        }));
        let leg = Value::Object(prefill_request(request.clone()));
        assert_eq!(
            (&leg["max_tokens"], &leg["max_completion_tokens"], &leg["stream"]),
            (&json!(1), &json!(1), &json!(false))
        );
        assert_eq!((leg.get("min_tokens"), leg.get("stream_options")), (None, None));
        assert_eq!((&leg["prompt"], &leg["temperature"]), (&json!("a"), &json!(0.5)));
        assert_eq!(leg["kv_transfer_params"]["do_remote_decode"], true);
        let decode = Value::Object(decode_request(request, json!({"remote_host": "h"})));
        assert_eq!((&decode["min_tokens"], &decode["max_completion_tokens"]), (&json!(5), &json!(60)));
        assert_eq!(
            (&decode["stream"], &decode["kv_transfer_params"]["remote_host"]),
            (&json!(true), &json!("h"))
        );
    }

    #[test]
    fn a_request_without_limits_gets_only_the_one_that_every_server_knows() {
        let leg = prefill_request(object(json!({"messages": []})));
        assert_eq!(leg["max_tokens"], 1);
        assert!(!leg.contains_key("max_completion_tokens"));
    }
}
