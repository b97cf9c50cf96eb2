//! Reading the folder over and over: who joined, changed, left. Bad files are skipped one by one.

use std::collections::HashMap;
use std::ffi::OsString;
use std::path::Path;
use std::time::{Duration, SystemTime};

use super::Change;
use super::roster::Roster;
use super::store::{self, Found};

/// What tells two states of a file apart without reading it.
type Stamp = (Option<SystemTime>, u64);

#[derive(Debug)]
struct Known {
    stamp: Stamp,
    /// The last whole record in the file, and when the file was last renewed, by our own clock: the writer's may differ.
    alive: Option<(Found, Duration)>,
    bad: bool,
}

/// The state between two scans. Time is passed in.
#[derive(Debug, Default)]
pub struct Scan {
    files: HashMap<OsString, Known>,
    roster: Roster,
    invalid: u64,
    unreadable: bool,
}

impl Scan {
    /// Files, in all states that were seen, that held no record.
    pub fn invalid(&self) -> u64 {
        self.invalid
    }

    /// Looks at the folder; what changed since the last time. A folder that is gone holds no records: they end with their leases.
    pub fn scan(&mut self, dir: &Path, now: Duration) -> Vec<Change> {
        let names = match std::fs::read_dir(dir) {
            Ok(entries) => {
                self.unreadable = false;
                entries.filter_map(Result::ok).map(|entry| entry.file_name()).filter(is_record).collect()
            }
            Err(error) => {
                if !std::mem::replace(&mut self.unreadable, true) {
                    tracing::warn!(dir = %dir.display(), %error, "the discovery folder cannot be read");
                }
                Vec::new()
            }
        };
        for name in &names {
            self.look_at(dir, name, now);
        }
        if !self.unreadable {
            // A removed file is a worker that left; a file that turned bad keeps its last record for its lease.
            self.files.retain(|name, _| names.contains(name));
        }
        self.changes(now)
    }

    fn look_at(&mut self, dir: &Path, name: &OsString, now: Duration) {
        let path = dir.join(name);
        let metadata = std::fs::symlink_metadata(&path).ok();
        let stamp = metadata.map_or((None, 0), |metadata| (metadata.modified().ok(), metadata.len()));
        let known = self.files.get(name);
        if known.is_some_and(|known| known.stamp == stamp) {
            return;
        }
        let first_sight = known.is_none();
        let (before, was_bad) =
            self.files.remove(name).map_or((None, false), |known| (known.alive, known.bad));
        let (alive, bad) = match store::read(&path) {
            // An old file may be of a dead worker: it counts once it is renewed before our eyes.
            Ok(found) if first_sight && store::age(&path).is_none_or(|age| age >= found.lease) => {
                (None, false)
            }
            Ok(found) => (Some((found, now)), false),
            Err(reason) => {
                if !was_bad {
                    self.invalid += 1;
                    tracing::warn!(path = %path.display(), reason, "not a worker's record, skipped");
                }
                (before, true)
            }
        };
        self.files.insert(name.clone(), Known { stamp, alive, bad });
    }

    fn changes(&mut self, now: Duration) -> Vec<Change> {
        let alive = self.files.values().filter_map(|known| {
            let (found, renewed) = known.alive.as_ref()?;
            (now.saturating_sub(*renewed) < found.lease).then(|| found.record.clone())
        });
        self.roster.replace(alive, "its record is gone or its lease is over")
    }
}

fn is_record(name: &OsString) -> bool {
    let name = Path::new(name);
    name.extension().is_some_and(|extension| extension == "json")
        && !name.as_os_str().to_string_lossy().starts_with('.')
}
