//! A pool as workers have it (one anonymous mapping, huge pages asked for), with known content.

use std::io;
use std::ptr::{NonNull, null_mut};
use std::sync::Arc;

use transfer::{Region, Scratch};

use super::case::Geometry;
use crate::error::{BenchError, Result};

/// The pool of one process.
pub struct Pool {
    region: Region,
    pub scratch: Scratch,
}

/// An anonymous mapping.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; who may touch it when is said where it is touched.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice aliases nothing.
        let base = unsafe { libc::mmap(null_mut(), len, prot, flags, -1, 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was mapped just now. The advice is a hint, its failure changes nothing.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let base = NonNull::new(base.cast()).expect("mmap gave a null address. This is a bug.");
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and nobody holds it any more.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

fn word(seed: u64, index: u64) -> u64 {
    (index + (seed << 48)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Pool {
    /// A pool of `blocks` blocks filled with what `seed` decides.
    pub fn new(geometry: &Geometry, blocks: u32, seed: u64) -> Result<Self> {
        let scratch = Scratch::after(u64::from(blocks), geometry.block_bytes());
        let len = u64::from(blocks + scratch.blocks) * geometry.block_bytes();
        let mapping = Arc::new(
            Mapping::new(len as usize).map_err(BenchError::io(format!("a pool of {blocks} blocks")))?,
        );
        // SAFETY: the region keeps the mapping alive; a process touches its pool itself only between transfers.
        let region = unsafe { Region::new(mapping.base, mapping.len, mapping.clone()) };
        let pool = Self { region, scratch };
        pool.fill(seed, 0, pool.len());
        Ok(pool)
    }

    pub fn region(&self) -> &Region {
        &self.region
    }

    pub fn len(&self) -> u64 {
        self.region.len() as u64
    }

    /// Writes the seed's words over `len` bytes at `offset`, both multiples of 8.
    pub fn fill(&self, seed: u64, offset: u64, len: u64) {
        let words = offset / 8..(offset + len) / 8;
        let mut buffer = Vec::with_capacity(CHUNK);
        for start in words.clone().step_by(CHUNK / 8) {
            buffer.clear();
            let end = words.end.min(start + CHUNK as u64 / 8);
            buffer.extend((start..end).flat_map(|index| word(seed, index).to_le_bytes()));
            self.region.write(start * 8, &buffer).expect("within the pool. This is a bug.");
        }
    }

    /// Whether the word at `offset` is what the seed puts at `origin`.
    pub fn holds(&self, offset: u64, seed: u64, origin: u64) -> bool {
        let mut bytes = [0; 8];
        self.region.read(offset, &mut bytes).expect("within the pool. This is a bug.");
        u64::from_le_bytes(bytes) == word(seed, origin / 8)
    }

    /// The first `len` bytes.
    pub fn bytes(&self, len: u64) -> &[u8] {
        assert!(len <= self.len(), "{len} bytes of {}. This is a bug.", self.len());
        // SAFETY: inside the pool, and nothing is transferred while a baseline is measured.
        unsafe { std::slice::from_raw_parts(self.region.base(), len as usize) }
    }

    /// The first `len` bytes, to write to.
    pub fn bytes_mut(&mut self, len: u64) -> &mut [u8] {
        assert!(len <= self.len(), "{len} bytes of {}. This is a bug.", self.len());
        // SAFETY: as above; the pool is borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.region.base(), len as usize) }
    }
}

/// Filled at a time.
const CHUNK: usize = 1 << 20;
