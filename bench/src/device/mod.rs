//! `bench device`: how near the forward pass comes to what the device can do, without a server around it.

mod floor;
mod roof;
mod steps;

use std::fmt;
use std::path::PathBuf;

use serde::Serialize;

use self::floor::ModelCost;
use self::roof::Roof;
use self::steps::Steps;
use crate::error::Result;
use crate::gpu::Device;
use crate::machine::Machine;
use crate::output::write_json;
use crate::table::Table;

/// Measure decode steps beside the memory floor and prompts beside the compute roof, both measured on the same device.
///
/// The model runs in this process: `--device cuda` needs a build with `--features cuda`. Tokens are made up, KV is real.
/// The floor of a decode step is the time in which a copy on this device moves the weights and the cached KV once; the roof
/// of a prompt is the rate of a large bf16 product.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Args {
    /// What to load: a folder, or `demo`. `bench random-model` makes one of full size.
    #[arg(long, value_name = "PATH|demo", default_value = "demo")]
    model: String,
    /// What computes: cpu, cuda or cuda:N.
    #[arg(long, value_name = "cpu|cuda[:N]", default_value = "cuda")]
    device: Device,
    /// Run CUDA kernels on the CPU, from the library of scripts/cuda-emulator: shows that this works, not how fast.
    #[arg(long, value_name = "FILE", hide = true)]
    cuda_emulator: Option<PathBuf>,
    /// Lengths of prompts, each computed in one step.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1500,3000", value_parser = positive)]
    prompt_tokens: Vec<usize>,
    /// Sequences that decode together.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "1,8,32", value_parser = positive)]
    batch: Vec<usize>,
    /// Tokens of each of these sequences, in the middle of what is measured.
    #[arg(long, value_name = "N", default_value_t = 512, value_parser = positive)]
    context: usize,
    /// Decode steps in each repeat.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = positive)]
    steps: usize,
    /// How often everything is measured; the median counts.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = positive)]
    repeats: usize,
    /// Write everything to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    json: Option<PathBuf>,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Report {
    command: Vec<String>,
    machine: Machine,
    device: String,
    roof: Roof,
    decode: Vec<DecodeRow>,
    prefill: Vec<PrefillRow>,
    settings: Args,
}

#[derive(Debug, Serialize)]
struct DecodeRow {
    batch: usize,
    context: usize,
    ms: f64,
    tokens_per_second: f64,
    floor_ms: f64,
    /// 1 is as fast as memory.
    of_floor: f64,
}

#[derive(Debug, Serialize)]
struct PrefillRow {
    tokens: usize,
    ms: f64,
    tflops: f64,
    /// 1 is as fast as a large product; none where no roof was measured.
    of_roof: Option<f64>,
}

fn positive(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|&number| number > 0).ok_or("expected a whole number of at least 1".into())
}

/// Measures and prints.
pub fn run(args: Args) -> Result<()> {
    let gpu = args.device.open(args.cuda_emulator.as_deref())?;
    let longest = args.prompt_tokens.iter().copied().max().unwrap_or(1);
    let deepest = args.context + args.steps + steps::WARMUP;
    let largest = args.batch.iter().copied().max().unwrap_or(1);
    let size = steps::Size { rows: longest, sequences: largest, context: deepest.max(longest) };
    let mut steps = Steps::load(&args.model, gpu.as_ref(), size)?;
    let cost = ModelCost::of(&steps.config);
    let roof = Roof::measure(gpu.as_ref())?;
    let mut report = Report {
        command: std::env::args().collect(),
        machine: Machine::look(),
        device: gpu.as_ref().map_or("cpu".into(), |gpu| {
            let info = gpu.info();
            format!("{} (sm_{}{}, {})", info.name, info.capability.0, info.capability.1, info.driver)
        }),
        roof,
        decode: Vec::new(),
        prefill: Vec::new(),
        settings: args.clone(),
    };
    for &batch in &args.batch {
        let ms = steps.decode(batch, args.context, args.steps, args.repeats)?;
        let floor_ms = cost.decode_bytes(batch, args.context) / (report.roof.copy_gb_per_s * 1e6);
        let tokens_per_second = batch as f64 / ms * 1e3;
        let (context, of_floor) = (args.context, floor_ms / ms);
        report.decode.push(DecodeRow { batch, context, ms, tokens_per_second, floor_ms, of_floor });
    }
    for &tokens in &args.prompt_tokens {
        let ms = steps.prefill(tokens, args.repeats)?;
        let tflops = cost.prefill_flop(tokens) / ms / 1e9;
        let of_roof = report.roof.product_tflops.map(|roof| tflops / roof);
        report.prefill.push(PrefillRow { tokens, ms, tflops, of_roof });
    }
    print!("{report}");
    write_json(args.json.as_deref(), &report)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let roof = match (self.roof.product_tflops, self.roof.product_by) {
            (Some(tflops), Some(by)) => format!("{tflops:.1} TFLOP/s by {by}"),
            _ => "-".into(),
        };
        writeln!(f, "{}: copies {:.0} GB/s, products {roof}\n", self.device, self.roof.copy_gb_per_s)?;
        let mut table =
            Table::new(&["<what", "ms", "tokens/s", "floor ms", "of floor", "TFLOP/s", "of roof"]);
        let percent = |share: f64| format!("{:.0} %", share * 100.0);
        for row in &self.decode {
            table.row([
                format!("decode, batch {} at {} tokens", row.batch, row.context),
                format!("{:.3}", row.ms),
                format!("{:.0}", row.tokens_per_second),
                format!("{:.3}", row.floor_ms),
                percent(row.of_floor),
            ]);
        }
        for row in &self.prefill {
            table.row([
                format!("prompt of {} tokens", row.tokens),
                format!("{:.2}", row.ms),
                format!("{:.0}", row.tokens as f64 / row.ms * 1e3),
                String::new(),
                String::new(),
                format!("{:.1}", row.tflops),
                row.of_roof.map_or("-".into(), percent),
            ]);
        }
        write!(f, "{table}")
    }
}
