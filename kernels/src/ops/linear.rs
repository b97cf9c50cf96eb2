//! Linear layers and the embedding table.

use candle_core::{CpuStorage, InplaceOp1, InplaceOp2, InplaceOp3, Layout, Result, Storage, Tensor, bail};

use super::{f32_slice, f32_slice_mut, input, output, range};
use crate::cpu::pointwise::{embed, embed_packed};
use crate::cpu::{self, Isa, Packed, Precision};

/// The weight `[out, in]` of a linear layer or an embedding table.
#[derive(Debug)]
pub enum Weight {
    /// bf16 or int8, in the kernels' own order.
    Packed(Packed),
    /// f32 or f16 as it is stored: exact, and slower.
    Stored(Tensor),
}

impl Weight {
    /// Outputs, or entries of the table.
    pub fn rows(&self) -> usize {
        match self {
            Weight::Packed(packed) => packed.n(),
            Weight::Stored(tensor) => tensor.dims()[0],
        }
    }

    /// Inputs, or elements of an entry.
    pub fn columns(&self) -> usize {
        match self {
            Weight::Packed(packed) => packed.k(),
            Weight::Stored(tensor) => tensor.dims()[1],
        }
    }

    /// True if activations are rounded to bf16 (or bytes) to be multiplied with this weight, so that they may be stored so.
    pub fn computes_bf16(&self) -> bool {
        matches!(self, Weight::Packed(w) if w.k() >= BF16_INPUTS && Isa::detect_for(w.precision()).computes_bf16())
    }
}

/// Inputs from which on activations are rounded to bf16. Rounding costs 0.6 % of the logits' length on Qwen3-0.6B (1,024
/// inputs), whose speed it doubles, but 1.3 % on a model of 64 inputs, whose sums average out less and whose speed does
/// not need it.
const BF16_INPUTS: usize = 512;

/// What products with this weight run on.
fn isa(w: &Packed) -> Isa {
    let exact = w.precision() == Precision::Bf16 && w.k() < BF16_INPUTS;
    let isa = Isa::detect_for(w.precision());
    if exact { isa.min(Isa::Avx512) } else { isa }
}

/// `y[rows, out] = x[rows, in] · wᵀ + bias[out]`, plus what `y` holds if `add`; `y` and `bias` f32, `x` f32 or bf16.
pub fn linear(y: &Tensor, x: &Tensor, w: &Weight, bias: Option<&Tensor>, add: bool) -> Result<()> {
    if x.dims().last() != Some(&w.columns()) || y.dims().last() != Some(&w.rows()) {
        bail!("linear: {:?} = {:?} by [{}, {}] does not fit", y.shape(), x.shape(), w.rows(), w.columns())
    }
    match w {
        Weight::Packed(w) => y.inplace_op2(x, &Product { w, bias, add }),
        Weight::Stored(w) => y.inplace_op3(x, w, &Stored { bias, add }),
    }
}

/// `out[rows, n] = silu(x · gateᵀ) * (x · upᵀ)`: `w[2 n, in]` is both weights, packed by [`Packed::gated`] or stored one
/// below the other. `scratch`, f32 `[rows, 2 n]`, is for stored ones only.
pub fn gate_up(out: &Tensor, x: &Tensor, w: &Weight, scratch: impl FnOnce() -> Result<Tensor>) -> Result<()> {
    if x.dims().last() != Some(&w.columns()) || out.dims().last() != Some(&(w.rows() / 2)) {
        bail!("gate_up: {:?} = {:?} by [{}, {}] does not fit", out.shape(), x.shape(), w.rows(), w.columns())
    }
    match w {
        Weight::Packed(w) => out.inplace_op2(x, &Gated(w)),
        Weight::Stored(_) => {
            let scratch = scratch()?;
            linear(&scratch, x, w, None, false)?;
            super::silu_mul(out, &scratch)
        }
    }
}

/// Rows `ids` of the table, as f32, into `out[ids.len(), columns]`.
pub fn embedding(out: &Tensor, table: &Weight, ids: &[u32]) -> Result<()> {
    if out.dims() != [ids.len(), table.columns()] {
        bail!("embedding: {:?} for {} ids", out.shape(), ids.len())
    }
    if let Some(id) = ids.iter().find(|&&id| id as usize >= table.rows()) {
        bail!("embedding: id {id} of {}", table.rows())
    }
    match table {
        Weight::Packed(table) => out.inplace_op1(&LookUp { table: Some(table), ids }),
        Weight::Stored(table) => out.inplace_op2(table, &LookUp { table: None, ids }),
    }
}

struct Product<'a> {
    w: &'a Packed,
    bias: Option<&'a Tensor>,
    add: bool,
}

impl InplaceOp2 for Product<'_> {
    fn name(&self) -> &'static str {
        "linear_packed"
    }

    fn cpu_fwd(&self, y: &mut CpuStorage, yl: &Layout, x: &CpuStorage, xl: &Layout) -> Result<()> {
        let (y, x) = (f32_slice_mut(y, yl, "linear's output")?, input(x, xl, "linear's input")?);
        with_bias(self.bias, |bias| cpu::matmul(isa(self.w), x, self.w, bias, y, self.add))
    }
}

struct Gated<'a>(&'a Packed);

impl InplaceOp2 for Gated<'_> {
    fn name(&self) -> &'static str {
        "gate_up"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, ol: &Layout, x: &CpuStorage, xl: &Layout) -> Result<()> {
        let (out, x) = (output(out, ol, "gate_up's output")?, input(x, xl, "gate_up's input")?);
        cpu::matmul::silu_mul(isa(self.0), x, self.0, out);
        Ok(())
    }
}

struct Stored<'a> {
    bias: Option<&'a Tensor>,
    add: bool,
}

impl InplaceOp3 for Stored<'_> {
    fn name(&self) -> &'static str {
        "linear"
    }

    fn cpu_fwd(
        &self,
        y: &mut CpuStorage,
        yl: &Layout,
        x: &CpuStorage,
        xl: &Layout,
        w: &CpuStorage,
        wl: &Layout,
    ) -> Result<()> {
        let (y, x) = (f32_slice_mut(y, yl, "linear's output")?, f32_slice(x, xl, "linear's input")?);
        let (sizes, range) = (wl.shape().dims2()?, range(wl, "linear's weight")?);
        with_bias(self.bias, |bias| {
            match w {
                CpuStorage::F32(w) => cpu::linear::linear(x, &w[range], bias, y, sizes, self.add),
                CpuStorage::F16(w) => cpu::linear::linear(x, &w[range], bias, y, sizes, self.add),
                _ => bail!("linear: stored weights are f32 or f16"),
            }
            Ok(())
        })?
    }
}

fn with_bias<T>(bias: Option<&Tensor>, then: impl FnOnce(Option<&[f32]>) -> T) -> Result<T> {
    let Some(bias) = bias else { return Ok(then(None)) };
    let (storage, layout) = bias.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else { bail!("linear's bias is not on the CPU") };
    Ok(then(Some(f32_slice(storage, layout, "linear's bias")?)))
}

struct LookUp<'a> {
    /// The packed table; else it is the op's second tensor.
    table: Option<&'a Packed>,
    ids: &'a [u32],
}

impl InplaceOp1 for LookUp<'_> {
    fn name(&self) -> &'static str {
        "embedding_packed"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, layout: &Layout) -> Result<()> {
        let Some(table) = self.table else { bail!("no packed table") };
        embed_packed(table, self.ids, f32_slice_mut(out, layout, "embedding's output")?);
        Ok(())
    }
}

impl InplaceOp2 for LookUp<'_> {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn cpu_fwd(&self, out: &mut CpuStorage, layout: &Layout, table: &CpuStorage, tl: &Layout) -> Result<()> {
        let out = f32_slice_mut(out, layout, "embedding's output")?;
        let ((_, width), range) = (tl.shape().dims2()?, range(tl, "the embedding table")?);
        match table {
            CpuStorage::F32(table) => embed(&table[range], self.ids, width, out),
            CpuStorage::F16(table) => embed(&table[range], self.ids, width, out),
            _ => bail!("embedding: stored weights are f32 or f16"),
        }
        Ok(())
    }
}
