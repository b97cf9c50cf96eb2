//! The forward pass against `transformers` and, for shapes of all kinds, against candle-transformers in process.

use std::path::{Path, PathBuf};

use kernels::KvDtype;
use models::qwen::ComputeDtype;
use tests::golden::{Bench, Golden, argmax, max_difference, relative_error};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent").to_path_buf()
}

fn checkpoints() -> [(PathBuf, PathBuf); 3] {
    let fixtures = root().join("tests/fixtures");
    [
        (root().join("models/demo"), fixtures.join("demo_golden.json")),
        (fixtures.join("tiny-random"), fixtures.join("tiny_random_golden.json")),
        (fixtures.join("tiny-random-qwen2"), fixtures.join("tiny_random_qwen2_golden.json")),
    ]
}

fn longest(golden: &Golden) -> usize {
    golden.prompts.iter().map(|prompt| prompt.input_ids.len()).max().expect("goldens have prompts") + 64
}

#[test]
fn f32_logits_are_those_of_transformers_whatever_the_chunks() {
    for (dir, golden) in checkpoints() {
        let golden = Golden::load(&golden).unwrap();
        let bench = Bench::load(&dir, ComputeDtype::F32, KvDtype::F32, longest(&golden)).unwrap();
        for prompt in &golden.prompts {
            for chunk in [prompt.input_ids.len(), 64, 16, 7] {
                let logits = bench.prompt(&prompt.input_ids, chunk).unwrap();
                let difference = max_difference(logits.last().unwrap(), &prompt.last_logits);
                assert!(
                    difference <= 1e-3,
                    "{} {} in chunks of {chunk}: {difference}",
                    dir.display(),
                    prompt.name
                );
                let argmaxes: Vec<u32> = logits.iter().map(|row| argmax(row)).collect();
                assert_eq!(argmaxes, prompt.argmax, "{} {} in chunks of {chunk}", dir.display(), prompt.name);
            }
        }
    }
}

#[test]
fn f32_greedy_tokens_are_those_of_transformers() {
    for (dir, golden) in checkpoints() {
        let golden = Golden::load(&golden).unwrap();
        let bench = Bench::load(&dir, ComputeDtype::F32, KvDtype::F32, longest(&golden)).unwrap();
        for prompt in &golden.prompts {
            let tokens = bench.greedy(&prompt.input_ids, prompt.greedy.len(), golden.tokens).unwrap();
            assert_eq!(tokens, prompt.greedy, "{} {}", dir.display(), prompt.name);
        }
    }
}

#[test]
fn bf16_weights_and_kv_stay_within_a_hundredth() {
    for (dir, golden) in checkpoints() {
        let golden = Golden::load(&golden).unwrap();
        let bench = Bench::load(&dir, ComputeDtype::Stored, KvDtype::Bf16, longest(&golden)).unwrap();
        for prompt in &golden.prompts {
            let logits = bench.prompt(&prompt.input_ids, prompt.input_ids.len()).unwrap();
            let error = relative_error(logits.last().unwrap(), &prompt.last_logits);
            assert!(error <= 1e-2, "{} {}: {error}", dir.display(), prompt.name);
        }
    }
}

/// The checkpoints of the tests are small, so each rounding counts for more than in a model that is worth quantizing.
#[test]
fn int8_weights_stay_near_the_reference() {
    for (dir, golden) in checkpoints() {
        let golden = Golden::load(&golden).unwrap();
        let bench = Bench::load(&dir, ComputeDtype::Int8, KvDtype::Bf16, longest(&golden)).unwrap();
        for prompt in &golden.prompts {
            let logits = bench.prompt(&prompt.input_ids, prompt.input_ids.len()).unwrap();
            let error = relative_error(logits.last().unwrap(), &prompt.last_logits);
            println!("{} {}: relative error of logits {error:.4}", dir.display(), prompt.name);
            assert!(error <= 0.15, "{} {}: {error}", dir.display(), prompt.name);
        }
    }
}
