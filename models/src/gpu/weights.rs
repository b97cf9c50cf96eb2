//! A checkpoint on the device: bf16 matrices, f32 vectors.

use candle_core::Device;
use kernels::cuda::pointwise::{cast_f16, cast_f32};
use kernels::cuda::{Buffer, Gpu};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::rope;
use crate::weights::{WeightDtype, WeightView, Weights};

type Loaded<T> = Result<T, ModelError>;

#[derive(Debug)]
pub(super) struct GpuWeights {
    pub embed: Buffer,
    pub layers: Vec<GpuLayer>,
    pub norm: Buffer,
    /// `None` where the embedding table is the head too.
    pub lm_head: Option<Buffer>,
    /// f32 `[max_len, head_dim / 2]`.
    pub cos: Buffer,
    pub sin: Buffer,
}

#[derive(Debug)]
pub(super) struct GpuLayer {
    pub input_norm: Buffer,
    /// q, k and v, one below the other.
    pub qkv: Buffer,
    pub qkv_bias: Option<Buffer>,
    /// RMSNorm weights of each head of q and of k (Qwen3 only).
    pub qk_norm: Option<(Buffer, Buffer)>,
    pub out: Buffer,
    pub out_bias: Option<Buffer>,
    pub post_norm: Buffer,
    /// gate and up, one below the other.
    pub gate_up: Buffer,
    pub down: Buffer,
}

impl GpuWeights {
    pub fn load(gpu: &Gpu, config: &ModelConfig, weights: &Weights, max_len: usize) -> Loaded<Self> {
        let loader = Loader { gpu, weights };
        let layers =
            (0..config.num_hidden_layers).map(|layer| loader.layer(config, layer)).collect::<Loaded<_>>()?;
        let lm_head = match config.tie_word_embeddings {
            true => None,
            false => Some(loader.matrix(&["lm_head.weight".into()])?),
        };
        let (cos, sin) = rope::tables(config.head_dim, config.rope_theta, max_len, &Device::Cpu)?;
        let table = |table: candle_core::Tensor| -> Loaded<Buffer> {
            Ok(gpu.buffer_of(&table.flatten_all()?.to_vec1::<f32>()?)?)
        };
        Ok(Self {
            embed: loader.matrix(&["model.embed_tokens.weight".into()])?,
            layers,
            norm: loader.vector(&["model.norm.weight".into()])?,
            lm_head,
            cos: table(cos)?,
            sin: table(sin)?,
        })
    }
}

struct Loader<'a> {
    gpu: &'a Gpu,
    weights: &'a Weights,
}

impl Loader<'_> {
    fn layer(&self, config: &ModelConfig, layer: usize) -> Loaded<GpuLayer> {
        let named = |parts: &[&str], suffix: &str| -> Vec<String> {
            parts.iter().map(|part| format!("model.layers.{layer}.{part}.{suffix}")).collect()
        };
        let matrix = |parts: &[&str]| self.matrix(&named(parts, "weight"));
        let norm = |part: &str| self.vector(&named(&[part], "weight"));
        let bias =
            |parts: &[&str], is_there: bool| is_there.then(|| self.vector(&named(parts, "bias"))).transpose();
        let qkv = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"];
        Ok(GpuLayer {
            input_norm: norm("input_layernorm")?,
            qkv: matrix(&qkv)?,
            qkv_bias: bias(&qkv, config.qkv_bias)?,
            qk_norm: match config.qk_norm {
                true => Some((norm("self_attn.q_norm")?, norm("self_attn.k_norm")?)),
                false => None,
            },
            out: matrix(&["self_attn.o_proj"])?,
            out_bias: bias(&["self_attn.o_proj"], config.o_bias)?,
            post_norm: norm("post_attention_layernorm")?,
            gate_up: matrix(&["mlp.gate_proj", "mlp.up_proj"])?,
            down: matrix(&["mlp.down_proj"])?,
        })
    }

    /// Matrices of equal width stacked by rows, in bf16.
    fn matrix(&self, names: &[String]) -> Loaded<Buffer> {
        let views = names.iter().map(|name| self.weights.view(name)).collect::<Loaded<Vec<_>>>()?;
        let elements = |view: &WeightView<'_>| view.shape.iter().product::<usize>();
        let buffer = self.gpu.alloc(2 * views.iter().map(elements).sum::<usize>())?;
        let mut at = 0;
        for view in &views {
            let count = elements(view);
            match view.dtype {
                WeightDtype::BF16 => buffer.write(at, view.bytes)?,
                // Uploaded as they are and rounded there.
                WeightDtype::F32 | WeightDtype::F16 => {
                    let stored = self.gpu.alloc(view.bytes.len())?;
                    stored.write(0, view.bytes)?;
                    let to = buffer.view().part(at, 2 * count);
                    match view.dtype {
                        WeightDtype::F32 => cast_f32(self.gpu, stored.view(), to, count)?,
                        _ => cast_f16(self.gpu, stored.view(), to, count)?,
                    }
                }
            }
            at += 2 * count;
        }
        Ok(buffer)
    }

    /// Vectors one after another. They are few and always f32.
    fn vector(&self, names: &[String]) -> Loaded<Buffer> {
        let mut values = Vec::new();
        for name in names {
            values.extend(self.weights.tensor_f32(name)?);
        }
        Ok(self.gpu.buffer_of::<f32>(&values)?)
    }
}
