//! CUDA workers on the emulated device: the forward pass with its graphs, and whole deployments.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kernels::cuda::Gpu;
use kernels::cuda::emulator::Build;
use kernels::{BatchMeta, KvDtype, KvPool};
use models::gpu::{GpuLimits, GpuModel};
use models::model::{Batch, Draw, Model, Row};
use models::qwen::ComputeDtype;
use models::{ModelConfig, Weights};
use tests::golden::{BLOCK_SIZE, Bench, Golden, layout, relative_error};
use tests::process::Worker;
use tests::{Answer, Ask, Deployment};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("tests/ has a parent").to_path_buf()
}

fn emulator() -> PathBuf {
    let sources = root().join("kernels/cu");
    let cache = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let build = Build { sources: &sources, cache, address_sanitizer: false, mutation: None, files: &[] };
    build.library().expect("g++ compiles the kernels")
}

fn gpu() -> Gpu {
    Gpu::emulated(&emulator(), 7).expect("the emulator loads")
}

#[test]
fn logits_are_those_of_transformers_within_the_rounding_of_bf16() {
    let fixtures = root().join("tests/fixtures");
    for (dir, golden) in [
        (root().join("models/demo"), "demo_golden.json"),
        (fixtures.join("tiny-random"), "tiny_random_golden.json"),
        (fixtures.join("tiny-random-qwen2"), "tiny_random_qwen2_golden.json"),
    ] {
        let golden = Golden::load(&fixtures.join(golden)).unwrap();
        let mut prompts: Vec<_> = golden.prompts.iter().filter(|p| p.input_ids.len() <= 100).collect();
        prompts.sort_by_key(|prompt| prompt.input_ids.len());
        let bench = Bench::load_on(&gpu(), &dir, 256).unwrap();
        for (index, prompt) in prompts.into_iter().enumerate() {
            // One chunk of many rows, chunks of few rows, and single rows: each takes other kernels. Single ones take long.
            let chunks = [prompt.input_ids.len(), 20, 1];
            for &chunk in if index == 0 { &chunks[..] } else { &chunks[..2] } {
                let logits = bench.prompt(&prompt.input_ids, chunk).unwrap();
                let error = relative_error(logits.last().unwrap(), &prompt.last_logits);
                let what = format!("{} {} in chunks of {chunk}", dir.display(), prompt.name);
                assert!(error <= 2e-2, "{what}: {error}");
            }
        }
    }
}

/// A model on the emulated device.
fn load(gpu: &Gpu, dir: &Path, limits: GpuLimits) -> GpuModel {
    let (config, weights) = (ModelConfig::load(dir).unwrap(), Weights::open(dir).unwrap());
    let valid = vec![true; config.vocab_size];
    GpuModel::load(gpu, &config, &weights, ComputeDtype::Stored, limits, &valid).unwrap()
}

/// Sequences of a model on the emulated device, decoded together.
struct Together {
    dir: PathBuf,
    model: GpuModel,
    pool: Arc<KvPool>,
    sequences: Vec<Vec<u32>>,
}

/// Blocks of each sequence.
const BLOCKS: u32 = 12;

/// Few and short sequences.
const LIMITS: GpuLimits = GpuLimits { max_len: 256, max_rows: 64, max_seqs: 4, eager: false };

impl Together {
    fn new(dir: &str, prompts: &[Vec<u32>]) -> Self {
        let (gpu, dir) = (gpu(), root().join(dir));
        let config = ModelConfig::load(&dir).unwrap();
        let blocks = BLOCKS as usize * prompts.len();
        let pool = Arc::new(KvPool::new_on(&gpu, layout(&config, KvDtype::Bf16), blocks, 0).unwrap());
        Self { model: load(&gpu, &dir, LIMITS), dir, pool, sequences: prompts.to_vec() }
    }

    /// What is new of these sequences, `new` tokens each.
    fn batch(&self, which: &[usize], new: impl Fn(usize) -> usize) -> Batch {
        let mut meta = BatchMeta::default();
        let (mut tokens, mut logits_rows) = (Vec::new(), Vec::new());
        for &index in which {
            let (sequence, new) = (&self.sequences[index], new(index));
            // Blocks of the sequences lie between one another.
            let table: Vec<u32> =
                (0..BLOCKS).map(|block| block * self.sequences.len() as u32 + index as u32).collect();
            meta.push(&table, sequence.len() - new, new, BLOCK_SIZE);
            tokens.extend_from_slice(&sequence[sequence.len() - new..]);
            logits_rows.push(tokens.len() as u32 - 1);
        }
        Batch { tokens, meta: Arc::new(meta), logits_rows }
    }

    /// Computes what is new of these sequences, `new` tokens each, and appends a greedy token to each of them.
    fn step(&mut self, which: &[usize], new: impl Fn(usize) -> usize) {
        let batch = self.batch(which, new);
        let greedy = Draw { uniform: 0.5, temperature: 0.0, min_p: 0.0, top_p: 1.0, top_k: None };
        let answer =
            self.model.step(&batch, &vec![Some(greedy); which.len()], &self.pool, &mut |_| ()).unwrap();
        for (&index, row) in which.iter().zip(&answer.rows) {
            let Row::Token(Some(token)) = row else { panic!("{row:?} of sequence {index}") };
            self.sequences[index].push(*token);
        }
    }
}

#[test]
fn decoding_in_captured_steps_gives_the_tokens_of_single_ones() {
    let golden = Golden::load(&root().join("tests/fixtures/demo_golden.json")).unwrap();
    let mut prompts: Vec<Vec<u32>> = golden.prompts.iter().map(|prompt| prompt.input_ids.clone()).collect();
    prompts.retain(|prompt| prompt.len() <= 100);
    prompts.truncate(3);
    assert_eq!(prompts.len(), 3, "three short prompts are needed");
    let lengths: Vec<usize> = prompts.iter().map(Vec::len).collect();
    let mut alone = Together::new("models/demo", &prompts);
    for index in 0..3 {
        alone.step(&[index], |index| lengths[index]);
        (1..10).for_each(|_| alone.step(&[index], |_| 1));
    }
    let mut together = Together::new("models/demo", &prompts);
    together.step(&[0, 1, 2], |index| lengths[index]);
    // The class of four rows is computed, captured and replayed, while sequences leave and come back.
    for which in [&[0, 1, 2][..], &[0, 1, 2], &[2, 0, 1], &[0, 1, 2], &[0, 1], &[2, 0, 1], &[0, 1, 2]] {
        together.step(which, |_| 1);
    }
    for (together, alone) in together.sequences.iter().zip(&alone.sequences) {
        assert_eq!(together[..], alone[..together.len()]);
    }
}

impl Together {
    /// A decoding step of these sequences, with all its logits. A model that was just loaded has no graphs: it must compute the
    /// same, to the last bit.
    fn decode_as_without_graphs(&mut self, which: &[usize]) {
        let batch = self.batch(which, |_| 1);
        let logits = |model: &mut GpuModel| {
            model.step(&batch, &vec![None; which.len()], &self.pool, &mut |_| ()).unwrap().logits
        };
        let plain = logits(&mut load(&gpu(), &self.dir, LIMITS));
        assert!(plain.iter().all(|logit| logit.is_finite()), "{which:?}");
        assert_eq!(logits(&mut self.model), plain, "{which:?}");
        for (&index, logits) in which.iter().zip(plain.chunks(plain.len() / which.len())) {
            let best = (0..logits.len()).max_by(|a, b| logits[*a].total_cmp(&logits[*b]));
            self.sequences[index].push(best.expect("a vocabulary") as u32);
        }
    }
}

/// A graph holds addresses of the workspace and of the inputs, which grow with contexts and batches: graphs must go with what
/// they name, be captured again where they are used again, and never without need.
#[test]
fn graphs_survive_growth_of_contexts_and_batches() {
    let prompt = |len: u32, of: u32| (0..len).map(|i| (i * 37 + of * 101) % 470).collect::<Vec<u32>>();
    let prompts: Vec<_> =
        [20, 30, 25, 35, 40, 130, 135, 140].into_iter().zip(1..).map(|(len, of)| prompt(len, of)).collect();
    let mut together = Together::new("tests/fixtures/tiny-random", &prompts);
    for (index, prompt) in prompts.iter().enumerate() {
        together.step(&[index], |_| prompt.len());
    }
    // The model whose graphs are tested has room for four rows and four splits.
    together.model =
        load(&gpu(), &together.dir, GpuLimits { max_len: 192, max_rows: 4, max_seqs: 4, eager: false });
    // A class runs plainly at first, then it is captured, then replayed.
    let mut decode = |which: &[usize], times: usize| {
        let before = together.model.captures();
        (0..times).for_each(|_| together.decode_as_without_graphs(which));
        together.model.captures() - before
    };
    assert_eq!(decode(&[0], 3), 1, "a row of a short context");
    assert_eq!(decode(&[0, 1], 3), 1, "two of them: another class");
    assert_eq!(decode(&[0], 2), 0, "back to one: nothing grew");
    assert_eq!(decode(&[5], 3), 1, "a longer context, for which there is room: another class");
    assert_eq!(decode(&[0], 1), 0, "back to the short one: nothing grew");
    assert_eq!(decode(&[5, 6, 7, 0], 3), 1, "seven splits: scratch grows");
    assert_eq!(decode(&[0], 3), 1, "the graphs of the old scratch are gone");
    assert_eq!(decode(&[0, 1], 3), 1, "all of them");
    assert_eq!(decode(&[0, 1, 2, 3, 4], 3), 1, "five rows: activations grow");
    assert_eq!(decode(&[0], 3), 1, "graphs are gone again");
    assert_eq!(decode(&[5, 6, 7, 0], 3), 1, "all of them");
    assert_eq!(
        decode(&[5, 6, 7, 0, 1], 3),
        1,
        "five rows of longer contexts: block tables, so the inputs, grow"
    );
    assert_eq!(decode(&[0], 3), 1, "graphs are gone again");
    for which in [&[5, 6, 7, 0, 1][..], &[0], &[7, 1, 6, 0, 5], &[1]] {
        assert_eq!(decode(which, 1), 0, "{which:?}: there is room, and the class was captured");
    }
}

fn cuda(deployment: Deployment) -> Deployment {
    let flags =
        "--device cuda --dtype bf16 --kv-cache-dtype bf16 --num-kv-blocks 64 --max-num-batched-tokens 64";
    deployment.flags(&format!("{flags} --max-num-seqs 4 --cuda-emulator {}", emulator().display()))
}

fn asks() -> Vec<Ask> {
    let question = || Ask::chat("What is a ticket?").max_tokens(10);
    vec![
        question(),
        // The device samples these, and the sampler on the host those.
        question().with("temperature", 0.7).with("seed", 3).with("top_p", 0.9).with("top_k", 20),
        question().with("logprobs", true).with("presence_penalty", 0.1),
    ]
}

async fn answers(deployment: Deployment) -> Vec<Answer> {
    let cluster = deployment.start().await;
    let mut answers = Vec::new();
    for ask in asks() {
        answers.push(cluster.client().answer(&ask).await);
    }
    cluster.settled().await;
    answers
}

#[tokio::test]
async fn a_deployment_on_cuda_answers_as_one_on_the_cpu() {
    let texts = |answers: Vec<Answer>| answers.into_iter().map(|answer| answer.text).collect::<Vec<_>>();
    let cpu = texts(answers(Deployment::both()).await);
    assert_eq!(texts(answers(cuda(Deployment::both())).await), cpu);
    assert_eq!(texts(answers(cuda(Deployment::split("socket"))).await), cpu);
}

#[tokio::test]
async fn a_device_that_is_not_there_is_named_and_auto_computes_on_the_cpu() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let launch =
        |device: &str| Deployment::both().launch("both", &format!("--role both --device {device}"), &[]);
    let (status, log) = Worker::run_to_end(dir.path(), launch("cuda:99")).await;
    assert!(!status.success() && log.contains("--device cuda:99 cannot be used"), "{log}");
    let whys = ["--features cuda", "libcuda was not found", "cuda:99 does not exist"];
    assert!(whys.iter().any(|why| log.contains(why)), "{log}");
    let (status, log) = Worker::run_to_end(dir.path(), launch("gpu")).await;
    assert!(!status.success() && log.contains("expected cpu, cuda, cuda:N, auto or sim"), "{log}");
    let worker = Worker::start(dir.path(), launch("auto --dtype auto --kv-cache-dtype auto")).await;
    worker.health_is("ready").await;
}

#[tokio::test]
async fn what_cuda_does_not_compute_in_is_refused_by_flag() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for (flags, words) in [
        ("--dtype f32", "--dtype f32 is not supported on cuda, expected bf16"),
        ("--quantization int8", "--quantization int8 is not supported on cuda, expected none"),
        ("--kv-cache-dtype f32", "--kv-cache-dtype f32 is not supported on cuda"),
        ("--num-kv-blocks 100000", "no memory for 100000 KV blocks"),
    ] {
        let launch = cuda(Deployment::both()).launch("both", &format!("--role both {flags}"), &[]);
        let (status, log) = Worker::run_to_end(dir.path(), launch).await;
        assert!(!status.success() && log.contains(words), "{words:?} is not in {log}");
    }
}

#[tokio::test]
async fn a_gpu_that_broke_ends_its_worker_instead_of_failing_every_request() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    // Enough for some requests: a step of the demo model launches some dozens of kernels.
    let deployment = cuda(Deployment::both()).env("KVFERRY_EMULATOR_FAULT", "launches=1000");
    let mut worker = Worker::start(dir.path(), deployment.launch("both", "--role both", &[])).await;
    worker.health_is("ready").await;
    let ask = Ask::chat("What is a ticket?").max_tokens(10);
    worker.client().answer(&ask).await;
    let mut failures = Vec::new();
    for _ in 0..100 {
        if let Err(failure) = worker.client().ask(&ask).await {
            failures.push(failure);
            break;
        }
    }
    let first = format!("{failures:?}");
    assert!(first.contains("500") && first.contains("CUDA_ERROR_ILLEGAL_ADDRESS"), "{first}");
    assert!(!worker.exited().await.success());
    let log = worker.log();
    for words in ["the device computes no more", "the engine's thread has ended"] {
        assert!(log.contains(words), "{words:?} is not in {log}");
    }
}

#[tokio::test]
async fn a_driver_that_captures_no_graph_costs_speed_not_answers() {
    let ask = Ask::chat("What is a ticket?").max_tokens(10);
    let refusing = cuda(Deployment::both()).env("KVFERRY_EMULATOR_FAULT", "capture").start().await;
    let text = refusing.client().answer(&ask).await.text;
    assert!(refusing.front().log().contains("is not captured as a graph"), "{}", refusing.front().log());
    let eager = cuda(Deployment::both()).flags("--enforce-eager").env("KVFERRY_EMULATOR_FAULT", "capture");
    let eager = eager.start().await;
    assert_eq!(eager.client().answer(&ask).await.text, text);
    assert!(!eager.front().log().contains("captured"), "{}", eager.front().log());
}

#[tokio::test]
async fn without_a_size_the_kv_cache_fits_the_gpu() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    for role in ["both", "prefill"] {
        let mut launch = cuda(Deployment::both()).launch(role, &format!("--role {role}"), &[]);
        let blocks = launch.args.iter().position(|arg| arg == "--num-kv-blocks").expect("tests have it");
        launch.args.drain(blocks..blocks + 2);
        Worker::start(dir.path(), launch).await.health_is("ready").await;
    }
}

/// Emulated devices have a GiB each, and a block of the demo model 24 KiB.
#[tokio::test]
async fn workers_on_one_gpu_take_their_share_of_it_and_others_are_named() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let emulator = emulator();
    let launch = |name: &str, flags: &str| {
        let flags = format!("--role both --dtype bf16 --kv-cache-dtype bf16 --max-num-seqs 4 {flags}");
        let flags = format!("{flags} --cuda-emulator {}", emulator.display());
        let mut launch = Deployment::both().launch(name, &flags, &[]);
        // A share takes the place of the number of blocks that tests have.
        let blocks = launch.args.iter().position(|arg| arg == "--num-kv-blocks").expect("tests have it");
        launch.args.drain(blocks..blocks + 2);
        launch
    };
    let (first, second) = tokio::join!(
        Worker::start(dir.path(), launch("first", "--device cuda:1 --gpu-memory-utilization 0.25")),
        Worker::start(dir.path(), launch("second", "--device cuda:1 --gpu-memory-utilization 0.125")),
    );
    let mut free = Vec::new();
    for (worker, share) in [(&first, 0.25), (&second, 0.125)] {
        worker.health_is("ready").await;
        assert!(worker.log().contains("device=1"), "{}", worker.log());
        let blocks = worker.client().metrics().await.account().capacity() as f64;
        let bytes = blocks * 24.0 * 1024.0;
        // The rest of the share is weights (6 MB) and activations.
        let of_share = bytes / (share * f64::from(1 << 30));
        assert!((0.8..1.0).contains(&of_share), "{share}: {blocks} blocks are {of_share} of it");
        free.push(blocks);
    }
    assert!(free[0] > free[1]);
    for (flags, words) in [
        ("--device cuda:2", "--device cuda:2 cannot be used: cuda:2 does not exist: 2 CUDA device(s)"),
        ("--device cuda:0 --gpu-memory-utilization 0.001", "--gpu-memory-utilization 0.001 leaves "),
    ] {
        let (status, log) = Worker::run_to_end(dir.path(), launch("refused", flags)).await;
        assert!(!status.success() && log.contains(words), "{words:?} is not in {log}");
    }
}
