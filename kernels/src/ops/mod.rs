//! Candle ops: what a model's forward pass is made of.
//!
//! Each writes into a tensor that the caller keeps, so that a step allocates nothing. Tensors are contiguous; activations
//! are f32 or, where the next op computes in bf16 anyway, bf16: the tensor's dtype says which.

mod attention;
mod linear;
mod pointwise;

pub use attention::{SplitQkv, computes_bf16_queries, paged_attention, split_qkv};
pub use linear::{Weight, embedding, gate_up, linear};
pub use pointwise::{rms_norm, silu_mul};

use std::ops::Range;

use candle_core::{CpuStorage, Layout, Result, bail};
use half::bf16;

use crate::cpu::{Input, Output};

fn range(layout: &Layout, what: &str) -> Result<Range<usize>> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("{what} is not contiguous") };
    Ok(start..end)
}

/// The f32 elements of a contiguous CPU tensor.
fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout, what: &str) -> Result<&'a [f32]> {
    Ok(&storage.as_slice::<f32>()?[range(layout, what)?])
}

/// The same, to be written.
fn f32_slice_mut<'a>(storage: &'a mut CpuStorage, layout: &Layout, what: &str) -> Result<&'a mut [f32]> {
    match output(storage, layout, what)? {
        Output::F32(out) => Ok(out),
        Output::Bf16(_) => bail!("{what} is bf16, expected f32"),
    }
}

fn input<'a>(storage: &'a CpuStorage, layout: &Layout, what: &str) -> Result<Input<'a>> {
    match storage {
        CpuStorage::F32(x) => Ok(Input::F32(&x[range(layout, what)?])),
        CpuStorage::BF16(x) => {
            let x: &[bf16] = &x[range(layout, what)?];
            Ok(Input::Bf16(x))
        }
        _ => bail!("{what} is neither f32 nor bf16"),
    }
}

fn output<'a>(storage: &'a mut CpuStorage, layout: &Layout, what: &str) -> Result<Output<'a>> {
    match storage {
        CpuStorage::F32(x) => Ok(Output::F32(&mut x[range(layout, what)?])),
        CpuStorage::BF16(x) => Ok(Output::Bf16(&mut x[range(layout, what)?])),
        _ => bail!("{what} is neither f32 nor bf16"),
    }
}
