use super::*;
use crate::api::SamplingParams;

fn params(temperature: f32, top_k: Option<u32>, top_p: f32) -> SamplingParams {
    SamplingParams { temperature, top_k, top_p, ..Default::default() }
}

fn row(params: SamplingParams, index: u64) -> SampleRow {
    SampleRow { row: 0, params, seed: 7, index, history: vec![], prompt_len: 0, suppressed: vec![] }
}

fn all(size: usize) -> Vocabulary {
    Vocabulary::new(vec![true; size])
}

fn token(vocabulary: &Vocabulary, logits: &[f32], row: &SampleRow) -> TokenId {
    vocabulary.sample(&mut logits.to_vec(), row).unwrap().token
}

fn counts(params: &SamplingParams, logits: &[f32]) -> Vec<usize> {
    let mut counts = vec![0; logits.len()];
    for index in 0..20_000 {
        counts[token(&all(logits.len()), logits, &row(params.clone(), index)) as usize] += 1;
    }
    counts
}

#[test]
fn greedy_takes_the_first_of_equal_maxima_and_never_a_row_without_a_token() {
    let mut valid = vec![true; 5];
    valid[4] = false;
    let vocabulary = Vocabulary::new(valid);
    let logits = [0.0, 3.0, 1.0, 3.0, 99.0];
    for params in [params(0.0, None, 1.0), params(1.0, Some(1), 1.0)] {
        assert_eq!(token(&vocabulary, &logits, &row(params, 0)), 1);
    }
    for index in 0..1000 {
        assert_ne!(token(&vocabulary, &logits, &row(params(2.0, None, 1.0), index)), 4);
    }
}

#[test]
fn frequencies_follow_the_softmax() {
    let logits = [0.0f32, 1.0, 2.0, -1.0];
    let sum: f32 = logits.iter().map(|logit| (logit / 0.8).exp()).sum();
    for (count, logit) in counts(&params(0.8, None, 1.0), &logits).iter().zip(logits) {
        let expected = 20_000.0 * (logit / 0.8).exp() / sum;
        assert!((*count as f32 - expected).abs() < 5.0 * expected.sqrt(), "{count} instead of {expected}");
    }
}

#[test]
fn top_k_top_p_and_min_p_cut_the_tail() {
    // Shares: 0.09, 0.24, 0.64, 0.03.
    let logits = [0.0, 1.0, 2.0, -1.0];
    let min_p = |min_p| SamplingParams { min_p, ..params(1.0, None, 1.0) };
    for (params, kept) in [
        (params(1.0, Some(2), 1.0), [false, true, true, false]),
        (params(1.0, None, 0.5), [false, false, true, false]),
        (params(1.0, None, 0.7), [false, true, true, false]),
        (params(1.0, Some(3), 0.99), [true, true, true, false]),
        (min_p(0.1), [true, true, true, false]),
        (min_p(0.3), [false, true, true, false]),
        (min_p(1.0), [false, false, true, false]),
    ] {
        let drawn: Vec<bool> = counts(&params, &logits).iter().map(|count| *count > 0).collect();
        assert_eq!(drawn, kept, "{params:?}");
    }
}

#[test]
fn a_nucleus_of_a_large_vocabulary_is_what_a_full_sort_gives() {
    let logits: Vec<f32> = (0..5000u32).map(|i| ((i * 7919 % 5003) as f32) / 500.0).collect();
    for top_p in [0.1, 0.5, 0.9, 0.999] {
        let mut sorted: Vec<(f64, u32)> =
            (0..).zip(&logits).map(|(id, l)| (f64::from(*l).exp(), id)).collect();
        sorted.sort_by(|a, b| b.0.total_cmp(&a.0));
        let target = f64::from(top_p) * sorted.iter().map(|(w, _)| w).sum::<f64>();
        let mut sum = 0.0;
        let size = sorted
            .iter()
            .position(|(w, _)| {
                sum += w;
                sum >= target
            })
            .unwrap()
            + 1;
        let nucleus: std::collections::HashSet<u32> = sorted[..size].iter().map(|(_, id)| *id).collect();
        for index in 0..500 {
            let drawn = token(&all(5000), &logits, &row(params(1.0, None, top_p), index));
            assert!(nucleus.contains(&drawn), "top_p {top_p}: {drawn} is not among the {size} likeliest");
        }
    }
}

#[test]
fn a_row_of_nan_is_an_error_not_a_token() {
    let sample = |logits: &[f32], t| all(2).sample(&mut logits.to_vec(), &row(params(t, None, 1.0), 0));
    assert!(sample(&[f32::NAN, f32::NAN], 0.0).is_err());
    assert!(sample(&[f32::NAN, f32::NEG_INFINITY], 1.0).is_err());
    assert_eq!(sample(&[f32::NAN, 0.5], 1.0).unwrap().token, 1);
}

#[test]
fn penalties_are_those_of_vllm() {
    let history = vec![0, 1, 2, 2];
    let penalised = |params: SamplingParams| {
        let row = SampleRow { history: history.clone(), prompt_len: 2, ..row(params, 0) };
        let mut logits = vec![2.0, -2.0, 2.0, 2.0];
        penalties::apply(&mut logits, &row);
        logits
    };
    let base = SamplingParams::default;
    assert_eq!(penalised(base()), [2.0, -2.0, 2.0, 2.0]);
    assert_eq!(penalised(SamplingParams { repetition_penalty: 2.0, ..base() }), [1.0, -4.0, 1.0, 2.0]);
    assert_eq!(penalised(SamplingParams { presence_penalty: 0.5, ..base() }), [2.0, -2.0, 1.5, 2.0]);
    assert_eq!(penalised(SamplingParams { frequency_penalty: 0.5, ..base() }), [2.0, -2.0, 1.0, 2.0]);
}

#[test]
fn bias_and_suppression_change_the_choice_but_not_the_logprobs() {
    let logits = [1.0, 3.0, 2.0];
    let with = |logit_bias, suppressed| SampleRow {
        suppressed,
        ..row(SamplingParams { logit_bias, logprobs: Some(2), ..Default::default() }, 0)
    };
    let plain = all(3).sample(&mut logits.to_vec(), &with(vec![], vec![])).unwrap();
    assert_eq!(plain.token, 1);
    let biased = all(3).sample(&mut logits.to_vec(), &with(vec![(0, 5.0)], vec![])).unwrap();
    assert_eq!(biased.token, 0);
    let suppressed = all(3).sample(&mut logits.to_vec(), &with(vec![], vec![1])).unwrap();
    assert_eq!(suppressed.token, 2);
    let everything = all(3).sample(&mut logits.to_vec(), &with(vec![], vec![0, 1, 2])).unwrap();
    assert_eq!(everything.token, 1, "with nothing else left the end may come early");
    let log_sum = logits.iter().map(|l: &f32| l.exp()).sum::<f32>().ln();
    for (sampled, logit) in [(plain, 3.0), (biased, 1.0), (suppressed, 2.0)] {
        let logprobs = sampled.logprobs.unwrap();
        assert!((logprobs.logprob - (logit - log_sum)).abs() < 1e-5);
        let ids: Vec<_> = logprobs.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 2]);
        assert!((logprobs.top[0].1 - (3.0 - log_sum)).abs() < 1e-5);
    }
}

#[test]
fn the_likeliest_of_any_number_of_logits_is_found_whatever_they_are() {
    let odd = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, 7.5, -3.0];
    for len in [1, 2, 15, 16, 17, 33, 1000] {
        for seed in 0..200 {
            // Few different values, so that the largest comes often and the first of them must be found.
            let value = |i| odd[(uniform(seed, i) * odd.len() as f64) as usize];
            let logits: Vec<f32> = (0..len).map(value).collect();
            let mut expected: Option<usize> = None;
            for (id, logit) in logits.iter().enumerate() {
                if *logit > expected.map_or(f32::NEG_INFINITY, |best| logits[best]) {
                    expected = Some(id);
                }
            }
            let sampled = all(len as usize).sample(&mut logits.clone(), &row(params(0.0, None, 1.0), 0));
            assert_eq!(sampled.ok().map(|sampled| sampled.token as usize), expected, "{logits:?}");
        }
    }
}
