//! `bench random-model`: a checkpoint of full size with random weights, for machines without a network.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::ValueEnum;
use models::{ModelConfig, SourceOptions, required_tensors};
use serde_json::{Map, Value, json};

use crate::error::{BenchError, Result};

/// Write a checkpoint with the shape of a known model and random weights (normal, deviation 0.02; norms of 1), to measure
/// with: everything about it is real but the text. Its tokenizer is the demo model's.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The folder to write to; made if it is not there.
    out: PathBuf,
    /// Whose shape.
    #[arg(long, value_enum, default_value_t = Preset::Qwen3_0_6b)]
    shape: Preset,
    /// Decides the weights.
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Preset {
    /// 0.6 billion parameters, 1.2 GB.
    #[value(name = "qwen3-0.6b")]
    Qwen3_0_6b,
    /// 1 million parameters with the same head size: for trying this out.
    #[value(name = "small")]
    Small,
}

impl Preset {
    fn config(self) -> Value {
        let (hidden, layers, heads, kv_heads, mlp, vocab) = match self {
            Preset::Qwen3_0_6b => (1024, 28, 16, 8, 3072, 151_936),
            Preset::Small => (128, 2, 4, 2, 256, 4352),
        };
        json!({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": false,
            "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
            "num_key_value_heads": kv_heads, "head_dim": 128, "intermediate_size": mlp, "vocab_size": vocab,
            "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_scaling": null, "max_position_embeddings": 40_960,
            "tie_word_embeddings": true, "hidden_act": "silu", "use_sliding_window": false,
            "torch_dtype": "bfloat16",
        })
    }
}

/// What goes with the weights.
const TOKENIZER: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];

/// Deviation of the weights, as Qwen3 is initialised.
const DEVIATION: f64 = 0.02;

/// Writes the folder.
pub fn run(args: &Args) -> Result<()> {
    let demo = models::resolve(models::DEMO, &SourceOptions::from_vars(|name| std::env::var(name).ok()))?;
    let writing = |path: &Path| BenchError::io(format!("writing {}", path.display()));
    std::fs::create_dir_all(&args.out).map_err(writing(&args.out))?;
    for name in TOKENIZER {
        let to = args.out.join(name);
        std::fs::copy(demo.join(name), &to).map_err(writing(&to))?;
    }
    let config = args.shape.config();
    let path = args.out.join("config.json");
    std::fs::write(&path, config.to_string()).map_err(writing(&path))?;
    let path = args.out.join("model.safetensors");
    let config = ModelConfig::from_json(&path, config)?;
    let bytes = write_weights(&path, &config, args.seed).map_err(writing(&path))?;
    println!("{}: {:.2} GB of random weights", args.out.display(), bytes as f64 / 1e9);
    Ok(())
}

fn write_weights(path: &Path, config: &ModelConfig, seed: u64) -> std::io::Result<usize> {
    let tensors = required_tensors(config);
    let (mut header, mut end) = (Map::new(), 0);
    for tensor in &tensors {
        let bytes = 2 * tensor.shape.iter().product::<usize>();
        let offsets = [end, end + bytes];
        header.insert(
            tensor.name.clone(),
            json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}),
        );
        end += bytes;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let mut normal = Normal::new(seed);
    for tensor in &tensors {
        let is_norm = tensor.name.ends_with("norm.weight");
        for _ in 0..tensor.shape.iter().product::<usize>() {
            let bits = if is_norm { bf16_bits(1.0) } else { normal.draw() };
            file.write_all(&bits.to_le_bytes())?;
        }
    }
    file.flush()?;
    Ok(end)
}

/// bf16 values of a normal distribution, drawn from a table: a checkpoint has 600 million of them.
struct Normal {
    table: Vec<u16>,
    state: u64,
}

impl Normal {
    fn new(seed: u64) -> Self {
        let size = 1usize << 16;
        // Quantiles: the table as a whole is normal, whatever is drawn from it evenly is, too.
        let quantile = |i: usize| DEVIATION * inverse_normal((i as f64 + 0.5) / size as f64);
        Self {
            table: (0..size).map(|i| bf16_bits(quantile(i) as f32)).collect(),
            state: seed ^ 0x9e37_79b9_7f4a_7c15,
        }
    }

    fn draw(&mut self) -> u16 {
        // SplitMix64 (Steele et al. 2014).
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        self.table[((z ^ (z >> 31)) >> 48) as usize]
    }
}

/// Rounded to nearest; the values here are finite.
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// The normal distribution's quantile by bisection of its distribution function: 65,536 of them are made, once.
fn inverse_normal(p: f64) -> f64 {
    let (mut low, mut high) = (-6.0, 6.0);
    for _ in 0..60 {
        let middle = (low + high) / 2.0;
        if normal_cdf(middle) < p { low = middle } else { high = middle }
    }
    low
}

/// Abramowitz & Stegun 26.2.17: to 7.5e-8.
fn normal_cdf(x: f64) -> f64 {
    let t = 1.0 / (1.0 + 0.231_641_9 * x.abs());
    let series = t
        * (0.319_381_530
            + t * (-0.356_563_782 + t * (1.781_477_937 + t * (-1.821_255_978 + t * 1.330_274_429))));
    let tail = (-x * x / 2.0).exp() / (2.0 * std::f64::consts::PI).sqrt() * series;
    if x >= 0.0 { 1.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use models::Weights;

    use super::*;

    #[test]
    fn the_checkpoint_loads_and_its_weights_are_normal() {
        let dir = tempfile::tempdir().unwrap();
        run(&Args { out: dir.path().into(), shape: Preset::Small, seed: 1 }).unwrap();
        let config = ModelConfig::load(dir.path()).unwrap();
        let weights = Weights::open(dir.path()).unwrap();
        assert!(weights.check(&config).unwrap().is_empty());
        let values = weights.tensor_f32("model.layers.1.mlp.down_proj.weight").unwrap();
        let mean = values.iter().sum::<f32>() / values.len() as f32;
        let deviation = (values.iter().map(|x| (x - mean).powi(2)).sum::<f32>() / values.len() as f32).sqrt();
        assert!(mean.abs() < 1e-3 && (deviation - 0.02).abs() < 1e-3, "{mean} {deviation}");
        assert!(weights.tensor_f32("model.norm.weight").unwrap().iter().all(|x| *x == 1.0));
    }
}
