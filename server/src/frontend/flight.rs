//! One request at one worker: its booking, its counts, its clock. Whatever way it ends, dropping it gives all back.

use std::sync::Arc;
use std::time::Instant;

use super::decide::Decision;
use super::fleet::Worker;
use super::metrics::{FrontMetrics, ModelMetrics};
use super::recent::Recent;
use super::stream_watch::SeenUsage;
use crate::shutdown::Running;

/// How many events go by between two looks at the load: about a block of tokens.
const BLOCK: usize = 16;

/// How a request at a worker ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ending {
    /// A whole answer.
    Done,
    /// An error that the worker answered with, within its stream or instead of one.
    WorkerError,
    /// The worker would not have the request: its prompt was not computed.
    Refused,
    /// The connection to the worker broke within the stream.
    Broken(String),
    Deadline,
    /// Our own shutdown.
    Cut,
    /// The client did not wait.
    ClientLeft,
    /// Tried again elsewhere.
    Retried,
}

/// What requests have in common.
#[derive(Clone)]
pub struct Ledger {
    pub metrics: Arc<FrontMetrics>,
    pub model: Arc<ModelMetrics>,
    pub recent: Arc<Recent>,
}

/// A request under way.
pub struct Flight {
    decision: Decision,
    /// Events that passed: about as many tokens.
    events: usize,
    ledger: Ledger,
    arrival: Instant,
    last: Option<Instant>,
    prompt_tokens: usize,
    /// As the worker says at the first token.
    cached_tokens: Option<u64>,
    ended: bool,
    /// Keeps a shutdown waiting.
    #[expect(dead_code, reason = "held for its Drop")]
    running: Arc<Running>,
}

impl Flight {
    pub fn start(
        decision: Decision,
        ledger: Ledger,
        arrival: Instant,
        prompt_tokens: usize,
        running: Arc<Running>,
    ) -> Self {
        ledger.metrics.inflight.inc();
        Self {
            decision,
            events: 0,
            ledger,
            arrival,
            last: None,
            prompt_tokens,
            cached_tokens: None,
            ended: false,
            running,
        }
    }

    pub fn decision(&self) -> &Decision {
        &self.decision
    }

    pub fn worker(&self) -> &Arc<Worker> {
        &self.decision.serve.worker
    }

    pub fn worker_name(&self) -> &str {
        &self.decision.serve.worker.name
    }

    /// The worker said how much of the prompt it found cached.
    pub fn cached(&mut self, tokens: Option<u64>) {
        self.cached_tokens = tokens.or(self.cached_tokens);
    }

    /// Some of the answer passes.
    pub fn passed(&mut self) {
        self.events += 1;
        if self.events.is_multiple_of(BLOCK) {
            self.decision.booking.generated(self.events);
        }
        let now = Instant::now();
        match self.last.replace(now) {
            Some(last) => self.ledger.model.itl.observe((now - last).as_secs_f64()),
            None => {
                let ttft = now - self.arrival;
                self.ledger.model.ttft.observe(ttft.as_secs_f64());
                self.ledger.recent.first_token(ttft);
                self.decision.booking.first_token();
            }
        }
    }

    /// The request is over.
    pub fn end(mut self, ending: Ending, usage: SeenUsage) {
        self.settle(&ending, usage);
    }

    fn settle(&mut self, ending: &Ending, usage: SeenUsage) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        let (metrics, model) = (&self.ledger.metrics, &self.ledger.model);
        metrics.inflight.dec();
        let now = Instant::now();
        match ending {
            Ending::Done => {
                self.worker().standing().succeeded(now);
                model.ok.inc();
                model.duration.observe((now - self.arrival).as_secs_f64());
                self.count_tokens(usage);
            }
            Ending::WorkerError | Ending::Deadline | Ending::Cut => model.failed.inc(),
            Ending::Broken(reason) => {
                model.failed.inc();
                metrics.broken_streams.inc();
                metrics.worker_failures.with_label_values(&[self.worker_name(), "stream"]).inc();
                self.worker().quarantine(reason);
            }
            Ending::ClientLeft => metrics.disconnected.inc(),
            Ending::Refused => {
                model.failed.inc();
                self.decision.booking.undo();
            }
            // The worker has not seen it, or not to an end: what it was thought to cache from now on it may not have.
            Ending::Retried => self.decision.booking.undo(),
        }
    }

    fn count_tokens(&self, usage: SeenUsage) {
        let model = &self.ledger.model;
        let prompt = usage.prompt_tokens.unwrap_or(self.prompt_tokens as u64);
        model.input.observe(prompt as f64);
        if let Some(completion) = usage.completion_tokens {
            model.output.observe(completion as f64);
        }
        let Some(cached) = usage.cached_tokens.or(self.cached_tokens) else { return };
        model.cached.observe(cached as f64);
        self.ledger.recent.prompt(prompt, cached);
        if let Some(predicted) = self.decision.predicted_cached_tokens() {
            self.ledger.recent.drift(predicted as i64 - cached as i64);
            let direction = if predicted as u64 > cached { "over" } else { "under" };
            let off = predicted.abs_diff(cached as usize);
            self.ledger.metrics.drift.with_label_values(&[direction]).observe(off as f64);
        }
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        self.settle(&Ending::ClientLeft, SeenUsage::default());
    }
}
