//! KV write and paged attention as candle ops over a shared pool.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, InplaceOp2, Layout, Result, Shape, Tensor};

use super::f32_slice;
use crate::batch::BatchMeta;
use crate::cpu::attention;
use crate::pool::KvPool;

/// Stores `keys` and `values` (`[tokens, kv_heads, dim]`) in layer `layer` of the pool, in the batch's slots.
///
/// The pool's contract is the engine's: the blocks of the slot mapping belong to the batch.
pub fn write_kv(
    keys: &Tensor,
    values: &Tensor,
    pool: &Arc<KvPool>,
    layer: usize,
    meta: &Arc<BatchMeta>,
) -> Result<()> {
    keys.inplace_op2(values, &WriteKv { pool: pool.clone(), layer, meta: meta.clone() })
}

/// Causal attention of `q[tokens, heads, dim]` over the pool -> `[tokens, heads * dim]`.
pub fn paged_attention(
    q: &Tensor,
    pool: &Arc<KvPool>,
    layer: usize,
    meta: &Arc<BatchMeta>,
) -> Result<Tensor> {
    q.apply_op1_no_bwd(&PagedAttention { pool: pool.clone(), layer, meta: meta.clone() })
}

struct WriteKv {
    pool: Arc<KvPool>,
    layer: usize,
    meta: Arc<BatchMeta>,
}

impl InplaceOp2 for WriteKv {
    fn name(&self) -> &'static str {
        "write_kv"
    }

    fn cpu_fwd(&self, keys: &mut CpuStorage, kl: &Layout, values: &CpuStorage, vl: &Layout) -> Result<()> {
        let (keys, values) = (f32_slice(keys, kl, "keys")?, f32_slice(values, vl, "values")?);
        // SAFETY: the engine put only blocks that this batch owns into the slot mapping.
        unsafe { attention::write_kv(&self.pool, self.layer, &self.meta, keys, values) };
        Ok(())
    }
}

struct PagedAttention {
    pool: Arc<KvPool>,
    layer: usize,
    meta: Arc<BatchMeta>,
}

impl CustomOp1 for PagedAttention {
    fn name(&self) -> &'static str {
        "paged_attention"
    }

    fn cpu_fwd(&self, q: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (tokens, heads, dim) = layout.shape().dims3()?;
        let q = f32_slice(q, layout, "queries")?;
        let mut out = vec![0f32; q.len()];
        // SAFETY: while this batch runs nobody writes the blocks of its tables: they are its own or sealed.
        unsafe { attention::paged_attention(&self.pool, self.layer, &self.meta, heads, q, &mut out) };
        Ok((CpuStorage::F32(out), Shape::from((tokens, heads * dim))))
    }
}
