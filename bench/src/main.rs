//! `bench`: every measurement of kvferry, each a subcommand in a file or folder of its own, and the demonstration.
//!
//! It starts the `serve` processes that it measures, on free loopback ports, and ends them whatever happens. All of that
//! runs on one thread: the cores are the workers'. `compute` alone measures in this process.
//!
//! Not here: what is right or wrong inside the program (tests), and anything that a worker does.

mod client;
mod compute;
mod demo;
mod deployment;
mod device;
mod error;
mod frontend;
mod gpu;
mod machine;
mod output;
mod prefix_hits;
mod process;
mod profile;
mod prometheus;
mod prompts;
mod random_model;
mod replay;
mod report;
mod routing;
mod sample;
mod serve_log;
mod sse;
mod stats;
mod table;
mod transfer;
mod transfers;
mod ttft;
mod workload;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tokio::signal::unix::{SignalKind, signal};

use crate::error::{BenchError, Result};

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
    PrefixHits(prefix_hits::Args),
    Routing(routing::Args),
    Replay(replay::Args),
    Profile(profile::Args),
    Frontend(frontend::Args),
    Transfer(transfer::Args),
    #[command(hide = true)]
    TransferEndpoint(transfer::EndpointArgs),
    Device(device::Args),
    RandomModel(random_model::Args),
    Kernels(compute::kernels::Args),
    Engine(compute::engine::Args),
    Demo(demo::Args),
}

/// The status of a process that Ctrl-C or SIGTERM ended, as shells have it.
const INTERRUPTED: u8 = 130;

// The thread that spawns a worker must live as long as this process: the system ends the worker with it.
#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let args = Args::parse();
    // Dropping the command ends its processes.
    let result = tokio::select! {
        result = run(args.command) => result,
        caught = interrupted() => caught.map(|()| ExitCode::from(INTERRUPTED)),
    };
    result.unwrap_or_else(|error| {
        eprintln!("\nbench: {error}");
        ExitCode::FAILURE
    })
}

async fn run(command: Command) -> Result<ExitCode> {
    match command {
        Command::Ttft(args) => Box::pin(ttft::run(args)).await?,
        Command::PrefixHits(args) => Box::pin(prefix_hits::run(args)).await?,
        Command::Frontend(args) => Box::pin(frontend::run(args)).await?,
        Command::Routing(args) => Box::pin(routing::run(args)).await?,
        Command::Replay(args) => Box::pin(replay::run(args)).await?,
        Command::Profile(args) => Box::pin(profile::run(args)).await?,
        Command::Transfer(args) => Box::pin(transfer::run(args)).await?,
        Command::TransferEndpoint(args) => transfer::run_endpoint(&args)?,
        Command::Device(args) => device::run(args)?,
        Command::RandomModel(args) => random_model::run(&args)?,
        Command::Kernels(args) => compute::kernels::run(args).await?,
        Command::Engine(args) => compute::engine::run(args).await?,
        Command::Demo(args) => Box::pin(demo::run(args)).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Resolves when a signal asks this program to end.
async fn interrupted() -> Result<()> {
    let caught = |kind| signal(kind).map_err(BenchError::io("signals cannot be caught"));
    let (mut interrupt, mut terminate) = (caught(SignalKind::interrupt())?, caught(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
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
