//! Memory for weights, in huge pages.
//!
//! A matrix-vector product reads every weight once: with 4 KiB pages this kind of machine reads 40 GB/s, with huge
//! pages 56 to 61 (shared/FACTS.md). The kernel gives them for anonymous memory when asked.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

const HUGE_PAGE: usize = 2 << 20;

/// Bytes reserved at a time. What is not used is never touched and costs no memory.
const CHUNK: usize = 256 << 20;

/// Slices start at multiples of this: a page, so that no two share one.
const ALIGNMENT: usize = 4096;

/// Hands out zeroed memory that is freed when the last slice of its chunk is.
#[derive(Debug, Default)]
pub struct Arena {
    chunk: Option<Arc<Mapping>>,
    used: usize,
}

/// `len` words of an [`Arena`].
#[derive(Debug)]
pub struct HugeSlice {
    _chunk: Arc<Mapping>,
    base: NonNull<u32>,
    len: usize,
}

// SAFETY: a slice is the only owner of its words, like a boxed slice.
unsafe impl Send for HugeSlice {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for HugeSlice {}

#[derive(Debug)]
struct Mapping {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: plain memory; access to it goes through slices that do not overlap.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Arena {
    /// `len` zeroed words.
    ///
    /// Errors: the mapping is refused.
    pub fn alloc(&mut self, len: usize) -> io::Result<HugeSlice> {
        let bytes = (len * size_of::<u32>()).next_multiple_of(ALIGNMENT);
        let chunk = match &self.chunk {
            Some(chunk) if self.used + bytes <= chunk.len - HUGE_PAGE => chunk.clone(),
            _ => {
                let chunk = Arc::new(Mapping::new(bytes.max(CHUNK) + HUGE_PAGE)?);
                (self.used, self.chunk) = (0, Some(chunk.clone()));
                chunk
            }
        };
        // SAFETY: the aligned start is at most a huge page after the mapping's, and `used + bytes` leaves that page.
        let base = unsafe { chunk.start.add(chunk.start.align_offset(HUGE_PAGE) + self.used) };
        self.used += bytes;
        Ok(HugeSlice { _chunk: chunk, base: base.cast(), len })
    }
}

impl Mapping {
    fn new(len: usize) -> io::Result<Self> {
        let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: an anonymous private mapping at an address of the kernel's choice aliases nothing.
        let start =
            unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags | libc::MAP_NORESERVE, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the range was mapped just now. The advice is a hint, its failure changes nothing.
        unsafe { libc::madvise(start, len, libc::MADV_HUGEPAGE) };
        Ok(Self { start: NonNull::new(start.cast()).expect("mmap gave a null address. This is a bug."), len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made in `new` with this length and no slice of it is left.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl HugeSlice {
    pub fn as_mut_ptr(&mut self) -> *mut u32 {
        self.base.as_ptr()
    }
}

impl DerefMut for HugeSlice {
    fn deref_mut(&mut self) -> &mut [u32] {
        // SAFETY: as in `deref`; this slice is the words' only owner, and is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl Deref for HugeSlice {
    type Target = [u32];

    fn deref(&self) -> &[u32] {
        // SAFETY: the words lie inside the chunk, which this slice keeps alive, and are initialised (zeroed by mmap).
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

/// Gives back the pages of a file mapping that lie wholly inside `bytes`: they count as this process's memory, and once
/// weights are packed nobody reads them again. Reading them all the same brings them back from the file.
///
/// # Safety
/// `bytes` lies in a mapping of a file that nobody has written through: pages without a file would lose their contents.
pub unsafe fn release_file_pages(bytes: &[u8]) {
    let start = bytes.as_ptr().align_offset(ALIGNMENT).min(bytes.len());
    let len = (bytes.len() - start) / ALIGNMENT * ALIGNMENT;
    if len > 0 {
        let first = bytes.as_ptr().wrapping_add(start).cast_mut();
        // SAFETY: whole pages of a mapping that the caller vouches for. The advice is a hint, its failure changes nothing.
        unsafe { libc::madvise(first.cast(), len, libc::MADV_DONTNEED) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_do_not_overlap_and_outlive_the_arena() {
        let mut arena = Arena::default();
        let mut slices: Vec<HugeSlice> = (1..40).map(|i| arena.alloc(i * 100_000).unwrap()).collect();
        drop(arena);
        for (i, slice) in slices.iter_mut().enumerate() {
            assert!(slice.iter().all(|&word| word == 0));
            // SAFETY: the slice is ours and `len` words long.
            unsafe { std::slice::from_raw_parts_mut(slice.as_mut_ptr(), slice.len()) }.fill(i as u32);
        }
        for (i, slice) in slices.iter().enumerate() {
            assert!(slice.len() == (i + 1) * 100_000 && slice.iter().all(|&word| word == i as u32));
        }
    }

    #[test]
    fn a_slice_larger_than_a_chunk_fits() {
        let slice = Arena::default().alloc(CHUNK / 4 + 12_345).unwrap();
        assert_eq!(slice[slice.len() - 1], 0);
    }
}
