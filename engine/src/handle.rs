//! The async side of the engine: submit a request, read its tokens, drop the stream to abort it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::Sender;

use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::oneshot;

use crate::api::{GenerateRequest, Output, RequestError, TokenId};
use crate::event::Event;
use crate::kv_events::KvSnapshot;
use crate::metrics::Metrics;

/// As many alternatives as OpenAI and vLLM give; each costs a place in every token's event.
pub const MAX_LOGPROBS: u32 = 20;

/// Names one request inside one engine; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RequestId(pub u64);

/// What does not change while the engine lives.
#[derive(Clone, Debug)]
pub struct EngineInfo {
    /// The name clients use in `model`.
    pub model_name: String,
    /// Prompt and answer together, in tokens.
    pub max_model_len: usize,
    /// Rows of the embedding; every token id is below it.
    pub vocab_size: usize,
    pub block_size: usize,
    /// Capacity of the KV pool.
    pub num_blocks: usize,
    /// Requests that may wait before new ones are refused.
    pub max_queued: usize,
}

/// A cheap, cloneable way to reach the engine's thread.
#[derive(Clone)]
pub struct EngineHandle {
    shared: Arc<Shared>,
}

struct Shared {
    events: Sender<Event>,
    info: EngineInfo,
    metrics: Arc<Metrics>,
    next_id: AtomicU64,
    waiting: Arc<AtomicUsize>,
    alive: Arc<AtomicBool>,
    draining: AtomicBool,
}

impl EngineHandle {
    /// `waiting` and `alive` are written by the engine's thread too.
    pub fn new(
        events: Sender<Event>,
        info: EngineInfo,
        metrics: Arc<Metrics>,
        waiting: Arc<AtomicUsize>,
        alive: Arc<AtomicBool>,
    ) -> Self {
        let (next_id, draining) = (AtomicU64::new(1), AtomicBool::new(false));
        Self { shared: Arc::new(Shared { events, info, metrics, next_id, waiting, alive, draining }) }
    }

    /// False once the engine's thread has ended: nothing can be answered any more.
    pub fn is_alive(&self) -> bool {
        self.shared.alive.load(Ordering::SeqCst)
    }

    pub fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.shared.metrics
    }

    /// Checks the request and queues it. Every error that depends on the request alone is found here, before
    /// anything is streamed.
    pub fn submit(&self, request: GenerateRequest) -> Result<OutputStream, RequestError> {
        self.check(&request).inspect_err(|error| self.shared.metrics.refused(error))?;
        let id = RequestId(self.shared.next_id.fetch_add(1, Ordering::Relaxed));
        let (outputs, receiver) = unbounded_channel();
        // Counted here and given back by the engine when the request leaves the queue, so that a burst
        // cannot pass the limit before the engine's thread has looked at its channel.
        self.shared.waiting.fetch_add(1, Ordering::Relaxed);
        let submit = Event::Submit(Submission { id, request, outputs });
        if self.shared.events.send(submit).is_err() {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
            return Err(RequestError::ShuttingDown);
        }
        Ok(OutputStream { id, receiver, events: self.shared.events.clone(), finished: false, ending: false })
    }

    /// From now on `submit` refuses; running requests go on.
    pub fn drain(&self) {
        self.shared.draining.store(true, Ordering::SeqCst);
    }

    /// What is in the prefix cache now; `None` if the engine cannot say (it ended, or its events are far behind).
    pub async fn kv_snapshot(&self) -> Option<KvSnapshot> {
        let (reply, answer) = oneshot::channel();
        self.shared.events.send(Event::KvSnapshot(reply)).ok()?;
        answer.await.ok()
    }

    /// Sends an event to the engine's thread; false if the thread is gone.
    pub fn send(&self, event: Event) -> bool {
        self.shared.events.send(event).is_ok()
    }

    fn check(&self, request: &GenerateRequest) -> Result<(), RequestError> {
        let info = &self.shared.info;
        if self.shared.draining.load(Ordering::SeqCst) {
            return Err(RequestError::ShuttingDown);
        }
        let prompt = request.prompt.len();
        if prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        if let Some(&id) = request.prompt.iter().find(|&&id| id as usize >= info.vocab_size) {
            return Err(RequestError::TokenOutOfRange { id, vocab_size: info.vocab_size });
        }
        if prompt >= info.max_model_len {
            return Err(RequestError::PromptTooLong { prompt, max_model_len: info.max_model_len });
        }
        let needed = prompt.div_ceil(info.block_size);
        if needed > info.num_blocks {
            let (capacity, block_size) = (info.num_blocks, info.block_size);
            return Err(RequestError::PromptNeverFits { prompt, needed, capacity, block_size });
        }
        request.sampling.check(info.vocab_size)?;
        let (queued, limit) = (self.shared.waiting.load(Ordering::Relaxed), info.max_queued);
        if queued >= limit {
            return Err(RequestError::QueueFull { queued, limit });
        }
        Ok(())
    }
}

/// A request on its way to the engine's thread.
#[derive(Debug)]
pub struct Submission {
    pub id: RequestId,
    pub request: GenerateRequest,
    /// Unbounded, yet it never holds more than `max_tokens` + 1 outputs: the engine sends no more than that.
    pub outputs: UnboundedSender<Output>,
}

/// The outputs of one request. Dropping it before the end aborts the request and frees its blocks.
#[derive(Debug)]
pub struct OutputStream {
    id: RequestId,
    receiver: UnboundedReceiver<Output>,
    events: Sender<Event>,
    finished: bool,
    /// The engine was told to finish.
    ending: bool,
}

impl OutputStream {
    pub fn id(&self) -> RequestId {
        self.id
    }

    /// The next output; `None` after the last. If the engine's thread dies this yields one `Failed`.
    pub async fn next(&mut self) -> Option<Output> {
        if self.finished {
            return None;
        }
        let output = self.receiver.recv().await.unwrap_or_else(|| {
            Output::Failed(RequestError::Internal("the engine stopped before the request ended".into()))
        });
        self.finished = !matches!(output, Output::Token { .. });
        Some(output)
    }

    /// Ends the request as its text's end would: nothing more is generated, and `Finished` is its last output, which the
    /// caller may await or not. Dropping the stream does not abort it any more.
    pub fn finish(&mut self) {
        if !self.finished && !std::mem::replace(&mut self.ending, true) {
            let _ = self.events.send(Event::Finish(self.id));
        }
    }

    /// What has arrived already, without waiting.
    pub fn try_next(&mut self) -> Option<Output> {
        if self.finished {
            return None;
        }
        let output = self.receiver.try_recv().ok()?;
        self.finished = !matches!(output, Output::Token { .. });
        Some(output)
    }
}

impl Drop for OutputStream {
    fn drop(&mut self) {
        if !self.finished && !self.ending {
            let _ = self.events.send(Event::Abort(self.id));
        }
    }
}

impl crate::api::SamplingParams {
    /// Refuses values outside their range, naming the field, the value and what was expected.
    pub fn check(&self, vocab_size: usize) -> Result<(), RequestError> {
        let bad = |field, value: String, expected| Err(RequestError::BadParameter { field, value, expected });
        if !(0.0..=2.0).contains(&self.temperature) {
            return bad("temperature", self.temperature.to_string(), "a number in [0, 2]");
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return bad("top_p", self.top_p.to_string(), "a number in (0, 1]");
        }
        if !(0.0..=1.0).contains(&self.min_p) {
            return bad("min_p", self.min_p.to_string(), "a number in [0, 1]");
        }
        if !(self.repetition_penalty > 0.0 && self.repetition_penalty.is_finite()) {
            return bad("repetition_penalty", self.repetition_penalty.to_string(), "a number above 0");
        }
        for (field, value) in
            [("presence_penalty", self.presence_penalty), ("frequency_penalty", self.frequency_penalty)]
        {
            if !(-2.0..=2.0).contains(&value) {
                return bad(field, value.to_string(), "a number in [-2, 2]");
            }
        }
        if let Some((id, bias)) = self.logit_bias.iter().find(|(_, bias)| !(-100.0..=100.0).contains(bias)) {
            return bad("logit_bias", format!("{bias} for token {id}"), "numbers in [-100, 100]");
        }
        if let Some((id, _)) = self.logit_bias.iter().find(|(id, _)| *id as usize >= vocab_size) {
            return bad("logit_bias", format!("token {id}"), "ids below the vocabulary size");
        }
        if self.min_tokens > self.max_tokens {
            return bad("min_tokens", self.min_tokens.to_string(), "at most max_tokens");
        }
        if let Some(count) = self.logprobs.filter(|&count| count > MAX_LOGPROBS) {
            return bad("logprobs", count.to_string(), "at most 20");
        }
        if self.max_tokens == 0 {
            return bad("max_tokens", "0".into(), "at least 1");
        }
        if let Some(id) = self.stop_token_ids.iter().find(|&&id: &&TokenId| id as usize >= vocab_size) {
            return bad("stop_token_ids", id.to_string(), "ids below the vocabulary size");
        }
        Ok(())
    }
}
