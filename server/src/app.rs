//! The life of one `serve` process: take the port, load, serve, drain, leave.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use axum::Router;
use engine::EngineHandle;
use prometheus::Registry;

use crate::config::Config;
use crate::http;
use crate::readiness::{Readiness, State};
use crate::routes::router;
use crate::shutdown::Signals;
use crate::state::{AppState, Identity, Serving};

/// What is left of the runtime's blocking threads may be a load that nobody waits for any more.
const RUNTIME_STOP: Duration = Duration::from_millis(200);

/// How soon a dead engine is noticed.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);

/// A loaded model with its engine.
pub struct Worker {
    pub serving: Serving,
    /// Links to other workers; runs once requests can be served, and sees to readiness. `None`: ready when loaded.
    pub start: Option<Box<dyn FnOnce() + Send>>,
    /// Ends the links and the engine's thread. Runs when no request is left, on a thread that may block.
    pub stop: Box<dyn FnOnce() + Send>,
}

/// Runs until a signal, and returns when every request that got its chance is over. A dead engine is an error.
///
/// `routes` makes what is served beside OpenAI's API, such as the link between workers; it is called before
/// anything is loaded. `load` runs on a thread of its own while the port already answers 503; its error ends
/// the process.
pub fn run<R, L>(config: Config, routes: R, load: L) -> anyhow::Result<()>
where
    R: FnOnce(&Arc<AppState>) -> Router,
    L: FnOnce(&Config, &Arc<AppState>) -> anyhow::Result<Worker> + Send + 'static,
{
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(serve(config, routes, load));
    runtime.shutdown_timeout(RUNTIME_STOP);
    result
}

async fn serve<R, L>(config: Config, routes: R, load: L) -> anyhow::Result<()>
where
    R: FnOnce(&Arc<AppState>) -> Router,
    L: FnOnce(&Config, &Arc<AppState>) -> anyhow::Result<Worker> + Send + 'static,
{
    let signals = Signals::catch().context("signals cannot be caught")?;
    let readiness = Readiness::default();
    let state = AppState::new(Identity::of(&config), readiness.clone(), Registry::new())?;
    let listener = http::bind(config.listen, config.port_file.as_deref()).await?;
    // A listener that is bound has an address; a worker that keeps KV says it.
    let _ = listener.local_addr().map(|address| state.port.set(address.port()));
    let shutdown = state.drain.clone().run(signals.first(), readiness.clone(), config.shutdown_grace);
    let router = router(Arc::clone(&state), routes(&state));
    let mut serving = tokio::spawn(http::run(listener, router, shutdown));

    let loading = tokio::task::spawn_blocking({
        let state = Arc::clone(&state);
        move || load(&config, &state)
    });
    let worker = tokio::select! {
        // Told to stop while loading: the load is abandoned.
        served = &mut serving => return Ok(served.context("the HTTP server panicked")??),
        loaded = loading => loaded.context("loading the model panicked")??,
    };
    let engine = worker.serving.engine.clone();
    state.serve(worker.serving);
    match worker.start {
        Some(start) => start(),
        None => readiness.set(State::Ready),
    }
    tokio::select! {
        served = serving => served.context("the HTTP server panicked")??,
        () = death(&engine) => {
            readiness.set(State::Unavailable("the engine's thread has ended".into()));
            bail!("the engine's thread has ended; its last words are in the log");
        }
    }
    tokio::task::spawn_blocking(worker.stop).await.context("stopping the engine panicked")?;
    tracing::info!("stopped");
    Ok(())
}

/// Resolves when the engine's thread has ended: a process that cannot serve must not look alive.
async fn death(engine: &EngineHandle) {
    let mut interval = tokio::time::interval(WATCH_INTERVAL);
    while engine.is_alive() {
        interval.tick().await;
    }
}
