//! Norms, activations, table lookup and casts.

use half::{bf16, f16};

use super::backend::{Dims, Launch};
use super::error::CudaError;
use super::gpu::{Gpu, View};

type Result<T> = std::result::Result<T, CudaError>;

/// RMSNorm of rows of f32 `x[_, width]` by `weight[width]` into bf16 `y[count, width]`. Row `i` is `x`'s row `rows[i]`
/// (i32), or `i`. `x` must have the rows that are named.
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm<'a> {
    pub x: View<'a>,
    pub weight: View<'a>,
    pub rows: Option<View<'a>>,
    pub y: View<'a>,
    pub count: usize,
    pub width: usize,
    pub eps: f32,
}

impl RmsNorm<'_> {
    pub fn run(&self, gpu: &Gpu) -> Result<()> {
        let Self { count, width, eps, .. } = *self;
        assert!(width.is_multiple_of(4), "rows of {width}. This is a bug.");
        let named = if self.rows.is_some() { 1 } else { count };
        let (x, weight) = (
            self.x.elements::<f32>(named * width, "rms_norm's input"),
            self.weight.elements::<f32>(width, "rms_norm's weight"),
        );
        let rows = self.rows.map_or(0, |rows| rows.elements::<i32>(count, "rms_norm's rows"));
        let y = self.y.elements::<bf16>(count * width, "rms_norm's output");
        let dims = Dims { grid: (count as u32, 1, 1), threads: 256, shared: 8 * size_of::<f32>() };
        let width = width as i32;
        let arguments: [&[u8]; 6] = [
            bytemuck::bytes_of(&x),
            bytemuck::bytes_of(&weight),
            bytemuck::bytes_of(&rows),
            bytemuck::bytes_of(&y),
            bytemuck::bytes_of(&width),
            bytemuck::bytes_of(&eps),
        ];
        // SAFETY: the views were checked; that `x` has the rows named is the caller's promise.
        unsafe { gpu.launch(&Launch { kernel: "rms_norm", dims, arguments: &arguments }) }
    }
}

/// bf16 `gate_up[rows, 2 width]` -> `silu(gate) * up` in bf16 `out[rows, width]`.
pub fn silu_mul(gpu: &Gpu, gate_up: View<'_>, out: View<'_>, rows: usize, width: usize) -> Result<()> {
    assert!(width.is_multiple_of(8), "rows of {width}. This is a bug.");
    let from = gate_up.elements::<bf16>(2 * rows * width, "silu_mul's input");
    let to = out.elements::<bf16>(rows * width, "silu_mul's output");
    let dims = Dims { grid: (rows as u32, width.div_ceil(8 * 256) as u32, 1), threads: 256, shared: 0 };
    let width = width as i32;
    let arguments: [&[u8]; 3] =
        [bytemuck::bytes_of(&from), bytemuck::bytes_of(&to), bytemuck::bytes_of(&width)];
    // SAFETY: the views were checked.
    unsafe { gpu.launch(&Launch { kernel: "silu_mul", dims, arguments: &arguments }) }
}

/// Rows `ids` (i32) of a bf16 table `[entries, width]` into f32 `x[count, width]`. Ids must be below `entries`.
pub fn embedding(
    gpu: &Gpu,
    table: View<'_>,
    ids: View<'_>,
    x: View<'_>,
    (count, width): (usize, usize),
) -> Result<()> {
    assert!(width.is_multiple_of(8), "rows of {width}. This is a bug.");
    let table = table.elements::<bf16>(width, "the embedding table");
    let ids = ids.elements::<i32>(count, "token ids");
    let x = x.elements::<f32>(count * width, "embedding's output");
    let dims = Dims { grid: (count as u32, 1, 1), threads: 128, shared: 0 };
    let width = width as i32;
    let arguments: [&[u8]; 4] = [
        bytemuck::bytes_of(&table),
        bytemuck::bytes_of(&ids),
        bytemuck::bytes_of(&x),
        bytemuck::bytes_of(&width),
    ];
    // SAFETY: the views were checked; that the ids are in the table is the caller's promise.
    unsafe { gpu.launch(&Launch { kernel: "embedding", dims, arguments: &arguments }) }
}

/// f32 `x[rows, width] += bias[width]`.
pub fn add_bias(gpu: &Gpu, x: View<'_>, bias: View<'_>, rows: usize, width: usize) -> Result<()> {
    let x = x.elements::<f32>(rows * width, "add_bias's rows");
    let bias = bias.elements::<f32>(width, "a bias");
    let dims = Dims { grid: (rows as u32, 1, 1), threads: 256, shared: 0 };
    let width = width as i32;
    let arguments: [&[u8]; 3] =
        [bytemuck::bytes_of(&x), bytemuck::bytes_of(&bias), bytemuck::bytes_of(&width)];
    // SAFETY: the views were checked.
    unsafe { gpu.launch(&Launch { kernel: "add_bias", dims, arguments: &arguments }) }
}

/// `count` f32 values rounded to bf16.
pub fn cast_f32(gpu: &Gpu, from: View<'_>, to: View<'_>, count: usize) -> Result<()> {
    cast(gpu, "cast_f32_bf16", from.elements::<f32>(count, "a cast's input"), to, count)
}

/// `count` f16 values rounded to bf16.
pub fn cast_f16(gpu: &Gpu, from: View<'_>, to: View<'_>, count: usize) -> Result<()> {
    cast(gpu, "cast_f16_bf16", from.elements::<f16>(count, "a cast's input"), to, count)
}

fn cast(gpu: &Gpu, kernel: &str, from: u64, to: View<'_>, count: usize) -> Result<()> {
    let to = to.elements::<bf16>(count, "a cast's output");
    let dims = Dims { grid: (count.div_ceil(256).clamp(1, 4096) as u32, 1, 1), threads: 256, shared: 0 };
    let count = count as i64;
    let arguments: [&[u8]; 3] =
        [bytemuck::bytes_of(&from), bytemuck::bytes_of(&to), bytemuck::bytes_of(&count)];
    // SAFETY: the views were checked, `from` by the caller.
    unsafe { gpu.launch(&Launch { kernel, dims, arguments: &arguments }) }
}
