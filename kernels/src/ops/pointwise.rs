//! Norms and activations as candle ops.

use candle_core::{CpuStorage, InplaceOp2, InplaceOp3, Layout, Result, Tensor};

use super::{f32_slice, output};
use crate::cpu::pointwise;

/// RMSNorm of `x` over the last dimension, whose size is the weight's, into `out` of the same shape.
pub fn rms_norm(out: &Tensor, x: &Tensor, weight: &Tensor, eps: f32) -> Result<()> {
    out.inplace_op3(x, weight, &RmsNorm(eps))
}

/// `[rows, 2 * n]` of `[gate | up]` -> `silu(gate) * up` into `out[rows, n]`.
pub fn silu_mul(out: &Tensor, gate_up: &Tensor) -> Result<()> {
    out.inplace_op2(gate_up, &SiluMul)
}

struct RmsNorm(f32);

impl InplaceOp3 for RmsNorm {
    fn name(&self) -> &'static str {
        "rms_norm"
    }

    fn cpu_fwd(
        &self,
        out: &mut CpuStorage,
        ol: &Layout,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<()> {
        let (x, w) = (f32_slice(x, xl, "rms_norm's input")?, f32_slice(w, wl, "rms_norm's weight")?);
        pointwise::rms_norm(x, w, self.0, output(out, ol, "rms_norm's output")?);
        Ok(())
    }
}

struct SiluMul;

impl InplaceOp2 for SiluMul {
    fn name(&self) -> &'static str {
        "silu_mul"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, ol: &Layout, gate_up: &CpuStorage, gl: &Layout) -> Result<()> {
        let (_, width) = ol.shape().dims2()?;
        let gate_up = f32_slice(gate_up, gl, "silu_mul's input")?;
        pointwise::silu_mul(gate_up, width, output(out, ol, "silu_mul's output")?);
        Ok(())
    }
}
