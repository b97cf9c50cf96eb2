//! `bench transfer`: what moving KV between two processes costs, for each transport, direction, shape and size, beside a
//! plain copy in memory and plain TCP of the same run.

mod baseline;
mod case;
mod child;
mod endpoint;
mod pool;
mod probe;
mod protocol;
mod report;
mod svg;
mod trace;

use std::path::PathBuf;

use transfer::Direction;

use crate::error::{BenchError, Result};
use crate::gpu::Device;
use crate::machine::{Machine, load};
use crate::output::{write, write_json};
use case::{Geometry, Shape};
use child::Child;
use protocol::{Answer, Command};
use report::{Baseline, Point, Report};

pub use endpoint::Args as EndpointArgs;
pub use endpoint::run as run_endpoint;

/// Measure transports between two processes of this machine.
///
/// Starts two processes for each transport, lets one write into the other's pool and read from it, and checks that the
/// bytes arrived. Times are from the call that posts a transfer until its caller hears that it settled.
#[derive(Clone, Debug, clap::Args, serde::Serialize)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// Transports to measure; those that cannot be used here are named and left out.
    #[arg(
        long,
        value_name = "NAME,...",
        value_delimiter = ',',
        default_value = "mmap,shm,tcp,ucx:shm,ucx:tcp,socket"
    )]
    pub transport: Vec<String>,
    /// Directions, seen from the process that posts.
    #[arg(long, value_name = "write|read,...", value_delimiter = ',', default_value = "write,read", value_parser = direction)]
    pub direction: Vec<Direction>,
    /// What one descriptor covers: everything (span), a block, a layer of a block, or 32 KiB as in vLLM (32k).
    #[arg(long, value_enum, value_name = "SHAPE,...", value_delimiter = ',', default_values_t = [Shape::Span, Shape::Block, Shape::Layer, Shape::Vllm])]
    pub shape: Vec<Shape>,
    /// Sizes in tokens; rounded up to whole blocks.
    #[arg(long, value_name = "N,...", value_delimiter = ',', default_value = "16,128,1040,8192", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub tokens: Vec<u32>,
    /// How often each is measured, after one time that does not count.
    #[arg(long, value_name = "N", default_value_t = 9, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub repeats: u32,
    /// Layers of the model whose KV is imitated; the default is Qwen3-0.6B.
    #[arg(long, value_name = "N", default_value_t = 28, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub layers: u32,
    /// KV heads of it.
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub kv_heads: u32,
    /// Elements of a head, two bytes each.
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub head_dim: u32,
    /// Tokens of a block.
    #[arg(long, value_name = "N", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_size: u32,
    /// Folder with libnixl_capi.so and its plugins.
    #[arg(long, env = "KVFERRY_NIXL_DIR", value_name = "DIR")]
    pub nixl_dir: Option<PathBuf>,
    /// Where the pools lie: in host memory, or in a GPU's (a build with `--features cuda`).
    #[arg(long, value_name = "cpu|cuda[:N]", default_value = "cpu")]
    pub device: Device,
    /// Where the other process's pool lies, if not there.
    #[arg(long, value_name = "cpu|cuda[:N]")]
    pub peer_device: Option<Device>,
    /// Let CUDA devices be emulated ones, from the library of scripts/cuda-emulator: shows that this works, not how fast.
    #[arg(long, value_name = "FILE", hide = true)]
    pub cuda_emulator: Option<PathBuf>,
    /// Only the self-test that workers run when they are linked.
    #[arg(long)]
    pub probe: bool,
    /// Start two workers instead, hand one prompt over with the first transport, and write what they did to this file, as
    /// a trace for ui.perfetto.dev.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file, conflicts_with_all = ["probe", "json", "svg"])]
    pub trace: Option<PathBuf>,
    /// With --trace: what the workers serve.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    pub model: String,
    /// With --trace: a further argument for them, such as --serve-arg=--threads=1; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    pub serve_arg: Vec<String>,
    /// Write everything that was measured to this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    pub json: Option<PathBuf>,
    /// Draw GB/s over size into this file.
    #[arg(long, value_name = "FILE", value_parser = crate::output::file)]
    pub svg: Option<PathBuf>,
}

const AFTER_HELP: &str = "\
`of memcpy` is the share of a copy of the same size within one process, by one thread, or with --device cuda within \
the GPU, by a kernel; `of TCP` the share of the best of \
several plain TCP streams over loopback between host memory of both processes. Both are measured in the same run, in the \
same processes.

Examples:
  bench transfer --transport shm,tcp --tokens 1040
  bench transfer --transport cuda_ipc,tcp --device cuda:0 --tokens 1040
  bench transfer --transport cuda_ipc --device cuda:0 --peer-device cuda:1 --probe
  bench transfer --transport shm --tokens 1024 --trace handoff.json
  bench transfer --json transfer.json --svg transfer.svg";

fn direction(text: &str) -> std::result::Result<Direction, String> {
    match text {
        "write" => Ok(Direction::Write),
        "read" => Ok(Direction::Read),
        _ => Err("expected write or read".into()),
    }
}

/// Measures, prints and writes what was asked for.
pub async fn run(args: Args) -> Result<()> {
    let transports = usable(&args)?;
    if let Some(path) = &args.trace {
        return trace::run(&args, path).await;
    }
    if args.probe {
        return probe::run(&args, &transports).await;
    }
    let load_before = load();
    let mut report = Report::new(&args, Machine::look(), load_before);
    for name in &transports {
        measure(&args, name, &mut report).await?;
    }
    report.load_after = load();
    println!("\n{report}");
    write_json(args.json.as_deref(), &report)?;
    if let Some(path) = &args.svg {
        write(path, &svg::draw(&report))?;
    }
    Ok(())
}

/// The asked transports that this machine has; an error names those that there are when a name is unknown, or when none
/// is left.
fn usable(args: &Args) -> Result<Vec<String>> {
    let mut usable = Vec::new();
    let mut reasons = Vec::new();
    for name in &args.transport {
        let config = transfer::TransportConfig {
            name: name.clone(),
            nixl_dir: args.nixl_dir.clone(),
            ..Default::default()
        };
        transfer::registry::check_name(&config).map_err(|error| BenchError::Usage(error.to_string()))?;
        let known = transfer::registry::usable(&config);
        match known.into_iter().find(|(known, _)| known == name).and_then(|(_, why)| why) {
            Some(why) => reasons.push(format!("{name} cannot be used here: {why}")),
            None => usable.push(name.clone()),
        }
    }
    reasons.iter().for_each(|reason| eprintln!("{reason}"));
    if usable.is_empty() { Err(BenchError::Usage(reasons.join("; "))) } else { Ok(usable) }
}

/// Two processes that know each other.
async fn pair(args: &Args, transport: &str) -> Result<(Child, Child)> {
    let mut caller = Child::start(args, transport, 1).await?;
    let mut peer = Child::start(args, transport, 2).await?;
    caller.add(&mut peer).await?;
    Ok((caller, peer))
}

async fn measure(args: &Args, transport: &str, report: &mut Report) -> Result<()> {
    eprintln!("measuring {transport} ...");
    let (mut caller, mut peer) = pair(args, transport).await?;
    let geometry = Geometry::of(args);
    for &tokens in &args.tokens {
        let blocks = geometry.blocks(tokens);
        let bytes = u64::from(blocks) * geometry.block_bytes();
        let baseline = baseline(args.repeats, bytes, &mut caller, &mut peer).await?;
        for &shape in &args.shape {
            for &direction in &args.direction {
                let command = Command::Move { direction, shape, blocks, repeats: args.repeats };
                let Answer::Moved { seconds, post_seconds, descriptors, lane } = caller.ask(&command).await?
                else {
                    return Err(caller.nonsense("Move"));
                };
                verify(direction, shape, blocks, &mut caller, &mut peer).await?;
                report.points.push(Point {
                    transport: transport.to_owned(),
                    direction,
                    shape,
                    tokens,
                    bytes,
                    descriptors,
                    seconds,
                    post_seconds,
                    lane,
                    baseline: baseline.clone(),
                });
            }
        }
    }
    caller.stop().await?;
    peer.stop().await
}

async fn baseline(repeats: u32, bytes: u64, caller: &mut Child, peer: &mut Child) -> Result<Baseline> {
    let Answer::Copied { seconds: memcpy } = caller.ask(&Command::Memcpy { bytes, repeats }).await? else {
        return Err(caller.nonsense("Memcpy"));
    };
    let mut tcp = Vec::new();
    for variant in baseline::VARIANTS {
        let Answer::Listening { port } = peer.ask(&Command::TcpListen { bytes, repeats }).await? else {
            return Err(peer.nonsense("TcpListen"));
        };
        let command = Command::TcpSend { port, bytes, repeats, variant };
        let Answer::Copied { seconds } = caller.ask(&command).await? else {
            return Err(caller.nonsense("TcpSend"));
        };
        tcp.push((variant, seconds));
    }
    Ok(Baseline { memcpy, tcp })
}

/// That the bytes are where they belong, and restores what was there.
async fn verify(
    direction: Direction,
    shape: Shape,
    blocks: u32,
    caller: &mut Child,
    peer: &mut Child,
) -> Result<()> {
    let (reader, source, swapped) = match direction {
        Direction::Write => (peer, 1, false),
        Direction::Read => (caller, 2, true),
    };
    match reader.ask(&Command::Verify { shape, blocks, source, swapped }).await? {
        Answer::Verified { wrong: 0 } => Ok(()),
        Answer::Verified { wrong } => Err(BenchError::Checks(vec![format!(
            "{wrong} descriptors of {} {shape:?} {} did not bring what was sent",
            blocks,
            direction.as_str()
        )])),
        _ => Err(reader.nonsense("Verify")),
    }
}
