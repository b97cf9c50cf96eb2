use kernels::cuda::Gpu;
use kernels::cuda::sample::{Sample, SampleParams};

use crate::support::*;

const GREEDY: SampleParams =
    SampleParams { uniform: 0.0, temperature: 0.0, floor: -40.0, top_p: 1.0, top_k: 0 };

pub fn sample(gpu: &Gpu, logits: &[f32], valid: &[u8], params: &[SampleParams]) -> Vec<i32> {
    let rows = params.len();
    let buffers =
        (gpu.buffer_of(logits).unwrap(), gpu.buffer_of(valid).unwrap(), gpu.buffer_of(params).unwrap());
    let (scratch, ids) = (gpu.alloc(8 * rows).unwrap(), gpu.alloc(4 * rows).unwrap());
    let sample = Sample {
        logits: buffers.0.view(),
        valid: buffers.1.view(),
        params: buffers.2.view(),
        scratch: scratch.view(),
        ids: ids.view(),
        rows,
        vocabulary: valid.len(),
    };
    sample.run(gpu).unwrap();
    ids.to_vec().unwrap()
}

/// The same by sorting, in f64; ids in order within what is kept.
fn expected(logits: &[f32], valid: &[u8], params: &SampleParams) -> i32 {
    let mut kept: Vec<(f32, usize)> = (0..logits.len())
        .filter(|id| valid[*id] != 0 && !logits[*id].is_nan() && logits[*id] > f32::NEG_INFINITY)
        .map(|id| (logits[id], id))
        .collect();
    kept.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let Some(&(top, best)) = kept.first() else { return -1 };
    if params.temperature == 0.0 || params.top_k == 1 {
        return best as i32;
    }
    let weight = |logit: f32| f64::from((logit - top) / params.temperature).exp();
    kept.retain(|(logit, _)| (logit - top) / params.temperature >= params.floor);
    if params.top_k > 0 {
        kept.truncate(params.top_k as usize);
    }
    if params.top_p < 1.0 {
        let target = f64::from(params.top_p) * kept.iter().map(|(logit, _)| weight(*logit)).sum::<f64>();
        let mut sum = 0.0;
        let count = kept.iter().position(|(logit, _)| {
            sum += weight(*logit);
            sum >= target
        });
        kept.truncate(count.map_or(kept.len(), |count| count + 1));
    }
    kept.sort_by_key(|(_, id)| *id);
    let mut left = params.uniform * kept.iter().map(|(logit, _)| weight(*logit)).sum::<f64>();
    for (logit, id) in &kept {
        left -= weight(*logit);
        if left < 0.0 {
            return *id as i32;
        }
    }
    kept.last().map_or(best, |(_, id)| *id) as i32
}

#[test]
fn the_likeliest_valid_token_is_the_first_of_equals() {
    on_every_device(|gpu| {
        let size = 3000;
        let mut logits = f32s(&random(3 * size, 1));
        let mut valid = vec![1u8; size];
        (logits[700], logits[2100], logits[50]) = (5.0, 5.0, f32::NAN);
        logits[size + 9] = 90.0;
        valid[9] = 0;
        logits[2 * size..].fill(f32::NEG_INFINITY);
        let ids = sample(gpu, &logits, &valid, &[GREEDY; 3]);
        let second = expected(&logits[size..2 * size], &valid, &GREEDY);
        assert_eq!(ids, [700, second, -1]);
    });
}

#[test]
fn draws_keep_what_sorting_keeps() {
    on_every_device(|gpu| {
        let size = 4100;
        let mut valid = vec![1u8; size];
        valid[size - 60..].fill(0);
        let row = f32s(&random(size, 2)).iter().map(|logit| logit * 4.0).collect::<Vec<_>>();
        let mut params = Vec::new();
        for (i, uniform) in [0.0, 0.2, 0.5, 0.77, 0.999_999].into_iter().enumerate() {
            for (temperature, floor, top_p, top_k) in [
                (1.0, -40.0, 1.0, 0),
                (0.7, -40.0, 0.9, 0),
                (1.0, -40.0, 1.0, 20),
                (0.6, -40.0, 0.95, 20 + i as i32),
                (1.3, -2.0, 1.0, 0),
                (1.0, -40.0, 0.5, 5000),
                (2.0, -40.0, 0.01, 1),
            ] {
                params.push(SampleParams { uniform, temperature, floor, top_p, top_k });
            }
        }
        let logits: Vec<f32> = params.iter().flat_map(|_| row.clone()).collect();
        let ids = sample(gpu, &logits, &valid, &params);
        for (params, id) in params.iter().zip(ids) {
            assert_eq!(id, expected(&row, &valid, params), "{params:?}");
        }
    });
}

#[test]
fn equal_logits_at_the_threshold_are_kept_by_id() {
    on_every_device(|gpu| {
        let mut logits = vec![0.0f32; 500];
        (logits[300], logits[20]) = (3.0, 2.0);
        let valid = vec![1u8; 500];
        for uniform in [0.1, 0.6, 0.9, 0.99] {
            for (top_k, top_p) in [(7, 1.0), (0, 0.3), (40, 0.8)] {
                let params = SampleParams { uniform, temperature: 1.0, floor: -40.0, top_p, top_k };
                let id = sample(gpu, &logits, &valid, &[params])[0];
                assert_eq!(id, expected(&logits, &valid, &params), "{params:?}");
            }
        }
    });
}
