//! Which worker a request goes to: what is known of the fleet, put before the policy, and booked.

use std::sync::Arc;
use std::time::Instant;

use axum::http::StatusCode;

use super::fleet::{Life, Worker};
use super::request::Asked;
use super::state::Front;
use crate::error::ApiError;
use crate::router::shared::Booking;
use crate::router::{Condition, IndexSource, NoWorker, WorkerId};

/// A worker, and the process there that was chosen.
#[derive(Clone, Debug)]
pub struct Leg {
    pub worker: Arc<Worker>,
    pub life: Arc<Life>,
}

/// A choice that is booked; the booking ends when this is dropped.
pub struct Decision {
    pub serve: Leg,
    /// Computes the prompt, if another worker is to.
    pub prefill: Option<Leg>,
    /// There are prefill workers, and this request does better without.
    pub local_prefill: bool,
    pub booking: Booking,
}

impl Decision {
    /// Prompt tokens that the index says are cached where the prompt is computed; `None` where nothing is known.
    pub fn predicted_cached_tokens(&self) -> Option<usize> {
        (self.booking.index() != IndexSource::None).then(|| self.booking.predicted_tokens())
    }
}

/// Workers that failed this request.
#[derive(Debug, Default)]
pub struct Tried {
    excluded: Vec<WorkerId>,
    suspects: Vec<WorkerId>,
}

impl Tried {
    pub fn failures(&self) -> usize {
        self.excluded.len() + self.suspects.len()
    }

    /// Not to be asked again.
    pub fn exclude(&mut self, worker: WorkerId) {
        self.excluded.push(worker);
    }

    /// To be asked once more.
    pub fn suspect(&mut self, worker: WorkerId) {
        match self.suspects.contains(&worker) {
            true => self.excluded.push(worker),
            false => self.suspects.push(worker),
        }
    }

    pub fn excludes(&self, worker: WorkerId) -> bool {
        self.excluded.contains(&worker)
    }
}

/// No worker may take the request.
pub struct Refusal {
    /// For labels.
    pub reason: &'static str,
    pub error: ApiError,
}

impl From<NoWorker> for Refusal {
    fn from(error: NoWorker) -> Self {
        let reason = match error {
            NoWorker::Unknown => "no_worker",
            NoWorker::Overloaded { .. } => "overloaded",
            NoWorker::Unavailable { .. } => "unavailable",
        };
        Self { reason, error: ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string()) }
    }
}

/// Whether a worker takes requests, in the router's words.
pub fn condition(worker: &Worker, now: Instant) -> Condition {
    use super::standing::Obstacle;
    match worker.standing().obstacle(now) {
        None => Condition::Ready,
        Some(Obstacle::Busy(_)) => Condition::Overloaded,
        Some(Obstacle::Refusing(_)) => Condition::Draining,
        Some(Obstacle::Unreachable(_) | Obstacle::Failing(_)) => Condition::Quarantined,
    }
}

impl Front {
    /// Chooses and books. Errors: no worker may take the request now.
    pub fn decide(&self, asked: &Asked, tried: &Tried) -> Result<Decision, Refusal> {
        let workers = self.fleet.all();
        let legs: Vec<Leg> = workers
            .iter()
            .filter_map(|worker| Some(Leg { worker: worker.clone(), life: worker.life()? }))
            .collect();
        self.sync_conditions(&legs);
        let mut without = tried.excluded.clone();
        without.extend(
            legs.iter().filter(|leg| !serves_model(leg, asked.model.as_deref())).map(|leg| leg.life.id),
        );
        loop {
            let mut booking = self.router.route(&asked.prompt, &without)?;
            let choice = booking.choice();
            let find = |id: WorkerId| legs.iter().find(|leg| leg.life.id == id).cloned();
            let Some(serve) = find(choice.serve) else {
                // It joined or left while we looked.
                without.push(choice.serve);
                booking.undo();
                continue;
            };
            let prefill = choice.prefill.and_then(find);
            self.count_decision(&booking, asked.prompt.num_tokens);
            let local_prefill = booking.estimate().is_some_and(|estimate| !estimate.remote);
            return Ok(Decision { serve, prefill, local_prefill, booking });
        }
    }

    fn count_decision(&self, booking: &Booking, num_tokens: usize) {
        let (reason, index) = (booking.choice().reason.as_str(), booking.index());
        self.metrics.decisions.with_label_values(&[reason, index.as_str()]).inc();
        if index != IndexSource::None {
            self.metrics.hit_rate.observe(booking.predicted_tokens() as f64 / num_tokens.max(1) as f64);
        }
        if let Some(estimate) = booking.estimate() {
            let place = if estimate.remote { "remote" } else { "local" };
            self.metrics.prefill_decisions.with_label_values(&[place, estimate.reason]).inc();
        }
    }

    /// Tells the router which workers take requests now: some come back by the clock alone.
    pub fn sync_conditions(&self, legs: &[Leg]) {
        let now = Instant::now();
        for leg in legs {
            let condition = condition(&leg.worker, now);
            if leg.worker.note_condition(leg.life.id, condition) {
                self.router.set_condition(leg.life.id, condition);
            }
        }
    }
}

fn serves_model(leg: &Leg, model: Option<&str>) -> bool {
    model.is_none_or(|model| leg.life.models.iter().any(|card| card.id == model))
}
