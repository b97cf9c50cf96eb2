//! Where a model comes from: a folder, the demo in the repository, or the Hugging Face hub.

use std::path::{Path, PathBuf};

use crate::error::ModelError;
use crate::hub::{HubId, HubOptions, snapshot};

/// The name that means the demo model, never a folder; `./demo` is the folder.
pub const DEMO: &str = "demo";

/// What [`resolve`] may use. `main` fills it from flags and the environment.
#[derive(Debug, Clone)]
pub struct SourceOptions {
    /// Where the demo model is, if not in the repository (`KVFERRY_DEMO_DIR`).
    pub demo_dir: Option<PathBuf>,
    pub hub: HubOptions,
    /// False for a process that only tokenizes: no weights are fetched or asked for.
    pub weights: bool,
}

impl SourceOptions {
    /// Reads the variables through `var`: `KVFERRY_DEMO_DIR` and those of [`HubOptions::from_vars`].
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let demo_dir = var("KVFERRY_DEMO_DIR").filter(|dir| !dir.is_empty()).map(PathBuf::from);
        Self { demo_dir, hub: HubOptions::from_vars(var), weights: true }
    }
}

/// The folder of `model`: an existing folder, `demo`, or a hub id `org/name[@revision]`, which is taken from
/// the hub's cache when complete there, else downloaded into it. Blocking.
///
/// # Errors
/// Nothing of that name, a folder without `config.json`, or a download that failed; each says what to do.
pub fn resolve(model: &str, options: &SourceOptions) -> Result<PathBuf, ModelError> {
    if model == DEMO {
        return demo(options);
    }
    let path = Path::new(model);
    if path.exists() {
        return folder(path);
    }
    let looks_like_path = model.starts_with(['.', '/', '~']) || model.matches('/').count() > 1;
    if looks_like_path && !model.contains('@') {
        return Err(ModelError::PathNotFound { path: path.to_owned() });
    }
    let id = HubId::parse(model)?;
    snapshot(&id, &options.hub, options.weights)
}

fn folder(path: &Path) -> Result<PathBuf, ModelError> {
    if !path.is_dir() {
        return Err(ModelError::NotAFolder { path: path.to_owned() });
    }
    if path.join("config.json").is_file() {
        return Ok(path.to_owned());
    }
    let hint = match path.join("snapshots").is_dir() {
        true => "; it is a folder of the hub's cache, whose snapshots/COMMIT is the model".to_owned(),
        false => String::new(),
    };
    Err(ModelError::MissingFile { dir: path.to_owned(), file: "config.json", hint })
}

/// The option, else `models/demo` in a folder above the executable or the working directory, else where this
/// crate was compiled.
fn demo(options: &SourceOptions) -> Result<PathBuf, ModelError> {
    let is_model = |dir: &PathBuf| dir.join("config.json").is_file();
    if let Some(dir) = &options.demo_dir {
        return match is_model(dir) {
            true => Ok(dir.clone()),
            false => Err(ModelError::DemoNotFound { searched: vec![dir.clone()] }),
        };
    }
    let starts = [std::env::current_exe().ok(), std::env::current_dir().ok()];
    let above =
        starts.iter().flatten().flat_map(|start| start.ancestors()).map(|dir| dir.join("models/demo"));
    let built = Path::new(env!("CARGO_MANIFEST_DIR")).join("demo");
    let searched: Vec<PathBuf> = above.chain([built]).collect();
    searched.iter().find(|dir| is_model(dir)).cloned().ok_or(ModelError::DemoNotFound { searched })
}
