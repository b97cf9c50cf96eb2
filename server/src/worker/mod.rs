//! Loading a worker: model files, KV pool, engine, link to other workers.

mod compute;
mod device;
pub mod presence;
mod transport;

use std::sync::{Arc, Mutex, PoisonError};

use engine::EngineInfo;
use engine::core::{CoreConfig, KvFailure};
use engine::metrics::Metrics;
use engine::service::{self, Parts};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use transfer::wire::PROTOCOL_VERSION;
use transfer::{Hello, LayoutFingerprint};

use self::compute::Compute;
use self::presence::{Facts, Presence};
use crate::app::Worker;
use crate::args::{self, Role};
use crate::config::{Config, PeerUrl};
use crate::link::demand::Demand;
use crate::link::frame::Greeting;
use crate::link::named::Named;
use crate::link::peers::Peers;
use crate::link::server::LinkServer;
use crate::link::transfers::{Transfers, log_summaries};
use crate::link::{LinkContext, client};
use crate::readiness::State;
use crate::state::{AppState, Handoffs, Serving};
use crate::text::Text;

/// Loads what `config` asks for. Blocks; must run within a tokio runtime.
pub fn load(config: &Config, state: &Arc<AppState>) -> anyhow::Result<Worker> {
    let dir = models::resolve(&config.model, &config.model_source)?;
    let Compute { text: files, fingerprint, max_model_len, pool, runner } = compute::load(config, &dir)?;
    let text = Arc::new(Text::new(files.tokenizer.clone(), files.chat_template));
    let incarnation: u64 = rand::random();
    let core = CoreConfig {
        block_size: config.block_size,
        num_blocks: pool.num_blocks(),
        block_bytes: pool.layout().block_bytes() as u64,
        num_layers: pool.layout().num_layers,
        push_layers: config.kv_push_layers.unwrap_or(pool.layout().num_layers),
        lease: config.kv_lease,
        notification_time: config.kv_link_timeout,
        kv_checksum: config.kv_checksum,
        max_model_len,
        max_batched_tokens: config.max_num_batched_tokens,
        max_seqs: config.max_num_seqs,
        eos: files.generation.eos_token_ids.clone(),
        kv_failure: match config.kv_failure {
            args::KvFailure::Recompute => KvFailure::Recompute,
            args::KvFailure::Fail => KvFailure::Fail,
        },
        first_ticket: rand::random(),
        check_invariants: config.check_invariants,
    };
    let info = EngineInfo {
        model_name: config.served_model_name.clone(),
        max_model_len,
        vocab_size: files.config.vocab_size,
        block_size: config.block_size,
        num_blocks: pool.num_blocks(),
        max_queued: config.max_num_queued_reqs,
    };
    let (events, queue) = service::event_channel();
    let hello = Hello {
        protocol_version: PROTOCOL_VERSION,
        incarnation,
        role: Some(config.role.as_str().to_owned()),
        fingerprint: transport::layout_fingerprint(&fingerprint, pool.layout()),
        transport: String::new(),
        pool_bytes: pool.len() as u64,
        metadata: Vec::new(),
    };
    let hello = match config.kv_layout_version {
        Some(version) => Hello { fingerprint: LayoutFingerprint { version, ..hello.fingerprint }, ..hello },
        None => hello,
    };
    let metrics = Arc::new(Metrics::new(&config.served_model_name));
    let linked = match config.role {
        Role::Both | Role::Frontend => None,
        Role::Prefill | Role::Decode => {
            let strict = config.kv_transport_strict;
            let transfers = Arc::new(Transfers::new(&config.kv_transport, strict, &metrics.registry));
            let (driver, hello) = transport::open(config, &pool, hello, events.clone(), transfers.clone())?;
            let first = state.transfers.set(transfers.clone()).is_ok();
            assert!(first, "a process loads one model. This is a bug.");
            Some((driver, hello, transfers))
        }
    };
    let driver = linked.as_ref().map(|(driver, ..)| driver.clone());
    metrics.cache_config(config.block_size, pool.num_blocks(), pool.layout().dtype.as_str());
    let facts = Facts {
        incarnation,
        num_blocks: pool.num_blocks(),
        max_model_len,
        kv_bytes_per_token: pool.layout().token_bytes() as u64,
        kv_transport: linked.as_ref().map(|(_, hello, _)| hello.transport.clone()),
    };
    let address = *state.address.get().expect("the port is taken before anything is loaded. This is a bug.");
    let (mut presence, kv_events) = Presence::open(config, address, facts)?;
    let max_prompt_tokens = (max_model_len - 1).min(pool.num_blocks() * config.block_size) as u64;
    let parts = Parts {
        config: core,
        info,
        metrics,
        runner,
        nice: config.cpu_nice,
        pool: Some(pool),
        driver,
        kv_events,
    };
    let engine = service::spawn(parts, events, queue);
    state.record.set(presence.record.clone()).expect("a process loads one model. This is a bug.");
    presence.register()?;
    let serving = Serving { engine: engine.handle.clone(), text, defaults: files.generation.sampling };
    let tasks: Tasks = Arc::default();
    let (ended, mine) = (tasks.clone(), tasks.clone());
    let logged = engine.handle.metrics().clone();
    let start = linked.map(|(driver, hello, transfers)| {
        let lease_ms = config.kv_lease.as_millis() as u64;
        let greeting = Greeting { hello, max_prompt_tokens, lease_ms, on_demand: false };
        let (silence, direction) = (config.kv_link_timeout, config.kv_direction);
        let context =
            LinkContext::new(engine.handle.clone(), driver, greeting, silence, direction, transfers);
        let summaries = Handle::current().spawn(log_summaries(logged));
        tasks.lock().unwrap_or_else(PoisonError::into_inner).push(summaries);
        let (config, state, runtime) = (config.clone(), state.clone(), Handle::current());
        Box::new(move || link(&config, &state, context, &runtime, &tasks)) as Box<dyn FnOnce() + Send>
    });
    if let Some(registration) = presence.registration() {
        // Whoever looks for workers finds this one no more as soon as it is told to stop.
        let readiness = state.readiness.clone();
        let withdraw = async move {
            readiness.draining().await;
            registration.withdraw().await;
        };
        mine.lock().unwrap_or_else(PoisonError::into_inner).push(Handle::current().spawn(withdraw));
    }
    let stop = move || {
        if let Some(registration) = presence.registration() {
            Handle::current().block_on(registration.withdraw());
        }
        ended.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(JoinHandle::abort);
        engine.stop();
        presence.close();
    };
    Ok(Worker { serving, start, stop: Box::new(stop) })
}

/// The tasks that keep links, to be ended with the worker.
type Tasks = Arc<Mutex<Vec<JoinHandle<()>>>>;

/// Takes links (prefill) or keeps them (decode), and sees to readiness from here on.
fn link(config: &Config, state: &Arc<AppState>, context: LinkContext, runtime: &Handle, tasks: &Tasks) {
    if config.role == Role::Prefill {
        let host = config.kv_advertise_host.clone().unwrap_or_else(|| transport::own_host(config));
        let first = state.kv.set(Handoffs::Keeps { engine_id: context.engine_id(), host }).is_ok()
            && state.link.set(Arc::new(LinkServer::new(context))).is_ok();
        assert!(first, "a process loads one model. This is a bug.");
        return state.readiness.set(State::Ready);
    }
    let peers = Peers::new(&config.prefill, state.readiness.clone());
    let demand = Demand::new(context.clone());
    let named = Named::new(context.clone(), demand.clone(), peers.clone());
    let first =
        state.kv.set(Handoffs::Fetches { demand: demand.clone(), peers: peers.clone(), named }).is_ok();
    assert!(first, "a process loads one model. This is a bug.");
    if config.prefill.is_empty() {
        return state.readiness.set(State::Ready);
    }
    let keep = |url: &PeerUrl| {
        runtime.spawn(client::keep(context.clone(), url.clone(), peers.clone(), demand.clone()))
    };
    tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(config.prefill.iter().map(keep));
}
