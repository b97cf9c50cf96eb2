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
use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, InplaceOp1, Layout, Result, Tensor, bail};
use half::bf16;

use crate::cpu::{Input, Output};

/// The elements of a whole f32 tensor, not copied: whoever else has the tensor finds it empty.
pub fn into_vec(x: Tensor) -> Result<Vec<f32>> {
    let taken = Taken(Mutex::default());
    x.inplace_op1(&taken)?;
    Ok(taken.0.into_inner().unwrap_or_else(PoisonError::into_inner))
}

struct Taken(Mutex<Vec<f32>>);

impl InplaceOp1 for Taken {
    fn name(&self) -> &'static str {
        "into_vec"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        match storage {
            CpuStorage::F32(x) if range(layout, "x")? == (0..x.len()) => {
                *self.0.lock().unwrap_or_else(PoisonError::into_inner) = std::mem::take(x);
                Ok(())
            }
            CpuStorage::F32(_) => bail!("x is a part of a tensor"),
            _ => bail!("x is not f32"),
        }
    }
}

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

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    #[test]
    fn a_tensors_elements_come_without_a_copy_and_a_part_of_one_is_refused() {
        let elements = vec![1f32, 2.0, 3.0, 4.0];
        let at = elements.as_ptr();
        let whole = Tensor::from_vec(elements, (2, 2), &Device::Cpu).unwrap();
        let row = whole.narrow(0, 1, 1).unwrap();
        assert!(into_vec(row).unwrap_err().to_string().contains("part of a tensor"));
        let taken = into_vec(whole).unwrap();
        assert_eq!((taken.as_slice(), taken.as_ptr()), ([1.0, 2.0, 3.0, 4.0].as_slice(), at));
    }
}
