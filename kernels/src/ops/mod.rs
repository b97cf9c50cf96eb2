//! Candle ops: what a model's forward pass is made of. Activations are f32 and contiguous.

mod attention;
mod linear;
mod pointwise;

pub use attention::{paged_attention, write_kv};
pub use linear::{embedding, linear};
pub use pointwise::{rms_norm, rope, silu_mul};

use candle_core::{CpuStorage, Layout, Result, bail};

/// The f32 elements of a contiguous CPU tensor.
fn f32_slice<'a>(storage: &'a CpuStorage, layout: &Layout, what: &str) -> Result<&'a [f32]> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("{what} is not contiguous") };
    Ok(&storage.as_slice::<f32>()?[start..end])
}
