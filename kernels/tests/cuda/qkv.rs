use half::bf16;
use kernels::cpu::Output;
use kernels::cpu::qkv::Qkv;
use kernels::cuda::qkv::SplitQkv;
use kernels::cuda::{Gpu, PoolView};
use kernels::{BatchMeta, KvPool};

use crate::support::*;

/// Relative errors of queries and of the pool against the CPU's kernel in f32, for rows with a slot; the last row is
/// padding.
fn errors(
    gpu: &Gpu,
    dim: usize,
    heads: usize,
    kv_heads: usize,
    with_norms: bool,
    with_bias: bool,
) -> (f64, f64) {
    let layout = layout(kv_heads, dim, 4);
    let (all, rows) = (heads + 2 * kv_heads, 6);
    let mut meta = BatchMeta::default();
    meta.push(&[3, 1], 2, rows - 1, 4);
    let plain = random(rows * all * dim, 1);
    let bias = if with_bias { random(all * dim, 2) } else { vec![0.0; all * dim] };
    let (q_norm, k_norm) = (random(dim, 3), random(dim, 4));
    let angles = random(16 * dim / 2, 5);
    let (cos, sin): (Vec<f64>, Vec<f64>) = angles.iter().map(|angle| (angle.cos(), angle.sin())).unzip();

    let cpu_pool = KvPool::new(layout, 5).unwrap();
    let norms = (f32s(&q_norm), f32s(&k_norm));
    let (cpu_cos, cpu_sin) = (f32s(&cos), f32s(&sin));
    let qkv = Qkv {
        pool: &cpu_pool,
        layer: 2,
        meta: &meta,
        heads,
        norms: with_norms.then_some((&norms.0[..], &norms.1[..])),
        eps: 1e-6,
        cos: &cpu_cos,
        sin: &cpu_sin,
    };
    let biased: Vec<f64> = plain.iter().enumerate().map(|(i, x)| x + bias[i % (all * dim)]).collect();
    let mut exact = vec![0f32; (rows - 1) * heads * dim];
    let input = &f32s(&biased)[..(rows - 1) * all * dim];
    // SAFETY: the pool is this test's.
    unsafe { qkv.run(0, input, Output::F32(&mut exact)) };

    let (pool, q) =
        (gpu.zeroed(5 * layout.block_bytes()).unwrap(), gpu.zeroed(2 * rows * heads * dim).unwrap());
    let slots: Vec<i64> = meta.slot_mapping.iter().map(|slot| *slot as i64).chain([-1]).collect();
    let positions: Vec<i32> = meta.positions.iter().map(|position| *position as i32).chain([0]).collect();
    let buffers = [&q_norm, &k_norm, &cos, &sin, &bias].map(|values| upload_f32(gpu, values));
    let [q_norm, k_norm, cos, sin, bias] = &buffers;
    let from = upload_bf16(gpu, &plain);
    let (positions, slots) = (gpu.buffer_of(&positions).unwrap(), gpu.buffer_of(&slots).unwrap());
    let split = SplitQkv {
        qkv: from.view(),
        bias: with_bias.then_some(bias.view()),
        norms: with_norms.then_some((q_norm.view(), k_norm.view())),
        eps: 1e-6,
        cos: cos.view(),
        sin: sin.view(),
        positions: positions.view(),
        slots: slots.view(),
        q: q.view(),
        rows,
        heads,
    };
    split.run(gpu, &PoolView { view: pool.view(), layout }, 2).unwrap();
    let wide = |bytes: Vec<u8>| -> Vec<f64> {
        bytes.as_chunks::<2>().0.iter().map(|pair| bf16::from_le_bytes(*pair).to_f64()).collect()
    };
    let cpu: Vec<f64> = (0..5).flat_map(|block| wide(cpu_pool.read_block(block))).collect();
    let queries = &read_bf16(&q).unwrap()[..exact.len()];
    let exact: Vec<f64> = exact.iter().map(|value| f64::from(*value)).collect();
    (relative_error(queries, &exact), relative_error(&read_bf16(&pool).unwrap(), &cpu))
}

#[test]
fn queries_keys_and_values_are_those_of_the_cpu_kernel() {
    on_every_device(|gpu| {
        for (dim, heads, kv_heads) in [(32, 4, 2), (64, 7, 1), (128, 2, 2), (96, 3, 1)] {
            for (norms, bias) in [(false, false), (true, false), (false, true)] {
                let (queries, pool) = errors(gpu, dim, heads, kv_heads, norms, bias);
                let what = format!("heads of {dim}, norms {norms}, bias {bias}: {queries:.2e} {pool:.2e}");
                assert!(queries <= BF16 && pool <= BF16 / 2.0, "{what}");
            }
        }
    });
}
