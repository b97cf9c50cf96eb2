//! `GET /route/index`: what the index believes of each worker, beside what the worker says it holds.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::{Value, json};

use super::state::Front;
use crate::error::ApiError;
use crate::events::snapshot::Reader;
use crate::router::policy::BlockKey;
use crate::router::shared::{IndexChange, WorkerStatus};

/// How long a worker may take to say what it holds.
const SNAPSHOT: Duration = Duration::from_secs(10);

/// Blocks of a snapshot at most; no pool has more.
const MAX_BLOCKS: usize = 1 << 22;

#[derive(Debug, Deserialize)]
pub struct Options {
    /// Replace what the index has of workers where the two differ.
    #[serde(default)]
    fix: bool,
}

/// For each worker: blocks in the index, blocks it really holds, and those that only one of the two has. While requests
/// run, some events are always on their way: compare when it is quiet.
pub async fn index(
    State(front): State<Arc<Front>>,
    options: Result<Query<Options>, QueryRejection>,
) -> Result<Json<Value>, ApiError> {
    let Query(options) = options.map_err(|error| ApiError::bad_request(error.body_text()))?;
    let mut workers = Vec::new();
    for status in front.router.workers() {
        workers.push(audit(&front, &status, options.fix).await);
    }
    Ok(Json(json!({ "sizes": front.router.sizes(), "workers": workers })))
}

async fn audit(front: &Front, status: &WorkerStatus, fix: bool) -> Value {
    let id = status.record.incarnation;
    let mut of = json!({
        "worker": id,
        "url": status.record.url,
        "index": status.index,
        "alarm": status.alarm,
        "blocks": status.cached_blocks,
        "orphan_blocks": status.orphan_blocks,
    });
    if front.model().is_none() {
        of["audit"] = json!(
            "prompts are known by their text: without --model they cannot be compared with what a worker holds"
        );
        return of;
    }
    let snapshot = status.record.events.as_ref().and_then(|events| events.snapshot_url.clone());
    let Some(url) = snapshot else {
        of["audit"] = json!("this worker cannot say what it holds");
        return of;
    };
    match truth(front, status, &url).await {
        Ok(changes) => {
            let truth = keys(&changes);
            let known: HashSet<BlockKey> = front.router.indexed_keys(id).into_iter().collect();
            let (missing, extra) = (truth.difference(&known).count(), known.difference(&truth).count());
            of["audit"] =
                json!({ "held": truth.len(), "known": known.len(), "missing": missing, "extra": extra });
            if fix && missing + extra > 0 {
                let all: Vec<_> = std::iter::once(IndexChange::Clear).chain(changes).collect();
                let applied = front.router.apply(id, &all);
                of["fixed"] = json!({ "stored": applied.stored, "orphans": applied.orphans });
                tracing::warn!(worker = %id, missing, extra, "the index was replaced by what the worker holds");
            }
        }
        Err(reason) => of["audit"] = json!(reason),
    }
    of
}

/// What the worker holds, as changes to an empty index.
async fn truth(front: &Front, status: &WorkerStatus, url: &str) -> Result<Vec<IndexChange>, String> {
    let uri = url.parse().map_err(|error| format!("{url}: {error}"))?;
    let (code, body) = front.upstream.get(uri, SNAPSHOT).await.map_err(|error| format!("{url}: {error}"))?;
    if code != StatusCode::OK {
        return Err(format!("{url} answered {code}"));
    }
    let text = std::str::from_utf8(&body).map_err(|error| format!("{url}: {error}"))?;
    let mut reader = Reader::new(status.record.incarnation, MAX_BLOCKS);
    let mut changes = Vec::new();
    for line in text.lines() {
        changes.extend(reader.line(line).map_err(|error| format!("{url}: {error}"))?);
    }
    reader.finish().map_err(|error| format!("{url}: {error}"))?;
    Ok(changes)
}

fn keys(changes: &[IndexChange]) -> HashSet<BlockKey> {
    let stored = changes.iter().filter_map(|change| match change {
        IndexChange::Store { keys, .. } => Some(keys.iter().copied()),
        IndexChange::Remove(_) | IndexChange::Clear => None,
    });
    stored.flatten().collect()
}
