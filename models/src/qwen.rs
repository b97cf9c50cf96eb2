//! The forward pass of Qwen3 (and Qwen2) over a paged KV pool.
//!
//! One batch is ragged: tokens of many sequences packed one after another, each with its position, its slot in the
//! pool and its sequence's block table ([`BatchMeta`]). There is no prefill pass and no decode pass. Activations are
//! f32; weights stay as they are stored unless another dtype is asked for.

use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor};
use kernels::{BatchMeta, KvPool, ops};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rope;
use crate::weights::{WeightDtype, Weights};

/// What weights are kept as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ComputeDtype {
    /// As the checkpoint stores each of them.
    Stored,
    Bf16,
    F32,
}

/// A loaded model. Cheap to share; [`Qwen::forward`] takes `&self`.
#[derive(Debug)]
pub struct Qwen {
    embed: Tensor,
    layers: Vec<Layer>,
    norm: Tensor,
    lm_head: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    eps: f32,
    device: Device,
}

/// Weight `[out, in]` and bias `[out]`.
#[derive(Debug)]
struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::linear(x, &self.weight, self.bias.as_ref())
    }
}

#[derive(Debug)]
struct Layer {
    input_norm: Tensor,
    /// q, k and v, one below the other: one pass over the activations.
    qkv: Linear,
    /// RMSNorm weights of each head of q and of k (Qwen3 only).
    qk_norm: Option<(Tensor, Tensor)>,
    out: Linear,
    post_norm: Tensor,
    /// gate and up, one below the other.
    gate_up: Linear,
    down: Linear,
}

/// One step's input.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Packed token ids.
    pub tokens: Vec<u32>,
    pub meta: Arc<BatchMeta>,
    /// Packed rows whose logits are wanted, ascending.
    pub logits_rows: Vec<u32>,
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
        let loader = Loader { config, weights, dtype, device: &device };
        let embed = loader.matrix(&["model.embed_tokens.weight"])?;
        let lm_head = match config.tie_word_embeddings {
            true => embed.clone(),
            false => loader.matrix(&["lm_head.weight"])?,
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| loader.layer(layer))
            .collect::<std::result::Result<_, _>>()?;
        let (cos, sin) = rope::tables(config.head_dim, config.rope_theta, max_len, &device)?;
        Ok(Self {
            embed,
            layers,
            norm: loader.vector("model.norm.weight")?,
            lm_head,
            cos,
            sin,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            eps: config.rms_norm_eps as f32,
            device,
        })
    }

    /// Computes the batch, writes its K and V into the pool and returns f32 logits `[logits_rows.len(), vocab]`.
    /// `None` if no row's logits are wanted.
    pub fn forward(&self, batch: &Batch, pool: &Arc<KvPool>) -> Result<Option<Tensor>> {
        let ids = Tensor::from_slice(&batch.tokens, batch.tokens.len(), &self.device)?;
        let mut x = ops::embedding(&self.embed, &ids)?;
        for (index, layer) in self.layers.iter().enumerate() {
            let attention = self.attention(layer, index, &x, batch, pool)?;
            x = (x + attention)?;
            let hidden = ops::rms_norm(&x, &layer.post_norm, self.eps)?;
            let hidden = ops::silu_mul(&layer.gate_up.forward(&hidden)?)?;
            x = (x + layer.down.forward(&hidden)?)?;
        }
        if batch.logits_rows.is_empty() {
            return Ok(None);
        }
        let rows = Tensor::from_slice(&batch.logits_rows, batch.logits_rows.len(), &self.device)?;
        let hidden = ops::rms_norm(&x.index_select(&rows, 0)?, &self.norm, self.eps)?;
        ops::linear(&hidden, &self.lm_head, None).map(Some)
    }

    fn attention(
        &self,
        layer: &Layer,
        index: usize,
        x: &Tensor,
        batch: &Batch,
        pool: &Arc<KvPool>,
    ) -> Result<Tensor> {
        let tokens = batch.tokens.len();
        let hidden = ops::rms_norm(x, &layer.input_norm, self.eps)?;
        let qkv = layer.qkv.forward(&hidden)?;
        let (q_rows, kv_rows) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let part = |start: usize, rows: usize, heads: usize| {
            qkv.narrow(1, start, rows)?.contiguous()?.reshape((tokens, heads, self.head_dim))
        };
        let mut q = part(0, q_rows, self.heads)?;
        let mut k = part(q_rows, kv_rows, self.kv_heads)?;
        let v = part(q_rows + kv_rows, kv_rows, self.kv_heads)?;
        if let Some((q_norm, k_norm)) = &layer.qk_norm {
            q = ops::rms_norm(&q, q_norm, self.eps)?;
            k = ops::rms_norm(&k, k_norm, self.eps)?;
        }
        let q = ops::rope(&q, &self.cos, &self.sin, &batch.meta)?;
        let k = ops::rope(&k, &self.cos, &self.sin, &batch.meta)?;
        ops::write_kv(&k, &v, pool, index, &batch.meta)?;
        layer.out.forward(&ops::paged_attention(&q, pool, index, &batch.meta)?)
    }
}

/// Turns tensors of the checkpoint into candle's, joined and converted as asked.
struct Loader<'a> {
    config: &'a ModelConfig,
    weights: &'a Weights,
    dtype: ComputeDtype,
    device: &'a Device,
}

type Loaded<T> = std::result::Result<T, ModelError>;

impl Loader<'_> {
    fn layer(&self, layer: usize) -> Loaded<Layer> {
        let name = |tensor: &str| format!("model.layers.{layer}.{tensor}");
        let linear = |parts: &[&str], has_bias: bool| -> Loaded<Linear> {
            let named =
                |suffix: &str| parts.iter().map(|part| name(&format!("{part}.{suffix}"))).collect::<Vec<_>>();
            let weight = self.matrix(&named("weight"))?;
            let bias = has_bias.then(|| self.joined_bias(&named("bias"))).transpose()?;
            Ok(Linear { weight, bias })
        };
        let norm = |tensor: &str| self.vector(&name(tensor));
        let qk_norm = match self.config.qk_norm {
            true => Some((norm("self_attn.q_norm.weight")?, norm("self_attn.k_norm.weight")?)),
            false => None,
        };
        Ok(Layer {
            input_norm: norm("input_layernorm.weight")?,
            qkv: linear(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], self.config.qkv_bias)?,
            qk_norm,
            out: linear(&["self_attn.o_proj"], self.config.o_bias)?,
            post_norm: norm("post_attention_layernorm.weight")?,
            gate_up: linear(&["mlp.gate_proj", "mlp.up_proj"], false)?,
            down: linear(&["mlp.down_proj"], false)?,
        })
    }

    /// Matrices of equal width stacked by rows. Parts of different dtypes become f32.
    fn matrix<S: AsRef<str>>(&self, names: &[S]) -> Loaded<Tensor> {
        let views = names.iter().map(|name| self.weights.view(name.as_ref())).collect::<Loaded<Vec<_>>>()?;
        let width = views[0].shape[1];
        let rows: usize = views.iter().map(|view| view.shape[0]).sum();
        let stored = views[0].dtype;
        let dtype = match self.dtype {
            ComputeDtype::F32 => DType::F32,
            ComputeDtype::Bf16 => DType::BF16,
            ComputeDtype::Stored if views.iter().any(|view| view.dtype != stored) => DType::F32,
            ComputeDtype::Stored => match stored {
                WeightDtype::BF16 => DType::BF16,
                WeightDtype::F16 => DType::F16,
                WeightDtype::F32 => DType::F32,
            },
        };
        let shape = (rows, width);
        let tensor = match dtype {
            DType::BF16 => {
                Tensor::from_vec(views.iter().flat_map(|view| view.to_bf16()).collect(), shape, self.device)
            }
            DType::F16 => {
                let halves = views.iter().flat_map(|view| view.bytes.as_chunks::<2>().0);
                let halves = halves.map(|bytes| half::f16::from_le_bytes(*bytes)).collect::<Vec<_>>();
                Tensor::from_vec(halves, shape, self.device)
            }
            _ => Tensor::from_vec(views.iter().flat_map(|view| view.to_f32()).collect(), shape, self.device),
        };
        Ok(tensor?)
    }

    /// Norm weights are few and always f32.
    fn vector(&self, name: &str) -> Loaded<Tensor> {
        let values = self.weights.tensor_f32(name)?;
        let len = values.len();
        Ok(Tensor::from_vec(values, len, self.device)?)
    }

    fn joined_bias<S: AsRef<str>>(&self, names: &[S]) -> Loaded<Tensor> {
        let mut values = Vec::new();
        for name in names {
            values.extend(self.weights.tensor_f32(name.as_ref())?);
        }
        let len = values.len();
        Ok(Tensor::from_vec(values, len, self.device)?)
    }
}
