//! The forward pass on a CUDA device.
//!
//! The same sums as [`crate::qwen`], with the kernels of [`kernels::cuda`]: bf16 weights and KV, an f32 residual stream, bf16
//! between products. A step is uploaded with one copy, runs without the host, and ends with one copy of the sampled ids. Steps
//! that only decode are captured once as a graph for each size class (see [`classes`]) and replayed.
//!
//! * [`weights`]: the checkpoint on the device. * [`inputs`]: where each of a step's numbers goes in the one upload.
//! * [`workspace`]: activations. * [`forward`]: the launches. * [`step`]: uploading, graphs, downloading.

mod classes;
mod forward;
mod inputs;
mod step;
mod weights;
mod workspace;

use kernels::cuda::attention::check_heads;
use kernels::cuda::linear::DEPTH;
use kernels::cuda::{CudaError, Gpu};

use crate::config::ModelConfig;
use crate::error::ModelError;
use crate::qwen::ComputeDtype;
use crate::weights::Weights;

pub use step::GpuModel;

/// Widths and heads that every launch needs.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    hidden: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    mlp: usize,
    vocab: usize,
}

impl Sizes {
    /// Errors where the kernels cannot compute a model of this shape.
    fn new(config: &ModelConfig) -> Result<Self, CudaError> {
        let sizes = Self {
            hidden: config.hidden_size,
            heads: config.num_attention_heads,
            kv_heads: config.num_key_value_heads,
            head_dim: config.head_dim,
            mlp: config.intermediate_size,
            vocab: config.vocab_size,
        };
        check_heads(sizes.heads, sizes.kv_heads, sizes.head_dim)?;
        for (what, value) in [("hidden_size", sizes.hidden), ("intermediate_size", sizes.mlp)] {
            if !value.is_multiple_of(DEPTH) {
                return Err(CudaError::Unsupported { what, value, expected: "a multiple of 32" });
            }
        }
        Ok(sizes)
    }

    /// All query heads.
    fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    /// All query, key and value heads.
    fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}

/// What a model on a GPU is made for.
#[derive(Clone, Copy, Debug)]
pub struct GpuLimits {
    /// Positions are below this.
    pub max_len: usize,
    /// Rows of a step.
    pub max_rows: usize,
    /// Sequences of a step, and rows whose token is sampled.
    pub max_seqs: usize,
    /// Decoding steps are launched kernel by kernel, not captured as graphs.
    pub eager: bool,
}

impl GpuModel {
    /// Copies the weights to the device. `valid[id]` says which rows of the vocabulary have a token.
    ///
    /// Errors: a shape or dtype that the kernels do not have, or no memory on the device.
    pub fn load(
        gpu: &Gpu,
        config: &ModelConfig,
        weights: &Weights,
        dtype: ComputeDtype,
        limits: GpuLimits,
        valid: &[bool],
    ) -> Result<Self, ModelError> {
        let refused = match dtype {
            ComputeDtype::F32 => Some(("--dtype f32", "bf16")),
            ComputeDtype::Int8 => Some(("--quantization int8", "none")),
            ComputeDtype::Bf16 | ComputeDtype::Stored => None,
        };
        if let Some((flag, expected)) = refused {
            return Err(ModelError::DeviceDtype { flag, device: "cuda", expected });
        }
        let sizes = Sizes::new(config)?;
        let weights = weights::GpuWeights::load(gpu, config, weights, limits.max_len)?;
        Ok(Self::new(gpu, sizes, weights, limits, valid, config.rms_norm_eps as f32)?)
    }
}
