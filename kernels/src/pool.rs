//! The KV pool: one allocation that holds every block, in host memory or on a device.

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::cuda::{Buffer, CudaError, Gpu, PoolView};
use crate::layout::{Half, KvLayout};

/// All KV blocks of a process in one allocation, in [`KvLayout`]'s order. Zeroed at start.
///
/// Interior mutability without locks: the engine guarantees that a block being written has no other reader or writer
/// (it belongs to one running request or to one ticket), and that shared blocks are only read.
#[derive(Debug)]
pub struct KvPool {
    memory: Memory,
    layout: KvLayout,
    num_blocks: usize,
    spare_blocks: usize,
}

#[derive(Debug)]
enum Memory {
    /// A mapping: anonymous, or of a file in memory.
    Host(NonNull<u8>, Option<Arc<OwnedFd>>),
    Device(Buffer),
}

// SAFETY: the pool is plain memory; concurrent access to one block is excluded by the engine's block ownership, which
// the accessors' contracts name.
unsafe impl Send for KvPool {}
// SAFETY: as above.
unsafe impl Sync for KvPool {}

impl KvPool {
    /// Reserves `num_blocks` blocks. Pages come as they are used, or by [`KvPool::populate`]; huge pages are asked for.
    ///
    /// Errors: the mapping is refused (too large for the address space or the overcommit limit).
    pub fn new(layout: KvLayout, num_blocks: usize) -> io::Result<Self> {
        Self::with_spare(layout, num_blocks, 0)
    }

    /// As [`KvPool::new`], with `spare_blocks` more behind them that belong to no request: for self-tests of transports.
    pub fn with_spare(layout: KvLayout, num_blocks: usize, spare_blocks: usize) -> io::Result<Self> {
        let len = pool_bytes(&layout, num_blocks.saturating_add(spare_blocks))?;
        Ok(Self { memory: Memory::Host(map(len, None)?, None), layout, num_blocks, spare_blocks })
    }

    /// As [`KvPool::with_spare`], in memory that another process can map: that of [`KvPool::file`]. It is huge pages only where
    /// the system gives them to shared memory (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`).
    ///
    /// Errors: as [`KvPool::new`], or the system has no such files.
    pub fn shared(layout: KvLayout, num_blocks: usize, spare_blocks: usize) -> io::Result<Self> {
        let len = pool_bytes(&layout, num_blocks.saturating_add(spare_blocks))?;
        // A file's memory is not promised by anybody: whether there is so much, only other memory tells.
        drop(Self::with_spare(layout, num_blocks, spare_blocks)?);
        let file = Arc::new(memory_file(len)?);
        let base = map(len, Some(&file))?;
        Ok(Self { memory: Memory::Host(base, Some(file)), layout, num_blocks, spare_blocks })
    }

    /// The file in memory that holds the pool from its first byte on; `None` where there is none.
    pub fn file(&self) -> Option<&Arc<OwnedFd>> {
        match &self.memory {
            Memory::Host(_, file) => file.as_ref(),
            Memory::Device(_) => None,
        }
    }

    /// Reserves `num_blocks` blocks on a device, in one allocation that other processes can map, and `spare_blocks` behind
    /// them as [`KvPool::with_spare`] does. Zeroed.
    ///
    /// Errors: [`CudaError::OutOfMemory`], or what the driver says.
    pub fn new_on(
        gpu: &Gpu,
        layout: KvLayout,
        num_blocks: usize,
        spare_blocks: usize,
    ) -> Result<Self, CudaError> {
        let bytes = pool_bytes(&layout, num_blocks.saturating_add(spare_blocks));
        let bytes = bytes.map_err(|error| CudaError::Kernel(error.to_string()))?;
        Ok(Self { memory: Memory::Device(gpu.zeroed(bytes)?), layout, num_blocks, spare_blocks })
    }

    /// What kernels on the device see; `None` in host memory.
    pub fn on_device(&self) -> Option<PoolView<'_>> {
        match &self.memory {
            Memory::Host(..) => None,
            Memory::Device(buffer) => Some(PoolView { view: buffer.view(), layout: self.layout }),
        }
    }

    /// The number of the CUDA device whose memory this is; `None` where the processor can read it.
    pub fn device(&self) -> Option<u32> {
        match &self.memory {
            Memory::Device(buffer) if !buffer.gpu().is_emulated() => Some(buffer.gpu().info().ordinal as u32),
            Memory::Host(..) | Memory::Device(_) => None,
        }
    }

    /// Copies `to.len()` bytes from `offset` to host memory, for a pool on a device. Beside what computes there.
    pub fn read_device(&self, offset: usize, to: &mut [u8]) -> Result<(), CudaError> {
        self.buffer().read(offset, to)
    }

    /// Copies `from` to the pool at `offset`, for a pool on a device. Beside what computes there.
    pub fn write_device(&self, offset: usize, from: &[u8]) -> Result<(), CudaError> {
        self.buffer().write(offset, from)
    }

    /// The device that has it; `None` in host memory.
    pub fn gpu(&self) -> Option<&Gpu> {
        match &self.memory {
            Memory::Host(..) => None,
            Memory::Device(buffer) => Some(buffer.gpu()),
        }
    }

    /// Whether other processes can map the pool, for a pool on a device.
    pub fn check_export(&self) -> Result<(), CudaError> {
        self.buffer().check_export()
    }

    fn buffer(&self) -> &Buffer {
        let Memory::Device(buffer) = &self.memory else {
            panic!("the pool is in host memory. This is a bug.")
        };
        buffer
    }

    pub fn layout(&self) -> &KvLayout {
        &self.layout
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    /// Blocks behind the last ordinary one.
    pub fn spare_blocks(&self) -> usize {
        self.spare_blocks
    }

    /// Has the system give its pages to `blocks`, in host memory, so that whoever writes there first does not wait for them to
    /// be cleared. Changes no byte, and may run beside anything.
    ///
    /// Errors: the system has no such call (Linux before 5.14), or no memory.
    pub fn populate(&self, blocks: Range<usize>) -> io::Result<()> {
        let Memory::Host(base, _) = &self.memory else { return Ok(()) };
        let of = |block: usize| block.min(self.num_blocks) * self.layout.block_bytes();
        let page = 1 << 12;
        let (start, end) = (of(blocks.start) / page * page, of(blocks.end));
        // SAFETY: the range is within the mapping, which begins with a page and ends with one.
        let outcome = unsafe {
            libc::madvise(
                base.as_ptr().add(start).cast(),
                end.saturating_sub(start),
                libc::MADV_POPULATE_WRITE,
            )
        };
        if outcome == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// Bytes of the whole pool, spare blocks included.
    pub fn len(&self) -> usize {
        (self.num_blocks + self.spare_blocks) * self.layout.block_bytes()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Address of the first block, for registration with a transport. On a device it is the device's.
    pub fn base(&self) -> NonNull<u8> {
        match &self.memory {
            Memory::Host(base, _) => *base,
            Memory::Device(buffer) => NonNull::new(buffer.address() as *mut u8)
                .expect("device memory has no null address. This is a bug."),
        }
    }

    fn host(&self) -> NonNull<u8> {
        let Memory::Host(base, _) = &self.memory else {
            panic!("the CPU reads a pool on a device. This is a bug.")
        };
        *base
    }

    /// Start of the keys or values of one layer of a block: `block_size` rows of `row()` elements.
    /// Panics on a block beyond the pool, which is a bug of the caller's block table.
    pub fn half_ptr(&self, block: u32, layer: usize, half: Half) -> *mut u8 {
        assert!((block as usize) < self.num_blocks, "block {block} of {}. This is a bug.", self.num_blocks);
        assert!(
            layer < self.layout.num_layers,
            "layer {layer} of {}. This is a bug.",
            self.layout.num_layers
        );
        // SAFETY: block and layer are in range, so the offset lies inside the mapping.
        unsafe { self.host().as_ptr().add(self.layout.half(block, layer, half).start) }
    }

    /// Shows `len` bytes at `offset`, while nobody writes them.
    pub fn inspect<T>(&self, offset: usize, len: usize, look: impl FnOnce(&[u8]) -> T) -> T {
        let end = offset.checked_add(len).filter(|&end| end <= self.len());
        assert!(end.is_some(), "{len} bytes at {offset} of {}. This is a bug.", self.len());
        match &self.memory {
            Memory::Host(base, _) => {
                // SAFETY: the range lies inside the mapping, checked above; the caller owns the blocks.
                look(unsafe { std::slice::from_raw_parts(base.as_ptr().add(offset), len) })
            }
            Memory::Device(buffer) => {
                let mut bytes = vec![0; len];
                buffer.read(offset, &mut bytes).expect("blocks can be copied from the device");
                look(&bytes)
            }
        }
    }

    /// A copy of one block's bytes: for tests and checksums, while nobody writes the block.
    pub fn read_block(&self, block: u32) -> Vec<u8> {
        assert!((block as usize) < self.num_blocks, "block {block} of {}. This is a bug.", self.num_blocks);
        let span = self.layout.block(block);
        self.inspect(span.start, span.len(), <[u8]>::to_vec)
    }
}

/// Maps `len` zeroed bytes, of `file` or of nothing, and asks for huge pages.
fn map(len: usize, file: Option<&OwnedFd>) -> io::Result<NonNull<u8>> {
    let (flags, fd) = match file {
        Some(file) => (libc::MAP_SHARED, file.as_raw_fd()),
        None => (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1),
    };
    // SAFETY: a mapping at an address of the kernel's choice aliases nothing of this process's.
    let base =
        unsafe { libc::mmap(std::ptr::null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, fd, 0) };
    if base == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the range was mapped just now. The advice is a hint, its failure changes nothing.
    unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
    Ok(NonNull::new(base.cast()).expect("mmap gave a null address. This is a bug."))
}

/// A file of `len` bytes that is nowhere but in memory and keeps its length: who maps it can rely on every byte.
fn memory_file(len: usize) -> io::Result<OwnedFd> {
    let check = |outcome: i32| if outcome < 0 { Err(io::Error::last_os_error()) } else { Ok(outcome) };
    let mut limit = libc::rlimit { rlim_cur: libc::RLIM_INFINITY, rlim_max: libc::RLIM_INFINITY };
    // SAFETY: writes to `limit` only.
    check(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit) })?;
    if len as u64 > limit.rlim_cur {
        // Beyond it the system ends the process.
        let text = format!(
            "shared memory of {len} bytes is above the limit of {} bytes for files (ulimit -f)",
            limit.rlim_cur
        );
        return Err(io::Error::other(text));
    }
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a C string.
    let fd = check(unsafe { libc::memfd_create(c"kvferry-kv-pool".as_ptr(), flags) })?;
    // SAFETY: the descriptor is new and nobody else's.
    let file = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: calls on an open descriptor.
    unsafe {
        check(libc::ftruncate(fd, len as libc::off_t))?;
        check(libc::fcntl(
            fd,
            libc::F_ADD_SEALS,
            libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL,
        ))?;
    }
    Ok(file)
}

/// Bytes of a pool, which must be some and addressable.
fn pool_bytes(layout: &KvLayout, num_blocks: usize) -> io::Result<usize> {
    let len = num_blocks.checked_mul(layout.block_bytes());
    len.filter(|&len| len > 0 && len <= isize::MAX as usize).ok_or_else(|| {
        let text = format!("a KV pool of {num_blocks} blocks of {} bytes", layout.block_bytes());
        io::Error::new(io::ErrorKind::InvalidInput, text)
    })
}

impl Drop for KvPool {
    fn drop(&mut self) {
        if let Memory::Host(base, _) = &self.memory {
            // SAFETY: this mapping was made in `new` with this length and nobody holds the pool any more.
            unsafe { libc::munmap(base.as_ptr().cast(), self.len()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::KvDtype;

    #[test]
    fn a_populated_pool_has_its_pages_and_its_bytes() {
        let layout =
            KvLayout { num_layers: 3, num_kv_heads: 1, head_dim: 8, block_size: 16, dtype: KvDtype::Bf16 };
        let pool = KvPool::with_spare(layout, 1000, 1).unwrap();
        // SAFETY: nobody else has the pool.
        unsafe { *pool.half_ptr(1, 0, Half::Key) = 7 };
        let before = pool.read_block(1);
        // Beyond the end there is nothing to do.
        pool.populate(0..2000).unwrap();
        assert!(before[0] == 7 && pool.read_block(1) == before);
        let mut resident = vec![0_u8; (1000 * layout.block_bytes()).div_ceil(1 << 12)];
        let base = pool.half_ptr(0, 0, Half::Key).cast();
        // SAFETY: the mapping has these pages, and there is a byte for each.
        let outcome = unsafe { libc::mincore(base, 1000 * layout.block_bytes(), resident.as_mut_ptr()) };
        assert!(outcome == 0 && resident.iter().all(|page| page & 1 == 1));
    }

    const LAYOUT: KvLayout =
        KvLayout { num_layers: 3, num_kv_heads: 1, head_dim: 8, block_size: 16, dtype: KvDtype::Bf16 };

    #[test]
    fn a_shared_pool_is_a_file_that_keeps_its_length() {
        let pool = KvPool::shared(LAYOUT, 10, 1).unwrap();
        // SAFETY: nobody else has the pool.
        unsafe { *pool.half_ptr(1, 0, Half::Key) = 7 };
        let file = std::fs::File::from(pool.file().unwrap().try_clone().unwrap());
        assert_eq!(file.metadata().unwrap().len(), pool.len() as u64);
        let mut byte = [0];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut byte, LAYOUT.block(1).start as u64).unwrap();
        assert_eq!(byte, [7]);
        assert!(file.set_len(0).is_err() && file.set_len(1 << 20).is_err());
        assert!(KvPool::with_spare(LAYOUT, 10, 1).unwrap().file().is_none());
    }

    /// The system ended the process without a word.
    #[test]
    fn a_limit_for_files_ended_the_process_that_shared_a_pool() {
        let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: reads and sets this process's limit.
        unsafe {
            assert_eq!(libc::getrlimit(libc::RLIMIT_FSIZE, &mut limit), 0);
            let small = libc::rlimit { rlim_cur: 1024, ..limit };
            assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &small), 0);
        }
        let outcome = KvPool::shared(LAYOUT, 10, 1);
        // SAFETY: as above.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &limit) }, 0);
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("ulimit -f") && error.contains("1024"), "{error}");
    }

    /// Shared memory is given by the page, when it is touched: a pool larger than the machine was taken for one.
    #[test]
    fn a_shared_pool_is_refused_where_another_is() {
        let blocks = (1 << 45) / LAYOUT.block_bytes();
        assert_eq!(KvPool::new(LAYOUT, blocks).is_err(), KvPool::shared(LAYOUT, blocks, 0).is_err());
    }
}
