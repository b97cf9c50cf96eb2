//! The engine's thread: it owns the core and the runner; events come in over one channel.

mod checksum;
mod effects;
mod transfers;

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use kernels::KvPool;
use kernels::cuda::{Gpu, Pinned};
use tokio::sync::mpsc::UnboundedSender;
use tokio::sync::oneshot;
use transfer::{DeviceMemory, DriverHandle, HostMemory, Memory, PeerId, Region};

use crate::api::{Output, RequestError};
use crate::core::{Core, CoreConfig, Input, Plan, Submit};
use crate::event::Event;
use crate::handle::{EngineHandle, EngineInfo, RequestId, Submission};
use crate::handoff::{PeerMessage, ToDecode};
use crate::kv_events::KvEventSink;
use crate::metrics::Metrics;
use crate::runner::Runner;
use crate::sampler::Sampled;

use self::transfers::Posted;

/// How long the thread sleeps at most while requests wait for something else: deadlines are looked at this often.
const TICK: Duration = Duration::from_millis(20);

/// What [`spawn`] needs.
pub struct Parts {
    pub config: CoreConfig,
    pub info: EngineInfo,
    pub metrics: Arc<Metrics>,
    pub runner: Box<dyn Runner>,
    /// How much the engine's thread, which computes, gives way to others of the machine (0 to 19).
    pub nice: u8,
    /// For checksums; `None` where nothing has bytes to sum.
    pub pool: Option<Arc<KvPool>>,
    /// Moves KV; `None` where the engine has no peers.
    pub driver: Option<DriverHandle>,
    /// Where changes of the prefix cache go, if anybody wants them.
    pub kv_events: Option<KvEventSink>,
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
    // The least that is pushed at a time.
    let region = region.in_pieces_of(pool.layout().layer_bytes() as u64);
    let region = match pool.file() {
        Some(file) => region.in_file(file.clone()),
        None => region,
    };
    let Some(gpu) = pool.gpu() else { return region };
    // An emulated device's memory is the processor's own: libraries reach it, too.
    let memory = pool.device().map_or(Memory::Host, Memory::Cuda);
    region.on_device(memory, Arc::new(OnDevice { pool: pool.clone(), gpu: gpu.clone() }))
}

/// Copies for transports that cannot reach a device's memory themselves.
struct OnDevice {
    pool: Arc<KvPool>,
    gpu: Gpu,
}

impl DeviceMemory for OnDevice {
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), String> {
        self.pool.read_device(offset, to).map_err(|error| error.to_string())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), String> {
        self.pool.write_device(offset, from).map_err(|error| error.to_string())
    }

    fn bind_thread(&self) -> Result<(), String> {
        self.gpu.bind_thread().map_err(|error| error.to_string())
    }

    fn check_export(&self) -> Result<(), String> {
        self.pool.check_export().map_err(|error| error.to_string())
    }

    fn staging(&self, bytes: usize) -> Result<Box<dyn HostMemory>, String> {
        match self.gpu.pinned(bytes) {
            Ok(pinned) => Ok(Box::new(Staged(pinned))),
            Err(error) => Err(error.to_string()),
        }
    }
}

/// Pinned memory as the transfer layer sees it.
struct Staged(Pinned);

impl HostMemory for Staged {
    fn bytes_mut(&mut self) -> &mut [u8] {
        self.0.bytes_mut()
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
    let nice = parts.nice;
    let waiting = Arc::new(AtomicUsize::new(0));
    let alive = Arc::new(AtomicBool::new(true));
    let handle = EngineHandle::new(events, parts.info, parts.metrics.clone(), waiting.clone(), alive.clone());
    let block_bytes = parts.config.block_bytes;
    let mut core = Core::new(parts.config);
    if parts.kv_events.is_some() {
        core.record_kv_events();
    }
    let service = Service {
        block_bytes,
        core,
        runner: Some(parts.runner),
        pool: parts.pool,
        driver: parts.driver,
        kv_events: parts.kv_events,
        posted: HashMap::new(),
        next_tag: 0,
        deferred: VecDeque::new(),
        metrics: parts.metrics,
        waiting,
        alive,
        streams: HashMap::new(),
        outboxes: HashMap::new(),
        idle_waiters: Vec::new(),
        started: Instant::now(),
        expected_traffic: false,
        nudge: false,
        stopping: false,
        broken: None,
    };
    let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
        if let Err(error) = kernels::cpu::priority::give_way(nice) {
            tracing::warn!(%error, nice, "the engine's thread keeps its priority");
        }
        service.run(&queue);
    });
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
    /// Taken out while a step runs.
    runner: Option<Box<dyn Runner>>,
    pool: Option<Arc<KvPool>>,
    block_bytes: u64,
    driver: Option<DriverHandle>,
    kv_events: Option<KvEventSink>,
    /// Transfers under way, by the tag they were posted with.
    posted: HashMap<u64, Posted>,
    next_tag: u64,
    /// Events that arrived during a step and must wait for its end, in order.
    deferred: VecDeque<Event>,
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
    /// A first token came: the rest of its KV is about to.
    nudge: bool,
    stopping: bool,
    /// Why the device computes no more.
    broken: Option<String>,
}

impl Service {
    fn run(mut self, queue: &Receiver<Event>) {
        // An idle worker exports its pool, too: before the first event nothing else would.
        self.metrics.sync(&self.core);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            while !self.stopping {
                self.take_events(queue);
                self.step(queue);
            }
            self.core
                .fail_all(&self.broken.take().map_or(RequestError::ShuttingDown, RequestError::Internal));
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
        // After events, deferred ones too, a step follows before the thread waits: it exports what they changed.
        let deferred = !self.deferred.is_empty();
        while let Some(event) = self.deferred.pop_front() {
            self.handle(event);
        }
        if !deferred && self.core.num_running() == 0 && self.core.num_waiting() == 0 {
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

    fn step(&mut self, queue: &Receiver<Event>) {
        self.carry_out();
        let now = self.started.elapsed();
        let plan = self.core.plan(now);
        self.carry_out();
        match plan {
            Some(plan) => {
                match self.compute(&plan, queue) {
                    Ok(sampled) => {
                        self.metrics.stepped(plan.tokens.len());
                        self.core.commit(&plan, sampled, self.started.elapsed());
                    }
                    Err(error) => {
                        tracing::error!(%error, tokens = plan.tokens.len(), "a step failed");
                        self.core.abandon(&plan, &error);
                        let runner = self.runner.as_mut().expect("put back after each step. This is a bug.");
                        if let Err(error) = runner.check() {
                            // Better no worker than one that fails every request at once, and so seems free.
                            tracing::error!(%error, "the device computes no more: the engine ends");
                            self.broken = Some(error);
                            self.stopping = true;
                        }
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

    /// Runs a step. As its layers finish their KV is posted, and events that touch nothing of the step are handled: a grant
    /// that comes a moment late, or another request's first token, does not wait for the step's end.
    fn compute(
        &mut self,
        plan: &Plan,
        queue: &Receiver<Event>,
    ) -> Result<Vec<Result<Sampled, String>>, String> {
        let mut runner = self.runner.take().expect("put back after each step. This is a bug.");
        let begun = Instant::now();
        let outcome = runner.run(plan, &mut |layers| {
            self.take_events_in_step(queue);
            self.core.layers_done(plan, layers, self.started.elapsed());
            self.carry_out();
        });
        self.runner = Some(runner);
        tracing::debug!(target: "kv_trace", tokens = plan.tokens.len(), us = begun.elapsed().as_micros() as u64, "step");
        outcome
    }

    /// Handles what may be handled now. What follows an event that may not waits with it: order is kept.
    fn take_events_in_step(&mut self, queue: &Receiver<Event>) {
        while let Ok(event) = queue.try_recv() {
            match self.deferred.is_empty() && self.may_handle_in_step(&event) {
                true => self.handle(event),
                false => self.deferred.push_back(event),
            }
        }
    }

    fn handle(&mut self, event: Event) {
        let now = self.started.elapsed();
        let input = match event {
            Event::Submit(submission) => return self.submit(submission, now),
            Event::Message { peer, message } => {
                self.nudge |= matches!(message, PeerMessage::ToDecode(ToDecode::FirstToken { .. }));
                message_input(peer, message)
            }
            Event::Abort(id) => {
                if let Some(stream) = self.streams.remove(&id) {
                    tracing::debug!(request_id = stream.request_id, "the client left");
                }
                Input::Abort(id)
            }
            Event::Finish(id) => Input::Finish(id),
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
            Event::Transfer(event) => match self.transfer_input(event) {
                Some(input) => input,
                None => return,
            },
            Event::ResetPrefixCache => Input::ResetPrefixCache,
            Event::KvSnapshot(reply) => return self.snapshot(reply),
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
            keep: request.keep,
            fetch: request.fetch,
            prefill: request.prefill,
            arrival,
            deadline: arrival + request.timeout,
        };
        self.core.apply(Input::Submit(submit), now);
        self.carry_out();
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
}

fn message_input(peer: PeerId, message: PeerMessage) -> Input {
    match message {
        PeerMessage::ToPrefill(message) => Input::FromDecode(peer, message),
        PeerMessage::ToDecode(message) => Input::FromPrefill(peer, message),
    }
}
