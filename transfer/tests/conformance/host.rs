//! Starting endpoints, talking to them, stopping and killing them.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ChildStdin, Command as Program, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;
use std::time::Duration;

use transfer::{Direction, Lane, Span};

use crate::endpoint::{Answer, Command, serve};

/// How `Host::kill` ends a process. Any other signal is a crash.
const SIGKILL: i32 = 9;

const ENDPOINT: &str = "KVFERRY_CONFORMANCE_ENDPOINT";

/// Longer than an endpoint waits for an event: then it is the endpoint that hangs.
const PATIENCE: Duration = Duration::from_secs(30);

/// What marks an endpoint's answers among what the test harness prints.
const MARK: &str = "endpoint> ";

/// Whether a backend's tests run. They fail without NIXL rather than pass in silence.
pub fn can_run(backend: &str) -> bool {
    let nixl = || transfer::nixl::search_path(None).iter().any(|file| file.is_file());
    if !["tcp", "shm"].contains(&backend) || nixl() {
        return true;
    }
    let allowed = env::var("KVFERRY_ALLOW_NO_NIXL").is_ok_and(|v| v == "1");
    assert!(allowed, "NIXL is not installed: run scripts/nixl-setup (or set KVFERRY_ALLOW_NO_NIXL=1)");
    false
}

/// Serves as an endpoint when `Host::start` began this process, and then ends it.
pub fn run_if_endpoint() {
    let Ok(what) = env::var(ENDPOINT) else { return };
    let (transport, seed) = what.split_once(':').expect("transport:seed");
    let (commands, queue) = channel();
    thread::spawn(move || {
        for line in std::io::stdin().lines() {
            if commands.send(line.expect("the test writes text")).is_err() {
                return;
            }
        }
    });
    serve(transport, seed.parse().expect("a number"), &queue, |line| println!("\n{MARK}{line}"));
}

/// An endpoint of its own.
pub struct Host {
    commands: Option<Commands>,
    answers: Receiver<String>,
    life: Life,
}

enum Commands {
    Pipe(ChildStdin),
    Channel(Sender<String>),
}

enum Life {
    Process(Child),
    Thread(Option<thread::JoinHandle<()>>),
}

impl Host {
    pub fn start(transport: &str, seed: u64) -> Self {
        if transport == "inproc" { Self::start_thread(seed) } else { Self::start_process(transport, seed) }
    }

    fn start_thread(seed: u64) -> Self {
        let ((commands, queue), (sender, answers)) = (channel(), channel());
        let thread = thread::spawn(move || {
            serve("inproc", seed, &queue, |line| drop(sender.send(line)));
        });
        Self { commands: Some(Commands::Channel(commands)), answers, life: Life::Thread(Some(thread)) }
    }

    fn start_process(transport: &str, seed: u64) -> Self {
        let mut child = Program::new(env::current_exe().expect("the test has a path"))
            .args(["--exact", "endpoint_process", "--nocapture"])
            .env(ENDPOINT, format!("{transport}:{seed}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the test starts itself");
        let (stdin, stdout) = (child.stdin.take().expect("piped"), child.stdout.take().expect("piped"));
        let (sender, answers) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                if let Some(answer) = line.strip_prefix(MARK)
                    && sender.send(answer.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        Self { commands: Some(Commands::Pipe(stdin)), answers, life: Life::Process(child) }
    }

    fn send(&mut self, command: &Command) {
        let line = serde_json::to_string(command).expect("commands serialize");
        match self.commands.as_mut().expect("the endpoint lives") {
            Commands::Pipe(pipe) => writeln!(pipe, "{line}").expect("the endpoint reads"),
            Commands::Channel(channel) => channel.send(line).expect("the endpoint reads"),
        }
    }

    fn answer(&self) -> Answer {
        let line = self.answers.recv_timeout(PATIENCE).expect("the endpoint answers");
        serde_json::from_str(&line).expect("endpoints send answers")
    }

    fn ask(&mut self, command: &Command) -> Answer {
        self.send(command);
        self.answer()
    }

    pub fn metadata(&mut self) -> String {
        match self.ask(&Command::Metadata) {
            Answer::Metadata(hex) => hex,
            other => panic!("{other:?} is no metadata"),
        }
    }

    pub fn add(&mut self, peer: u64, metadata: &str) -> Answer {
        self.ask(&Command::Add { peer, metadata: metadata.into() })
    }

    pub fn post(&mut self, peer: u64, notification: &str, spans: &[Span]) -> Answer {
        self.transfer(Direction::Write, peer, notification, spans)
    }

    pub fn transfer(
        &mut self,
        direction: Direction,
        peer: u64,
        notification: &str,
        spans: &[Span],
    ) -> Answer {
        let spans = spans.iter().map(|s| (s.local, s.remote, s.len)).collect();
        let notification = notification.into();
        self.ask(&Command::Post { direction, peer, notification, spans, then_remove: false })
    }

    pub fn transfer_then_remove(&mut self, direction: Direction, peer: u64, spans: &[Span]) -> Answer {
        let spans = spans.iter().map(|s| (s.local, s.remote, s.len)).collect();
        let notification = "aborted".into();
        self.ask(&Command::Post { direction, peer, notification, spans, then_remove: true })
    }

    pub fn fill(&mut self, seed: u64) {
        assert_eq!(self.ask(&Command::Fill { seed }), Answer::Ok);
    }

    pub fn checksum(&mut self) -> u64 {
        match self.ask(&Command::Checksum) {
            Answer::Checksum(sum) => sum,
            other => panic!("{other:?} is no checksum"),
        }
    }

    pub fn lane(&mut self, direction: Direction) -> Option<Lane> {
        match self.ask(&Command::Lane { direction }) {
            Answer::Lane(lane) => lane,
            other => panic!("{other:?} is no lane"),
        }
    }

    pub fn event(&mut self) -> Answer {
        self.ask(&Command::Event)
    }

    /// Lets the endpoint wait for its next event while the test turns to another.
    pub fn begin_event(&mut self) -> Waiting<'_> {
        self.begin_events(1)
    }

    pub fn begin_events(&mut self, count: usize) -> Waiting<'_> {
        (0..count).for_each(|_| self.send(&Command::Event));
        Waiting { host: self, count }
    }

    pub fn pause(&mut self) {
        match &self.life {
            Life::Process(child) => signal(child, "STOP"),
            Life::Thread(_) => self.send(&Command::Pause),
        }
    }

    pub fn resume(&mut self) {
        match &self.life {
            Life::Process(child) => signal(child, "CONT"),
            Life::Thread(_) => self.send(&Command::Resume),
        }
    }

    pub fn kill(&mut self) {
        self.commands = None;
        match &mut self.life {
            Life::Process(child) => {
                child.kill().expect("the endpoint lives");
                child.wait().expect("the endpoint is ours");
            }
            Life::Thread(thread) => thread.take().expect("lives").join().expect("no panic"),
        }
    }
}

impl Drop for Host {
    /// Ends the endpoint the ordinary way, by the end of its input, unless the test is failing.
    fn drop(&mut self) {
        self.commands = None;
        if let Life::Process(child) = &mut self.life {
            if thread::panicking() {
                let _ = child.kill();
            }
            let status = child.wait().expect("the endpoint is ours");
            assert!(thread::panicking() || status.success() || status.signal() == Some(SIGKILL), "{status}");
        }
    }
}

/// Events that an endpoint was asked for.
#[must_use]
pub struct Waiting<'a> {
    host: &'a Host,
    count: usize,
}

impl Waiting<'_> {
    pub fn wait(self) -> Answer {
        self.host.answer()
    }

    pub fn wait_all(self) -> Vec<Answer> {
        (0..self.count).map(|_| self.host.answer()).collect()
    }
}

fn signal(child: &Child, name: &str) {
    let status = Program::new("kill").args([&format!("-{name}"), &child.id().to_string()]).status();
    assert!(status.expect("kill is everywhere").success());
}
