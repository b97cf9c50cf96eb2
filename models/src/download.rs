//! Download of a snapshot into the hub's cache, by the hf-hub crate.
//!
//! hf-hub sets no timeout on reads, so a connection that goes silent would hang the start for ever. The
//! download therefore runs on a thread of its own and this one watches that bytes arrive.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::time::{Duration, Instant};

use hf_hub::api::Progress;
use hf_hub::api::sync::{ApiBuilder, ApiError, ApiRepo};
use hf_hub::{Cache, CacheRepo, Repo, RepoType};

use crate::hub::{HubId, HubOptions, weight_files};
use crate::shards::{INDEX, SINGLE};

/// What is fetched beside the weights, where the model has it.
const SMALL_FILES: [&str; 5] = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
];
/// Long enough not to fill a log with a download of minutes.
const LOG_EVERY: Duration = Duration::from_secs(10);

/// Fetches what serving needs of `id`. The branch is recorded in the cache only when every file is there, so
/// an interrupted download is never taken for a model; it resumes at the next start.
///
/// # Errors
/// Why it failed, for a person. After a stall the silent thread is left behind, blocked in a read: it holds
/// no lock of ours, and the process is about to exit.
pub(crate) fn download(id: &HubId, options: &HubOptions, weights: bool) -> Result<(), String> {
    let received = Arc::new(AtomicU64::new(0));
    let (done, outcome) = sync_channel(1);
    let (id, hub, counter) = (id.clone(), options.clone(), Arc::clone(&received));
    let work = move || {
        // The watcher may have given up; then nobody wants the outcome.
        let _ = done.send(fetch_all(&id, &hub, weights, &counter));
    };
    std::thread::Builder::new().name("hub-download".into()).spawn(work).map_err(|error| error.to_string())?;

    let tick = options.stall.min(Duration::from_secs(1));
    let (mut last, mut last_change, mut last_log) = (0, Instant::now(), Instant::now());
    loop {
        match outcome.recv_timeout(tick) {
            Ok(result) => return result,
            Err(RecvTimeoutError::Disconnected) => return Err("the download thread died".into()),
            Err(RecvTimeoutError::Timeout) => {}
        }
        let bytes = received.load(Ordering::Relaxed);
        if bytes != last {
            (last, last_change) = (bytes, Instant::now());
        } else if last_change.elapsed() >= options.stall {
            return Err(format!("no bytes for {:?} (after {bytes} bytes)", options.stall));
        }
        if last_log.elapsed() >= LOG_EVERY {
            tracing::info!(mib = bytes >> 20, "downloading");
            last_log = Instant::now();
        }
    }
}

fn fetch_all(id: &HubId, hub: &HubOptions, weights: bool, counter: &Arc<AtomicU64>) -> Result<(), String> {
    let cache = Cache::new(hub.cache.clone());
    let api = ApiBuilder::from_cache(cache.clone())
        .with_endpoint(hub.endpoint.clone())
        .with_token(hub.token.clone())
        .with_progress(false)
        .build()
        .map_err(|error| describe(&error))?;
    let branch = Repo::with_revision(id.repo.clone(), RepoType::Model, id.revision.clone());
    let info = api.repo(branch.clone()).info().map_err(|error| describe(&error))?;
    // All files from one commit, even if the branch moves meanwhile.
    let commit = Repo::with_revision(id.repo.clone(), RepoType::Model, info.sha.clone());
    let snapshot = Snapshot { repo: api.repo(commit.clone()), cached: cache.repo(commit), counter };

    let offered = |file: &str| info.siblings.iter().any(|sibling| sibling.rfilename == file);
    let mut dir: Option<PathBuf> = None;
    for file in SMALL_FILES.into_iter().filter(|file| offered(file)) {
        dir = snapshot.fetch(file)?.parent().map(Path::to_owned);
    }
    if weights {
        let dir = dir.ok_or("the repository has no config.json")?;
        if offered(INDEX) {
            snapshot.fetch(INDEX)?;
        } else if !offered(SINGLE) {
            return Err("the repository has no safetensors weights".into());
        }
        for file in weight_files(&dir)? {
            snapshot.fetch(&file)?;
        }
    }
    cache.repo(branch).create_ref(&info.sha).map_err(|error| format!("cannot write to the cache: {error}"))
}

/// One commit, on the hub and in the cache.
struct Snapshot<'a> {
    repo: ApiRepo,
    cached: CacheRepo,
    counter: &'a Arc<AtomicU64>,
}

impl Snapshot<'_> {
    /// Fetches one file, unless the cache has it; returns its path in the snapshot.
    fn fetch(&self, file: &str) -> Result<PathBuf, String> {
        loop {
            if let Some(path) = self.cached.get(file) {
                return Ok(path);
            }
            let progress = Counted { received: Arc::clone(self.counter), file: String::new() };
            match self.repo.download_with_progress(file, progress) {
                Ok(path) => return Ok(path),
                // Prefill and decode often start together. The other process watches its own download, and
                // its lock goes with it, so waiting for it counts as progress here.
                Err(ApiError::LockAcquisition(_)) => {
                    tracing::info!(file, "another process is downloading this file; waiting for it");
                    self.counter.fetch_add(1, Ordering::Relaxed);
                }
                Err(error) => return Err(format!("{file}: {}", describe(&error))),
            }
        }
    }
}

/// Counts the bytes of a download, for the watcher.
struct Counted {
    received: Arc<AtomicU64>,
    file: String,
}

impl Progress for Counted {
    fn init(&mut self, size: usize, filename: &str) {
        // hf-hub announces a file twice.
        if self.file != filename {
            filename.clone_into(&mut self.file);
            tracing::info!(file = filename, bytes = size, "downloading");
        }
    }

    fn update(&mut self, size: usize) {
        self.received.fetch_add(size as u64, Ordering::Relaxed);
    }

    fn finish(&mut self) {}
}

/// The error with its causes, and what a status means here.
fn describe(error: &ApiError) -> String {
    let mut text = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    let hint = [
        ("401", " (no such model, or it is private or gated: set HF_TOKEN)"),
        ("403", " (no access with this token: accept the model's terms, or set HF_TOKEN)"),
        ("404", " (no such model, revision or file)"),
    ];
    let known = hint.iter().find(|(status, _)| text.contains(&format!("status code {status}")));
    text + known.map_or("", |(_, hint)| hint)
}
