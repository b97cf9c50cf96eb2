//! Linear layers and the embedding table, over weights as they are stored.

use candle_core::{CpuStorage, CustomOp2, DType, Layout, Result, Shape, Tensor, bail};

use super::f32_slice;
use crate::cpu;

/// `x[.., k] · w[n, k]ᵀ + bias[n]` -> f32 `[rows, n]`; `w` bf16, f16 or f32.
pub fn linear(x: &Tensor, w: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let y = x.apply_op2_no_bwd(w, &Linear)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// Rows `ids` of the table `w[vocab, hidden]`, as f32 `[ids.len(), hidden]`.
pub fn embedding(w: &Tensor, ids: &Tensor) -> Result<Tensor> {
    w.index_select(ids, 0)?.to_dtype(DType::F32)
}

struct Linear;

impl CustomOp2 for Linear {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let x = f32_slice(x, xl, "linear's input")?;
        let (n, k) = wl.shape().dims2()?;
        if xl.dims().last() != Some(&k) {
            bail!("linear: input {:?} does not fit weight {:?}", xl.shape(), wl.shape())
        }
        let Some((start, end)) = wl.contiguous_offsets() else { bail!("linear's weight is not contiguous") };
        let m = x.len() / k;
        let mut y = vec![0f32; m * n];
        match w {
            CpuStorage::F32(w) => cpu::linear::linear(x, &w[start..end], None, &mut y, (m, n, k)),
            CpuStorage::BF16(w) => cpu::linear::linear(x, &w[start..end], None, &mut y, (m, n, k)),
            CpuStorage::F16(w) => cpu::linear::linear(x, &w[start..end], None, &mut y, (m, n, k)),
            _ => bail!("linear: weights are f32, bf16 or f16"),
        }
        Ok((CpuStorage::F32(y), Shape::from((m, n))))
    }
}
