//! `POST /route/explain`: where a request would go now, and why; nothing is sent or booked.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use bytes::Bytes;
use serde_json::{Value, json};

use super::decide::Leg;
use super::request::Asked;
use super::state::Front;
use crate::error::ApiError;
use crate::openai::{Api, parse_object};

/// Takes the body of a chat or of a completion request. Each worker's overlap, load and cost, who computes the prompt,
/// and the choice, as the router would make it now.
pub async fn explain(State(front): State<Arc<Front>>, body: Bytes) -> Result<Json<Value>, ApiError> {
    let api = match parse_object(&body)?.get("messages") {
        Some(_) => Api::Chat,
        None => Api::Completions,
    };
    let asked = Asked::read(api, &body, front.naming()).await?;
    front.check_model(asked.model.as_deref())?;
    let workers = front.fleet.all();
    let legs: Vec<_> = workers
        .iter()
        .filter_map(|worker| Some(Leg { worker: worker.clone(), life: worker.life()? }))
        .collect();
    front.sync_conditions(&legs);
    let names: BTreeMap<_, _> =
        legs.iter().map(|leg| (leg.life.id.to_string(), leg.worker.name.clone())).collect();
    let explanation = front.router.explain(&asked.prompt);
    let url = |id: Option<String>| id.and_then(|id| names.get(&id).cloned());
    let choice = explanation.choice.as_ref();
    let serve = url(choice.map(|choice| choice.serve.to_string()));
    let prefill = url(choice.and_then(|choice| choice.prefill).map(|id| id.to_string()));
    let mut answer = json!(explanation);
    answer["urls"] = json!(names);
    answer["serve_url"] = json!(serve);
    answer["prefill_url"] = json!(prefill);
    Ok(Json(answer))
}
