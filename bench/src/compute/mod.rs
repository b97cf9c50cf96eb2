//! Measurements in this process: kernels beside the machine's roofs, and the engine's steps beside the floors that follow
//! from them.

pub mod engine;
pub mod kernels;
mod roofs;

use std::time::Instant;

use ::kernels::cpu::{Isa, team};
use serde::Serialize;

use crate::error::{BenchError, Result};
use crate::machine::{self, Load, Machine};

/// What both commands compute on.
#[derive(Clone, Debug, clap::Args, Serialize)]
pub struct Cpu {
    /// Compute threads; one per core when not given.
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    threads: Option<usize>,
    /// The CPU's instructions to use: portable, avx2, avx512, avx512-bf16, amx-bf16; the fastest that it has when not given.
    #[arg(long, env = "KVFERRY_CPU_ISA", value_name = "NAME")]
    #[serde(serialize_with = "isa_name")]
    cpu_isa: Option<Isa>,
}

impl Cpu {
    /// Starts the threads. Once in a process.
    fn start(&self) -> Result<Isa> {
        if let Some(isa) = self.cpu_isa {
            if !isa.is_available() {
                let have = Isa::available().map(Isa::as_str).collect::<Vec<_>>().join(", ");
                let name = isa.as_str();
                return Err(BenchError::Usage(format!("--cpu-isa is {name}, but this CPU has only {have}")));
            }
            Isa::choose(isa);
        }
        if let Some(threads) = self.threads {
            team::set_threads(threads);
        }
        Ok(Isa::detect())
    }
}

fn isa_name<S: serde::Serializer>(isa: &Option<Isa>, to: S) -> std::result::Result<S::Ok, S::Error> {
    isa.map(Isa::as_str).serialize(to)
}

fn at_least_one(text: &str) -> std::result::Result<usize, String> {
    text.parse().ok().filter(|&n| n >= 1).ok_or_else(|| "expected a whole number of at least 1".into())
}

/// What a file of results says besides them.
#[derive(Debug, Serialize)]
struct Report<S, R> {
    command: Vec<String>,
    settings: S,
    machine: Machine,
    load_before: Option<Load>,
    load_after: Option<Load>,
    threads: usize,
    isa: &'static str,
    results: R,
}

impl<S: Serialize, R: Serialize> Report<S, R> {
    fn new(settings: S, isa: Isa, load_before: Option<Load>, results: R) -> Self {
        Self {
            command: std::env::args().collect(),
            settings,
            machine: Machine::look(),
            load_before,
            load_after: machine::load(),
            threads: team::threads(),
            isa: isa.as_str(),
            results,
        }
    }
}

/// Runs `measure` on a thread of its own, so that signals still end the program meanwhile.
async fn aside<T: Send + 'static>(measure: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (send, receive) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || drop(send.send(measure())));
    let panicked = |_| BenchError::Usage("the measurement ended in a panic, see above".into());
    receive.await.map_err(panicked)?
}

fn seconds(run: impl FnOnce()) -> f64 {
    let started = Instant::now();
    run();
    started.elapsed().as_secs_f64()
}
