//! A peer's pool mapped into this process, where both run on one machine: spans are then copied, by the thread that polls,
//! and the connection carries nothing but notifications and what settles them.
//!
//! A pool lies in a file in memory (memfd) that the peer opens through `/proc`, for which both must run as the same user and in
//! the same process namespace.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;

use serde::{Deserialize, Serialize};

use super::SocketTransport;
use super::outbound::Job;
use crate::error::TransferError;
use crate::lane::Lane;
use crate::registry::Backend;
use crate::transport::{Direction, Memory, Region, Span};

/// The transport that copies between mapped pools.
pub const BACKEND: Backend = Backend {
    name: "mmap",
    what: "the peer's pool mapped, one copy between processes of one machine, no library needed",
    family: super::BACKEND.family,
    lanes: None,
    device_memory: false,
    unusable: |_, _| None,
    open: |_, config, pool| {
        let why = match (pool.file(), pool.memory()) {
            (Some(_), _) => return Ok(Box::new(SocketTransport::new(&config.into(), pool, true)?)),
            (None, Memory::Cuda(device)) => format!("the KV pool lies on CUDA device {device}"),
            (None, Memory::Host) => "the KV pool lies in memory that other processes cannot map".into(),
        };
        Err(TransferError::Unavailable { name: "mmap".into(), why })
    },
};

/// What carries a peer's bytes, whose pool is mapped or not.
pub fn lane(is_mapped: bool) -> Lane {
    let (carrier, how) = match is_mapped {
        true => ("mmap/memory", "one copy"),
        false => ("tcp/socket", "copy-in, copy-out"),
    };
    Lane { carrier: carrier.into(), how: how.into() }
}

/// Bytes copied in one poll: less than a millisecond, which is how late anything else is noticed meanwhile, and more than what
/// [`crate::driver`] takes for no progress.
const SLICE: u64 = 8 << 20;

/// Where a peer finds a pool's file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    process: u32,
    descriptor: i32,
    /// What tells the file from any other of this machine.
    device: u64,
    inode: u64,
}

impl Export {
    /// `None` where others cannot map the pool.
    pub fn of(pool: &Region) -> Option<Self> {
        let descriptor = pool.file()?;
        let found = File::from(descriptor.try_clone().ok()?).metadata().ok()?;
        Some(Self {
            process: std::process::id(),
            descriptor: descriptor.as_raw_fd(),
            device: found.dev(),
            inode: found.ino(),
        })
    }

    /// Maps `len` bytes of the pool.
    ///
    /// Errors: the process is not to be seen from here, belongs to another user, or has gone; what is there is another file.
    pub fn map(&self, len: u64) -> io::Result<Mapping> {
        let path = format!("/proc/{}/fd/{}", self.process, self.descriptor);
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?;
        let found = file.metadata()?;
        if (found.dev(), found.ino()) != (self.device, self.inode) || found.len() < len {
            return Err(io::Error::other(format!("{path} is not the peer's pool of {len} bytes")));
        }
        // A file that became shorter would end this process when it is read.
        // SAFETY: a call on an open descriptor.
        let seals = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GET_SEALS) };
        if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
            return Err(io::Error::other(format!("{path} may become shorter")));
        }
        Mapping::new(&file, len as usize)
    }
}

/// A peer's pool, mapped. The memory stays when the peer ends.
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; who may touch which bytes when is settled by tickets, as for `Region`.
unsafe impl Send for Mapping {}
impl Mapping {
    fn new(file: &File, len: usize) -> io::Result<Self> {
        let (prot, fd) = (libc::PROT_READ | libc::PROT_WRITE, file.as_raw_fd());
        // SAFETY: a mapping at an address of the kernel's choice aliases nothing of this process's.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, libc::MAP_SHARED, fd, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was mapped just now. The advice is a hint, its failure changes nothing.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        Ok(Self { base: NonNull::new(base.cast()).expect("mmap gave a null address. This is a bug."), len })
    }

    /// Copies the part of `span` from `done` on, of at most `len` bytes, between `pool`, which is in host memory, and this one;
    /// returns how many bytes.
    fn copy(
        &self,
        direction: Direction,
        pool: &Region,
        span: Span,
        done: u64,
        len: u64,
    ) -> Result<u64, TransferError> {
        let len = len.min(span.len - done);
        let own = pool.checked(span.local + done, len)?;
        let (start, end) = (span.remote + done, span.remote + done + len);
        if end > self.len as u64 {
            return Err(TransferError::OutOfRange { offset: start, len, pool: self.len as u64 });
        }
        // SAFETY: both ranges were checked, `SocketTransport::map` that the pool is in host memory, and nobody else touches the
        // bytes of a transfer while it runs.
        unsafe {
            let (own, peers) = (pool.base().add(own.start), self.base.as_ptr().add(start as usize));
            match direction {
                Direction::Write => copy(own, peers, len as usize),
                Direction::Read => copy(peers, own, len as usize),
            }
        }
        Ok(len)
    }
}

/// A transfer whose bytes are being copied.
pub struct Copying {
    pub job: Job,
    /// The span, and how much of it is done.
    at: (usize, u64),
}

impl Copying {
    pub fn new(job: Job) -> Self {
        Self { job, at: (0, 0) }
    }

    /// Goes on for [`SLICE`] bytes. True when all are there.
    pub fn go_on(&mut self, mapping: &Mapping, pool: &Region) -> Result<bool, TransferError> {
        let mut left = SLICE;
        while left > 0 {
            let (index, done) = self.at;
            let Some(span) = self.job.spans.get(index) else { return Ok(true) };
            let copied = mapping.copy(self.job.direction, pool, *span, done, left)?;
            left -= copied;
            self.at = if done + copied == span.len { (index + 1, 0) } else { (index, done + copied) };
        }
        Ok(self.at.0 == self.job.spans.len())
    }
}

/// Copies `len` bytes past the caches, in which KV that goes elsewhere would displace what is computed with: memory then does
/// not read what is overwritten, either. (The C library does so from some 100 MB on where the cache is large.)
///
/// # Safety
/// The bytes may be read and written, and do not overlap.
unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::_mm_sfence;
        let head = to.align_offset(LINE).min(len);
        let (pages, lines) = ((len - head) / (WAYS * PAGE), (len - head) % (WAYS * PAGE) / LINE);
        // SAFETY: passed on from the caller; every line is inside, and those written begin at multiples of 64 bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, to, head);
            let (mut from, mut to) = (from.add(head), to.add(head));
            for _ in 0..pages {
                for at in (0..PAGE).step_by(LINE) {
                    (0..WAYS).for_each(|way| stream(from.add(way * PAGE + at), to.add(way * PAGE + at)));
                }
                (from, to) = (from.add(WAYS * PAGE), to.add(WAYS * PAGE));
            }
            (0..lines).for_each(|line| stream(from.add(line * LINE), to.add(line * LINE)));
            // What is streamed is ordered by this alone; the notification must come after it.
            _mm_sfence();
            let (done, rest) = (lines * LINE, (len - head) % LINE);
            std::ptr::copy_nonoverlapping(from.add(done), to.add(done), rest);
        }
    }
    // SAFETY: passed on from the caller.
    #[cfg(not(target_arch = "x86_64"))]
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, len)
    }
}

#[cfg(target_arch = "x86_64")]
const LINE: usize = 64;
#[cfg(target_arch = "x86_64")]
const PAGE: usize = 4096;
/// Pages copied side by side: memory has more to do at once than one page's stream of lines asks for.
#[cfg(target_arch = "x86_64")]
const WAYS: usize = 4;

/// Copies a line past the caches.
///
/// # Safety
/// 64 bytes may be read and written, those written from a multiple of 64 on.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
unsafe fn stream(from: *const u8, to: *mut u8) {
    use std::arch::x86_64::*;
    let (from, to): (*const __m128i, *mut __m128i) = (from.cast(), to.cast());
    // SAFETY: passed on from the caller.
    unsafe {
        let line: [__m128i; 4] = std::array::from_fn(|i| _mm_loadu_si128(from.add(i)));
        line.into_iter().enumerate().for_each(|(i, part)| _mm_stream_si128(to.add(i), part));
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made in `new` with this length, and whoever copies borrows it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_any_length_and_alignment_change_nothing_beside_them() {
        const ROOM: usize = 80_000;
        let from: Vec<u8> =
            (0..ROOM as u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8 | 1).collect();
        for start in [0, 1, 15, 16, 63, 64] {
            for len in [0, 1, 63, 64, 65, 128, 500, 16_384, 16_385, 16_448, 40_000, 65_599] {
                let mut to = vec![0u8; ROOM];
                // SAFETY: both vectors are that long.
                unsafe { copy(from.as_ptr().add(3), to.as_mut_ptr().add(start), len) };
                assert_eq!(to[start..start + len], from[3..3 + len], "{len} bytes to {start}");
                assert!(to[..start].iter().chain(&to[start + len..]).all(|&byte| byte == 0));
            }
        }
    }

    #[test]
    fn another_file_or_one_that_may_shrink_is_not_mapped() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let found = file.metadata().unwrap();
        let export = Export {
            process: std::process::id(),
            descriptor: file.as_raw_fd(),
            device: found.dev(),
            inode: found.ino(),
        };
        let error = |export: &Export, len| export.map(len).err().expect("refused").to_string();
        assert!(error(&export, 4096).contains("may become shorter"), "{}", error(&export, 4096));
        assert!(error(&export, 4097).contains("not the peer's pool of 4097 bytes"));
        assert!(error(&Export { inode: 1, ..export.clone() }, 4096).contains("not the peer's pool"));
        let gone = Export { descriptor: 1 << 20, ..export };
        assert!(error(&gone, 4096).contains("/fd/1048576"), "{}", error(&gone, 4096));
    }
}
