//! `serve`: a worker that answers OpenAI's HTTP API, or computes prompts for one that does.
#![forbid(unsafe_code)]

use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use server::args::Args;
use server::config::Config;
use tracing_subscriber::EnvFilter;

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let filter = EnvFilter::try_new(&args.log_level).unwrap_or_else(|error| {
        exit(format!("--log-level is {:?}, expected a level or filters: {error}", args.log_level))
    });
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let config = Config::from_args(args, |name| std::env::var(name).ok())
        .unwrap_or_else(|error| exit(error.to_string()));
    server::app::run(config, server::link::server::routes, server::worker::load)
}

/// As clap reports what it finds itself: the message and a hint to stderr, status 2.
fn exit(message: String) -> ! {
    Args::command().error(ErrorKind::ValueValidation, message).exit()
}
