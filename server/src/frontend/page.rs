//! The status page at `/`: one file, kept up to date by server-sent events.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, Response, header};
use axum::response::{Html, IntoResponse};
use futures_util::stream;
use serde_json::{Value, json};

use super::fleet::Worker;
use super::state::Front;
use crate::router::shared::WorkerStatus;

const PAGE: &str = include_str!("page.html");

/// How often the page gets news.
const INTERVAL: Duration = Duration::from_secs(1);

/// The window of the figures in the page's head, in seconds.
const WINDOW: u64 = 60;

/// The page with what it shows now, so that it is whole before the first news.
pub async fn page(State(front): State<Arc<Front>>) -> Html<String> {
    // As part of a script, text must not end it.
    let first = snapshot(&front).to_string().replace('<', "\\u003c");
    Html(PAGE.replace("{\"placeholder\":true}", &first))
}

/// What the page shows, once.
pub async fn status(State(front): State<Arc<Front>>) -> Json<Value> {
    Json(snapshot(&front))
}

/// What the page shows, every second until the reader leaves or the server does.
pub async fn events(State(front): State<Arc<Front>>) -> Response<Body> {
    let cut = front.app.drain.cut();
    let first = tokio::time::interval(INTERVAL);
    let events = stream::unfold((front, first), |(front, mut interval)| async move {
        interval.tick().await;
        let event = format!("data: {}\n\n", snapshot(&front));
        // A shutdown does not wait for a page that somebody left open.
        let open = front.readiness() != crate::readiness::State::Draining;
        open.then_some((Ok::<_, Infallible>(event), (front, interval)))
    });
    let events = futures_util::StreamExt::take_until(events, Box::pin(cut));
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8")),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, Body::from_stream(events)).into_response()
}

fn snapshot(front: &Front) -> Value {
    let now = Instant::now();
    let statuses = front.router.workers();
    let of = |worker: &Worker| {
        let id = worker.life()?.id;
        statuses.iter().find(|status| status.record.incarnation == id)
    };
    let workers: Vec<_> = front.fleet.all().iter().map(|worker| row(worker, of(worker), now)).collect();
    let readiness = front.readiness();
    json!({
        "status": readiness.label(),
        "reason": readiness.reason(),
        "mode": front.router.mode(),
        "version": env!("CARGO_PKG_VERSION"),
        "uptime_secs": front.started.elapsed().as_secs(),
        "models": front.models().into_iter().map(|model| model.id).collect::<Vec<_>>(),
        "inflight": front.metrics.inflight.get(),
        "mismatches": front.router.mismatches(),
        "index": front.router.sizes(),
        "minute": front.recent.totals(WINDOW),
        "seconds": front.recent.points(),
        "workers": workers,
    })
}

fn row(worker: &Worker, status: Option<&WorkerStatus>, now: Instant) -> Value {
    let sample = *worker.sample();
    let standing = worker.standing();
    let obstacle = standing.obstacle(now);
    let misfit = status.and_then(|status| status.misfit.clone());
    let state = match (&misfit, obstacle) {
        (Some(_), _) => "refused",
        (None, Some(obstacle)) => obstacle.label(),
        (None, None) => "ready",
    };
    json!({
        "url": worker.name,
        "role": worker.role.as_str(),
        "state": state,
        "reason": misfit.or(obstacle.map(|obstacle| obstacle.reason())),
        "index": status.map(|status| status.index),
        "alarm": status.and_then(|status| status.alarm),
        "cached_blocks": status.map(|status| status.cached_blocks),
        "capacity_blocks": status.and_then(|status| status.record.capacity_blocks),
        "load": status.map(|status| status.load),
        "requests": status.map(|status| status.requests),
        "kv_usage": sample.kv_usage,
        "hit_rate": sample.hit_rate,
        "running": sample.running,
        "waiting": sample.waiting,
        "transfer_gb_per_sec": sample.transferred_per_sec.map(|rate| rate / 1e9),
        "link_gb_per_sec": sample.link_bytes_per_sec.map(|rate| rate / 1e9),
    })
}
