//! The processes that serve together: one that does both, or a prefill and a decode worker.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use clap::ValueEnum;
use serde::{Serialize, Serializer};
use tempfile::TempDir;

use crate::client::Client;
use crate::error::{BenchError, Result};
use crate::process::{Process, serve_binary};
use crate::serve_log;

/// How often running processes are looked at while nothing else is to be done.
const POLL: Duration = Duration::from_millis(50);

/// A process whose connection broke because it died is gone by then.
const DEATH_WITHIN: Duration = Duration::from_millis(500);

/// How KV moves between workers: what `serve --kv-transport` takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Transport {
    /// NIXL with the fastest lane both sides have, else `mmap` or `socket`.
    Auto,
    /// NIXL over TCP.
    Tcp,
    /// NIXL over CUDA IPC.
    #[value(name = "cuda_ipc")]
    CudaIpc,
    /// NIXL over shared memory.
    Shm,
    /// NIXL over InfiniBand or RoCE.
    Rdma,
    /// UCX without NIXL, with the lanes that fit.
    Ucx,
    /// UCX without NIXL, over TCP.
    #[value(name = "ucx:tcp")]
    UcxTcp,
    /// UCX without NIXL, over shared memory.
    #[value(name = "ucx:shm")]
    UcxShm,
    /// UCX without NIXL, over CUDA IPC.
    #[value(name = "ucx:cuda_ipc")]
    UcxCudaIpc,
    /// UCX without NIXL, over InfiniBand or RoCE.
    #[value(name = "ucx:rdma")]
    UcxRdma,
    /// The peer's pool mapped, no library needed.
    Mmap,
    /// Plain TCP, no library needed.
    Socket,
}

/// What to start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    /// One process.
    Both,
    /// Prefill and decode in processes of their own.
    Disaggregated(Transport),
}

impl fmt::Display for Transport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let value = self.to_possible_value().expect("none is skipped. This is a bug.");
        f.write_str(value.get_name())
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Shape::Both => f.write_str("both"),
            Shape::Disaggregated(transport) => write!(f, "disagg-{transport}"),
        }
    }
}

impl Serialize for Shape {
    fn serialize<S: Serializer>(&self, serializer: S) -> std::result::Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// Starts deployments that are alike but for their shape.
pub struct Launcher {
    serve: PathBuf,
    /// Arguments of every process.
    args: Vec<String>,
    /// Further ones of decode workers.
    decode_args: Vec<String>,
    logs: TempDir,
    started: usize,
}

impl Launcher {
    /// `extra` goes to every process as it is.
    pub fn new(model: &str, extra: &[String]) -> Result<Self> {
        let logs = tempfile::Builder::new().prefix("kvferry-bench-").tempdir();
        let logs = logs.map_err(BenchError::io("a temporary folder for the logs"))?;
        let args = [vec!["--model".to_owned(), model.to_owned()], extra.to_vec()].concat();
        Ok(Self { serve: serve_binary()?, args, decode_args: Vec::new(), logs, started: 0 })
    }

    /// `extra` goes to decode workers too.
    pub fn with_decode_args(self, extra: &[String]) -> Self {
        Self { decode_args: extra.to_vec(), ..self }
    }

    /// Starts the processes of `shape` and waits until all are ready.
    pub async fn start(&mut self, shape: Shape) -> Result<Deployment> {
        self.started += 1;
        let dir = self.logs.path().join(format!("{:03}-{shape}", self.started));
        std::fs::create_dir(&dir).map_err(BenchError::io(format!("{}", dir.display())))?;
        let spawn = |name, args: Vec<String>| {
            let (serve, dir, args) = (&self.serve, &dir, [args, self.args.clone()].concat());
            async move { Process::start(serve, dir, name, &args).await }
        };
        let words = |words: &[&str]| words.iter().map(|&word| word.to_owned()).collect::<Vec<_>>();
        let (front, prefill) = match shape {
            Shape::Both => (spawn("both", words(&["--role", "both"])).await?, None),
            Shape::Disaggregated(transport) => {
                let transport = transport.to_string();
                let transport = ["--kv-transport", transport.as_str()];
                let args = words(&[&["--role", "prefill"], &transport[..]].concat());
                let prefill = spawn("prefill", args).await?;
                let peer = ["--role", "decode", "--prefill", prefill.url()];
                let args = [words(&[&peer, &transport[..]].concat()), self.decode_args.clone()].concat();
                let decode = spawn("decode", args).await?;
                (decode, Some(prefill))
            }
        };
        let client = Client::new(front.url());
        let mut deployment = Deployment { client, front, prefill };
        deployment.ready().await?;
        Ok(deployment)
    }
}

/// Running processes that are ready. Dropping it ends them.
pub struct Deployment {
    /// Talks to the process that answers completions.
    pub client: Client,
    front: Process,
    prefill: Option<Process>,
}

impl Deployment {
    async fn ready(&mut self) -> Result<()> {
        if let Some(prefill) = &mut self.prefill {
            let client = Client::new(prefill.url());
            prefill.ready(&client).await?;
        }
        self.front.ready(&self.client).await
    }

    /// The log of the process that answers completions.
    pub fn log(&self) -> String {
        self.front.log()
    }

    /// The prefill worker's log; `None` for one process.
    pub fn prefill_log(&self) -> Option<String> {
        self.prefill.as_ref().map(Process::log)
    }

    /// The transport that was really opened; `None` for one process.
    pub fn transport(&self) -> Option<String> {
        self.prefill.as_ref().and_then(|_| serve_log::transport(&self.log()))
    }

    /// What became of `result`: if a process has died that is the reason, whatever the request that was under way says.
    pub async fn blame<T>(&mut self, result: Result<T>) -> Result<T> {
        if result.is_err() {
            // A connection ends a moment before its process does.
            let death = self.outlive();
            tokio::time::timeout(DEATH_WITHIN, death).await.unwrap_or(Ok(()))?;
        }
        result
    }

    /// Waits for one of the processes to end, which is an error.
    pub async fn outlive(&mut self) -> Result<()> {
        loop {
            self.processes().try_for_each(Process::check_alive)?;
            tokio::time::sleep(POLL).await;
        }
    }

    /// Ends the decode worker first, so that the prefill worker has nobody left to serve.
    pub async fn stop(self) -> Result<()> {
        self.front.stop().await?;
        match self.prefill {
            Some(prefill) => prefill.stop().await,
            None => Ok(()),
        }
    }

    fn processes(&mut self) -> impl Iterator<Item = &mut Process> {
        self.prefill.iter_mut().chain([&mut self.front])
    }
}
