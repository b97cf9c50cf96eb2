//! The activations of one step, kept from step to step so that none allocates.

use std::cell::OnceCell;

use candle_core::{DType, Device, Result, Storage, Tensor};
use half::bf16;
use kernels::cpu::team;

use crate::qwen::Sizes;

/// Rows that pass through a layer's products together, for each thread: the gate and up projections of two blocks of 192
/// rows of Qwen3-0.6B are 9 MiB, which stay in the last-level cache until the next product reads them.
const CHUNK_ROWS: usize = 192;

/// Tensors for batches of up to `rows` rows. What depends on all rows is as long as the batch, the rest as a chunk.
#[derive(Debug)]
pub(crate) struct Workspace {
    rows: usize,
    chunk: usize,
    dtypes: (DType, DType),
    /// The residual stream, f32 `[rows, hidden]`.
    x: Tensor,
    /// Normalised, rotated queries, `[rows, q]`.
    q: Tensor,
    attention: Tensor,
    /// What the next product reads, `[chunk, hidden]`.
    hidden: Tensor,
    qkv: Tensor,
    /// Only where gates are not multiplied as they are computed.
    gate_up: OnceCell<Tensor>,
    /// `silu(gate) * up`, `[chunk, mlp]`.
    product: Tensor,
}

impl Workspace {
    /// `dtypes`: of activations between products, and of queries.
    pub fn new(rows: usize, sizes: Sizes, dtypes: (DType, DType), device: &Device) -> Result<Self> {
        let chunk = rows.min(CHUNK_ROWS * team::threads().clamp(2, 16));
        let zeros = |rows: usize, width: usize, dtype| aligned_zeros(rows, width, dtype, device);
        Ok(Self {
            rows,
            chunk,
            dtypes,
            x: zeros(rows, sizes.hidden, DType::F32)?,
            q: zeros(rows, sizes.q, dtypes.1)?,
            attention: zeros(rows, sizes.q, dtypes.0)?,
            hidden: zeros(chunk, sizes.hidden, dtypes.0)?,
            qkv: zeros(chunk, sizes.qkv, DType::F32)?,
            gate_up: OnceCell::new(),
            product: zeros(chunk, sizes.mlp, dtypes.0)?,
        })
    }

    pub fn fits(&self, rows: usize, dtypes: (DType, DType)) -> bool {
        rows <= self.rows && dtypes == self.dtypes
    }

    /// `(first row, rows)` of each chunk of a batch, of about equal size.
    pub fn chunks(&self, rows: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let size = rows.div_ceil(rows.div_ceil(self.chunk).max(1)).max(1);
        (0..rows).step_by(size).map(move |first| (first, size.min(rows - first)))
    }

    pub fn x(&self, first: usize, rows: usize) -> Result<Tensor> {
        self.x.narrow(0, first, rows)
    }

    pub fn q(&self, first: usize, rows: usize) -> Result<Tensor> {
        self.q.narrow(0, first, rows)
    }

    pub fn attention(&self, first: usize, rows: usize) -> Result<Tensor> {
        self.attention.narrow(0, first, rows)
    }

    pub fn hidden(&self, rows: usize) -> Result<Tensor> {
        self.hidden.narrow(0, 0, rows)
    }

    pub fn qkv(&self, rows: usize) -> Result<Tensor> {
        self.qkv.narrow(0, 0, rows)
    }

    pub fn gate_up(&self, rows: usize) -> Result<Tensor> {
        let (_, width) = self.product.dims2()?;
        let whole = match self.gate_up.get() {
            Some(whole) => whole,
            None => {
                let whole = Tensor::zeros((self.chunk, 2 * width), DType::F32, self.product.device())?;
                self.gate_up.get_or_init(|| whole)
            }
        };
        whole.narrow(0, 0, rows)
    }

    pub fn product(&self, rows: usize) -> Result<Tensor> {
        self.product.narrow(0, 0, rows)
    }
}

/// Zeros that start at a multiple of 64 bytes: a cache line, and a row of a tile where the CPU has such.
fn aligned_zeros(rows: usize, width: usize, dtype: DType, device: &Device) -> Result<Tensor> {
    const ALIGNMENT: usize = 64;
    let size = dtype.size_in_bytes();
    let room = Tensor::zeros(rows * width + ALIGNMENT / size, dtype, device)?;
    let start = match &*room.storage_and_layout().0 {
        Storage::Cpu(storage) => match dtype {
            DType::BF16 => storage.as_slice::<bf16>()?.as_ptr().cast::<u8>().align_offset(ALIGNMENT) / size,
            DType::F32 => storage.as_slice::<f32>()?.as_ptr().cast::<u8>().align_offset(ALIGNMENT) / size,
            _ => 0,
        },
        // Other devices align their allocations themselves.
        _ => 0,
    };
    room.narrow(0, start, rows * width)?.reshape((rows, width))
}
