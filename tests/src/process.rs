//! One `serve` process.

use std::ffi::OsString;
use std::fs::File;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::client::Client;
use crate::serve_binary;
use crate::wait::until;

/// From start to ready, with a debug build's weights and somebody else's compiler on the machine.
const START: Duration = Duration::from_secs(60);

/// How long a process may take to leave after SIGTERM, with its default grace period of 30 s.
const LEAVE: Duration = Duration::from_secs(45);

/// Lines of the log that a failed test shows.
const LOG_TAIL: usize = 40;

/// How to start a process.
#[derive(Clone, Debug)]
pub struct Launch {
    /// For the names of its files.
    pub name: String,
    pub args: Vec<String>,
    /// Pins the process, with all its threads, to these cores; to none if there are none here.
    pub cores: Vec<usize>,
    /// Runs a copy of the binary from this folder, with it as home: nothing is found above it, NIXL neither.
    pub away: Option<PathBuf>,
    /// Further variables of its environment.
    pub env: Vec<(String, String)>,
}

/// A running `serve`, killed with its process group when dropped. If a test fails the end of its log is shown.
#[derive(Debug)]
pub struct Worker {
    child: Child,
    launch: Launch,
    dir: PathBuf,
    port: u16,
}

impl Worker {
    /// Starts a process on a port that it chooses (or on `--port` in the arguments) and waits until it listens.
    ///
    /// # Panics
    /// When it ends before that, with its log.
    pub async fn start(dir: &Path, launch: Launch) -> Self {
        let mut worker = Self { child: spawn(dir, &launch), launch, dir: dir.to_owned(), port: 0 };
        let path = worker.file("port");
        let port = until(START, "the port file", || {
            let exited = worker.child.try_wait().expect("our child can be waited for");
            assert!(exited.is_none(), "{} ended with {exited:?}", worker.launch.name);
            let port = std::fs::read_to_string(&path).ok().and_then(|text| text.trim().parse().ok());
            async move { port.ok_or("no port yet".to_owned()) }
        })
        .await;
        worker.port = port;
        worker
    }

    /// Starts a process that is expected to leave by itself; its status and log.
    pub async fn run_to_end(dir: &Path, launch: Launch) -> (ExitStatus, String) {
        let mut worker = Self { child: spawn(dir, &launch), launch, dir: dir.to_owned(), port: 0 };
        let status = worker.exited().await;
        (status, worker.log())
    }

    pub fn client(&self) -> Client {
        Client::new(self.port)
    }

    /// A client that uses another of the worker's addresses; an IPv6 address in brackets.
    pub fn client_at(&self, host: &str) -> Client {
        Client::at(host, self.port)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Waits for this word in `/health`.
    pub async fn health_is(&self, expected: &str) {
        self.health_says(expected, &[]).await;
    }

    /// Waits for this word in `/health`, with a reason that has all of `words`. Reasons follow one another: while a
    /// peer starts, there is another one than when it has.
    pub async fn health_says(&self, expected: &str, words: &[&str]) {
        let client = self.client();
        until(START, &format!("{} to be {expected} with {words:?}", self.launch.name), || async {
            match client.health().await? {
                (_, status, reason)
                    if status == expected && words.iter().all(|word| reason.contains(word)) =>
                {
                    Ok(())
                }
                other => Err(format!("{other:?}")),
            }
        })
        .await
    }

    /// SIGKILL: no last words. Returns when the process is gone.
    pub fn kill(&mut self) {
        self.signal(libc::SIGKILL);
        self.child.wait().expect("our child can be waited for");
    }

    /// Starts the process again at the same port, after its end.
    pub async fn restart(&mut self) {
        let port = self.port.to_string();
        let mut launch = self.launch.clone();
        if let Some(at) = launch.args.iter().position(|arg| arg == "--port") {
            launch.args[at + 1] = port;
        }
        *self = Self::start(&self.dir.clone(), launch).await;
    }

    /// SIGTERM: drain and leave.
    pub fn terminate(&self) {
        self.signal(libc::SIGTERM);
    }

    /// SIGSTOP: the process stands still, its sockets stay open.
    pub fn pause(&self) {
        self.signal(libc::SIGSTOP);
    }

    /// SIGCONT.
    pub fn resume(&self) {
        self.signal(libc::SIGCONT);
    }

    /// Waits for the process to leave by itself.
    pub async fn exited(&mut self) -> ExitStatus {
        let name = self.launch.name.clone();
        until(LEAVE, &format!("the end of {name}"), || {
            let status = self.child.try_wait().expect("our child can be waited for");
            async move { status.ok_or("still running".to_owned()) }
        })
        .await
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("our child can be waited for").is_none()
    }

    /// How many files and sockets it has open.
    pub fn open_files(&self) -> usize {
        let dir = format!("/proc/{}/fd", self.child.id());
        std::fs::read_dir(dir).expect("our child has a folder in /proc").count()
    }

    /// It may have no more than this many open; returns how many it might before.
    pub fn limit_open_files(&self, most: u64) -> u64 {
        let pid = self.child.id() as libc::pid_t;
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the child has not been waited for, so the number is its own; the limits are ours for the time of the calls.
        let set = unsafe {
            libc::prlimit(pid, libc::RLIMIT_NOFILE, std::ptr::null(), &mut limit);
            let lower = libc::rlimit { rlim_cur: most, ..limit };
            libc::prlimit(pid, libc::RLIMIT_NOFILE, &lower, std::ptr::null_mut())
        };
        assert_eq!(set, 0, "{most} files of {}: {}", self.launch.name, std::io::Error::last_os_error());
        limit.rlim_cur
    }

    /// Bytes of memory it holds.
    pub fn resident(&self) -> u64 {
        let path = format!("/proc/{}/status", self.child.id());
        let status = std::fs::read_to_string(path).expect("our child has a folder in /proc");
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).expect("a resident size");
        line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number of kilobytes") << 10
    }

    /// All it has logged, without colours.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    fn file(&self, extension: &str) -> PathBuf {
        self.dir.join(format!("{}.{extension}", self.launch.name))
    }

    fn signal(&self, signal: libc::c_int) {
        // SAFETY: kill has no memory effects. The child leads the group and has not been waited for while signals are
        // sent, so the group is not another's.
        let sent = unsafe { libc::kill(-(self.child.id() as libc::pid_t), signal) };
        assert_eq!(sent, 0, "signal {signal} to {}: {}", self.launch.name, std::io::Error::last_os_error());
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.child.try_wait().is_ok_and(|status| status.is_none()) {
            self.signal(libc::SIGKILL);
            // It was killed; whatever wait says there is nothing left to do.
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<_> = log.lines().collect();
            let tail = &lines[lines.len().saturating_sub(LOG_TAIL)..];
            eprintln!("--- {} {:?}\n{}", self.launch.name, self.launch.args, tail.join("\n"));
        }
    }
}

fn spawn(dir: &Path, launch: &Launch) -> Child {
    let file = |extension: &str| dir.join(format!("{}.{extension}", launch.name));
    // What an earlier process of this name wrote is not this one's port.
    let _ = std::fs::remove_file(file("port"));
    // Appended to, so that a restarted process does not hide what the first one said.
    let log =
        File::options().create(true).append(true).open(file("log")).expect("the test's folder is writable");
    let mut command = match &launch.away {
        None => Command::new(serve_binary::serve()),
        Some(home) => away(home),
    };
    command.args(&launch.args).arg("--port-file").arg(OsString::from(file("port")));
    command.env("NO_COLOR", "1").env_remove("KV_TRANSPORT").env_remove("KVFERRY_LOG").process_group(0);
    // Tests do not meet each other's workers.
    command.env("KVFERRY_FILE_KV", dir.join("workers"));
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
    command.envs(launch.env.iter().cloned());
    let cores = launch.cores.clone();
    // SAFETY: both calls are async-signal-safe and touch only the stack of the forked child.
    unsafe { command.pre_exec(move || prepare(&cores)) };
    command
        .spawn()
        .unwrap_or_else(|error| panic!("{} cannot be started: {error}", serve_binary::serve().display()))
}

fn away(home: &Path) -> Command {
    let copy = home.join("serve");
    if !copy.exists() {
        std::fs::copy(serve_binary::serve(), &copy).expect("the binary can be copied");
    }
    let mut command = Command::new(copy);
    command.current_dir(home).env("HOME", home).env_remove("XDG_DATA_HOME").env_remove("KVFERRY_NIXL_DIR");
    command.env("KVFERRY_DEMO_DIR", serve_binary::repository().join("models/demo"));
    command
}

/// In the child before it becomes `serve`: dies with the test, and stays on its cores.
fn prepare(cores: &[usize]) -> std::io::Result<()> {
    // SAFETY: prctl with these arguments touches no memory; the CPU set is ours and as large as said.
    let failed = unsafe {
        let mut failed = libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) != 0;
        if !cores.is_empty() {
            let mut set: libc::cpu_set_t = std::mem::zeroed();
            cores.iter().for_each(|&core| libc::CPU_SET(core, &mut set));
            failed |= libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &set) != 0;
        }
        failed
    };
    if failed { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// The first `count` cores that this process may run on, or fewer where there are fewer.
pub fn first_cores(count: usize) -> Vec<usize> {
    // SAFETY: the set is ours and as large as said.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let got = libc::sched_getaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &mut set);
        assert_eq!(got, 0, "sched_getaffinity: {}", std::io::Error::last_os_error());
        set
    };
    // SAFETY: every index below CPU_SETSIZE is within the set.
    let allowed = |core: &usize| unsafe { libc::CPU_ISSET(*core, &set) };
    (0..libc::CPU_SETSIZE as usize).filter(allowed).take(count).collect()
}
