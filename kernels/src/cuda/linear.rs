//! Products with weights: bf16 `w[n, k]`, rows of `x`.

use bytemuck::{Pod, Zeroable};
use half::bf16;

use super::backend::{Dims, Launch, Product, ProductOutput};
use super::error::CudaError;
use super::gpu::{Gpu, View};

type Result<T> = std::result::Result<T, CudaError>;

/// Rows up to which a product runs on the kernels for few rows, whose limit is the memory's speed.
pub const FEW_ROWS: usize = 32;

/// Rows up to which these kernels normalise their input themselves.
pub const NORM_ROWS: usize = 8;

/// Elements of k that a warp of these kernels takes at a time: k must be a multiple.
pub const DEPTH: usize = 32;

/// What a product multiplies.
#[derive(Clone, Copy, Debug)]
pub enum Rows<'a> {
    /// bf16 `[m, k]`.
    Bf16(View<'a>),
    /// f32 `[m, k]`, normalised by RMSNorm with an f32 weight `[k]` first. At most [`NORM_ROWS`] rows.
    Normed { x: View<'a>, norm: View<'a>, eps: f32 },
}

/// Where a product goes.
#[derive(Clone, Copy, Debug)]
pub enum Into<'a> {
    /// bf16 `[m, n]`.
    Bf16(View<'a>),
    /// f32 `[m, n]`.
    F32(View<'a>),
    /// Added to f32 `[m, n]`: the residual costs nothing.
    Residual(View<'a>),
    /// `silu(gate) * up` in bf16 `[m, n]`, of a weight `[2 n, k]` with gate above up. At most [`FEW_ROWS`] rows.
    SiluMul(View<'a>),
}

/// Sizes of a product; `n` are the outputs' columns.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
}

/// `struct Skinny` of skinny.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Skinny {
    x: u64,
    norm: u64,
    w: u64,
    y: u64,
    m: i32,
    n: i32,
    k: i32,
    eps: f32,
}

/// `struct Gemm` of gemm.cu.
#[repr(C)]
#[derive(Clone, Copy, Pod, Zeroable)]
struct Gemm {
    x: u64,
    w: u64,
    y: u64,
    m: i32,
    n: i32,
    k: i32,
    end: i32,
}

/// `y = x · wᵀ`, by whatever is fastest for that many rows.
///
/// Errors: `k` is no multiple of [`DEPTH`], or the device refuses. Panics on views that are too short, and on what the
/// row limits exclude: bugs of the caller.
pub fn multiply(gpu: &Gpu, x: Rows<'_>, w: View<'_>, y: Into<'_>, shape: Shape) -> Result<()> {
    let Shape { m, n, k } = shape;
    if !k.is_multiple_of(DEPTH) {
        return Err(CudaError::Unsupported {
            what: "a product's width",
            value: k,
            expected: "a multiple of 32",
        });
    }
    assert!(m > 0 && n > 0 && m.max(n).max(k) <= i32::MAX as usize, "{shape:?}. This is a bug.");
    let fused = matches!(y, Into::SiluMul(_)) || matches!(x, Rows::Normed { .. });
    let limit = if matches!(x, Rows::Normed { .. }) { NORM_ROWS } else { FEW_ROWS };
    assert!(m <= limit || !fused, "{m} rows of a fused product. This is a bug.");
    if m <= FEW_ROWS { few_rows(gpu, x, w, y, shape) } else { many_rows(gpu, x, w, y, shape) }
}

fn few_rows(gpu: &Gpu, x: Rows<'_>, w: View<'_>, y: Into<'_>, Shape { m, n, k }: Shape) -> Result<()> {
    let weight_rows = if matches!(y, Into::SiluMul(_)) { 2 * n } else { n };
    let (rows, norm, eps) = match x {
        Rows::Bf16(x) => (x.elements::<bf16>(m * k, "a product's input"), 0, 0.0),
        Rows::Normed { x, norm, eps } => {
            (x.elements::<f32>(m * k, "a product's input"), norm.elements::<f32>(k, "a norm"), eps)
        }
    };
    let (to, kind) = match y {
        Into::Bf16(y) => (y.elements::<bf16>(m * n, "a product's output"), "store"),
        Into::SiluMul(y) => (y.elements::<bf16>(m * n, "a product's output"), "silu"),
        Into::F32(y) => (y.elements::<f32>(m * n, "a product's output"), "f32"),
        Into::Residual(y) => (y.elements::<f32>(m * n, "a product's output"), "add"),
    };
    let before = if norm == 0 { "" } else { "norm_" };
    let tiles = match m {
        0..=8 => 1,
        9..=16 => 2,
        _ => 4,
    };
    // A norm before another end than these two has no kernel: the launch says so.
    let kernel = format!("skinny_{before}{kind}_{}", 8 * tiles);
    let parts = if kind == "silu" { 2 } else { 1 };
    let shared = (8 * parts * 8 * tiles * 16 + if norm == 0 { 0 } else { 64 }) * size_of::<f32>();
    let arguments = Skinny {
        x: rows,
        norm,
        w: w.elements::<bf16>(weight_rows * k, "a weight"),
        y: to,
        m: m as i32,
        n: n as i32,
        k: k as i32,
        eps,
    };
    let dims = Dims { grid: (n.div_ceil(16) as u32, 1, 1), threads: 256, shared };
    let launch = Launch { kernel: &kernel, dims, arguments: &[bytemuck::bytes_of(&arguments)] };
    // SAFETY: the views are as long as the kernel reads and writes, checked above.
    unsafe { gpu.launch(&launch) }
}

fn many_rows(gpu: &Gpu, x: Rows<'_>, w: View<'_>, y: Into<'_>, Shape { m, n, k }: Shape) -> Result<()> {
    let Rows::Bf16(x) = x else { unreachable!("checked by the caller") };
    let (x, w) = (x.elements::<bf16>(m * k, "a product's input"), w.elements::<bf16>(n * k, "a weight"));
    let (y, output) = match y {
        Into::Bf16(y) => (y.elements::<bf16>(m * n, "a product's output"), ProductOutput::Bf16),
        Into::F32(y) => (y.elements::<f32>(m * n, "a product's output"), ProductOutput::F32),
        Into::Residual(y) => (y.elements::<f32>(m * n, "a product's output"), ProductOutput::AddF32),
        Into::SiluMul(_) => unreachable!("checked by the caller"),
    };
    let product = Product { x, w, y, m, n, k, output };
    // SAFETY: the views are as long as the product reads and writes, checked above.
    if unsafe { gpu.product(&product)? } {
        return Ok(());
    }
    let kernel = match output {
        ProductOutput::Bf16 => "gemm_bf16",
        ProductOutput::F32 => "gemm_f32",
        ProductOutput::AddF32 => "gemm_add",
    };
    let arguments = Gemm { x, w, y, m: m as i32, n: n as i32, k: k as i32, end: 0 };
    let grid = (n.div_ceil(64) as u32, m.div_ceil(64) as u32, 1);
    let dims = Dims { grid, threads: 128, shared: 3 * 128 * 64 * size_of::<bf16>() };
    let launch = Launch { kernel, dims, arguments: &[bytemuck::bytes_of(&arguments)] };
    // SAFETY: as above.
    unsafe { gpu.launch(&launch) }
}
