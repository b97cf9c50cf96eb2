//! Device memory of a step. It grows when a step needs more than any before; addresses change with that.

use kernels::cuda::attention::scratch_floats;
use kernels::cuda::{Buffer, CudaError, Gpu};

use super::Sizes;

/// Activations and scratch, each as long as the longest step so far needed.
#[derive(Debug)]
pub(super) struct Workspace {
    pub capacity: Capacity,
    /// The residual stream, f32 `[rows, hidden]`.
    pub x: Buffer,
    /// bf16 from here on: `[rows, hidden]`.
    pub hidden: Buffer,
    pub qkv: Buffer,
    pub q: Buffer,
    pub attention: Buffer,
    pub gate_up: Buffer,
    pub product: Buffer,
    /// bf16 `[samples, hidden]`.
    pub last: Buffer,
    /// f32 `[samples, vocab]`.
    pub logits: Buffer,
    /// u64 and i32 `[samples]`.
    pub best: Buffer,
    pub ids: Buffer,
    pub splits: Buffer,
}

/// How much fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Capacity {
    pub rows: usize,
    pub samples: usize,
    pub splits: usize,
}

impl Capacity {
    pub fn holds(&self, other: &Self) -> bool {
        self.rows >= other.rows && self.samples >= other.samples && self.splits >= other.splits
    }

    pub fn max(&self, other: &Self) -> Self {
        Self {
            rows: self.rows.max(other.rows),
            samples: self.samples.max(other.samples),
            splits: self.splits.max(other.splits),
        }
    }
}

impl Workspace {
    pub fn new(gpu: &Gpu, sizes: &Sizes, capacity: Capacity) -> Result<Self, CudaError> {
        let Capacity { rows, samples, splits } = capacity;
        Ok(Self {
            capacity,
            x: gpu.alloc(4 * rows * sizes.hidden)?,
            hidden: gpu.alloc(2 * rows * sizes.hidden)?,
            qkv: gpu.alloc(2 * rows * sizes.qkv())?,
            q: gpu.alloc(2 * rows * sizes.q())?,
            // Padding rows of a class have no attention; what follows must find numbers there.
            attention: gpu.zeroed(2 * rows * sizes.q())?,
            gate_up: gpu.alloc(4 * rows * sizes.mlp)?,
            product: gpu.alloc(2 * rows * sizes.mlp)?,
            last: gpu.alloc(2 * samples * sizes.hidden)?,
            logits: gpu.alloc(4 * samples * sizes.vocab)?,
            best: gpu.alloc(8 * samples)?,
            ids: gpu.alloc(4 * samples)?,
            splits: gpu.alloc(4 * scratch_floats(splits, sizes.heads, sizes.head_dim))?,
        })
    }
}
