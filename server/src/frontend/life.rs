//! The life of a frontend: take the port, load the tokenizer, watch the workers, serve, drain, leave.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use models::{SourceOptions, TextFiles};
use prometheus::Registry;
use tokio::task::JoinSet;

use super::Config;
use super::fleet::Worker;
use super::found;
use super::probe;
use super::routes::router;
use super::state::Front;
use crate::args::Role;
use crate::http;
use crate::lanes;
use crate::readiness::Readiness;
use crate::shutdown::Signals;
use crate::state::{AppState, Identity};
use crate::text::Text;

/// What is left of the runtime's blocking threads may be a load that nobody waits for any more.
const RUNTIME_STOP: Duration = Duration::from_millis(200);

/// Runs until a signal, and returns when every request that got its chance is over.
pub fn run(config: Config) -> anyhow::Result<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let result = runtime.block_on(serve(config));
    runtime.shutdown_timeout(RUNTIME_STOP);
    result
}

async fn serve(config: Config) -> anyhow::Result<()> {
    let signals = Signals::catch().context("signals cannot be caught")?;
    let readiness = Readiness::default();
    let identity = Identity {
        role: Role::Frontend,
        model_name: config.served_model_name.clone().unwrap_or_default(),
        model_root: config.model.clone().unwrap_or_default(),
        request_timeout: config.request_timeout,
    };
    let app = AppState::new(identity, readiness.clone(), Registry::new())?;
    let listener = http::bind(config.listen, config.port_file.as_deref()).await?;
    let shutdown = app.drain.clone().run(signals.first(), readiness.clone(), config.shutdown_grace);
    let front = Front::new(app, config.router, config.served_model_name)?;
    let lanes = std::thread::available_parallelism()?.get();
    let served = front.clone();
    let mut serving = tokio::spawn(lanes::run(listener, lanes, move || router(served.clone()), shutdown));
    let loading = load_text(config.model, config.model_source);
    let text = tokio::select! {
        // Told to stop while loading: the load is abandoned.
        served = &mut serving => return Ok(served.context("the HTTP server panicked")??),
        text = loading => text?,
    };
    let mut tasks = JoinSet::new();
    for (url, role) in &front.config.workers {
        let worker = Arc::new(Worker::new(url.clone(), *role, true, front.config.breaker));
        front.fleet.add(worker.clone());
        tasks.spawn(probe::keep(front.clone(), worker));
    }
    if let Some(options) = &config.discovery {
        let discovery = options.open()?;
        let changes = discovery.watch().await?;
        tracing::info!(backend = discovery.name(), "looking for workers");
        tasks.spawn(found::keep(front.clone(), discovery, changes));
    }
    tasks.spawn(tick(front.clone()));
    front.loaded(text);
    serving.await.context("the HTTP server panicked")??;
    tasks.shutdown().await;
    tracing::info!("stopped");
    Ok(())
}

/// What the router has to look at now and then.
async fn tick(front: Arc<Front>) {
    let mut interval = tokio::time::interval(Duration::from_secs(1));
    loop {
        interval.tick().await;
        front.router.tick();
        // Some workers come back by the clock alone.
        front.standing_changed();
    }
}

async fn load_text(model: Option<String>, source: SourceOptions) -> anyhow::Result<Option<Arc<Text>>> {
    let Some(model) = model else { return Ok(None) };
    let load = move || -> anyhow::Result<Option<Arc<Text>>> {
        let dir = models::resolve(&model, &source)?;
        let files = TextFiles::load(&dir)?;
        Ok(Some(Arc::new(Text::new(files.tokenizer, files.chat_template))))
    };
    tokio::task::spawn_blocking(load).await.context("loading the tokenizer panicked")?
}
