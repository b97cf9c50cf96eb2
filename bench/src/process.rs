//! One `serve` process: started on a free port, watched until it is ready, and ended whatever happens to us.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use tokio::process::{Child, Command};
use tokio::time::{sleep, timeout};

use crate::client::{Client, Health};
use crate::error::{BenchError, LogTail, Result};

/// How often a starting process is looked at.
const POLL: Duration = Duration::from_millis(10);

/// Longest load of a model: full-size weights from a cold disk take tens of seconds.
const READY_WITHIN: Duration = Duration::from_secs(180);

/// An idle process drains in milliseconds.
const STOP_WITHIN: Duration = Duration::from_secs(5);

/// What an abandoned process gets between two signals before it is killed.
const DROP_PAUSE: Duration = Duration::from_millis(200);

/// Lines of a log that are shown when a process fails.
const TAIL: usize = 15;

/// A running `serve`. Dropping it ends the process.
pub struct Process {
    name: &'static str,
    child: Child,
    log: PathBuf,
    url: String,
}

/// The `serve` that was built with this program.
pub fn serve_binary() -> Result<PathBuf> {
    let own = std::env::current_exe().map_err(BenchError::io("the path of this program"))?;
    let path = own.with_file_name(format!("serve{}", std::env::consts::EXE_SUFFIX));
    match path.is_file() {
        true => Ok(path),
        false => Err(BenchError::NoServe { path }),
    }
}

impl Process {
    /// Starts `serve` with `args` and waits until it has its port, which it takes before it loads anything. Its log is
    /// `dir/name.log`.
    pub async fn start(serve: &Path, dir: &Path, name: &'static str, args: &[String]) -> Result<Self> {
        let (log, port_file) = (dir.join(format!("{name}.log")), dir.join(format!("{name}.port")));
        let stderr = File::create(&log).map_err(BenchError::io(format!("{}", log.display())))?;
        let mut command = Command::new(serve);
        command.args(args).args(["--port", "0"]).arg("--port-file").arg(&port_file);
        // A log that can be read here whatever the user's own setting is; --log-level still overrides it.
        command.env("NO_COLOR", "1").env("KVFERRY_LOG", "info");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(stderr);
        // Its own group: Ctrl-C reaches us alone, and we end the processes in order.
        command.process_group(0).kill_on_drop(true);
        die_with_us(&mut command);
        let child = command.spawn().map_err(BenchError::io(format!("starting {}", serve.display())))?;
        let mut process = Self { name, child, log, url: String::new() };
        process.url = format!("http://127.0.0.1:{}", process.port(&port_file).await?);
        Ok(process)
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    /// The process's number, while it runs.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// What it has logged so far.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.log).unwrap_or_default()).into_owned()
    }

    /// Waits until it serves as it was told to. A decode worker that has no link yet is not there: it may be that the
    /// prefill worker is loading.
    pub async fn ready(&mut self, client: &Client) -> Result<()> {
        let started = Instant::now();
        loop {
            self.check_alive()?;
            // Nobody answers for a moment while the process starts or dies.
            let reason = match client.health().await {
                Ok(Health { status, .. }) if status == "ready" => return Ok(()),
                Ok(Health { status, reason }) if status == "unavailable" => {
                    return Err(self.failed(format!("cannot serve: {}", reason.unwrap_or_default())));
                }
                Ok(Health { status, reason }) => format!("{status}, {}", reason.unwrap_or_default()),
                Err(error) => error.to_string(),
            };
            if started.elapsed() > READY_WITHIN {
                return Err(self.failed(format!("is not ready after {READY_WITHIN:?} ({reason})")));
            }
            sleep(POLL).await;
        }
    }

    /// Fails if the process has ended.
    pub fn check_alive(&mut self) -> Result<()> {
        match self.exited() {
            Some(status) => Err(self.failed(format!("ended ({status})"))),
            None => Ok(()),
        }
    }

    /// Ends it as an operator would, and waits for its end.
    pub async fn stop(mut self) -> Result<()> {
        self.signal(libc::SIGTERM);
        match timeout(STOP_WITHIN, self.child.wait()).await {
            Ok(Ok(status)) if status.success() => Ok(()),
            Ok(Ok(status)) => Err(self.failed(format!("ended with an error when told to stop ({status})"))),
            Ok(Err(source)) => Err(BenchError::Io { what: format!("waiting for {}", self.name), source }),
            Err(_) => Err(self.failed(format!("did not stop within {STOP_WITHIN:?} of SIGTERM"))),
        }
    }

    async fn port(&mut self, file: &Path) -> Result<u16> {
        let started = Instant::now();
        loop {
            let text = std::fs::read_to_string(file).unwrap_or_default();
            if let Ok(port) = text.trim().parse() {
                return Ok(port);
            }
            self.check_alive()?;
            if started.elapsed() > READY_WITHIN {
                return Err(self.failed(format!("has no port after {READY_WITHIN:?}")));
            }
            sleep(POLL).await;
        }
    }

    fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    fn failed(&self, reason: String) -> BenchError {
        let log = self.log();
        let lines: Vec<_> = log.lines().collect();
        let lines = lines[lines.len().saturating_sub(TAIL)..].iter().map(|&line| line.to_owned()).collect();
        BenchError::Process { name: self.name, reason, log: LogTail(lines) }
    }

    /// Signals its group, unless it is known to have ended: its number may be another's then.
    fn signal(&self, signal: libc::c_int) {
        if let Some(pid) = self.child.id().and_then(|pid| libc::pid_t::try_from(pid).ok()) {
            // SAFETY: kill takes two numbers and touches no memory of ours.
            unsafe { libc::kill(-pid, signal) };
        }
    }

    fn ends_soon(&mut self) -> bool {
        let started = Instant::now();
        while started.elapsed() < DROP_PAUSE {
            if self.exited().is_some() {
                return true;
            }
            std::thread::sleep(POLL);
        }
        false
    }
}

impl Drop for Process {
    /// First asks, so that it can give back shared memory; a second SIGTERM cuts its drain short.
    fn drop(&mut self) {
        for signal in [libc::SIGTERM, libc::SIGTERM, libc::SIGKILL] {
            if self.exited().is_some() {
                return;
            }
            self.signal(signal);
            if self.ends_soon() {
                return;
            }
        }
    }
}

/// Has the system kill the process when we are killed and cannot do it.
#[cfg(target_os = "linux")]
fn die_with_us(command: &mut Command) {
    let request = || {
        // SAFETY: prctl with these arguments takes no pointers and may be called between fork and exec.
        match unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    };
    // SAFETY: the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(request) };
}

#[cfg(not(target_os = "linux"))]
fn die_with_us(_: &mut Command) {}
