//! A started endpoint, as the measuring process sees it.

use std::process::Stdio;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{self, ChildStdin, ChildStdout};

use super::Args;
use super::case::Geometry;
use super::protocol::{Answer, Command};
use crate::error::{BenchError, LogTail, Result};

/// One process; ends with this value.
pub struct Child {
    process: process::Child,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
    name: &'static str,
}

impl Child {
    /// `seed` is 1 for the process that posts and 2 for the other.
    pub async fn start(args: &Args, transport: &str, seed: u64) -> Result<Self> {
        let geometry = Geometry::of(args);
        let blocks = args.tokens.iter().map(|&tokens| geometry.blocks(tokens)).max().unwrap_or(1);
        let program = std::env::current_exe().map_err(BenchError::io("this program's own path"))?;
        let mut command = process::Command::new(program);
        command
            .arg("transfer-endpoint")
            .args(["--transport", transport])
            .args(["--seed", &seed.to_string()])
            .args(["--blocks", &blocks.to_string()])
            .args([
                "--geometry",
                &serde_json::to_string(&geometry).expect("numbers serialize. This is a bug."),
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true);
        let device = if seed == 1 { args.device } else { args.peer_device.unwrap_or(args.device) };
        command.args(["--device", &device.to_string()]);
        if let Some(library) = &args.cuda_emulator {
            command.arg("--cuda-emulator").arg(library);
        }
        if let Some(dir) = &args.nixl_dir {
            command.arg("--nixl-dir").arg(dir);
        }
        let mut process = command.spawn().map_err(BenchError::io("starting an endpoint"))?;
        let (input, output) = (process.stdin.take().expect("piped"), process.stdout.take().expect("piped"));
        let name = if seed == 1 { "the posting endpoint" } else { "the other endpoint" };
        Ok(Self { process, input, output: BufReader::new(output).lines(), name })
    }

    /// Makes the two known to each other, as peer 1.
    pub async fn add(&mut self, peer: &mut Self) -> Result<()> {
        let (ours, theirs) = (self.metadata().await?, peer.metadata().await?);
        peer.ask(&Command::Add { peer: 1, metadata: ours }).await?;
        self.ask(&Command::Add { peer: 1, metadata: theirs }).await?;
        Ok(())
    }

    async fn metadata(&mut self) -> Result<Vec<u8>> {
        match self.ask(&Command::Metadata).await? {
            Answer::Metadata { metadata } => Ok(metadata),
            _ => Err(self.nonsense("Metadata")),
        }
    }

    /// Sends a command and takes its answer. [`Command::TcpListen`] has a second one, which the next call skips.
    pub async fn ask(&mut self, command: &Command) -> Result<Answer> {
        let line = serde_json::to_string(command).expect("commands serialize. This is a bug.") + "\n";
        let sent = self.input.write_all(line.as_bytes()).await;
        let expects_added = matches!(command, Command::Add { .. });
        loop {
            let answer = match &sent {
                Ok(()) => self.output.next_line().await.map_err(BenchError::io("reading an answer"))?,
                Err(_) => None,
            };
            let Some(answer) = answer else { return Err(self.ended().await) };
            match serde_json::from_str(&answer) {
                Ok(Answer::Failed { reason }) => return Err(self.error(reason)),
                Ok(Answer::Added) if !expects_added => {}
                Ok(answer) => return Ok(answer),
                Err(error) => return Err(self.error(format!("said {answer:?}: {error}"))),
            }
        }
    }

    pub fn nonsense(&self, command: &str) -> BenchError {
        self.error(format!("answered something else to {command}"))
    }

    fn error(&self, reason: String) -> BenchError {
        BenchError::Usage(format!("{}: {reason}", self.name))
    }

    async fn ended(&mut self) -> BenchError {
        let status = self.process.wait().await.map_or_else(|e| e.to_string(), |status| status.to_string());
        let reason = format!("ended early ({status}); what it said is above");
        BenchError::Process { name: self.name, reason, log: LogTail(Vec::new()) }
    }

    /// Ends it the ordinary way.
    pub async fn stop(mut self) -> Result<()> {
        drop(self.input);
        let status = self.process.wait().await.map_err(BenchError::io("waiting for an endpoint"))?;
        match status.success() {
            true => Ok(()),
            false => Err(BenchError::Usage(format!("{} ended with {status}", self.name))),
        }
    }
}
