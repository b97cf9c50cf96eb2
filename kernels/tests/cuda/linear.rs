use half::bf16;
use kernels::cuda::linear::{Into, Rows, Shape, multiply};
use kernels::cuda::{CudaError, Gpu};

use crate::support::*;

/// `[m, n]` of `x · wᵀ`.
fn product(x: &[f64], w: &[f64], Shape { m, n, k }: Shape) -> Vec<f64> {
    let at = |i: usize| (0..k).map(|l| x[i / n * k + l] * w[i % n * k + l]).sum();
    (0..m * n).map(at).collect()
}

fn normed(x: &[f64], norm: &[f64], eps: f64) -> Vec<f64> {
    let row = |row: &[f64]| {
        let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64 + eps).sqrt();
        row.iter().zip(norm).map(|(x, w)| x * scale * w).collect::<Vec<_>>()
    };
    x.chunks(norm.len()).flat_map(row).collect()
}

fn silu_mul(gate_up: &[f64], n: usize) -> Vec<f64> {
    let silu = |x: f64| x / (1.0 + (-x).exp());
    let row = |row: &[f64]| (0..n).map(|i| silu(row[i]) * row[n + i]).collect::<Vec<_>>();
    gate_up.chunks(2 * n).flat_map(row).collect()
}

const SHAPES: [(usize, usize, usize); 9] = [
    (1, 64, 64),
    (1, 40, 1024),
    (3, 48, 96),
    (8, 16, 352),
    (9, 33, 64),
    (17, 64, 128),
    (32, 20, 160),
    (33, 70, 64),
    (130, 96, 224),
];

fn shape((m, n, k): (usize, usize, usize)) -> Shape {
    Shape { m, n, k }
}

#[test]
fn products_are_stored_and_added_as_asked() {
    on_every_device(|gpu| {
        for sizes in SHAPES {
            let (m, n, k) = sizes;
            let (x, w) = (random(m * k, 1), random(n * k, 2));
            let exact = product(&x, &w, shape(sizes));
            let (x, w) = (upload_bf16(gpu, &x), upload_bf16(gpu, &w));
            let (narrow, wide) = (gpu.alloc(2 * m * n).unwrap(), gpu.alloc(4 * m * n).unwrap());
            let before = random(m * n, 3);
            let added = upload_f32(gpu, &before);
            for y in [Into::Bf16(narrow.view()), Into::F32(wide.view()), Into::Residual(added.view())] {
                multiply(gpu, Rows::Bf16(x.view()), w.view(), y, shape(sizes)).unwrap();
            }
            let what = |kind| format!("{sizes:?} {kind}");
            assert_close(&read_bf16(&narrow).unwrap(), &exact, BF16, &what("bf16"));
            assert_close(&read_f32(&wide).unwrap(), &exact, F32, &what("f32"));
            let sum: Vec<f64> = exact.iter().zip(&before).map(|(product, before)| product + before).collect();
            assert_close(&read_f32(&added).unwrap(), &sum, F32, &what("residual"));
        }
    });
}

/// Errors of the fused products of `m` rows.
pub fn fused_errors(gpu: &Gpu, (m, n, k): (usize, usize, usize)) -> Result<(f64, f64), CudaError> {
    let (x, norm) = (random(m * k, 4), random(k, 5));
    // So small that gates are about 1, as in a model: else the few largest would decide the length of the result.
    let w: Vec<f64> =
        random(2 * n * k, 6).iter().map(|w| bf16::from_f64(w / (k as f64).sqrt()).to_f64()).collect();
    let rows = normed(&x, &norm, 1e-6);
    let exact = product(&rows, &w[..n * k], Shape { m, n, k });
    let gate_up = product(&rows, &w, Shape { m, n: 2 * n, k });
    let (x, norm, w) = (upload_f32(gpu, &x), upload_f32(gpu, &norm), upload_bf16(gpu, &w));
    let rows = Rows::Normed { x: x.view(), norm: norm.view(), eps: 1e-6 };
    let (stored, silu) = (gpu.alloc(2 * m * n)?, gpu.alloc(2 * m * n)?);
    multiply(gpu, rows, w.view(), Into::Bf16(stored.view()), Shape { m, n, k })?;
    multiply(gpu, rows, w.view(), Into::SiluMul(silu.view()), Shape { m, n, k })?;
    Ok((
        relative_error(&read_bf16(&stored)?, &exact),
        relative_error(&read_bf16(&silu)?, &silu_mul(&gate_up, n)),
    ))
}

#[test]
fn the_norm_before_and_silu_after_are_part_of_the_product() {
    on_every_device(|gpu| {
        for sizes in [(1, 64, 64), (2, 48, 1024), (8, 40, 352)] {
            let (stored, silu) = fused_errors(gpu, sizes).unwrap();
            assert!(stored <= BF16 && silu <= BF16, "{sizes:?}: {stored:.2e}, {silu:.2e}");
        }
        for (m, n, k) in [(1, 32, 64), (16, 40, 96), (32, 24, 128)] {
            // Small enough that no few large gates decide the length of the result.
            let x: Vec<f64> = random(m * k, 7).iter().map(|x| x / 8.0).collect();
            let w = random(2 * n * k, 8);
            let exact = silu_mul(&product(&x, &w, Shape { m, n: 2 * n, k }), n);
            let (x, w) = (upload_bf16(gpu, &x), upload_bf16(gpu, &w));
            let y = gpu.alloc(2 * m * n).unwrap();
            let shape = Shape { m, n, k };
            multiply(gpu, Rows::Bf16(x.view()), w.view(), Into::SiluMul(y.view()), shape).unwrap();
            assert_close(&read_bf16(&y).unwrap(), &exact, BF16, "silu");
        }
    });
}

#[test]
fn a_rows_product_does_not_depend_on_its_batch() {
    on_every_device(|gpu| {
        let (n, k) = (48, 256);
        let (x, w) = (random(8 * k, 9), random(n * k, 10));
        let (x, w) = (upload_bf16(gpu, &x), upload_bf16(gpu, &w));
        let (alone, together) = (gpu.alloc(4 * n).unwrap(), gpu.alloc(4 * 8 * n).unwrap());
        let third = Rows::Bf16(x.view().part(2 * 2 * k, 2 * k));
        multiply(gpu, third, w.view(), Into::F32(alone.view()), Shape { m: 1, n, k }).unwrap();
        let all = Rows::Bf16(x.view());
        multiply(gpu, all, w.view(), Into::F32(together.view()), Shape { m: 8, n, k }).unwrap();
        assert_eq!(alone.to_vec::<f32>().unwrap(), together.to_vec::<f32>().unwrap()[2 * n..3 * n]);
    });
}

#[test]
fn a_width_that_no_kernel_takes_is_refused_by_value() {
    on_every_device(|gpu| {
        let buffer = gpu.alloc(1024).unwrap();
        let view = buffer.view();
        let error = multiply(gpu, Rows::Bf16(view), view, Into::Bf16(view), Shape { m: 1, n: 1, k: 40 });
        assert_eq!(
            error.unwrap_err().to_string(),
            "the CUDA kernels do not support a product's width 40, expected a multiple of 32"
        );
    });
}
