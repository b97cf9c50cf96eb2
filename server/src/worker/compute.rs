//! What computes a worker's steps: a model on a device, or a simulated one.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, bail};
use engine::runner::{ModelRunner, Runner};
use engine::sampler::Vocabulary;
use engine::sim::{ModelSize, Profile, SimRunner};
use kernels::cpu::{Isa, Precision};
use kernels::{BatchMeta, KvDtype, KvLayout, KvPool};
use models::gpu::{GpuLimits, GpuModel};
use models::model::{Batch, Model};
use models::qwen::{ComputeDtype, Qwen};
use models::{ModelConfig, ModelFiles, TextFiles};

use super::device::{self, Device};
use crate::args::{DType, DeviceKind, Quantization, Role};
use crate::config::{Config, DEFAULT_KV_CACHE, KvCacheSize};

/// A model's text side, its KV pool and what computes on it.
pub struct Compute {
    pub text: TextFiles,
    /// Equal in two processes exactly if they compute the same.
    pub fingerprint: String,
    pub max_model_len: usize,
    pub pool: Arc<KvPool>,
    pub runner: Box<dyn Runner>,
}

/// Loads what `config` asks for and proves that it can compute a step.
pub fn load(config: &Config, dir: &Path) -> anyhow::Result<Compute> {
    let started = Instant::now();
    let compute = match config.device {
        DeviceKind::Sim => load_sim(config, dir)?,
        DeviceKind::Cpu | DeviceKind::Cuda(_) | DeviceKind::Auto => load_model(config, dir)?,
    };
    let precision = match config.quantization {
        Quantization::Int8 => Precision::Int8,
        Quantization::None => Precision::Bf16,
    };
    tracing::info!(
        model = %dir.display(),
        threads = config.threads,
        cpu_isa = Isa::detect_for(precision).as_str(),
        kv_blocks = compute.pool.num_blocks(),
        kv_tokens = compute.pool.num_blocks() * config.block_size,
        kv_bytes = compute.pool.len(),
        max_model_len = compute.max_model_len,
        seconds = started.elapsed().as_secs_f64(),
        "model loaded"
    );
    Ok(compute)
}

fn load_model(config: &Config, dir: &Path) -> anyhow::Result<Compute> {
    if let Some(cpus) = &config.cpu_affinity {
        // Before any of them starts: the engine's and the transport's threads are started from here too.
        kernels::cpu::team::pin_thread(cpus)
            .with_context(|| format!("--cpu-affinity names none of this process's cores: {cpus:?}"))?;
    }
    let nice = config.cpu_nice;
    let first = kernels::cpu::priority::set_threads(config.threads, nice);
    let first = first.with_context(|| format!("the compute threads cannot start with --cpu-nice {nice}"))?;
    assert!(first, "the compute threads start with the first model. This is a bug.");
    if let Some(isa) = config.cpu_isa {
        assert!(Isa::choose(isa), "the instructions are chosen before the first kernel runs. This is a bug.");
    }
    let ModelFiles {
        dir,
        config: model_config,
        generation,
        weights,
        tokenizer,
        chat_template,
        mut fingerprint,
        ..
    } = ModelFiles::load(dir)?;
    if config.quantization == Quantization::Int8 {
        fingerprint += " int8";
    }
    let max_model_len = max_model_len(config, &model_config)?;
    let (dtype, valid) = (compute_dtype(config), tokenizer.valid_token_mask(model_config.vocab_size));
    let device = device::open(config)?;
    let mut model: Box<dyn Model> = match &device {
        Device::Cpu => Box::new(Qwen::load(&model_config, &weights, dtype, max_model_len)?),
        Device::Cuda(gpu) => {
            let (max_rows, max_seqs) = (config.max_num_batched_tokens, config.max_num_seqs);
            let limits =
                GpuLimits { max_len: max_model_len, max_rows, max_seqs, eager: config.enforce_eager };
            Box::new(GpuModel::load(gpu, &model_config, &weights, dtype, limits, &valid)?)
        }
    };
    let pool = Arc::new(kv_pool(config, &model_config, &device)?);
    try_step(&mut *model, &pool).context("the model cannot compute on this device")?;
    populate(&pool);
    let runner = Box::new(ModelRunner::new(model, pool.clone(), Vocabulary::new(valid)));
    let text = TextFiles { dir, config: model_config, generation, tokenizer, chat_template };
    Ok(Compute { text, fingerprint, max_model_len, pool, runner })
}

/// The weights are not read, and need not be there.
fn load_sim(config: &Config, dir: &Path) -> anyhow::Result<Compute> {
    let text = TextFiles::load(dir)?;
    let max_model_len = max_model_len(config, &text.config)?;
    let pool = Arc::new(kv_pool(config, &text.config, &Device::Cpu)?);
    let profile = sim_profile(&config.sim_profile, &model_size(&text.config, &pool))?;
    tracing::warn!(?profile, speed = config.sim_speed, "simulated device: times and texts are made up");
    let valid = text.tokenizer.valid_token_mask(text.config.vocab_size);
    let plain = |id: &u32| valid[*id as usize] && !text.tokenizer.is_special(*id);
    let tokens: Vec<u32> = (0..text.config.vocab_size as u32).filter(plain).collect();
    let eos = text.generation.eos_token_ids.first().copied();
    let runner = Box::new(SimRunner::new(pool.clone(), profile, config.sim_speed, tokens, eos));
    let fingerprint = format!("simulated {} x {}", text.config.num_hidden_layers, text.config.hidden_size);
    Ok(Compute { text, fingerprint, max_model_len, pool, runner })
}

/// A built-in profile by name, or a file.
fn sim_profile(name: &str, size: &ModelSize) -> anyhow::Result<Profile> {
    if Path::new(name).is_file() {
        let text = std::fs::read_to_string(name).with_context(|| format!("--sim-profile {name}"))?;
        return Profile::from_json(&text).with_context(|| format!("--sim-profile {name}"));
    }
    Profile::gpu(name, size).context("--sim-profile is neither a file nor a name")
}

fn model_size(config: &ModelConfig, pool: &KvPool) -> ModelSize {
    let (hidden, mlp) = (config.hidden_size as f64, config.intermediate_size as f64);
    let q = (config.num_attention_heads * config.head_dim) as f64;
    let kv = (config.num_key_value_heads * config.head_dim) as f64;
    let layer = hidden * (2.0 * q + 2.0 * kv) + 3.0 * hidden * mlp;
    ModelSize {
        parameters: layer * config.num_hidden_layers as f64 + hidden * config.vocab_size as f64,
        attention_width: q * config.num_hidden_layers as f64,
        kv_bytes_per_token: pool.layout().token_bytes() as f64,
    }
}

fn compute_dtype(config: &Config) -> ComputeDtype {
    match (config.quantization, config.dtype) {
        (Quantization::Int8, _) => ComputeDtype::Int8,
        (Quantization::None, DType::Auto) => ComputeDtype::Stored,
        (Quantization::None, DType::Bf16) => ComputeDtype::Bf16,
        (Quantization::None, DType::F32) => ComputeDtype::F32,
    }
}

fn max_model_len(config: &Config, model: &ModelConfig) -> anyhow::Result<usize> {
    let limit = model.max_position_embeddings;
    match config.max_model_len {
        Some(len) if len > limit => {
            bail!("--max-model-len is {len}, but the model's limit is {limit} tokens")
        }
        Some(len) => Ok(len),
        None => Ok(limit),
    }
}

/// Of a GPU's memory, what the process may use if nothing is said.
const DEFAULT_SHARE: f64 = 0.9;

/// What a process that uses `used` of `total` bytes may still take to have a share of them.
fn share_of((total, used): (usize, usize), share: f64) -> usize {
    ((total as f64 * share) as usize).saturating_sub(used)
}

/// The KV cache that `config` asks for, in the model's shape.
fn kv_pool(config: &Config, model: &ModelConfig, device: &Device) -> anyhow::Result<KvPool> {
    let dtype = match (config.kv_cache_dtype, config.dtype) {
        (DType::F32, _) | (DType::Auto, DType::F32) => KvDtype::F32,
        (DType::Auto | DType::Bf16, _) => KvDtype::Bf16,
    };
    let layout = KvLayout {
        num_layers: model.num_hidden_layers,
        num_kv_heads: model.num_key_value_heads,
        head_dim: model.head_dim,
        block_size: config.block_size,
        dtype,
    };
    let num_blocks = match config.kv_cache {
        KvCacheSize::Blocks(blocks) => blocks,
        KvCacheSize::Bytes(bytes) => (bytes.0 as usize) / layout.block_bytes(),
        KvCacheSize::Default => {
            let free = match device {
                Device::Cpu => usize::MAX,
                Device::Cuda(_) => share_of(device.memory()?, DEFAULT_SHARE),
            };
            free.min(DEFAULT_KV_CACHE.0 as usize) / layout.block_bytes()
        }
        KvCacheSize::Share(share) => {
            let (total, used) = device.memory()?;
            let bytes = share_of((total, used), share);
            if bytes < layout.block_bytes() {
                bail!(
                    "--gpu-memory-utilization {share} leaves {bytes} bytes for the KV cache: {used} of the device's {total} \
                     are this process's already, and a block has {}",
                    layout.block_bytes()
                );
            }
            bytes / layout.block_bytes()
        }
    };
    if num_blocks == 0 || num_blocks > u32::MAX as usize {
        bail!(
            "the KV cache would have {num_blocks} blocks of {} bytes, expected 1 to {}",
            layout.block_bytes(),
            u32::MAX
        );
    }
    let spare = match config.role {
        Role::Both | Role::Frontend => 0,
        Role::Prefill | Role::Decode => transfer::Scratch::blocks_of(layout.block_bytes() as u64) as usize,
    };
    let pool = match device {
        Device::Cpu => {
            super::transport::host_pool(config, layout, num_blocks, spare).map_err(anyhow::Error::from)
        }
        Device::Cuda(_) if dtype == KvDtype::F32 => {
            bail!("--kv-cache-dtype f32 is not supported on cuda, expected bf16 or auto")
        }
        Device::Cuda(gpu) => KvPool::new_on(gpu, layout, num_blocks, spare).map_err(anyhow::Error::from),
    };
    pool.with_context(|| format!("no memory for {num_blocks} KV blocks"))
}

/// Tokens whose KV has its pages before anybody asks for them, as far as the pool has so many.
const POPULATED_TOKENS: usize = 16_384;

/// Gives the pool its first pages before prompts need them: a prompt's KV takes thousands of them here and again on the
/// decode worker, and clearing them would make the first prompts some 5 % slower.
fn populate(pool: &Arc<KvPool>) {
    let blocks = pool.num_blocks().min(POPULATED_TOKENS / pool.layout().block_size);
    // A huge page at a time, and half of the time nothing. Not at a low priority: the address space is locked meanwhile, and
    // who waits for that would wait for a thread that gets no processor.
    let piece = ((2 << 20) / pool.layout().block_bytes()).max(1);
    let pool = Arc::downgrade(pool);
    let work = move || {
        for start in (0..blocks).step_by(piece) {
            let Some(pool) = pool.upgrade() else { return };
            let began = Instant::now();
            if let Err(error) = pool.populate(start..(start + piece).min(blocks)) {
                return tracing::debug!(%error, "the KV pool's pages are made as they are used");
            }
            drop(pool);
            std::thread::sleep(began.elapsed());
        }
    };
    if let Err(error) = std::thread::Builder::new().name("kv-pages".into()).spawn(work) {
        tracing::debug!(%error, "the KV pool's pages are made as they are used");
    }
}

/// Computes one token in the first block, while nobody owns it: a model that cannot compute must not become ready.
fn try_step(model: &mut dyn Model, pool: &Arc<KvPool>) -> anyhow::Result<()> {
    let mut meta = BatchMeta::default();
    meta.push(&[0], 0, 1, pool.layout().block_size);
    let batch = Batch { tokens: vec![0], meta: Arc::new(meta), logits_rows: vec![0] };
    // No draw: a device that samples gives the logits, too.
    let logits = model.step(&batch, &[None], pool, &mut |_| ()).map_err(anyhow::Error::msg)?.logits;
    if logits.is_empty() {
        bail!("the model gave no logits");
    }
    if let Some(index) = logits.iter().position(|logit| !logit.is_finite()) {
        bail!("the logit of token {index} is {}, expected a finite number", logits[index]);
    }
    Ok(())
}
