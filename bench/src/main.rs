//! `bench`: every measurement of kvferry, each a subcommand in a file of its own, and the demonstration.
//!
//! It starts the `serve` processes that it measures, on free loopback ports, and ends them whatever happens. All of it
//! runs on one thread: the cores are the workers'.
//!
//! Not here: what is right or wrong inside the program (tests), and anything that a worker does.

mod client;
mod demo;
mod deployment;
mod error;
mod machine;
mod process;
mod prometheus;
mod prompts;
mod report;
mod sample;
mod serve_log;
mod sse;
mod stats;
mod table;
mod transfers;
mod ttft;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

/// Measure kvferry, or see it work.
#[derive(Debug, Parser)]
#[command(name = "bench", version)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    Ttft(ttft::Args),
    Demo(demo::Args),
}

/// The status of a process that Ctrl-C or SIGTERM ended, as shells have it.
const INTERRUPTED: u8 = 130;

// The thread that spawns a worker must live as long as this process: the system ends the worker with it.
#[tokio::main(flavor = "current_thread")]
async fn main() -> anyhow::Result<ExitCode> {
    let args = Args::parse();
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    // Dropping the command ends its processes.
    tokio::select! {
        result = run(args.command) => result.map(|()| ExitCode::SUCCESS),
        _ = interrupt.recv() => Ok(ExitCode::from(INTERRUPTED)),
        _ = terminate.recv() => Ok(ExitCode::from(INTERRUPTED)),
    }
}

async fn run(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Ttft(args) => Box::pin(ttft::run(args)).await?,
        Command::Demo(args) => Box::pin(demo::run(args)).await?,
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn command_line_definition_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn every_option_has_help() {
        for command in Args::command().get_subcommands() {
            for arg in command.get_arguments() {
                assert!(arg.get_help().is_some(), "{} --{} has no help", command.get_name(), arg.get_id());
            }
        }
    }
}
