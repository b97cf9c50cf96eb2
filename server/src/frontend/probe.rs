//! Asks each worker how it is, and who it is; the answers decide who gets requests.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::http::{StatusCode, Uri};
use serde::Deserialize;
use serde_json::Value;

use super::fleet::{Life, ModelCard, Worker};
use super::standing::Reach;
use super::state::Front;
use super::upstream::SendError;
use crate::discovery::record::RECORD_VERSION;
use crate::discovery::{EventEndpoints, WorkerRecord};

/// First pause after a failed probe; doubled up to the interval.
const RETRY: Duration = Duration::from_millis(100);

/// A worker that is too busy to answer one probe is not dead.
const TIMEOUTS_TO_HANG: u32 = 2;

/// Where a worker of ours says what it is.
pub const INFO_PATH: &str = "/kv/v1/worker";

/// Probes `worker` until the task is aborted.
pub async fn keep(front: Arc<Front>, worker: Arc<Worker>) {
    let mut pause = RETRY;
    let mut timeouts = 0;
    loop {
        let reach = probe(&front, &worker, &mut timeouts).await;
        let failed = matches!(reach, Reach::Down(_));
        pause = match failed {
            true => (pause * 2).min(front.config.probe_interval),
            // Once more, and at once: it is busy, or it hangs.
            false if timeouts > 0 => RETRY,
            // One that loads is there soon.
            false if reach != Reach::Up => front.config.probe_interval.min(5 * RETRY),
            false => front.config.probe_interval,
        };
        if !failed && timeouts == 0 {
            scrape(&front, &worker).await;
        }
        worker.probed(reach);
        front.standing_changed();
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = worker.wake.notified() => pause = RETRY,
        }
    }
}

async fn probe(front: &Front, worker: &Worker, timeouts: &mut u32) -> Reach {
    let health = ask(front, worker, "/health").await;
    if !matches!(health, Err(SendError::Timeout(_))) {
        *timeouts = 0;
    }
    match health {
        Ok((status, body)) if status == StatusCode::OK || status == StatusCode::NOT_FOUND => {
            match learn(front, worker, &body).await {
                Ok(life) => front.lives(worker, life).map_or_else(Reach::Refusing, |()| Reach::Up),
                Err(reason) => Reach::Refusing(reason),
            }
        }
        Ok((status, body)) => Reach::Refusing(reason(status, &body)),
        Err(error @ SendError::Timeout(_)) => {
            *timeouts += 1;
            let was_up = *worker.standing().reach() == Reach::Up;
            if was_up && *timeouts < TIMEOUTS_TO_HANG {
                return Reach::Up;
            }
            worker.hung.notify_waiters();
            Reach::Down(error.to_string())
        }
        Err(error @ SendError::Connect(_)) => {
            // Nobody listens: what comes up there is another process.
            worker.restarted();
            front.dies(worker);
            worker.hung.notify_waiters();
            Reach::Down(error.to_string())
        }
        Err(error @ SendError::Local(_)) => {
            tracing::warn!(worker = worker.name, %error, "workers cannot be asked");
            worker.standing().reach().clone()
        }
        Err(error) => Reach::Down(error.to_string()),
    }
}

/// Who the process is. Ours say it themselves; of others the API says which models they serve.
async fn learn(front: &Front, worker: &Worker, health: &[u8]) -> Result<Life, String> {
    let health: Value = serde_json::from_slice(health).unwrap_or_default();
    if health["role"] == "frontend" {
        return Err("it is a frontend, expected a worker".into());
    }
    if health.get("incarnation").is_some() {
        let (status, body) = ask(front, worker, INFO_PATH).await.map_err(|error| error.to_string())?;
        let record: WorkerRecord = serde_json::from_slice(&body)
            .map_err(|error| format!("{INFO_PATH} answered {status}, and no worker's record: {error}"))?;
        if record.role != worker.role {
            let (is, expected) = (record.role.as_str(), worker.role.as_str());
            return Err(format!("its role is {is}, expected {expected}"));
        }
        let models = vec![ModelCard { id: record.model.clone(), max_model_len: record.max_model_len }];
        return Ok(Life { id: record.incarnation, record, models, ours: true });
    }
    if let Some(life) = worker.life().filter(|life| life.id == worker.made_up_id() && !life.models.is_empty())
    {
        // Still the same process; models are not asked for every two seconds.
        return Ok(Life {
            id: life.id,
            record: life.record.clone(),
            models: life.models.clone(),
            ours: false,
        });
    }
    let models = models(front, worker).await?;
    Ok(Life { id: worker.made_up_id(), record: made_up(front, worker, &models), models, ours: false })
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    max_model_len: Option<u64>,
}

async fn models(front: &Front, worker: &Worker) -> Result<Vec<ModelCard>, String> {
    let (status, body) = ask(front, worker, "/v1/models").await.map_err(|error| error.to_string())?;
    let models: Models = serde_json::from_slice(&body)
        .map_err(|error| format!("/v1/models answered {status}, and no list of models: {error}"))?;
    let cards =
        models.data.into_iter().map(|model| ModelCard { id: model.id, max_model_len: model.max_model_len });
    let cards: Vec<_> = cards.collect();
    match cards.is_empty() {
        true => Err("it serves no model".into()),
        false => Ok(cards),
    }
}

/// The record of a server that has none.
fn made_up(front: &Front, worker: &Worker, models: &[ModelCard]) -> WorkerRecord {
    let sample = *worker.sample();
    let source = front.config.event_sources.get(&worker.url);
    let events = source.and_then(|source| {
        Some(EventEndpoints {
            endpoint: source.publisher.clone()?,
            replay_endpoint: source.replay.clone(),
            topic: String::new(),
            snapshot_url: None,
        })
    });
    WorkerRecord {
        version: RECORD_VERSION,
        worker_id: worker.name.clone(),
        incarnation: worker.made_up_id(),
        role: worker.role,
        model: models.first().map(|model| model.id.clone()).unwrap_or_default(),
        url: worker.name.clone(),
        block_size: sample.block_size.map(|size| size as u32),
        capacity_blocks: sample.num_blocks,
        max_model_len: models.first().and_then(|model| model.max_model_len),
        events,
        hash_scheme: None,
        prefill_tokens_per_sec: None,
        kv_bytes_per_token: None,
        kv_transport: None,
        draining: false,
        labels: Default::default(),
    }
}

/// Reads the worker's metrics; one that has none is no worse for it.
async fn scrape(front: &Front, worker: &Worker) {
    if let Ok((StatusCode::OK, body)) = ask(front, worker, "/metrics").await {
        let text = String::from_utf8_lossy(&body);
        let next = worker.sample().next(&text, Instant::now());
        *worker.sample() = next;
    }
}

async fn ask(front: &Front, worker: &Worker, path: &str) -> Result<(StatusCode, bytes::Bytes), SendError> {
    let uri: Uri = worker.uri(path).expect("a checked URL with a constant path is a URI. This is a bug.");
    front.upstream.get(uri, front.config.probe_timeout).await
}

/// What a worker says of why it takes no requests.
fn reason(status: StatusCode, body: &[u8]) -> String {
    let body: Value = serde_json::from_slice(body).unwrap_or_default();
    if body["role"] == "frontend" {
        // What it says of its workers may be what we say: it may be this one.
        return "it is a frontend, expected a worker".into();
    }
    let said = body["reason"].as_str().or(body["error"]["message"].as_str());
    said.map_or_else(|| format!("/health answered {status}"), str::to_owned)
}
