//! UCX's own log, caught in memory: the lanes that it chose, and its warnings as ours.
//!
//! `UCX_PROTO_INFO` makes UCX write a table for each kind of operation on each kind of connection when it first meets
//! it; nothing else tells truly what carries the bytes. The log is a file without a name (memfd), given to UCX as a path
//! under `/proc`, so that nothing is left behind however the process ends.

use std::ffi::CString;
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, OnceLock};

use super::tables::{Tables, WARNING};
use crate::lane::Lane;
use crate::transport::Direction;

/// The one log of the process: UCX is loaded once.
static LOG: OnceLock<Option<Mutex<UcxLog>>> = OnceLock::new();

/// Read at most this much at a time; a table has a few kilobytes.
const CHUNK: usize = 64 << 10;

struct UcxLog {
    file: File,
    /// How much of the file was read.
    read: u64,
    /// A line whose end has not been written yet.
    rest: Vec<u8>,
    tables: Tables,
    /// The last warnings, for errors that UCX reports by a number only.
    warnings: Vec<String>,
}

/// Warnings kept for [`last_warnings`].
const KEPT: usize = 3;

/// The path to give UCX as `UCX_LOG_FILE`; `None` where the system has no memfd.
pub fn file() -> Option<String> {
    let log = LOG.get_or_init(|| UcxLog::new().map(Mutex::new)).as_ref()?;
    Some(format!("/proc/self/fd/{}", lock(log).file.as_raw_fd()))
}

/// The lane that UCX uses for `direction` between this process and its peers; `None` before the first transfer, or
/// when UCX writes its log elsewhere. Where peers differ, all lanes in use.
pub fn lane(direction: Direction) -> Option<Lane> {
    let mut log = lock(LOG.get()?.as_ref()?);
    log.follow();
    log.tables.lane(direction)
}

/// What UCX warned of lately, for the text of an error.
pub fn last_warnings() -> Option<String> {
    let mut log = lock(LOG.get()?.as_ref()?);
    log.follow();
    (!log.warnings.is_empty()).then(|| log.warnings.join("; "))
}

fn lock(log: &Mutex<UcxLog>) -> MutexGuard<'_, UcxLog> {
    log.lock().unwrap_or_else(|e| e.into_inner())
}

impl UcxLog {
    fn new() -> Option<Self> {
        let name = CString::new("kvferry-ucx-log").expect("no NUL");
        // SAFETY: the name is NUL-terminated; the result is a new descriptor or -1.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return None;
        }
        // SAFETY: the descriptor is open and nobody else's.
        let file = File::from(unsafe { OwnedFd::from_raw_fd(fd) });
        Some(Self { file, read: 0, rest: Vec::new(), tables: Tables::default(), warnings: Vec::new() })
    }

    /// Takes what UCX has written since the last call, and gives its memory back.
    fn follow(&mut self) {
        // UCX writes through the C library's buffer. SAFETY: null stands for every stream that is open for writing.
        unsafe { libc::fflush(std::ptr::null_mut()) };
        let mut chunk = vec![0; CHUNK];
        let before = self.read;
        while let Ok(len @ 1..) = self.file.read_at(&mut chunk, self.read) {
            self.read += len as u64;
            self.rest.extend_from_slice(&chunk[..len]);
        }
        if self.read == before {
            return;
        }
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: the descriptor is open; only bytes that were read are dropped. A failure costs memory, no more.
        unsafe { libc::fallocate(self.file.as_raw_fd(), mode, 0, self.read as libc::off_t) };
        while let Some(end) = self.rest.iter().position(|&byte| byte == b'\n') {
            let line: Vec<u8> = self.rest.drain(..=end).collect();
            self.line(&String::from_utf8_lossy(&line[..end]));
        }
    }

    fn line(&mut self, line: &str) {
        if self.tables.line(line) {
            return;
        }
        if let Some((_, text)) = WARNING.iter().find_map(|level| line.split_once(level)) {
            let text = text.trim();
            tracing::warn!(target: "ucx", "{text}");
            if self.warnings.len() == KEPT {
                self.warnings.remove(0);
            }
            self.warnings.push(text.to_owned());
        }
    }
}
