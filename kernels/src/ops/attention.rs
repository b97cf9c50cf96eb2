//! KV write and paged attention as candle ops over a shared pool.

use std::ops::Deref;
use std::sync::Arc;

use candle_core::{CpuStorage, InplaceOp2, Layout, Result, Storage, Tensor, bail};

use super::{f32_slice, input, output};
use crate::batch::BatchMeta;
use crate::cpu::qkv::Qkv;
use crate::cpu::{Attention, Isa};
use crate::pool::KvPool;

/// What becomes of the joined projection's rows in one layer. Vectors are f32.
pub struct SplitQkv<'a> {
    pub pool: &'a Arc<KvPool>,
    pub layer: usize,
    pub meta: &'a Arc<BatchMeta>,
    /// Query heads.
    pub heads: usize,
    /// RMSNorm weights of each head of q and of k, if there are such norms.
    pub norms: Option<(&'a Tensor, &'a Tensor)>,
    pub eps: f32,
    /// `[max_len, head_dim / 2]`.
    pub cos: &'a Tensor,
    pub sin: &'a Tensor,
    /// Row of the batch that the first row here is.
    pub first_row: usize,
}

/// Normalises and rotates q and k of `qkv[rows, (heads + 2 kv_heads) * dim]`, writes q into `q[rows, heads * dim]` and k
/// and v into the pool, in the batch's slots.
///
/// The pool's contract is the engine's: the blocks of the slot mapping belong to the batch.
pub fn split_qkv(q: &Tensor, qkv: &Tensor, split: &SplitQkv<'_>) -> Result<()> {
    q.inplace_op2(qkv, split)
}

/// Causal attention of `q[tokens, heads * dim]` over the pool into `out` of the same shape.
pub fn paged_attention(
    out: &Tensor,
    q: &Tensor,
    pool: &Arc<KvPool>,
    layer: usize,
    meta: &Arc<BatchMeta>,
    heads: usize,
) -> Result<()> {
    out.inplace_op2(q, &PagedAttention(Attention { pool, layer, meta, heads }))
}

/// True if attention over this pool computes with queries rounded to bf16, so that they may be stored so.
pub fn computes_bf16_queries(pool: &KvPool, heads: usize) -> bool {
    Attention { pool, layer: 0, meta: &BatchMeta::default(), heads }.has_bf16_kernel(Isa::detect())
}

impl InplaceOp2 for SplitQkv<'_> {
    fn name(&self) -> &'static str {
        "split_qkv"
    }

    fn cpu_fwd(&self, q: &mut CpuStorage, ql: &Layout, qkv: &CpuStorage, kl: &Layout) -> Result<()> {
        let (q, qkv) = (output(q, ql, "queries")?, f32_slice(qkv, kl, "qkv")?);
        let norms = self.norms.map(|(q, k)| (q.storage_and_layout(), k.storage_and_layout()));
        let norms = match &norms {
            Some((q, k)) => Some((values(q)?, values(k)?)),
            None => None,
        };
        let (cos, sin) = (self.cos.storage_and_layout(), self.sin.storage_and_layout());
        let (pool, layer, meta, heads, eps) = (self.pool, self.layer, self.meta, self.heads, self.eps);
        let split = Qkv { pool, layer, meta, heads, norms, eps, cos: values(&cos)?, sin: values(&sin)? };
        // SAFETY: the engine put only blocks that this batch owns into the slot mapping.
        unsafe { split.run(self.first_row, qkv, q) };
        Ok(())
    }
}

/// The values of a vector that is read during an op without being one of its operands.
fn values<'a>((storage, layout): &'a (impl Deref<Target = Storage>, &Layout)) -> Result<&'a [f32]> {
    let Storage::Cpu(storage) = &**storage else { bail!("a vector of split_qkv is not on the CPU") };
    f32_slice(storage, layout, "a vector of split_qkv")
}

struct PagedAttention<'a>(Attention<'a>);

impl InplaceOp2 for PagedAttention<'_> {
    fn name(&self) -> &'static str {
        "paged_attention"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, ol: &Layout, q: &CpuStorage, ql: &Layout) -> Result<()> {
        let (out, q) = (output(out, ol, "attention's output")?, input(q, ql, "queries")?);
        // SAFETY: while this batch runs nobody writes the blocks of its tables: they are its own or sealed.
        unsafe { self.0.run(Isa::detect(), q, out) };
        Ok(())
    }
}
