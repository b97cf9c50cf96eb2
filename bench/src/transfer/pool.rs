//! A pool as workers have it, in host memory or on a GPU, with known content.

use std::sync::Arc;
use std::time::Instant;

use kernels::cuda::Gpu;
use kernels::cuda::blocks::{Side, copy_blocks};
use kernels::{KvLayout, KvPool};
use transfer::{Region, Scratch};

use super::case::Geometry;
use crate::error::{BenchError, Result};

/// The pool of one process.
pub struct Pool {
    region: Region,
    kv: Arc<KvPool>,
    pub scratch: Scratch,
}

fn word(seed: u64, index: u64) -> u64 {
    (index + (seed << 48)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

impl Pool {
    /// A pool of `blocks` blocks filled with what `seed` decides, on `gpu` or in host memory, which other processes can map if
    /// it `is_shared`.
    pub fn new(
        geometry: &Geometry,
        blocks: u32,
        seed: u64,
        gpu: Option<&Gpu>,
        is_shared: bool,
    ) -> Result<Self> {
        let scratch = Scratch::after(u64::from(blocks), geometry.block_bytes());
        let (layout, spare): (KvLayout, _) = (geometry.layout(), scratch.blocks as usize);
        let kv = match gpu {
            None if is_shared => KvPool::shared(layout, blocks as usize, spare)
                .map_err(BenchError::io(format!("a shared pool of {blocks} blocks")))?,
            None => KvPool::with_spare(layout, blocks as usize, spare)
                .map_err(BenchError::io(format!("a pool of {blocks} blocks")))?,
            Some(gpu) => KvPool::new_on(gpu, layout, blocks as usize, spare)?,
        };
        let kv = Arc::new(kv);
        // As a worker gives it to its transport. This process touches its pool itself only between transfers.
        let pool = Self { region: engine::service::region(&kv), kv, scratch };
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
            self.region.write(start * 8, &buffer).expect("within the pool, on a device that works");
        }
    }

    /// Whether the word at `offset` is what the seed puts at `origin`.
    pub fn holds(&self, offset: u64, seed: u64, origin: u64) -> bool {
        let mut bytes = [0; 8];
        self.region.read(offset, &mut bytes).expect("within the pool, on a device that works");
        u64::from_le_bytes(bytes) == word(seed, origin / 8)
    }

    /// Seconds of each of `repeats` copies of the first `bytes` into memory of the same kind, after one that does not count:
    /// in host memory by one thread, on a device by a kernel that copies block by block.
    pub fn copies(&self, bytes: u64, repeats: u32) -> Result<Vec<f64>> {
        let mut once = self.copier(bytes)?;
        (0..=repeats)
            .map(|_| {
                let start = Instant::now();
                once()?;
                Ok(start.elapsed().as_secs_f64())
            })
            .skip(1)
            .collect()
    }

    fn copier(&self, bytes: u64) -> Result<Box<dyn FnMut() -> Result<()> + '_>> {
        let (Some(gpu), Some(pool)) = (self.kv.gpu(), self.kv.on_device()) else {
            let mut to = vec![0; bytes as usize];
            return Ok(Box::new(move || {
                to.copy_from_slice(self.bytes(bytes));
                std::hint::black_box(&mut to);
                Ok(())
            }));
        };
        let block = self.kv.layout().block_bytes();
        let to = gpu.alloc(bytes as usize)?;
        Ok(Box::new(move || {
            let side = |blocks| Side { blocks, ids: None };
            copy_blocks(gpu, side(to.view()), side(pool.view), bytes as usize / block, block)?;
            Ok(gpu.synchronize()?)
        }))
    }

    /// The first `len` bytes of a pool in host memory.
    fn bytes(&self, len: u64) -> &[u8] {
        assert!(
            len <= self.len() && self.kv.gpu().is_none(),
            "{len} bytes of {}. This is a bug.",
            self.len()
        );
        // SAFETY: inside the pool, and nothing is transferred while a baseline is measured.
        unsafe { std::slice::from_raw_parts(self.region.base(), len as usize) }
    }
}

/// Filled at a time.
const CHUNK: usize = 1 << 20;
