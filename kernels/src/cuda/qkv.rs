//! From the joined projection to queries and cached keys and values.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::backend::{Dims, Launch};
use super::error::CudaError;
use super::gpu::{Gpu, View};
use super::pool::PoolView;

/// What is done to each row of bf16 `qkv[rows, (heads + 2 kv_heads) * dim]`: bias, norms, rotary embedding, KV write.
#[derive(Clone, Copy, Debug)]
pub struct SplitQkv<'a> {
    pub qkv: View<'a>,
    /// f32, of a row.
    pub bias: Option<View<'a>>,
    /// f32 RMSNorm weights `[dim]` of each head of q and of k (Qwen3 only).
    pub norms: Option<(View<'a>, View<'a>)>,
    pub eps: f32,
    /// f32 `[positions, dim / 2]`.
    pub cos: View<'a>,
    pub sin: View<'a>,
    /// i32 positions and i64 slots of each row; a negative slot is padding. They must be in the tables and the pool.
    pub positions: View<'a>,
    pub slots: View<'a>,
    /// bf16 `[rows, heads * dim]`.
    pub q: View<'a>,
    pub rows: usize,
    pub heads: usize,
}

/// `struct Heads` of qkv.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Heads {
    q: i32,
    kv: i32,
    dim: i32,
}

/// Warps of a block, a head each.
const WARPS: usize = 4;

impl SplitQkv<'_> {
    pub fn run(&self, gpu: &Gpu, pool: &PoolView<'_>, layer: usize) -> Result<(), CudaError> {
        let (rows, dim, kv_heads) = (self.rows, pool.layout.head_dim, pool.layout.num_kv_heads);
        let all = self.heads + 2 * kv_heads;
        assert!(dim.is_multiple_of(2) && dim <= 256, "heads of {dim}. This is a bug.");
        let optional =
            |view: Option<View<'_>>, count| view.map_or(0, |view| view.elements::<f32>(count, "a vector"));
        let qkv = self.qkv.elements::<bf16>(rows * all * dim, "qkv");
        let bias = optional(self.bias, all * dim);
        let (q_norm, k_norm) =
            (optional(self.norms.map(|norms| norms.0), dim), optional(self.norms.map(|norms| norms.1), dim));
        let (cos, sin) =
            (self.cos.elements::<f32>(dim / 2, "cosines"), self.sin.elements::<f32>(dim / 2, "sines"));
        let positions = self.positions.elements::<i32>(rows, "positions");
        let slots = self.slots.elements::<i64>(rows, "slots");
        let q = self.q.elements::<bf16>(rows * self.heads * dim, "queries");
        let heads = Heads { q: self.heads as i32, kv: kv_heads as i32, dim: dim as i32 };
        let layer = pool.layer(layer);
        let grid = (rows as u32, all.div_ceil(WARPS) as u32, 1);
        let dims = Dims { grid, threads: 32 * WARPS as u32, shared: 0 };
        let arguments: [&[u8]; 12] = [
            bytemuck::bytes_of(&qkv),
            bytemuck::bytes_of(&bias),
            bytemuck::bytes_of(&q_norm),
            bytemuck::bytes_of(&k_norm),
            bytemuck::bytes_of(&cos),
            bytemuck::bytes_of(&sin),
            bytemuck::bytes_of(&positions),
            bytemuck::bytes_of(&slots),
            bytemuck::bytes_of(&q),
            bytemuck::bytes_of(&layer),
            bytemuck::bytes_of(&heads),
            bytemuck::bytes_of(&self.eps),
        ];
        // SAFETY: the views were checked; positions and slots are the caller's promise.
        unsafe { gpu.launch(&Launch { kernel: "split_qkv", dims, arguments: &arguments }) }
    }
}
