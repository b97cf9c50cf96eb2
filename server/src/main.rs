//! `serve`: a worker that answers OpenAI's HTTP API, or computes prompts for one that does.
#![forbid(unsafe_code)]

use std::io::IsTerminal;

use clap::CommandFactory;
use clap::error::ErrorKind;
use server::args::{Args, Role};
use server::config::Config;
use server::error::with_causes;
use server::frontend;
use tracing_subscriber::EnvFilter;

fn main() {
    let (args, idle) = Args::read(std::env::args_os()).unwrap_or_else(|error| error.exit());
    // The crate says itself what we say once, each time that it tries again.
    let filter = EnvFilter::try_new(format!("kube_client=off,kube_runtime=off,{}", args.log_level))
        .unwrap_or_else(|error| {
            exit(format!("--log-level is {:?}, expected a level or filters: {error}", args.log_level))
        });
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    for flag in idle {
        tracing::warn!("{flag} does nothing with --role {}", args.role.as_str());
    }
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
            eprintln!("error: {}", with_causes(error.as_ref()));
            transfer::leave(1)
        }
    }
}

/// As clap reports what it finds itself: the message and a hint to stderr, status 2.
fn exit(message: String) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
