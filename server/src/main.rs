//! `serve`: a worker that answers OpenAI's HTTP API, or computes prompts for one that does.
#![forbid(unsafe_code)]

use std::io::IsTerminal;

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use server::args::{Args, Role};
use server::config::Config;
use server::frontend;
use tracing_subscriber::EnvFilter;

fn main() {
    let args = Args::parse();
    let filter = EnvFilter::try_new(&args.log_level).unwrap_or_else(|error| {
        exit(format!("--log-level is {:?}, expected a level or filters: {error}", args.log_level))
    });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    let var = |name: &str| std::env::var(name).ok();
    let ended = match args.role {
        Role::Frontend => {
            let config =
                frontend::Config::from_args(args, var).unwrap_or_else(|error| exit(error.to_string()));
            frontend::run(config)
        }
        Role::Both | Role::Prefill | Role::Decode => {
            let config = Config::from_args(args, var).unwrap_or_else(|error| exit(error.to_string()));
            server::app::run(config, server::link::server::routes, server::worker::load)
        }
    };
    match ended {
        Ok(()) => transfer::leave(0),
        Err(error) => {
            eprintln!("error: {}", report(&error));
            transfer::leave(1)
        }
    }
}

/// As clap reports what it finds itself: the message and a hint to stderr, status 2.
fn exit(message: String) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}

/// The error and its causes in one line, for whoever started the process: no backtrace, and no cause that the
/// text before it has named already.
fn report(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string).filter(|cause| !cause.is_empty()) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text = format!("{text}: {cause}");
        }
    }
    text
}
