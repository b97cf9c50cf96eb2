//! The command line of `serve`, as written by the user. [`crate::config::Config`] is its checked form.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::parser::ValueSource;
use clap::{Arg, CommandFactory, FromArgMatches, Parser, ValueEnum};
use kernels::cpu::Isa;

use transfer::faulty::Faults;

use crate::frontend::args::{FrontendArgs, ROUTER};
use crate::size::ByteSize;
use crate::worker::presence::PresenceArgs;

const MODEL: &str = "Model";
const HTTP: &str = "HTTP server";
const ENGINE: &str = "Engine";
const KV_CACHE: &str = "KV cache";
const DISAGG: &str = "Prefill/decode";
const DIAGNOSTICS: &str = "Diagnostics";

/// Serve Qwen3 over OpenAI's HTTP API, in one process or with prefill and decode in separate workers.
///
/// One process:   serve --model Qwen/Qwen3-0.6B
/// Two workers:   serve --role prefill --port 8001 --model M
///                serve --role decode  --port 8000 --model M --prefill http://127.0.0.1:8001
/// Many workers:  serve --role frontend --port 8000 --model M --worker-urls http://a:8001 http://b:8001
#[derive(Clone, Debug, Parser)]
#[command(name = "serve", version, verbatim_doc_comment)]
pub struct Args {
    /// What this process does: prompts and answers (both), prompts only, answers, or sending requests to workers (frontend).
    #[arg(long, value_enum, default_value_t = Role::Both, help_heading = DISAGG)]
    pub role: Role,
    /// A prefill worker's address, such as http://127.0.0.1:8001; repeat it for several. With --role decode, which
    /// computes prompts itself when there is none, or --role frontend.
    #[arg(long, value_name = "URL", help_heading = DISAGG)]
    pub prefill: Vec<String>,
    /// How KV moves between workers: tcp, shm, cuda_ipc or rdma (NIXL over UCX), the same after `ucx:` (UCX without
    /// NIXL), mmap (pools mapped, on one machine) or socket (plain TCP), which need no library, or auto: NIXL where its
    /// library is found, else mmap or socket.
    #[arg(long, env = "KV_TRANSPORT", value_name = "NAME", default_value = "auto", help_heading = DISAGG)]
    pub kv_transport: String,
    /// (Decode) refuse a prefill worker when KV does not go over the lane that --kv-transport promises.
    #[arg(long, help_heading = DISAGG)]
    pub kv_transport_strict: bool,
    /// Folder with libnixl_capi.so and its plugins.
    #[arg(long, env = "KVFERRY_NIXL_DIR", value_name = "DIR", help_heading = DISAGG)]
    pub nixl_dir: Option<PathBuf>,
    /// When a prefill worker or a transfer fails: compute the prompt here, or fail the request.
    #[arg(long, value_enum, default_value_t = KvFailure::Recompute, help_heading = DISAGG)]
    pub kv_failure: KvFailure,
    /// (Decode) who moves KV: the prefill worker writes it (push), this one reads it (pull), or what is faster.
    #[arg(long, value_enum, default_value_t = KvDirection::Auto, help_heading = DISAGG)]
    pub kv_direction: KvDirection,
    /// (Prefill) layers whose KV is written together while the next ones compute, or `chunk`: all, after each chunk.
    #[arg(long, value_name = "N|chunk", default_value = "4", value_parser = push_layers, help_heading = DISAGG)]
    pub kv_push_layers: PushLayers,
    /// (Prefill) keep a prompt's KV this long for a decode worker that does not renew its lease.
    #[arg(long, value_name = "SECS", default_value_t = 30.0, value_parser = positive_secs, help_heading = DISAGG)]
    pub kv_lease_secs: f64,
    /// A worker at the other end of a link that says nothing for this long is given up.
    #[arg(long, value_name = "SECS", default_value_t = 5.0, value_parser = positive_secs, help_heading = DISAGG)]
    pub kv_link_timeout_secs: f64,
    /// (Decode) have a checksum sent with each block, and compute a prompt here when one is wrong.
    #[arg(long, help_heading = DISAGG)]
    pub kv_checksum: bool,
    /// (Prefill) host name or address that others are told in kv_transfer_params; the one listened on when not given.
    #[arg(long, value_name = "HOST", help_heading = DISAGG)]
    pub kv_advertise_host: Option<String>,

    /// A folder with config.json and weights, a Hugging Face id such as Qwen/Qwen3-0.6B, or `demo`, the tiny
    /// model that comes with the source. A frontend needs only its tokenizer, and does without when none is named.
    #[arg(long, value_name = "PATH|ID|demo", help_heading = MODEL)]
    pub model: Option<String>,
    /// The name clients use in `model`; --model's value when not given.
    #[arg(long, value_name = "NAME", help_heading = MODEL)]
    pub served_model_name: Option<String>,
    /// Precision of the weights; `auto` is what the checkpoint has (bf16, f16 or f32).
    #[arg(long, value_enum, default_value_t = DType::Auto, help_heading = MODEL)]
    pub dtype: DType,
    /// `int8` keeps the layers' matrices as bytes with a scale for each output: half the memory and faster, at a relative
    /// error of some percent of the logits. The embedding and the head stay as they are.
    #[arg(long, value_enum, default_value_t = Quantization::None, help_heading = MODEL)]
    pub quantization: Quantization,
    /// Longest prompt and answer together, in tokens; the model's own limit when not given.
    #[arg(long, value_name = "TOKENS", value_parser = at_least_one, help_heading = MODEL)]
    pub max_model_len: Option<usize>,
    /// Where the model runs.
    #[arg(long, value_name = "cpu|cuda[:N]|auto|sim", default_value = "cpu", help_heading = MODEL)]
    pub device: DeviceKind,
    /// With --device cuda: run its kernels on the CPU, from the library of scripts/cuda-emulator (for tests).
    #[arg(long, value_name = "FILE", hide = true, help_heading = MODEL)]
    pub cuda_emulator: Option<PathBuf>,
    /// With --device cuda: launch decoding steps kernel by kernel instead of as CUDA graphs: slower, for finding faults.
    #[arg(long, help_heading = MODEL)]
    pub enforce_eager: bool,
    /// With --device sim: a GPU to imitate (h200, h100, a100, l40s, l4), or a file written by `bench profile`.
    #[arg(long, value_name = "NAME|FILE", default_value = "h100", help_heading = MODEL)]
    pub sim_profile: String,
    /// With --device sim: how many times faster than the profile to run.
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = above_zero, help_heading = MODEL)]
    pub sim_speed: f64,
    /// Compute threads; one per core (of --cpu-affinity) when not given.
    #[arg(long, value_name = "N", value_parser = threads, help_heading = MODEL)]
    pub threads: Option<usize>,
    /// Cores that compute, such as 0,2-3; all that the process may use when not given.
    #[arg(long, value_name = "CORES", value_parser = cpu_list, help_heading = MODEL)]
    pub cpu_affinity: Option<CpuList>,

    /// How much compute threads give way to other processes (0 to 19, as nice(1)). When not given 10 for --role decode, else
    /// 0: where both roles share cores, prompts that wait for their first token go before further tokens of others. Linux
    /// weighs only what was started from the same terminal (session) against each other.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u8).range(0..=19), help_heading = MODEL)]
    pub cpu_nice: Option<u8>,

    /// The CPU's instructions to compute with: portable, avx2, avx512, avx512-bf16 or amx-bf16; the fastest that it has when
    /// not given.
    #[arg(long, env = "KVFERRY_CPU_ISA", value_name = "NAME", value_parser = cpu_isa, help_heading = DIAGNOSTICS)]
    pub cpu_isa: Option<Isa>,

    /// Address or host name to listen on.
    #[arg(long, default_value = "127.0.0.1", help_heading = HTTP)]
    pub host: String,
    /// Port to listen on; 0 takes any free one.
    #[arg(long, default_value_t = 8000, help_heading = HTTP)]
    pub port: u16,
    /// Write the port that was really taken to this file.
    #[arg(long, value_name = "PATH", help_heading = HTTP)]
    pub port_file: Option<PathBuf>,
    /// A request ends with an error after this long; its own `timeout_secs` may be shorter.
    #[arg(long, value_name = "SECS", default_value_t = 600.0, value_parser = positive_secs, help_heading = HTTP)]
    pub request_timeout_secs: f64,
    /// After SIGTERM running requests may go on this long; then they end with an error.
    #[arg(long, value_name = "SECS", default_value_t = 30.0, value_parser = secs, help_heading = HTTP)]
    pub shutdown_grace_secs: f64,

    /// Tokens computed in one step, over all requests: longer prompts are computed in chunks, and a chunk's KV moves
    /// while the next one computes.
    #[arg(long, value_name = "TOKENS", default_value_t = 512, value_parser = at_least_one, help_heading = ENGINE)]
    pub max_num_batched_tokens: usize,
    /// Requests that run at the same time.
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = at_least_one, help_heading = ENGINE)]
    pub max_num_seqs: usize,
    /// Requests that may wait; further ones get 429.
    #[arg(long, value_name = "N", default_value_t = 1024, value_parser = at_least_one, help_heading = ENGINE)]
    pub max_num_queued_reqs: usize,

    /// Precision of the KV cache; `auto` is bf16, or f32 with --dtype f32.
    #[arg(long, value_enum, default_value_t = DType::Auto, help_heading = KV_CACHE)]
    pub kv_cache_dtype: DType,
    /// Tokens in a KV block.
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = at_least_one, help_heading = KV_CACHE)]
    pub block_size: usize,
    /// Size of the KV cache in blocks.
    #[arg(long, value_name = "N", value_parser = at_least_one, help_heading = KV_CACHE)]
    #[arg(conflicts_with = "kv_cache_memory_bytes")]
    pub num_kv_blocks: Option<usize>,
    /// Share of the device's memory (here: of the machine's) that the whole process may fill; the KV cache gets what the
    /// weights leave of it.
    #[arg(long, value_name = "FRACTION", value_parser = fraction, help_heading = KV_CACHE)]
    #[arg(conflicts_with_all = ["kv_cache_memory_bytes", "num_kv_blocks"])]
    pub gpu_memory_utilization: Option<f64>,
    /// Size of the KV cache in bytes (also 512MiB, 1GiB); when no size is given, 1GiB, or what 0.9 of a GPU leaves.
    #[arg(long, value_name = "SIZE", help_heading = KV_CACHE)]
    pub kv_cache_memory_bytes: Option<ByteSize>,

    #[command(flatten)]
    pub frontend: FrontendArgs,
    #[command(flatten)]
    pub presence: PresenceArgs,

    /// What to log, to stderr: a level, or filters such as info,engine=debug.
    #[arg(long, env = "KVFERRY_LOG", value_name = "FILTER", default_value = "info", help_heading = DIAGNOSTICS)]
    pub log_level: String,
    /// Faults that tests need: delay-ms=N (each transfer), lose-note=N and mix-up=N (every Nth notification, transfer).
    #[arg(long, value_name = "FAULTS", hide = true, help_heading = DIAGNOSTICS)]
    pub kv_faults: Option<Faults>,
    /// Pretend that KV has another layout, for tests.
    #[arg(long, value_name = "VERSION", hide = true, help_heading = DIAGNOSTICS)]
    pub kv_layout_version: Option<u32>,
    /// Recount every KV block after each step; slow, for tests.
    #[arg(long, help_heading = DIAGNOSTICS)]
    pub check_invariants: bool,
}

impl Args {
    /// The arguments, and those flags among them that do nothing in their role. Errors: clap's, for `exit`.
    pub fn read<I>(argv: I) -> Result<(Self, Vec<String>), clap::Error>
    where
        I: IntoIterator,
        I::Item: Into<OsString> + Clone,
    {
        // A negative number is a value that is refused with what was expected, not a flag that nobody knows.
        let command = Self::command().mut_args(|arg| match arg.get_action().takes_values() {
            true => arg.allow_negative_numbers(true),
            false => arg,
        });
        let matches = command.clone().try_get_matches_from(argv)?;
        let args = Self::from_arg_matches(&matches)?;
        let given =
            |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
        let idle = command.get_arguments().filter(given).filter(|arg| !args.role.heeds(arg));
        let idle = idle.filter_map(|arg| Some(format!("--{}", arg.get_long()?))).collect();
        Ok((args, idle))
    }
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Role {
    /// Prompts and answers in one process.
    Both,
    /// Computes prompts and sends their KV to decode workers.
    Prefill,
    /// Answers requests; gets prompt KV from prefill workers.
    Decode,
    /// Sends requests to workers; has no weights.
    Frontend,
}

/// What to do when KV does not arrive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvFailure {
    /// Compute the prompt on this worker.
    Recompute,
    /// End the request with an error.
    Fail,
}

/// Who moves KV between two workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvDirection {
    /// The prefill worker writes.
    Push,
    /// The decode worker reads.
    Pull,
    /// What was measured to be faster when the two were linked.
    Auto,
}

/// Layers that are written together; `None`: all, after each chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PushLayers(pub Option<usize>);

fn push_layers(text: &str) -> Result<PushLayers, String> {
    let layers = text.parse().ok().filter(|&n: &usize| n >= 1);
    match (text, layers) {
        ("chunk", _) => Ok(PushLayers(None)),
        (_, Some(layers)) => Ok(PushLayers(Some(layers))),
        _ => Err("expected a whole number of at least 1, or chunk".into()),
    }
}

/// How the weights of the layers' matrices are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Quantization {
    None,
    Int8,
}

/// A floating-point precision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DType {
    /// As stored (weights), or bf16 unless the weights were asked for in f32 (KV cache).
    Auto,
    Bf16,
    F32,
}

/// Where tensors live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    Cpu,
    /// The CUDA device with this number.
    Cuda(usize),
    /// The first CUDA device where there is one, else the CPU.
    Auto,
    /// Everything real but the model: KV bytes are made up, moved and checked, steps take as long as a profile says.
    Sim,
}

impl std::str::FromStr for DeviceKind {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let number = |text: &str| text.strip_prefix("cuda:").and_then(|number| number.parse().ok());
        match text {
            "cpu" => Ok(Self::Cpu),
            "cuda" => Ok(Self::Cuda(0)),
            "auto" => Ok(Self::Auto),
            "sim" => Ok(Self::Sim),
            _ => number(text).map(Self::Cuda).ok_or("expected cpu, cuda, cuda:N, auto or sim"),
        }
    }
}

impl Role {
    /// The word on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::Both => "both",
            Role::Prefill => "prefill",
            Role::Decode => "decode",
            Role::Frontend => "frontend",
        }
    }

    /// Whether the flag does anything in this role.
    fn heeds(self, flag: &Arg) -> bool {
        let (heading, name) = (flag.get_help_heading().unwrap_or_default(), flag.get_id().as_str());
        match self {
            Role::Frontend if [MODEL, DISAGG].contains(&heading) => {
                ["model", "served_model_name", "role", "prefill"].contains(&name)
            }
            Role::Frontend => ![ENGINE, KV_CACHE].contains(&heading),
            Role::Both | Role::Prefill | Role::Decode => heading != ROUTER,
        }
    }

    /// Whether clients' completions are answered here.
    pub fn serves_completions(self) -> bool {
        self != Role::Prefill
    }
}

fn fraction(text: &str) -> Result<f64, String> {
    let valid = |share: &f64| *share > 0.0 && *share <= 1.0;
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number above 0, at most 1".into())
}

fn above_zero(text: &str) -> Result<f64, String> {
    let valid = |factor: &f64| *factor > 0.0 && factor.is_finite();
    text.parse().ok().filter(valid).ok_or_else(|| "expected a number above 0".into())
}

/// Numbers of cores, ascending, none twice, at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuList(pub Vec<usize>);

/// The kernel's own notation: numbers and ranges, between commas.
fn cpu_list(text: &str) -> Result<CpuList, String> {
    /// The kernel's masks end here.
    const MAX: usize = 1023;
    let number = |text: &str| text.trim().parse::<usize>().ok().filter(|&cpu| cpu <= MAX);
    let range = |part: &str| {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        number(first).zip(number(last)).filter(|(first, last)| first <= last)
    };
    let ranges: Option<Vec<(usize, usize)>> = text.split(',').map(range).collect();
    let ranges = ranges.ok_or_else(|| format!("expected numbers up to {MAX} and ranges, such as 0,2-3"))?;
    let cpus: std::collections::BTreeSet<usize> =
        ranges.into_iter().flat_map(|(first, last)| first..=last).collect();
    Ok(CpuList(cpus.into_iter().collect()))
}

fn cpu_isa(text: &str) -> Result<Isa, String> {
    let isa: Isa = text.parse()?;
    match isa.is_available() {
        true => Ok(isa),
        false => {
            let have: Vec<&str> = Isa::available().map(Isa::as_str).collect();
            Err(format!("this CPU has only {}", have.join(", ")))
        }
    }
}

fn threads(text: &str) -> Result<usize, String> {
    /// More than any machine has cores; far below what a system lets a process start.
    const MAX: usize = 1024;
    let valid = |threads: &usize| (1..=MAX).contains(threads);
    text.parse().ok().filter(valid).ok_or_else(|| format!("expected a whole number from 1 to {MAX}"))
}

fn at_least_one(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|&n| n >= 1).ok_or_else(|| "expected a whole number of at least 1".into())
}

fn secs(text: &str) -> Result<f64, String> {
    // A year: far above any sensible limit, far below where Duration and Instant overflow.
    const MAX: f64 = 366.0 * 86_400.0;
    let valid = |&secs: &f64| (0.0..=MAX).contains(&secs);
    text.parse().ok().filter(valid).ok_or_else(|| format!("expected a number of seconds in [0, {MAX}]"))
}

pub(crate) fn positive_secs(text: &str) -> Result<f64, String> {
    secs(text).ok().filter(|&secs| secs > 0.0).ok_or_else(|| "expected a number of seconds above 0".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_option_has_help_and_a_heading() {
        for arg in Args::command().get_arguments() {
            assert!(arg.get_help().is_some(), "--{} has no help", arg.get_id());
            assert!(arg.get_help_heading().is_some(), "--{} has no heading", arg.get_id());
        }
    }

    #[test]
    fn flags_without_meaning_in_a_role_were_taken_in_silence() {
        let idle = |flags: &str| {
            Args::read(["serve"].into_iter().chain(flags.split(' '))).expect("valid flags").1.join(" ")
        };
        assert_eq!(
            idle("--role frontend --model M --port 0 --prefill http://a:1 --router-mode kv --namespace n"),
            ""
        );
        assert_eq!(
            idle("--role frontend --dtype f32 --block-size 16 --kv-checksum"),
            "--kv-checksum --dtype --block-size"
        );
        assert_eq!(idle("--role decode --model M --dtype f32 --prefill http://a:1 --namespace n"), "");
        assert_eq!(idle("--model M --router-mode kv"), "--router-mode");
    }

    #[test]
    fn cores_are_numbers_and_ranges() {
        let cpus = |text| cpu_list(text).map(|cpus| cpus.0);
        assert_eq!(cpus("0"), Ok(vec![0]));
        assert_eq!(cpus("7, 0,2-4,3"), Ok(vec![0, 2, 3, 4, 7]));
        assert!(cpus("0-").is_err() && cpus("1024").is_err() && cpus("a").is_err());
    }

    #[test]
    fn bad_values_are_named_with_what_was_expected() {
        let cases: &[(&[&str], &[&str])] = &[
            (&["--port", "99999"], &["99999", "--port"]),
            (&["--block-size", "0"], &["'0'", "--block-size", "at least 1"]),
            (&["--role", "wizard"], &["wizard", "--role", "prefill"]),
            (&["--kv-cache-memory-bytes", "lots"], &["lots", "--kv-cache-memory-bytes", "512MiB"]),
            (&["--threads", "20000"], &["'20000'", "--threads", "1 to 1024"]),
            (&["--cpu-affinity", "3-1"], &["3-1", "--cpu-affinity", "0,2-3"]),
            (&["--kv-push-layers", "0"], &["'0'", "--kv-push-layers", "chunk"]),
            (&["--kv-direction", "up"], &["up", "--kv-direction", "pull"]),
            (&["--kv-lease-secs", "0"], &["'0'", "--kv-lease-secs", "above 0"]),
            (&["--cpu-isa", "mmx"], &["mmx", "--cpu-isa", "portable"]),
            (&["--quantization", "int4"], &["int4", "--quantization", "int8"]),
            (&["--cpu-affinity", ""], &["--cpu-affinity", "0,2-3"]),
            (&["--request-timeout-secs", "-1"], &["'-1'", "--request-timeout-secs", "above 0"]),
            (&["--request-timeout-secs", "0"], &["'0'", "--request-timeout-secs", "above 0"]),
            (
                &["--num-kv-blocks", "5", "--kv-cache-memory-bytes", "1GiB"],
                &["--num-kv-blocks", "cannot be used"],
            ),
        ];
        for (flags, expected) in cases {
            let argv = ["serve", "--model", "demo"].iter().chain(flags.iter());
            let message = Args::read(argv).unwrap_err().to_string();
            for part in *expected {
                assert!(message.contains(part), "{flags:?}: {part:?} is not in {message}");
            }
        }
    }
}
