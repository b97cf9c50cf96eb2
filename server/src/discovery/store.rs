//! Records as files in one folder: `<worker id>.json`, alive as long as its modification time is renewed.
//!
//! Writers hold a lock on the folder's `.lock` (it goes with the process), write a temporary file and rename it, so that
//! readers see whole records only, and two workers of one id cannot both believe that they have it.

use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::{DiscoveryError, WorkerRecord};
use crate::router::WorkerId;

/// A record is some hundred bytes; anything much larger is not one.
const MAX_RECORD: u64 = 64 << 10;

/// How long to wait for another worker that registers: it takes milliseconds.
const LOCK_TIME: Duration = Duration::from_secs(5);

/// What a file holds.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    /// Seconds without renewal after which the record is void.
    lease_secs: f64,
    record: WorkerRecord,
}

/// A record read from a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub record: WorkerRecord,
    pub lease: Duration,
}

/// The folder.
#[derive(Clone, Debug)]
pub struct Store {
    dir: PathBuf,
    lease: Duration,
}

impl Store {
    /// Records in `dir`, written with `lease`.
    pub fn new(dir: PathBuf, lease: Duration) -> Self {
        Self { dir, lease }
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Writes the record, unless another living worker has its id. An expired one's is taken over.
    pub fn register(&self, record: &WorkerRecord) -> Result<(), DiscoveryError> {
        let path = self.path(&record.worker_id);
        let fault = |what: &str, error: &std::io::Error| fault(&format!("{what} {}", path.display()), error);
        std::fs::create_dir_all(&self.dir)
            .map_err(|error| self::fault(&format!("make folder {}", self.dir.display()), &error))?;
        let _lock = self.lock()?;
        if let Ok(found) = read(&path)
            && found.record.incarnation != record.incarnation
            && let Some(left) =
                age(&path).and_then(|age| found.lease.checked_sub(age)).filter(|left| !left.is_zero())
        {
            return Err(DiscoveryError::Taken {
                id: record.worker_id.clone(),
                owner: format!("worker {} at {}", found.record.incarnation, found.record.url),
                remaining_secs: left.as_secs_f64(),
            });
        }
        let stored = Stored { lease_secs: self.lease.as_secs_f64(), record: record.clone() };
        let json = serde_json::to_vec_pretty(&stored).expect("records are plain data. This is a bug.");
        let temporary = self.dir.join(format!(".{}.{}.tmp", record.worker_id, record.incarnation));
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(&json)?;
            file.sync_all()
        };
        let written = write().map_err(|error| fault("write", &error));
        let renamed = written
            .and_then(|()| std::fs::rename(&temporary, &path).map_err(|error| fault("rename to", &error)));
        // Whatever failed, nothing half-written stays.
        renamed.inspect_err(|_| drop(std::fs::remove_file(&temporary)))
    }

    /// Extends the lease of a record of ours. False if the file holds something else, or is not there.
    pub fn renew(&self, record: &WorkerRecord) -> std::io::Result<bool> {
        let path = self.path(&record.worker_id);
        match read(&path) {
            Ok(found) if found.record == *record => {
                File::options().write(true).open(&path)?.set_modified(SystemTime::now())?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Removes the record of this incarnation, and nothing else.
    pub fn remove(&self, worker_id: &str, incarnation: WorkerId) {
        let path = self.path(worker_id);
        let Ok(_lock) = self.lock() else { return };
        if read(&path).is_ok_and(|found| found.record.incarnation == incarnation)
            && let Err(error) = std::fs::remove_file(&path)
        {
            tracing::warn!(path = %path.display(), %error, "this worker's record stays until its lease is over");
        }
    }

    fn path(&self, worker_id: &str) -> PathBuf {
        self.dir.join(format!("{worker_id}.json"))
    }

    fn lock(&self) -> Result<File, DiscoveryError> {
        let path = self.dir.join(".lock");
        let fault = |error| fault(&format!("lock {}", path.display()), &error);
        let file = OpenOptions::new().create(true).truncate(false).write(true).open(&path).map_err(fault)?;
        let started = std::time::Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(std::fs::TryLockError::WouldBlock) if started.elapsed() < LOCK_TIME => {
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(std::fs::TryLockError::WouldBlock) => return Err(fault(ErrorKind::TimedOut.into())),
                Err(std::fs::TryLockError::Error(error)) => return Err(fault(error)),
            }
        }
    }
}

/// An id becomes a file's name, so it is a plain word.
pub fn is_worker_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._-".contains(&byte);
    (1..=128).contains(&id.len()) && !id.starts_with('.') && id.bytes().all(plain)
}

/// Reads one record; the error says why it is none.
pub fn read(path: &Path) -> Result<Found, String> {
    let metadata = std::fs::metadata(path).map_err(|error| error.to_string())?;
    if !metadata.is_file() {
        return Err("not a file".into());
    }
    if metadata.len() > MAX_RECORD {
        return Err(format!("{} bytes, expected at most {MAX_RECORD}", metadata.len()));
    }
    let mut bytes = Vec::new();
    let read = File::open(path).and_then(|file| file.take(MAX_RECORD).read_to_end(&mut bytes));
    read.map_err(|error| error.to_string())?;
    let stored: Stored = serde_json::from_slice(&bytes).map_err(|error| error.to_string())?;
    let id = &stored.record.worker_id;
    if path.file_name().and_then(|name| name.to_str()) != Some(&format!("{id}.json")) {
        return Err(format!("it is of worker {id:?}, expected the file's own name"));
    }
    let lease = Duration::try_from_secs_f64(stored.lease_secs).ok().filter(|lease| !lease.is_zero());
    let lease = lease.ok_or_else(|| format!("lease_secs is {}, expected more than 0", stored.lease_secs))?;
    Ok(Found { record: stored.record, lease })
}

/// How long ago the file was renewed; zero for one from the future.
pub fn age(path: &Path) -> Option<Duration> {
    let modified = std::fs::metadata(path).ok()?.modified().ok()?;
    Some(SystemTime::now().duration_since(modified).unwrap_or_default())
}

/// Errors of the file system in words that say what to do.
pub fn fault(what: &str, error: &std::io::Error) -> DiscoveryError {
    let hint = match error.kind() {
        ErrorKind::PermissionDenied => {
            "; give this user the right to write there, or choose another folder with --discovery-dir"
        }
        ErrorKind::StorageFull => "; the disk is full",
        ErrorKind::QuotaExceeded => "; the quota is used up",
        ErrorKind::ReadOnlyFilesystem => "; the file system is read-only",
        _ => "",
    };
    DiscoveryError::Backend { backend: "file", what: what.to_owned(), reason: format!("{error}{hint}") }
}
