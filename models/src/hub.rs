//! Models from the Hugging Face hub, through its cache.
//!
//! A snapshot that is complete in the cache is used as it is and the hub is not asked: a start needs no
//! network, and two processes on one machine serve the same commit. `org/name@revision` asks for another.

use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::download::download;
use crate::error::ModelError;
use crate::files::read_json;
use crate::shards::{INDEX, SINGLE, parse_index};

/// How the hub is reached.
#[derive(Debug, Clone)]
pub struct HubOptions {
    /// The folder with `models--org--name` in it.
    pub cache: PathBuf,
    pub endpoint: String,
    pub token: Option<String>,
    /// Never use the network.
    pub offline: bool,
    /// A download that gets no bytes for this long has failed.
    pub stall: Duration,
}

impl HubOptions {
    /// Reads `HF_HUB_CACHE`, `HF_HOME`, `XDG_CACHE_HOME`, `HOME`, `HF_ENDPOINT`, `HF_TOKEN`,
    /// `HF_TOKEN_PATH` and `HF_HUB_OFFLINE` through `var`, with the meaning that huggingface_hub gives them.
    pub fn from_vars(var: impl Fn(&str) -> Option<String>) -> Self {
        let var = |name: &str| var(name).filter(|value| !value.is_empty());
        let path = |name: &str| var(name).map(PathBuf::from);
        let user_cache =
            path("XDG_CACHE_HOME").unwrap_or_else(|| path("HOME").unwrap_or_default().join(".cache"));
        let home = path("HF_HOME").unwrap_or_else(|| user_cache.join("huggingface"));
        let token_file = path("HF_TOKEN_PATH").unwrap_or_else(|| home.join("token"));
        let stored_token = || std::fs::read_to_string(token_file).ok();
        let token = var("HF_TOKEN").or_else(stored_token).map(|token| token.trim().to_owned());
        let truthy = |value: String| ["1", "on", "yes", "true"].contains(&value.to_lowercase().as_str());
        Self {
            cache: path("HF_HUB_CACHE").unwrap_or_else(|| home.join("hub")),
            endpoint: var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_owned()),
            token: token.filter(|token| !token.is_empty()),
            offline: var("HF_HUB_OFFLINE").is_some_and(truthy),
            // Longer than any pause of a working connection, shorter than an operator's patience.
            stall: Duration::from_secs(60),
        }
    }
}

/// `org/name[@revision]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HubId {
    pub repo: String,
    pub revision: String,
}

impl HubId {
    pub fn parse(text: &str) -> Result<Self, ModelError> {
        let bad = |reason| Err(ModelError::BadModelName { name: text.to_owned(), reason });
        let (repo, revision) = text.split_once('@').unwrap_or((text, "main"));
        // Both become parts of paths in the cache, so nothing in them may climb out of it.
        let plain = |part: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
            !part.is_empty() && !part.starts_with('.') && part.chars().all(allowed)
        };
        match repo.split('/').collect::<Vec<_>>()[..] {
            [org, name] if plain(org) && plain(name) => {}
            [_] => return bad("there is no such folder, and a hub id has the form org/name"),
            _ => return bad("a hub id is org/name, of letters, digits, '.', '_' and '-'"),
        }
        if !revision.split('/').all(plain) {
            return bad("the revision after @ is not a branch, tag or commit");
        }
        Ok(Self { repo: repo.to_owned(), revision: revision.to_owned() })
    }
}

/// The folder of the snapshot of `id`, complete.
pub(crate) fn snapshot(id: &HubId, options: &HubOptions, weights: bool) -> Result<PathBuf, ModelError> {
    let reason = match cached(id, &options.cache, weights) {
        Ok(dir) => {
            tracing::info!(model = %id.repo, dir = %dir.display(), "model is in the hub cache");
            return Ok(dir);
        }
        Err(reason) => reason,
    };
    let (model, cache) = (format!("{}@{}", id.repo, id.revision), options.cache.clone());
    if options.offline {
        return Err(ModelError::NotInCache { model, cache, reason });
    }
    let hub_error = |reason| ModelError::Hub {
        model: model.clone(),
        endpoint: options.endpoint.clone(),
        cache: options.cache.clone(),
        reason,
    };
    download(id, options, weights).map_err(hub_error)?;
    cached(id, &options.cache, weights).map_err(hub_error)
}

/// The snapshot in the cache, or what is missing there.
fn cached(id: &HubId, cache: &Path, weights: bool) -> Result<PathBuf, String> {
    let folder = cache.join(format!("models--{}", id.repo.replace('/', "--")));
    let commit = commit_of(&folder, &id.revision);
    let dir = folder.join("snapshots").join(&commit);
    if !dir.is_dir() {
        return Err(format!("{} has no snapshot of {}", folder.display(), id.revision));
    }
    let mut needed = vec!["config.json".to_owned(), "tokenizer.json".to_owned()];
    if weights {
        needed.extend(weight_files(&dir)?);
    }
    match needed.into_iter().find(|file| !dir.join(file).is_file()) {
        Some(missing) => Err(format!("{} is missing in {}", missing, dir.display())),
        None => Ok(dir),
    }
}

/// A branch or tag is a file that holds a commit; a commit names its snapshot itself. A file that is empty is being written by
/// another process, which started together with this one.
fn commit_of(folder: &Path, revision: &str) -> String {
    for _ in 0..200 {
        match std::fs::read_to_string(folder.join("refs").join(revision)) {
            Ok(commit) if commit.trim().is_empty() => std::thread::sleep(Duration::from_millis(10)),
            Ok(commit) => return commit.trim().to_owned(),
            Err(_) => break,
        }
    }
    revision.to_owned()
}

/// The files that hold the weights of the snapshot in `dir`, whether they are there or not.
pub(crate) fn weight_files(dir: &Path) -> Result<Vec<String>, String> {
    let index = dir.join(INDEX);
    match read_json(&index).map_err(|error| error.to_string())? {
        Some(value) => {
            let files = parse_index(&index, &value).map_err(|error| error.to_string())?;
            Ok(files.into_keys().collect())
        }
        None => Ok(vec![SINGLE.to_owned()]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two workers that start together both write the name of the commit, and not in one go.
    #[test]
    fn a_ref_that_was_being_written_was_taken_for_a_commit() {
        let folder = tempfile::tempdir().unwrap();
        let refs = folder.path().join("refs");
        std::fs::create_dir(&refs).unwrap();
        std::fs::write(refs.join("main"), "").unwrap();
        let path = refs.join("main");
        let writer = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(50));
            std::fs::write(path, "c0ffee\n").unwrap();
        });
        assert_eq!(commit_of(folder.path(), "main"), "c0ffee");
        writer.join().unwrap();
        assert_eq!(commit_of(folder.path(), "0123"), "0123");
    }
}
