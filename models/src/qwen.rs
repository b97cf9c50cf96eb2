//! The forward pass of Qwen3 (and Qwen2) over a paged KV pool.
//!
//! One batch is ragged: tokens of many sequences packed one after another, each with its position, its slot in the
//! pool and its sequence's block table ([`kernels::BatchMeta`]). There is no prefill pass and no decode pass. Activations are
//! f32, and bf16 where the next product rounds them anyway; weights stay as they are stored unless another dtype is asked
//! for.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{DType, Device, Result, Tensor};
use kernels::KvPool;
use kernels::ops::{self, SplitQkv, Weight};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::loader::Loader;
pub use crate::model::Batch;
use crate::rope;
use crate::weights::Weights;
use crate::workspace::Workspace;

/// What weights are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDtype {
    /// As the checkpoint stores each of them.
    Stored,
    Bf16,
    F32,
    /// The layers' matrices as int8 with a scale for each output, the rest as [`Self::Bf16`].
    Int8,
}

/// A loaded model. Cheap to share; [`Qwen::forward`] takes `&self`.
#[derive(Debug)]
pub struct Qwen {
    embed: Weight,
    layers: Vec<Layer>,
    norm: Tensor,
    /// `None` where the embedding table is the head too.
    lm_head: Option<Weight>,
    cos: Tensor,
    sin: Tensor,
    sizes: Sizes,
    eps: f32,
    device: Device,
    /// Activations of the step that runs; kept for the next one.
    workspace: Mutex<Option<Workspace>>,
}

/// Elements of a row of each kind of activation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sizes {
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// All query heads.
    pub q: usize,
    /// All query, key and value heads.
    pub qkv: usize,
    pub mlp: usize,
}

impl Sizes {
    fn new(config: &ModelConfig) -> Self {
        let (heads, kv_heads) = (config.num_attention_heads, config.num_key_value_heads);
        Self {
            hidden: config.hidden_size,
            heads,
            q: heads * config.head_dim,
            qkv: (heads + 2 * kv_heads) * config.head_dim,
            mlp: config.intermediate_size,
        }
    }
}

/// Weight `[out, in]` and bias `[out]`.
#[derive(Debug)]
pub(crate) struct Linear {
    pub weight: Weight,
    pub bias: Option<Tensor>,
}

impl Linear {
    /// `y = x · Wᵀ + bias`.
    fn set(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        ops::linear(y, x, &self.weight, self.bias.as_ref(), false)
    }

    /// `y += x · Wᵀ + bias`: the residual costs nothing.
    fn add(&self, y: &Tensor, x: &Tensor) -> Result<()> {
        ops::linear(y, x, &self.weight, self.bias.as_ref(), true)
    }
}

#[derive(Debug)]
pub(crate) struct Layer {
    pub input_norm: Tensor,
    /// q, k and v, one below the other: one pass over the activations.
    pub qkv: Linear,
    /// RMSNorm weights of each head of q and of k (Qwen3 only).
    pub qk_norm: Option<(Tensor, Tensor)>,
    pub out: Linear,
    pub post_norm: Tensor,
    /// gate and up, one below the other.
    pub gate_up: Linear,
    pub down: Linear,
}

impl Qwen {
    /// Copies the weights out of the mapped files. `max_len` bounds the positions that `forward` may see.
    ///
    /// Errors: a tensor is missing or of the wrong shape (all were checked by [`Weights::check`], so only if the caller
    /// did not), or the device refuses the memory.
    pub fn load(
        config: &ModelConfig,
        weights: &Weights,
        dtype: ComputeDtype,
        max_len: usize,
    ) -> std::result::Result<Self, ModelError> {
        let device = Device::Cpu;
        let mut loader = Loader::new(config, weights, dtype, &device);
        let embed = loader.table("model.embed_tokens.weight")?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.table("lm_head.weight")?),
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| loader.layer(layer))
            .collect::<std::result::Result<_, _>>()?;
        let norm = loader.vector("model.norm.weight")?;
        loader.release_files();
        let (cos, sin) = rope::tables(config.head_dim, config.rope_theta, max_len, &device)?;
        Ok(Self {
            embed,
            layers,
            norm,
            lm_head,
            cos,
            sin,
            sizes: Sizes::new(config),
            eps: config.rms_norm_eps as f32,
            device,
            workspace: Mutex::new(None),
        })
    }

    /// Computes the batch, writes its K and V into the pool and returns f32 logits `[logits_rows.len(), vocab]`.
    /// `None` if no row's logits are wanted. One step at a time: a second caller waits.
    pub fn forward(&self, batch: &Batch, pool: &Arc<KvPool>) -> Result<Option<Tensor>> {
        self.forward_with(batch, pool, &mut |_| ())
    }

    /// As [`Self::forward`]; calls `progress(n)` when the K and V of layers `..n` are in the pool.
    pub fn forward_with(
        &self,
        batch: &Batch,
        pool: &Arc<KvPool>,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Option<Tensor>> {
        // A panic in a step leaves nothing behind but values that the next one overwrites.
        let mut workspace = self.workspace.lock().unwrap_or_else(PoisonError::into_inner);
        let (rows, dtypes) = (batch.tokens.len(), self.dtypes(pool));
        let workspace = match workspace.take().filter(|workspace| workspace.fits(rows, dtypes)) {
            Some(kept) => workspace.insert(kept),
            None => workspace.insert(Workspace::new(rows, self.sizes, dtypes, &self.device)?),
        };
        ops::embedding(&workspace.x(0, rows)?, &self.embed, &batch.tokens)?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.attention(layer, index, workspace, batch, pool)?;
            progress(index + 1);
            for (first, rows) in workspace.chunks(rows) {
                self.mlp(layer, workspace, first, rows)?;
            }
        }
        self.logits(&workspace.x(0, rows)?, batch)
    }

    /// Dtypes of activations between products, and of queries.
    fn dtypes(&self, pool: &KvPool) -> (DType, DType) {
        let rounds = |layer: &Layer| {
            [&layer.qkv, &layer.out, &layer.gate_up, &layer.down]
                .iter()
                .all(|linear| linear.weight.computes_bf16())
        };
        let bf16 = self.layers.iter().all(rounds);
        let dtype = |bf16| if bf16 { DType::BF16 } else { DType::F32 };
        (dtype(bf16), dtype(bf16 && ops::computes_bf16_queries(pool, self.sizes.heads)))
    }

    /// Writes the layer's K and V and the attention of each row.
    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        workspace: &Workspace,
        batch: &Batch,
        pool: &Arc<KvPool>,
    ) -> Result<()> {
        let tokens = batch.tokens.len();
        let norms = layer.qk_norm.as_ref().map(|(q, k)| (q, k));
        for (first_row, rows) in workspace.chunks(tokens) {
            let (hidden, qkv) = (workspace.hidden(rows)?, workspace.qkv(rows)?);
            ops::rms_norm(&hidden, &workspace.x(first_row, rows)?, &layer.input_norm, self.eps)?;
            layer.qkv.set(&qkv, &hidden)?;
            let (heads, eps, cos, sin) = (self.sizes.heads, self.eps, &self.cos, &self.sin);
            let split =
                SplitQkv { pool, layer: index, meta: &batch.meta, heads, norms, eps, cos, sin, first_row };
            ops::split_qkv(&workspace.q(first_row, rows)?, &qkv, &split)?;
        }
        let (out, q) = (workspace.attention(0, tokens)?, workspace.q(0, tokens)?);
        ops::paged_attention(&out, &q, pool, index, &batch.meta, self.sizes.heads)
    }

    /// The output projection and the MLP of some rows: their activations stay in the cache from one to the next.
    fn mlp(&self, layer: &Layer, workspace: &Workspace, first: usize, rows: usize) -> Result<()> {
        let (x, hidden) = (workspace.x(first, rows)?, workspace.hidden(rows)?);
        layer.out.add(&x, &workspace.attention(first, rows)?)?;
        ops::rms_norm(&hidden, &x, &layer.post_norm, self.eps)?;
        let product = workspace.product(rows)?;
        ops::gate_up(&product, &hidden, &layer.gate_up.weight, || workspace.gate_up(rows))?;
        layer.down.add(&x, &product)
    }

    fn logits(&self, x: &Tensor, batch: &Batch) -> Result<Option<Tensor>> {
        let count = batch.logits_rows.len();
        if count == 0 {
            return Ok(None);
        }
        let rows = Tensor::from_slice(&batch.logits_rows, count, &self.device)?;
        let x = x.index_select(&rows, 0)?;
        let hidden = x.zeros_like()?;
        ops::rms_norm(&hidden, &x, &self.norm, self.eps)?;
        let head = self.lm_head.as_ref().unwrap_or(&self.embed);
        let logits = Tensor::zeros((count, head.rows()), DType::F32, &self.device)?;
        ops::linear(&logits, &hidden, head, None, false)?;
        Ok(Some(logits))
    }
}
