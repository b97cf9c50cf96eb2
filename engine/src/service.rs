//! The engine's thread: it owns the core and the runner; events come in over one channel.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::KvPool;
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use transfer::{DeviceMemory, DriverEvent, DriverHandle, PeerId, Region};

use crate::api::{Output, RequestError};
use crate::core::{Core, CoreConfig, Effect, Input, Submit, Written};
use crate::event::Event;
use crate::handle::{EngineHandle, EngineInfo, RequestId, Submission};
use crate::handoff::PeerMessage;
use crate::metrics::Metrics;
use crate::runner::Runner;

/// How long the thread sleeps at most while requests wait for something else: deadlines are looked at this often.
const TICK: Duration = Duration::from_millis(20);

/// What [`spawn`] needs.
pub struct Parts {
    pub config: CoreConfig,
    pub info: EngineInfo,
    pub metrics: Arc<Metrics>,
    pub runner: Box<dyn Runner>,
    /// Moves KV; `None` where the engine has no peers.
    pub driver: Option<DriverHandle>,
}

/// Both ends of an engine's event channel: the transfer driver needs the sending one before the engine starts.
pub fn event_channel() -> (Sender<Event>, Receiver<Event>) {
    channel()
}

/// The pool as the transfer layer registers it.
pub fn region(pool: &Arc<KvPool>) -> Region {
    // SAFETY: the pool's memory lives as long as the Arc that goes with it. Blocks that a transport reads are pinned
    // until its writes settle, blocks that it writes are ticketed or quarantined: the engine touches neither meanwhile.
    let region = unsafe { Region::new(pool.base(), pool.len(), pool.clone()) };
    match pool.device() {
        None => region,
        Some(device) => region.on_device(device, Arc::new(OnDevice(pool.clone()))),
    }
}

/// Copies for transports that cannot reach a device's memory themselves.
struct OnDevice(Arc<KvPool>);

impl DeviceMemory for OnDevice {
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), String> {
        self.0.read_device(offset, to).map_err(|error| error.to_string())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), String> {
        self.0.write_device(offset, from).map_err(|error| error.to_string())
    }
}

/// A running engine.
pub struct Engine {
    pub handle: EngineHandle,
    thread: JoinHandle<()>,
}

impl Engine {
    /// Ends the thread; requests that still run fail. Blocks until the step under way is over.
    pub fn stop(self) {
        self.handle.send(Event::Stop);
        if self.thread.join().is_err() {
            tracing::error!("the engine's thread had panicked");
        }
    }
}

/// Starts the engine's thread.
///
/// Panics when the system gives no thread.
pub fn spawn(parts: Parts, events: Sender<Event>, queue: Receiver<Event>) -> Engine {
    let waiting = Arc::new(AtomicUsize::new(0));
    let alive = Arc::new(AtomicBool::new(true));
    let handle = EngineHandle::new(events, parts.info, parts.metrics.clone(), waiting.clone(), alive.clone());
    let service = Service {
        core: Core::new(parts.config),
        runner: parts.runner,
        driver: parts.driver,
        metrics: parts.metrics,
        waiting,
        alive,
        streams: HashMap::new(),
        outboxes: HashMap::new(),
        idle_waiters: Vec::new(),
        started: Instant::now(),
        expected_traffic: false,
        stopping: false,
    };
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || service.run(&queue));
    Engine { handle, thread: thread.expect("the system gives a thread at start") }
}

/// A client's end of a request.
struct Stream {
    outputs: UnboundedSender<Output>,
    arrival: Instant,
    last_token: Option<Instant>,
    request_id: String,
}

struct Service {
    core: Core,
    runner: Box<dyn Runner>,
    driver: Option<DriverHandle>,
    metrics: Arc<Metrics>,
    /// Requests in the queue, shared with the handle that checks the limit.
    waiting: Arc<AtomicUsize>,
    /// Cleared when the thread ends, however it does.
    alive: Arc<AtomicBool>,
    streams: HashMap<RequestId, Stream>,
    outboxes: HashMap<PeerId, UnboundedSender<PeerMessage>>,
    idle_waiters: Vec<(PeerId, oneshot::Sender<()>)>,
    started: Instant,
    expected_traffic: bool,
    stopping: bool,
}

impl Service {
    fn run(mut self, queue: &Receiver<Event>) {
        // An idle worker exports its pool, too: before the first event nothing else would.
        self.metrics.sync(&self.core);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            while !self.stopping {
                self.take_events(queue);
                self.step();
            }
            self.core.fail_all(&RequestError::ShuttingDown);
            self.carry_out();
        }));
        self.alive.store(false, Ordering::SeqCst);
        if let Err(panic) = outcome {
            // Dropping the streams tells every client; the process's owner sees the thread end.
            let text = panic.downcast_ref::<String>().map(String::as_str);
            tracing::error!(
                panic = text.or(panic.downcast_ref::<&str>().copied()),
                "the engine's thread panicked"
            );
        }
    }

    /// Waits for an event if there is nothing to compute, then takes all that are there.
    fn take_events(&mut self, queue: &Receiver<Event>) {
        if self.core.num_running() == 0 && self.core.num_waiting() == 0 {
            let first = match self.core.is_empty() {
                true => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
                false => queue.recv_timeout(TICK),
            };
            match first {
                Ok(event) => self.handle(event),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => self.stopping = true,
            }
        }
        while let Ok(event) = queue.try_recv() {
            self.handle(event);
        }
    }

    fn step(&mut self) {
        self.carry_out();
        let now = self.started.elapsed();
        let plan = self.core.plan(now);
        self.carry_out();
        match plan {
            Some(plan) => {
                match self.runner.run(&plan) {
                    Ok(sampled) => {
                        self.metrics.stepped(plan.tokens.len());
                        self.core.commit(&plan, sampled, self.started.elapsed());
                    }
                    Err(error) => {
                        tracing::error!(%error, tokens = plan.tokens.len(), "a step failed");
                        self.core.abandon(&plan, &error);
                    }
                }
                self.carry_out();
            }
            // Requests wait for blocks that others hold: look again soon, but do not spin.
            None if self.core.num_waiting() > 0 => std::thread::sleep(Duration::from_micros(200)),
            None => {}
        }
        self.metrics.sync(&self.core);
    }

    fn handle(&mut self, event: Event) {
        let now = self.started.elapsed();
        let input = match event {
            Event::Submit(submission) => return self.submit(submission, now),
            Event::Abort(id) => {
                if let Some(stream) = self.streams.remove(&id) {
                    tracing::debug!(request_id = stream.request_id, "the client left");
                }
                Input::Abort(id)
            }
            Event::PeerUp { peer, role, outbox } => {
                self.outboxes.insert(peer, outbox);
                Input::PeerUp(peer, role)
            }
            Event::PeerDown(peer) => {
                self.forget(peer);
                Input::PeerDown(peer)
            }
            Event::PeerGone(peer) => {
                self.forget(peer);
                Input::PeerGone(peer)
            }
            Event::AwaitIdle { peer, reply } => return self.idle_waiters.push((peer, reply)),
            Event::Message { peer, message: PeerMessage::ToPrefill(message) } => {
                Input::FromDecode(peer, message)
            }
            Event::Message { peer, message: PeerMessage::ToDecode(message) } => {
                Input::FromPrefill(peer, message)
            }
            Event::Transfer(event) => match self.transfer_input(event) {
                Some(input) => input,
                None => return,
            },
            Event::ResetPrefixCache => Input::ResetPrefixCache,
            Event::Stop => {
                self.stopping = true;
                return;
            }
        };
        self.core.apply(input, now);
        self.carry_out();
    }

    fn submit(&mut self, submission: Submission, now: Duration) {
        let Submission { id, request, outputs } = submission;
        let age = request.arrival.elapsed();
        let arrival = now.saturating_sub(age);
        let (request_id, last_token) = (request.request_id.clone(), None);
        self.streams.insert(id, Stream { outputs, arrival: request.arrival, last_token, request_id });
        self.metrics.submitted(request.sampling.max_tokens);
        let seed = request.sampling.seed.unwrap_or_else(rand::random);
        let submit = Submit {
            id,
            request_id: request.request_id,
            prompt: request.prompt,
            sampling: request.sampling,
            cache_salt: request.cache_salt,
            seed,
            arrival,
            deadline: arrival + request.timeout,
        };
        self.core.apply(Input::Submit(submit), now);
        self.carry_out();
    }

    fn transfer_input(&mut self, event: DriverEvent) -> Option<Input> {
        match event {
            DriverEvent::Settled { tag, result, .. } => {
                let result = match result {
                    Ok(stats) => Ok(Written { post: stats.post, wire: stats.wire }),
                    Err(error) => {
                        self.metrics.transfer_failed();
                        Err(error.to_string())
                    }
                };
                Some(Input::Settled { id: RequestId(tag), result })
            }
            DriverEvent::Notified { payload } => Some(Input::Notified(payload)),
            DriverEvent::PeerLost { peer, error } => {
                tracing::warn!(?peer, %error, "the KV transport lost a peer");
                // Closing the link makes both sides start over with a new handshake.
                self.outboxes.remove(&peer);
                None
            }
        }
    }

    /// The peer's link is closed: nothing is sent to it any more, and writes to it are given up.
    fn forget(&mut self, peer: PeerId) {
        self.outboxes.remove(&peer);
        if let Some(driver) = &self.driver
            && let Err(error) = driver.remove_peer(peer)
        {
            tracing::warn!(?peer, %error, "cannot remove a peer from the KV transport");
        }
    }

    fn carry_out(&mut self) {
        for effect in self.core.take_effects() {
            self.carry_out_one(effect);
        }
        let core = &self.core;
        for (_, reply) in self.idle_waiters.extract_if(.., |(peer, _)| core.is_idle_for(*peer)) {
            // Whoever asked may have given up.
            let _ = reply.send(());
        }
        let expected = self.core.expects_traffic();
        if expected != self.expected_traffic
            && let Some(driver) = &self.driver
        {
            self.expected_traffic = expected;
            if let Err(error) = driver.expect_traffic(usize::from(expected)) {
                tracing::error!(%error, "the KV transfer thread is gone");
            }
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        match effect {
            Effect::Output(id, output) => self.output(id, output),
            Effect::Dequeued(_) => drop(self.waiting.fetch_sub(1, Ordering::Relaxed)),
            Effect::Send(peer, message) => {
                if let Some(outbox) = self.outboxes.get(&peer)
                    && outbox.send(message).is_err()
                {
                    // The link's end is on its way as an event.
                    self.outboxes.remove(&peer);
                }
            }
            Effect::Post { id, peer, spans, note } => self.post(id, peer, spans, note),
            Effect::DropPeer(peer) => drop(self.outboxes.remove(&peer)),
            Effect::Pushed(totals, timing) => self.metrics.transferred(&totals, &timing),
            Effect::Received { request_id, totals, timing } => {
                tracing::info!(
                    request_id,
                    bytes = totals.bytes,
                    descriptors = totals.descriptors,
                    writes = totals.writes,
                    compute_us = timing.compute_us,
                    wire_us = timing.wire_us,
                    exposed_us = timing.exposed_us,
                    "KV received"
                );
                self.metrics.transferred(&totals, &timing);
            }
        }
    }

    fn post(&mut self, id: RequestId, peer: PeerId, spans: Vec<transfer::Span>, note: Vec<u8>) {
        let posted = match &self.driver {
            Some(driver) => driver.post_write(peer, spans, note, id.0).map_err(|error| error.to_string()),
            None => Err("this worker has no KV transport".to_owned()),
        };
        if let Err(reason) = posted {
            let input = Input::Settled { id, result: Err(reason) };
            self.core.apply(input, self.started.elapsed());
        }
    }

    fn output(&mut self, id: RequestId, output: Output) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        match &output {
            Output::Token { .. } => {
                let now = Instant::now();
                match stream.last_token.replace(now) {
                    None => self.metrics.first_token(now - stream.arrival),
                    Some(before) => self.metrics.next_token(now - before),
                }
            }
            Output::Finished { reason, usage, timeline, .. } => {
                self.metrics.finished(*reason, usage, timeline);
                tracing::info!(
                    request_id = stream.request_id,
                    reason = reason.as_str(),
                    prompt_tokens = usage.prompt_tokens,
                    cached_tokens = usage.cached_tokens,
                    transferred_tokens = usage.transferred_tokens,
                    completion_tokens = usage.completion_tokens,
                    ?timeline,
                    "finished"
                );
            }
            Output::Failed(error) => {
                self.metrics.refused(error);
                tracing::warn!(request_id = stream.request_id, %error, "failed");
            }
        }
        let last = !matches!(output, Output::Token { .. });
        // A client that has left is aborted by its own event.
        let _ = stream.outputs.send(output);
        if last {
            self.streams.remove(&id);
        }
    }
}
