//! A deployment of one or two workers.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::client::Client;
use crate::process::{Launch, Worker};
use crate::serve_binary::repository;

/// Set to 1 where NIXL cannot be had: tests of its transports then pass without having tested anything, and say so.
const ALLOW_NO_NIXL: &str = "KVFERRY_ALLOW_NO_NIXL";

/// What to start. The defaults suit exact comparisons: everything in f32, one compute thread for each worker, a pool
/// of 256 blocks, and all blocks recounted after every step.
#[derive(Clone, Debug)]
pub struct Deployment {
    both: Vec<String>,
    prefill: Vec<String>,
    decode: Vec<String>,
    transport: Option<String>,
    cores: Vec<usize>,
    away: Option<PathBuf>,
    env: Vec<(String, String)>,
}

impl Deployment {
    /// One process.
    pub fn both() -> Self {
        let common = ["--model", "demo", "--threads", "1", "--check-invariants", "--port", "0"];
        let both = common.map(str::to_owned).to_vec();
        let (prefill, decode) = (vec![], vec![]);
        let deployment =
            Self { both, prefill, decode, transport: None, cores: vec![], away: None, env: vec![] };
        deployment.flags("--dtype f32 --kv-cache-dtype f32 --num-kv-blocks 256")
    }

    /// A prefill and a decode worker, with KV between them over `transport`. It is pushed: by itself the decode worker
    /// takes the direction that was faster when the link came up, which is chance here, and what a lost worker leaves
    /// behind is not the same (a prefill worker keeps what may still be read for its lease).
    pub fn split(transport: &str) -> Self {
        Self { transport: Some(transport.to_owned()), ..Self::both() }.decode_flags("--kv-direction push")
    }

    /// Flags for all workers, separated by spaces; each replaces an earlier one of its name.
    pub fn flags(mut self, flags: &str) -> Self {
        merge(&mut self.both, flags);
        self
    }

    /// Further flags for the prefill worker.
    pub fn prefill_flags(mut self, flags: &str) -> Self {
        merge(&mut self.prefill, flags);
        self
    }

    /// Further flags for the decode worker.
    pub fn decode_flags(mut self, flags: &str) -> Self {
        merge(&mut self.decode, flags);
        self
    }

    /// All processes share these cores.
    pub fn on_cores(mut self, cores: &[usize]) -> Self {
        self.cores = cores.to_vec();
        self
    }

    /// Processes run from a copy of the binary in `home`; see [`Launch::away`].
    pub fn away(mut self, home: &Path) -> Self {
        self.away = Some(home.to_owned());
        self
    }

    /// A variable in the environment of every worker.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Starts the workers and waits until they can serve as they should.
    pub async fn start(&self) -> Cluster {
        let cluster = self.start_unready().await;
        cluster.front().health_is("ready").await;
        cluster
    }

    /// Starts the workers and waits until they listen.
    pub async fn start_unready(&self) -> Cluster {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        if self.transport.is_none() {
            let front = Worker::start(dir.path(), self.launch("both", "--role both", &[])).await;
            return Cluster { front, prefill: None, dir };
        }
        let prefill = self.start_prefill(dir.path()).await;
        let front = self.start_decode(dir.path(), &format!("--prefill {}", prefill.client().url())).await;
        Cluster { front, prefill: Some(prefill), dir }
    }

    /// Starts a prefill worker alone and waits until it is ready.
    pub async fn start_prefill(&self, dir: &Path) -> Worker {
        let prefill = Worker::start(dir, self.launch("prefill", "--role prefill", &self.prefill)).await;
        prefill.health_is("ready").await;
        prefill
    }

    /// Starts a decode worker alone, with further flags, and waits until it listens.
    pub async fn start_decode(&self, dir: &Path, flags: &str) -> Worker {
        Worker::start(dir, self.launch("decode", &format!("--role decode {flags}"), &self.decode)).await
    }

    /// How one of the processes is started.
    pub fn launch(&self, name: &str, flags: &str, more: &[String]) -> Launch {
        let mut args = self.both.clone();
        merge(&mut args, flags);
        if let Some(transport) = &self.transport {
            merge(&mut args, &format!("--kv-transport {transport}"));
        }
        merge(&mut args, &more.join(" "));
        Launch {
            name: name.to_owned(),
            args,
            cores: self.cores.clone(),
            away: self.away.clone(),
            env: self.env.clone(),
        }
    }
}

/// Adds flags with their values; one that is there already gets the new value.
fn merge(args: &mut Vec<String>, flags: &str) {
    let mut words = flags.split_whitespace().peekable();
    while let Some(flag) = words.next() {
        let value = words.next_if(|word| !word.starts_with("--"));
        match args.iter().position(|arg| arg == flag) {
            Some(at) => args[at + 1] = value.expect("a flag given twice has a value").to_owned(),
            None => args.extend([Some(flag), value].into_iter().flatten().map(str::to_owned)),
        }
    }
}

/// Running workers; killed when dropped.
#[derive(Debug)]
pub struct Cluster {
    front: Worker,
    prefill: Option<Worker>,
    dir: TempDir,
}

impl Cluster {
    /// The worker that answers clients.
    pub fn front(&self) -> &Worker {
        &self.front
    }

    pub fn front_mut(&mut self) -> &mut Worker {
        &mut self.front
    }

    /// # Panics
    /// In a deployment of one process.
    pub fn prefill(&self) -> &Worker {
        self.prefill.as_ref().expect("this deployment is split")
    }

    /// # Panics
    /// In a deployment of one process.
    pub fn prefill_mut(&mut self) -> &mut Worker {
        self.prefill.as_mut().expect("this deployment is split")
    }

    /// A client of the worker that answers.
    pub fn client(&self) -> Client {
        self.front.client()
    }

    /// Where its processes have their files.
    pub fn dir(&self) -> &Path {
        self.dir.path()
    }

    /// Waits until no worker has a request or holds a block for one.
    pub async fn settled(&self) {
        self.client().settled().await;
        if let Some(prefill) = &self.prefill {
            prefill.client().settled().await;
        }
    }
}

/// True if a transport can be tested here. Without NIXL, `tcp` and `shm` cannot: a failure, unless it is allowed.
///
/// # Panics
/// When NIXL is missing and nobody said that this is fine.
pub fn can_test(transport: &str) -> bool {
    let installed =
        repository().join(".nixl/version").is_file() || std::env::var_os("KVFERRY_NIXL_DIR").is_some();
    if ["socket", "mmap"].contains(&transport) || installed {
        return true;
    }
    let allowed = std::env::var(ALLOW_NO_NIXL).is_ok_and(|value| value == "1");
    assert!(
        allowed,
        "NIXL is not installed: run scripts/nixl-setup, or set {ALLOW_NO_NIXL}=1 to go without it"
    );
    eprintln!("NOT TESTED: {transport}, since NIXL is not installed and {ALLOW_NO_NIXL}=1");
    false
}
