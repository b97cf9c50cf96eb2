use half::f16;
use kernels::cuda::pointwise::{RmsNorm, add_bias, cast_f16, cast_f32, embedding, silu_mul};
use kernels::cuda::{CudaError, Gpu};

use crate::support::*;

pub fn rms_norm_error(
    gpu: &Gpu,
    count: usize,
    width: usize,
    named: Option<&[i32]>,
) -> Result<f64, CudaError> {
    let (x, weight) = (random(count * width, 1), random(width, 2));
    let (from, weights) = (upload_f32(gpu, &x), upload_f32(gpu, &weight));
    let ids = named.map(|named| gpu.buffer_of(named).unwrap());
    let rows = named.map_or((0..count as i32).collect(), <[i32]>::to_vec);
    let y = gpu.alloc(2 * rows.len() * width).unwrap();
    let norm = RmsNorm {
        x: from.view(),
        weight: weights.view(),
        rows: ids.as_ref().map(|ids| ids.view()),
        y: y.view(),
        count: rows.len(),
        width,
        eps: 1e-5,
    };
    norm.run(gpu)?;
    let exact = |row: &i32| {
        let row = &x[*row as usize * width..][..width];
        let scale = 1.0 / (row.iter().map(|x| x * x).sum::<f64>() / width as f64 + 1e-5).sqrt();
        row.iter().zip(&weight).map(|(x, w)| x * scale * w).collect::<Vec<_>>()
    };
    Ok(relative_error(&read_bf16(&y)?, &rows.iter().flat_map(exact).collect::<Vec<_>>()))
}

#[test]
fn rms_norm_of_all_and_of_named_rows() {
    on_every_device(|gpu| {
        for (count, width) in [(1, 64), (3, 192), (5, 1024), (2, 2500)] {
            assert!(rms_norm_error(gpu, count, width, None).unwrap() <= BF16, "{count} rows of {width}");
        }
        assert!(rms_norm_error(gpu, 6, 128, Some(&[5, 0, 3])).unwrap() <= BF16);
    });
}

#[test]
fn silu_mul_is_finite_at_its_extremes() {
    on_every_device(|gpu| {
        for (rows, width) in [(1, 8), (3, 192), (2, 3072)] {
            let mut gate_up = random(rows * 2 * width, 3);
            (gate_up[0], gate_up[1], gate_up[2]) = (-200.0, 200.0, 0.0);
            // So small that the one large gate does not decide the length of the whole result.
            gate_up[width + 1] = 1.0 / 256.0;
            let exact = |row: &[f64]| {
                (0..width).map(|i| row[i] / (1.0 + (-row[i]).exp()) * row[width + i]).collect::<Vec<_>>()
            };
            let exact: Vec<f64> = gate_up.chunks(2 * width).flat_map(exact).collect();
            let (from, out) = (upload_bf16(gpu, &gate_up), gpu.alloc(2 * rows * width).unwrap());
            silu_mul(gpu, from.view(), out.view(), rows, width).unwrap();
            assert_close(&read_bf16(&out).unwrap(), &exact, BF16, "silu_mul");
        }
    });
}

#[test]
fn rows_of_the_table_are_looked_up_exactly() {
    on_every_device(|gpu| {
        for width in [8, 192, 1024] {
            let table = random(20 * width, 4);
            let ids = [19, 0, 7, 7];
            let (from, named) = (upload_bf16(gpu, &table), gpu.buffer_of(&ids).unwrap());
            let x = gpu.alloc(4 * ids.len() * width).unwrap();
            embedding(gpu, from.view(), named.view(), x.view(), (ids.len(), width)).unwrap();
            let exact: Vec<f64> =
                ids.iter().flat_map(|id| table[*id as usize * width..][..width].to_vec()).collect();
            assert_eq!(read_f32(&x).unwrap(), exact);
        }
    });
}

#[test]
fn biases_are_added_to_every_row() {
    on_every_device(|gpu| {
        let (x, bias) = (random(3 * 300, 5), random(300, 6));
        let (to, from) = (upload_f32(gpu, &x), upload_f32(gpu, &bias));
        add_bias(gpu, to.view(), from.view(), 3, 300).unwrap();
        let exact: Vec<f64> = x.iter().enumerate().map(|(i, x)| x + bias[i % 300]).collect();
        assert_close(&read_f32(&to).unwrap(), &exact, 1e-7, "add_bias");
    });
}

#[test]
fn casts_round_to_nearest_even_as_half_does() {
    on_every_device(|gpu| {
        let values: Vec<f32> = (0..5000).map(|i| (i as f32 - 2500.0) * 1.000_37 / 64.0).collect();
        let halves: Vec<f16> = values.iter().map(|value| f16::from_f32(*value)).collect();
        let expected = |wide: &dyn Fn(usize) -> f32| {
            (0..values.len()).map(|i| half::bf16::from_f32(wide(i))).collect::<Vec<_>>()
        };
        let to = gpu.alloc(2 * values.len()).unwrap();
        cast_f32(gpu, gpu.buffer_of(&values).unwrap().view(), to.view(), values.len()).unwrap();
        assert_eq!(to.to_vec::<half::bf16>().unwrap(), expected(&|i| values[i]));
        cast_f16(gpu, gpu.buffer_of(&halves).unwrap().view(), to.view(), values.len()).unwrap();
        assert_eq!(to.to_vec::<half::bf16>().unwrap(), expected(&|i| halves[i].to_f32()));
    });
}
