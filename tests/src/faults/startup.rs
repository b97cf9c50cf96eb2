//! Faults that show when a worker starts: its port is taken, or it does not fit its peer.

use std::net::TcpListener;
use std::time::{Duration, Instant};

use super::run::Setup;
use crate::ask::Ask;
use crate::process::Worker;
use crate::prompts;

/// A process that cannot have its port says so and leaves.
pub async fn port_taken(setup: &Setup) -> Result<(), String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|error| error.to_string())?;
    let port = listener.local_addr().map_err(|error| error.to_string())?.port();
    let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
    let launch = setup.deployment().launch("taken", &format!("--role prefill --port {port}"), &[]);
    let started = Instant::now();
    let (status, log) = Worker::run_to_end(dir.path(), launch).await;
    let named = log.contains(&format!("127.0.0.1:{port}"));
    match (status.success(), named, started.elapsed() < Duration::from_secs(10)) {
        (false, true, true) => Ok(()),
        found => Err(format!("ended with (success, named, in time) {found:?}: {log}")),
    }
}

/// A pair that does not fit serves nothing and says why; each worker alone would.
pub async fn misfit(setup: &Setup, flag: &str, named: &str) -> Result<(), String> {
    let fixture = crate::serve_binary::repository().join("tests/fixtures");
    let flag = flag.replace("tests/fixtures", &fixture.display().to_string());
    let cluster = setup.deployment().decode_flags(&flag).start_unready().await;
    cluster.front().health_says("unavailable", &[named]).await;
    let ask = Ask::completion(prompts::ids(20, 1));
    match cluster.client().ask(&ask).await {
        Err(failure) if failure.status() == Some(503) && failure.message().contains(named) => {}
        other => return Err(format!("expected 503 that names {named:?}, got {other:?}")),
    }
    cluster.prefill().client().settled().await;
    Ok(())
}
