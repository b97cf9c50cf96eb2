//! A request to a worker, and to another one when that fails before the first byte of the answer.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use axum::response::IntoResponse;
use bytes::Bytes;
use http_body_util::BodyExt;
use hyper::body::Incoming;

use super::decide::{Decision, Tried};
use super::flight::{Ending, Flight, Ledger};
use super::headers;
use super::pair;
use super::relay::{Limits, RelayBody};
use super::request::Asked;
use super::state::Front;
use super::stream_watch::SeenUsage;
use super::upstream::{SendError, Upstream};
use crate::error::ApiError;
use crate::openai::Api;
use crate::shutdown::Running;
use crate::state::AppState;

/// Answers that are not streams are read whole, so that a worker which dies within one costs nobody their answer.
const MAX_ANSWER: usize = 256 << 20;

/// A client's request.
pub struct Order {
    pub api: Api,
    pub request_id: String,
    /// The thread's own.
    pub upstream: Upstream,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub asked: Asked,
    pub ledger: Ledger,
    pub arrival: Instant,
    pub running: Arc<Running>,
}

/// Why an attempt brought no answer. The client has seen nothing of it.
pub struct Failure {
    /// For labels.
    pub reason: &'static str,
    /// What the client gets if nobody else can answer.
    pub answer: Response<Body>,
    pub blame: Blame,
}

/// What is at fault, and so what is left to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blame {
    /// The worker that answers clients.
    Serve,
    /// Perhaps only a kept connection that had been closed: the same worker may be asked once more.
    Connection,
    /// The worker that computes the prompt.
    Prefill,
    /// The pair: the one that answers has no link to the one that computes the prompt, and does not do it instead.
    Link,
    /// The request: no worker will take it.
    Request,
}

/// Sends the request until a worker answers, or none is left to try.
pub async fn deliver(front: &Arc<Front>, order: &Order) -> Response<Body> {
    let deadline = tokio::time::Instant::from_std(order.arrival + front.app.request_timeout);
    let mut cut = Box::pin(front.app.drain.cut());
    let mut tried = Tried::default();
    let mut last: Option<Failure> = None;
    loop {
        let decided = Instant::now();
        let decision = match front.decide(&order.asked, &tried) {
            Ok(decision) => decision,
            // What the last worker said is nearer to the truth than that there is no other.
            Err(refusal) => {
                front.metrics.rejected.with_label_values(&[refusal.reason]).inc();
                return last.map_or_else(|| refusal.error.into_response(), |failure| failure.answer);
            }
        };
        // A worker that would rather fail than compute the prompt itself is not asked to after all.
        if decision.prefill.is_none()
            && let Some(failure) = last.take_if(|failure| failure.blame == Blame::Link)
        {
            return failure.answer;
        }
        front.metrics.scheduling_ms.observe(super::metrics::ms(decided.elapsed()));
        if last.is_none() {
            front.metrics.total_ms.observe(super::metrics::ms(order.arrival.elapsed()));
        }
        let (serve, prefill) = (decision.serve.life.id, decision.prefill.as_ref().map(|leg| leg.life.id));
        let worker = decision.serve.worker.clone();
        let attempt = attempt(front, order, decision);
        let failure = tokio::select! {
            result = attempt => match result {
                Ok(answer) => return answer,
                Err(failure) => failure,
            },
            () = &mut cut => return AppState::cut_error().into_response(),
            () = tokio::time::sleep_until(deadline) => {
                let message = format!("no worker answered within {:?}", front.app.request_timeout);
                front.metrics.worker_failures.with_label_values(&[worker.name.as_str(), "deadline"]).inc();
                worker.standing().failed(Instant::now());
                return ApiError::new(StatusCode::GATEWAY_TIMEOUT, message).into_response();
            }
        };
        front.metrics.worker_failures.with_label_values(&[worker.name.as_str(), failure.reason]).inc();
        tracing::warn!(
            request_id = order.request_id,
            worker = worker.name,
            reason = failure.reason,
            "attempt failed"
        );
        if failure.blame == Blame::Request || tried.failures() >= front.config.max_retries {
            return failure.answer;
        }
        front.metrics.retries.with_label_values(&[failure.reason]).inc();
        match failure.blame {
            Blame::Prefill | Blame::Link => tried.exclude(prefill.unwrap_or(serve)),
            Blame::Connection => tried.suspect(serve),
            Blame::Serve | Blame::Request => tried.exclude(serve),
        }
        last = Some(failure);
    }
}

/// One try. Errors: no byte of an answer came, and another worker may do better.
async fn attempt(front: &Arc<Front>, order: &Order, decision: Decision) -> Result<Response<Body>, Failure> {
    let worker = decision.serve.worker.clone();
    let mut headers = headers::to_worker(&order.headers, &order.request_id);
    let mut body = order.body.clone();
    let running = order.running.clone();
    let num_tokens = order.asked.prompt.num_tokens;
    let flight = Flight::start(decision, order.ledger.clone(), order.arrival, num_tokens, running);
    match &flight.decision().prefill {
        Some(prefill) if prefill.life.ours => {
            headers.insert(headers::PREFILL, header_value(&prefill.worker.name));
        }
        Some(prefill) => {
            let leg = pair::Leg {
                upstream: &order.upstream,
                prefill: &prefill.worker,
                api: order.api,
                headers: &headers,
            };
            match leg.prefill(&order.body).await {
                Ok(rewritten) => body = rewritten,
                Err(failure) => return Err(retried(flight, failure)),
            }
        }
        None if flight.decision().local_prefill => {
            headers.insert(headers::PREFILL, HeaderValue::from_static("local"));
        }
        None => {}
    }
    let sent = order.upstream.post(worker.api_uri(order.api), headers, body);
    let response = tokio::select! {
        response = sent => response,
        () = worker.hung.notified() => Err(SendError::Broken("the worker hangs".into())),
    };
    match response {
        Ok(response) => answer(front, order, flight, response).await,
        Err(error) => {
            let failure = unreachable(&worker, &error);
            Err(retried(flight, failure))
        }
    }
}

fn retried(flight: Flight, failure: Failure) -> Failure {
    flight.end(Ending::Retried, SeenUsage::default());
    failure
}

/// The connection failed before an answer began.
pub fn unreachable(worker: &super::fleet::Worker, error: &SendError) -> Failure {
    let (reason, blame) = match error {
        SendError::Connect(_) => ("connect", Blame::Serve),
        SendError::Broken(_) => ("broken", Blame::Connection),
        SendError::Timeout(_) => ("timeout", Blame::Serve),
        SendError::Local(_) => ("local", Blame::Request),
    };
    match error {
        SendError::Connect(reason) => worker.quarantine(reason),
        // A kept connection may have been closed by a worker that is well: a probe finds out, and one more try.
        SendError::Broken(_) | SendError::Timeout(_) => {
            worker.standing().lost(Instant::now());
            worker.wake.notify_one();
        }
        SendError::Local(_) => {}
    }
    let message = format!("worker {}: {error}", worker.name);
    let answer = ApiError::unavailable(message).into_response();
    Failure { reason, answer, blame }
}

/// The worker answers.
async fn answer(
    front: &Arc<Front>,
    order: &Order,
    mut flight: Flight,
    response: Response<Incoming>,
) -> Result<Response<Body>, Failure> {
    let (mut head, body) = response.into_parts();
    let cached = head.headers.get(headers::CACHED_TOKENS).and_then(|value| value.to_str().ok()?.parse().ok());
    flight.cached(cached);
    let unlinked = head.headers.get(headers::PREFILL) == Some(&headers::UNLINKED);
    let streams = is_stream(&head.headers) && head.status == StatusCode::OK;
    let retry_after = retry_after(&head.headers);
    headers::to_client(&mut head.headers);
    tell(&mut head.headers, flight.decision());
    if unlinked {
        not_prefilled(front, &order.request_id, &mut head.headers, flight.decision());
    }
    if streams {
        return stream(front, order, flight, head, body).await;
    }
    let worker = flight.worker().clone();
    let collected = tokio::select! {
        collected = http_body_util::Limited::new(body, MAX_ANSWER).collect() => collected,
        () = worker.hung.notified() => Err("the worker hangs".into()),
    };
    let bytes = match collected {
        Ok(collected) => collected.to_bytes(),
        Err(error) => {
            let failure = unreachable(&worker, &SendError::Broken(error.to_string()));
            return Err(retried(flight, failure));
        }
    };
    let status = head.status;
    if status.is_success() {
        flight.passed();
        let mut usage = SeenUsage::default();
        usage.see(&bytes);
        flight.end(Ending::Done, usage);
        return Ok(Response::from_parts(head, Body::from(bytes)));
    }
    if unlinked && status == StatusCode::SERVICE_UNAVAILABLE {
        // `--kv-failure fail`: the worker is well, another prefill worker may have a link to it.
        let answer = Response::from_parts(head, Body::from(bytes));
        let failure = Failure { reason: "prefill_not_linked", answer, blame: Blame::Link };
        return Err(retried(flight, failure));
    }
    if status.is_server_error() && status != StatusCode::SERVICE_UNAVAILABLE {
        worker.standing().failed(Instant::now());
    }
    let reason = match status {
        StatusCode::TOO_MANY_REQUESTS => "overloaded",
        StatusCode::SERVICE_UNAVAILABLE => "unavailable",
        StatusCode::BAD_GATEWAY => "bad_gateway",
        _ => {
            let ending = if status.is_client_error() { Ending::Refused } else { Ending::WorkerError };
            flight.end(ending, SeenUsage::default());
            return Ok(Response::from_parts(head, Body::from(bytes)));
        }
    };
    worker.busy(retry_after);
    worker.wake.notify_one();
    head.headers.entry(header::RETRY_AFTER).or_insert(HeaderValue::from_static("1"));
    let answer = Response::from_parts(head, Body::from(bytes));
    Err(retried(flight, Failure { reason, answer, blame: Blame::Serve }))
}

/// Waits for the first bytes: until then another worker can still answer.
async fn stream(
    front: &Arc<Front>,
    order: &Order,
    flight: Flight,
    head: axum::http::response::Parts,
    mut body: Incoming,
) -> Result<Response<Body>, Failure> {
    let worker = flight.worker().clone();
    let first = loop {
        let frame = tokio::select! {
            frame = body.frame() => frame,
            () = worker.hung.notified() => None,
        };
        match frame {
            Some(Ok(frame)) => {
                if let Ok(bytes) = frame.into_data() {
                    break bytes;
                }
            }
            other => {
                let reason = other.map_or("it sent nothing".to_owned(), |frame| match frame {
                    Err(error) => error.to_string(),
                    Ok(_) => "it sent nothing".to_owned(),
                });
                let failure = unreachable(&worker, &SendError::Broken(reason));
                return Err(retried(flight, failure));
            }
        }
    };
    let timeout = front.app.request_timeout;
    let deadline = tokio::time::Instant::from_std(order.arrival + timeout);
    let limits = Limits {
        deadline: Box::pin(tokio::time::sleep_until(deadline)),
        timeout,
        cut: Box::pin(front.app.drain.cut()),
    };
    Ok(Response::from_parts(head, RelayBody::body(Some(first), body, limits, flight)))
}

/// Adds who answers and what the choice rested on.
fn tell(headers: &mut HeaderMap, decision: &Decision) {
    headers.insert(headers::KV_INDEX, HeaderValue::from_static(decision.booking.index().as_str()));
    headers.insert(headers::WORKER, header_value(&decision.serve.worker.name));
    headers.insert(headers::WORKER_ID, header_value(&decision.serve.life.id.to_string()));
    if let Some(prefill) = &decision.prefill {
        headers.insert(headers::PREFILL_WORKER, header_value(&prefill.worker.name));
        headers.insert(headers::PREFILL_ID, header_value(&prefill.life.id.to_string()));
    }
}

/// The decode worker has no link to the prefill worker that was chosen, and has done without or failed.
fn not_prefilled(front: &Front, request_id: &str, answer: &mut HeaderMap, decision: &Decision) {
    answer.remove(headers::PREFILL_WORKER);
    answer.remove(headers::PREFILL_ID);
    let Some(prefill) = &decision.prefill else { return };
    let (worker, prefill) = (&decision.serve.worker.name, &prefill.worker.name);
    front.metrics.prefill_unlinked.with_label_values(&[worker.as_str(), prefill.as_str()]).inc();
    tracing::warn!(request_id, worker, prefill, "the decode worker has no link to the prefill worker");
}

fn header_value(text: &str) -> HeaderValue {
    HeaderValue::from_str(text).unwrap_or(HeaderValue::from_static("unknown"))
}

fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// `Retry-After` in seconds; the form with a date is not used by workers.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(header::RETRY_AFTER)?.to_str().ok()?;
    text.trim().parse::<u32>().ok().map(|secs| Duration::from_secs(secs.into()))
}
