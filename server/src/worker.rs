//! Loading a worker: model files, engine, link to other workers.

use anyhow::bail;

use crate::app::Worker;
use crate::config::Config;
use crate::state::AppState;

/// Loads what `config` asks for.
pub fn load(config: &Config, _state: &AppState) -> anyhow::Result<Worker> {
    bail!("cannot load {}: the engine is not wired to the server yet", config.model)
}
