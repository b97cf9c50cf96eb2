//! Norms, activations and rotations as candle ops.

use std::sync::Arc;

use candle_core::{CpuStorage, CustomOp1, CustomOp2, CustomOp3, Layout, Result, Shape, Tensor};

use super::f32_slice;
use crate::batch::BatchMeta;
use crate::cpu::pointwise;

/// RMSNorm over the last dimension, whose size is the weight's. Keeps the shape.
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f32) -> Result<Tensor> {
    x.apply_op2_no_bwd(weight, &RmsNorm(eps))
}

/// `[rows, 2 * n]` of `[gate | up]` -> `silu(gate) * up`, `[rows, n]`.
pub fn silu_mul(gate_up: &Tensor) -> Result<Tensor> {
    gate_up.apply_op1_no_bwd(&SiluMul)
}

/// Rotates `x[tokens, heads, dim]` by the batch's positions; `cos`, `sin`: `[max_len, dim / 2]`.
pub fn rope(x: &Tensor, cos: &Tensor, sin: &Tensor, meta: &Arc<BatchMeta>) -> Result<Tensor> {
    x.apply_op3_no_bwd(cos, sin, &Rope(meta.clone()))
}

struct RmsNorm(f32);

impl CustomOp2 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (x, w) = (f32_slice(x, xl, "rms_norm's input")?, f32_slice(w, wl, "rms_norm's weight")?);
        let mut out = vec![0f32; x.len()];
        pointwise::rms_norm(x, w, self.0, &mut out);
        Ok((CpuStorage::F32(out), xl.shape().clone()))
    }
}

struct SiluMul;

impl CustomOp1 for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let (rows, width) = layout.shape().dims2()?;
        let mut out = vec![0f32; rows * width / 2];
        pointwise::silu_mul(f32_slice(x, layout, "silu_mul's input")?, width / 2, &mut out);
        Ok((CpuStorage::F32(out), Shape::from((rows, width / 2))))
    }
}

struct Rope(Arc<BatchMeta>);

impl CustomOp3 for Rope {
    fn name(&self) -> &'static str {
        "rope"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        xl: &Layout,
        cos: &CpuStorage,
        cl: &Layout,
        sin: &CpuStorage,
        sl: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (_, heads, dim) = xl.shape().dims3()?;
        let mut out = f32_slice(x, xl, "rope's input")?.to_vec();
        let (cos, sin) = (f32_slice(cos, cl, "rope's cosines")?, f32_slice(sin, sl, "rope's sines")?);
        pointwise::rope(&mut out, &self.0.positions, cos, sin, (heads, dim / 2));
        Ok((CpuStorage::F32(out), xl.shape().clone()))
    }
}
