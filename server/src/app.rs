//! The life of one `serve` process: take the port, load, serve, drain, leave.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use prometheus::Registry;

use crate::config::Config;
use crate::http;
use crate::readiness::{Readiness, State};
use crate::router::router;
use crate::shutdown::Signals;
use crate::state::{AppState, Identity, Serving};

/// What is left of the runtime's blocking threads may be a load that nobody waits for any more.
const RUNTIME_STOP: Duration = Duration::from_millis(200);

/// A loaded model with its engine.
pub struct Worker {
    pub serving: Serving,
    /// Stops the engine's thread and joins it. Runs when no request is left, on a thread that may block.
    pub stop: Box<dyn FnOnce() + Send>,
}

/// Runs until a signal, and returns when every request that got its chance is over.
///
/// `load` runs on a thread of its own while the port already answers 503. It may set readiness to
/// `Degraded` or `Unavailable`; if it leaves it at `Loading`, the worker is ready when it returns. Its error
/// ends the process.
pub fn run<L>(config: Config, load: L) -> anyhow::Result<()>
where
    L: FnOnce(&Config, &AppState) -> anyhow::Result<Worker> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(serve(config, load));
    runtime.shutdown_timeout(RUNTIME_STOP);
    result
}

async fn serve<L>(config: Config, load: L) -> anyhow::Result<()>
where
    L: FnOnce(&Config, &AppState) -> anyhow::Result<Worker> + Send + 'static,
{
    let signals = Signals::catch().context("signals cannot be caught")?;
    let readiness = Readiness::default();
    let state = AppState::new(Identity::of(&config), readiness.clone(), Registry::new())?;
    let listener = http::bind(config.listen, config.port_file.as_deref()).await?;
    let shutdown = state.drain.clone().run(signals.first(), readiness.clone(), config.shutdown_grace);
    let mut serving = tokio::spawn(http::run(listener, router(Arc::clone(&state)), shutdown));

    let loading = tokio::task::spawn_blocking({
        let state = Arc::clone(&state);
        move || load(&config, &state)
    });
    let worker = tokio::select! {
        // Told to stop while loading: the load is abandoned.
        served = &mut serving => return Ok(served.context("the HTTP server panicked")??),
        loaded = loading => loaded.context("loading the model panicked")??,
    };
    state.serve(worker.serving);
    if readiness.get() == State::Loading {
        readiness.set(State::Ready);
    }
    let served = serving.await.context("the HTTP server panicked")?;
    tokio::task::spawn_blocking(worker.stop).await.context("stopping the engine panicked")?;
    tracing::info!("stopped");
    Ok(served?)
}
