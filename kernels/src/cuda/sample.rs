//! From logits to token ids on the device.

use bytemuck::{Pod, Zeroable};

use super::backend::{Dims, Launch};
use super::error::CudaError;
use super::gpu::{Gpu, View};

/// How one row is sampled: `struct SampleRow` of sample.cu.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Pod, Zeroable)]
pub struct SampleParams {
    /// In [0, 1).
    pub uniform: f64,
    /// 0: the likeliest token.
    pub temperature: f32,
    /// `ln(min_p)`, at least -40.
    pub floor: f32,
    /// 1 keeps all.
    pub top_p: f32,
    /// 0 keeps all.
    pub top_k: i32,
}

/// Blocks of the grid that share a row of argmax.
const SHARERS: u32 = 64;

/// Samples `rows` rows.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// f32 `[rows, vocabulary]`.
    pub logits: View<'a>,
    /// One byte an id: 0 where there is no token.
    pub valid: View<'a>,
    /// [`SampleParams`] of each row.
    pub params: View<'a>,
    /// Room for a u64 of each row.
    pub scratch: View<'a>,
    /// i32 of each row: the id, or -1 where no logit is finite.
    pub ids: View<'a>,
    pub rows: usize,
    pub vocabulary: usize,
}

impl Sample<'_> {
    pub fn run(&self, gpu: &Gpu) -> Result<(), CudaError> {
        let (rows, size) = (self.rows, self.vocabulary);
        let logits = self.logits.elements::<f32>(rows * size, "logits");
        let valid = self.valid.elements::<u8>(size, "the vocabulary's mask");
        let params = self.params.elements::<SampleParams>(rows, "sampling parameters");
        let best = self.scratch.elements::<u64>(rows, "sampling's scratch");
        let ids = self.ids.elements::<i32>(rows, "sampled ids");
        gpu.zero(self.scratch.part(0, rows * size_of::<u64>()))?;
        let size = size as i32;
        let dims = Dims { grid: (SHARERS, rows as u32, 1), threads: 256, shared: 0 };
        let (logits, valid, best) =
            (bytemuck::bytes_of(&logits), bytemuck::bytes_of(&valid), bytemuck::bytes_of(&best));
        let argmax =
            Launch { kernel: "argmax", dims, arguments: &[logits, valid, best, bytemuck::bytes_of(&size)] };
        // SAFETY: the views were checked.
        unsafe { gpu.launch(&argmax)? };
        let dims = Dims { grid: (rows as u32, 1, 1), threads: 1024, shared: 4096 };
        let arguments = [
            logits,
            valid,
            best,
            bytemuck::bytes_of(&params),
            bytemuck::bytes_of(&ids),
            bytemuck::bytes_of(&size),
        ];
        // SAFETY: as above.
        unsafe { gpu.launch(&Launch { kernel: "sample_rows", dims, arguments: &arguments }) }
    }
}
