//! Loading a worker: model files, KV pool, engine, link to other workers.

use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, bail};
use engine::EngineInfo;
use engine::core::{CoreConfig, KvFailure};
use engine::event::Event;
use engine::metrics::Metrics;
use engine::runner::{ModelRunner, Runner};
use engine::sampler::Vocabulary;
use engine::service::{self, Parts};
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::ModelFiles;
use models::qwen::{Batch, ComputeDtype, Qwen};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use transfer::driver::{Driver, DriverHandle};
use transfer::wire::PROTOCOL_VERSION;
use transfer::{Hello, LayoutFingerprint, TransportConfig};

use crate::app::Worker;
use crate::args::{self, DType, Role};
use crate::config::{Config, KvCacheSize, PeerUrl};
use crate::link::peers::Peers;
use crate::link::server::LinkServer;
use crate::link::{LinkContext, client};
use crate::readiness::State;
use crate::state::{AppState, Serving};
use crate::text::Text;

/// Changes with the byte order within a block.
const LAYOUT_VERSION: u32 = 1;

/// Loads what `config` asks for. Blocks; must run within a tokio runtime.
pub fn load(config: &Config, state: &Arc<AppState>) -> anyhow::Result<Worker> {
    let started = Instant::now();
    if let Some(cpus) = &config.cpu_affinity {
        // Before any of them starts: the engine's and the transport's threads are started from here too.
        kernels::cpu::team::pin_thread(cpus)
            .with_context(|| format!("--cpu-affinity names none of this process's cores: {cpus:?}"))?;
    }
    if !kernels::cpu::team::set_threads(config.threads) {
        bail!("the kernels' threads have started already");
    }
    // For what libraries do in parallel, such as tokenizing a batch.
    rayon::ThreadPoolBuilder::new()
        .num_threads(config.threads)
        .thread_name(|index| format!("compute-{index}"))
        .build_global()
        .context("the compute threads cannot be started")?;
    let dir = models::resolve(&config.model, &config.model_source)?;
    let files = ModelFiles::load(&dir)?;
    let max_model_len = max_model_len(config, &files)?;
    let model = Qwen::load(&files.config, &files.weights, compute_dtype(config.dtype), max_model_len)?;
    let pool = Arc::new(kv_pool(config, &files)?);
    try_step(&model, &pool).context("the model cannot compute on this device")?;
    tracing::info!(
        model = %dir.display(),
        threads = config.threads,
        kv_blocks = pool.num_blocks(),
        kv_tokens = pool.num_blocks() * config.block_size,
        kv_bytes = pool.len(),
        max_model_len,
        seconds = started.elapsed().as_secs_f64(),
        "model loaded"
    );

    let text = Arc::new(Text::new(files.tokenizer.clone(), files.chat_template));
    let vocabulary = Vocabulary::new(files.tokenizer.valid_token_mask(files.config.vocab_size));
    let incarnation: u64 = rand::random();
    let core = CoreConfig {
        block_size: config.block_size,
        num_blocks: pool.num_blocks(),
        block_bytes: pool.layout().block_bytes() as u64,
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
        fingerprint: layout_fingerprint(&files.fingerprint, pool.layout()),
        transport: String::new(),
        pool_bytes: pool.len() as u64,
        metadata: Vec::new(),
    };
    let linked = match config.role {
        Role::Both => None,
        Role::Prefill | Role::Decode => Some(open_transport(config, &pool, hello, events.clone())?),
    };
    let driver = linked.as_ref().map(|(driver, _)| driver.clone());
    let metrics = Arc::new(Metrics::new(&config.served_model_name));
    let runner: Box<dyn Runner> = Box::new(ModelRunner::new(model, pool, vocabulary));
    let engine = service::spawn(Parts { config: core, info, metrics, runner, driver }, events, queue);
    let serving = Serving { engine: engine.handle.clone(), text, defaults: files.generation.sampling };
    let tasks: Tasks = Arc::default();
    let ended = tasks.clone();
    let start = linked.map(|(driver, hello)| {
        let context = LinkContext::new(engine.handle.clone(), driver, hello);
        let (config, state, runtime) = (config.clone(), state.clone(), Handle::current());
        Box::new(move || link(&config, &state, context, &runtime, &tasks)) as Box<dyn FnOnce() + Send>
    });
    let stop = move || {
        ended.lock().unwrap_or_else(PoisonError::into_inner).iter().for_each(JoinHandle::abort);
        engine.stop();
    };
    Ok(Worker { serving, start, stop: Box::new(stop) })
}

fn compute_dtype(dtype: DType) -> ComputeDtype {
    match dtype {
        DType::Auto => ComputeDtype::Stored,
        DType::Bf16 => ComputeDtype::Bf16,
        DType::F32 => ComputeDtype::F32,
    }
}

fn max_model_len(config: &Config, files: &ModelFiles) -> anyhow::Result<usize> {
    let limit = files.config.max_position_embeddings;
    match config.max_model_len {
        Some(len) if len > limit => {
            bail!("--max-model-len is {len}, but the model's limit is {limit} tokens")
        }
        Some(len) => Ok(len),
        None => Ok(limit),
    }
}

/// The KV cache that `config` asks for, in the model's shape.
fn kv_pool(config: &Config, files: &ModelFiles) -> anyhow::Result<KvPool> {
    let dtype = match (config.kv_cache_dtype, config.dtype) {
        (DType::F32, _) | (DType::Auto, DType::F32) => KvDtype::F32,
        (DType::Auto | DType::Bf16, _) => KvDtype::Bf16,
    };
    let layout = KvLayout {
        num_layers: files.config.num_hidden_layers,
        num_kv_heads: files.config.num_key_value_heads,
        head_dim: files.config.head_dim,
        block_size: config.block_size,
        dtype,
    };
    let num_blocks = match config.kv_cache {
        KvCacheSize::Blocks(blocks) => blocks,
        KvCacheSize::Bytes(bytes) => (bytes.0 as usize) / layout.block_bytes(),
    };
    if num_blocks == 0 || num_blocks > u32::MAX as usize {
        bail!(
            "the KV cache would have {num_blocks} blocks of {} bytes, expected 1 to {}",
            layout.block_bytes(),
            u32::MAX
        );
    }
    KvPool::new(layout, num_blocks).with_context(|| format!("no memory for {num_blocks} KV blocks"))
}

/// Computes one token in the first block, while nobody owns it: a model that cannot compute must not become ready.
fn try_step(model: &Qwen, pool: &Arc<KvPool>) -> anyhow::Result<()> {
    let mut meta = BatchMeta::default();
    meta.push(&[0], 0, 1, pool.layout().block_size);
    let batch = Batch { tokens: vec![0], meta: Arc::new(meta), logits_rows: vec![0] };
    let logits = model.forward(&batch, pool)?.context("no logits")?.flatten_all()?.to_vec1::<f32>()?;
    if let Some(index) = logits.iter().position(|logit| !logit.is_finite()) {
        bail!("the logit of token {index} is {}, expected a finite number", logits[index]);
    }
    Ok(())
}

fn layout_fingerprint(model: &str, layout: &KvLayout) -> LayoutFingerprint {
    LayoutFingerprint {
        version: LAYOUT_VERSION,
        model: model.to_owned(),
        dtype: layout.dtype.as_str().to_owned(),
        num_layers: layout.num_layers as u32,
        num_kv_heads: layout.num_kv_heads as u32,
        head_dim: layout.head_dim as u32,
        block_size: layout.block_size as u32,
    }
}

/// Opens the transport with the pool registered and starts its thread; completes what we say of ourselves.
fn open_transport(
    config: &Config,
    pool: &Arc<KvPool>,
    mut hello: Hello,
    events: std::sync::mpsc::Sender<Event>,
) -> anyhow::Result<(DriverHandle, Hello)> {
    let host = own_host(config);
    let transport = TransportConfig {
        name: config.kv_transport.as_str().to_owned(),
        same_host: same_host(config),
        bind_host: config.listen.ip().to_string(),
        advertise_host: Some(host),
        nixl_dir: config.nixl_dir.clone(),
        incarnation: hello.incarnation,
    };
    let transport =
        transfer::open(&transport, service::region(pool)).context("the KV transport cannot be opened")?;
    hello.transport = transport.name().to_owned();
    hello.metadata = transport.metadata();
    let on_event = move |event| drop(events.send(Event::Transfer(event)));
    Ok((Driver::spawn(transport, Box::new(on_event)), hello))
}

/// True if all workers of this deployment are on this machine, as far as this one can tell.
fn same_host(config: &Config) -> bool {
    let loopback = |address: SocketAddr| address.ip().is_loopback();
    let is_local = |host: &str, port: u16| {
        (host, port).to_socket_addrs().is_ok_and(|mut addresses| addresses.all(loopback))
    };
    loopback(config.listen) && config.prefill.iter().all(|peer| is_local(&peer.host, peer.port))
}

/// The address under which prefill workers reach this one: the one listened on or, listening on all, the one that
/// the route to the first prefill worker leaves from. No packet is sent.
fn own_host(config: &Config) -> String {
    let listen = config.listen.ip();
    if !listen.is_unspecified() {
        return listen.to_string();
    }
    let route = || {
        let peer = config.prefill.first()?;
        let to = (peer.host.as_str(), peer.port).to_socket_addrs().ok()?.next()?;
        let socket = UdpSocket::bind(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" }).ok()?;
        socket.connect(to).ok()?;
        Some(socket.local_addr().ok()?.ip().to_string())
    };
    route().unwrap_or_else(|| listen.to_string())
}

/// The tasks that keep links, to be ended with the worker.
type Tasks = Arc<Mutex<Vec<JoinHandle<()>>>>;

/// Takes links (prefill) or keeps them (decode), and sees to readiness from here on.
fn link(config: &Config, state: &Arc<AppState>, context: LinkContext, runtime: &Handle, tasks: &Tasks) {
    if config.role == Role::Prefill {
        let first = state.link.set(Arc::new(LinkServer::new(context))).is_ok();
        assert!(first, "a process loads one model. This is a bug.");
        return state.readiness.set(State::Ready);
    }
    if config.prefill.is_empty() {
        return state.readiness.set(State::Ready);
    }
    let peers = Peers::new(&config.prefill, state.readiness.clone());
    let keep = |url: &PeerUrl| runtime.spawn(client::keep(context.clone(), url.clone(), peers.clone()));
    tasks.lock().unwrap_or_else(PoisonError::into_inner).extend(config.prefill.iter().map(keep));
}
