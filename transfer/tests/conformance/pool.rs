//! Pools with known content, and what they should hold after transfers.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};

use kernels::{KvDtype, KvLayout, KvPool};
use transfer::{DeviceMemory, HostMemory, Memory, Region, Span};
use xxhash_rust::xxh3::xxh3_64;

/// Larger than what the kernel buffers for a TCP connection when 65 are under way.
pub const BLOCK: u64 = 256 << 10;
pub const BYTES: u64 = 132 * BLOCK;

fn word(seed: u64, index: u64) -> u64 {
    (index + (seed << 32)).wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

/// A pool for a transport.
pub fn region() -> Region {
    let words = Arc::new(vec![0u64; BYTES as usize / 8]);
    let base = NonNull::new(words.as_ptr() as *mut u8).expect("a vector has an address");
    // SAFETY: the vector lives as long as the region, nothing else touches it, and the tests read what was
    // written only after its notification.
    let region = unsafe { Region::new(base, BYTES as usize, words) };
    // Some tests' spans are whole pieces, some are not: both ways of posting are used.
    region.in_pieces_of(BLOCK / 4)
}

/// A pool that other processes can map.
pub fn shared_region() -> Region {
    let layout =
        KvLayout { num_layers: 4, num_kv_heads: 8, head_dim: 128, block_size: 16, dtype: KvDtype::Bf16 };
    assert_eq!(layout.block_bytes() as u64, BLOCK);
    let pool = Arc::new(KvPool::shared(layout, (BYTES / BLOCK) as usize, 0).expect("memory"));
    let file = pool.file().expect("a shared pool has a file").clone();
    // SAFETY: as in `region`, with the pool in place of the vector.
    unsafe { Region::new(pool.base(), pool.len(), pool) }.in_file(file)
}

/// A pool on a device that the processor cannot reach: only copies through the device do.
pub fn device_region() -> Region {
    let device = Arc::new(Device { bytes: Mutex::new(vec![0; BYTES as usize]), pinned: Arc::default() });
    let nowhere = NonNull::new(4096 as *mut u8).expect("not null");
    // SAFETY: nobody may read or write there, and whoever does is stopped by the system: the first page is not mapped.
    let region = unsafe { Region::new(nowhere, BYTES as usize, Arc::new(())) };
    region.on_device(Memory::Cuda(0), device)
}

struct Device {
    bytes: Mutex<Vec<u8>>,
    /// What was given out as pinned.
    pinned: Arc<Mutex<Vec<Range<usize>>>>,
}

impl Device {
    /// A transport's own threads copy from and to pinned memory only; the tests may do otherwise.
    fn check(&self, host: &[u8]) -> Result<(), String> {
        let by_transport = std::thread::current().name().is_some_and(|name| name.starts_with("kv-socket"));
        let (start, end) = (host.as_ptr() as usize, host.as_ptr() as usize + host.len());
        let is_pinned = self.pinned.lock().unwrap().iter().any(|at| at.start <= start && end <= at.end);
        if by_transport && !is_pinned { Err("a copy of memory that is not pinned".into()) } else { Ok(()) }
    }
}

impl DeviceMemory for Device {
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), String> {
        self.check(to)?;
        to.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + to.len()]);
        Ok(())
    }

    fn write(&self, offset: usize, from: &[u8]) -> Result<(), String> {
        self.check(from)?;
        self.bytes.lock().unwrap()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn bind_thread(&self) -> Result<(), String> {
        Ok(())
    }

    fn check_export(&self) -> Result<(), String> {
        Err("it is only a test's".into())
    }

    fn staging(&self, bytes: usize) -> Result<Box<dyn HostMemory>, String> {
        let bytes = vec![0; bytes];
        let start = bytes.as_ptr() as usize;
        let range = start..start + bytes.len();
        self.pinned.lock().unwrap().push(range);
        Ok(Box::new(Pinned { bytes, of: self.pinned.clone() }))
    }
}

struct Pinned {
    bytes: Vec<u8>,
    of: Arc<Mutex<Vec<Range<usize>>>>,
}

impl HostMemory for Pinned {
    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let start = self.bytes.as_ptr() as usize;
        self.of.lock().unwrap().retain(|range| range.start != start);
    }
}

pub fn fill(region: &Region, seed: u64) {
    region.write(0, &Mirror::new(seed).0).expect("a mirror is as large as a pool");
}

pub fn checksum(region: &Region) -> u64 {
    let mut bytes = vec![0; BYTES as usize];
    region.read(0, &mut bytes).expect("within the pool");
    xxh3_64(&bytes)
}

/// The test's own copy of a pool.
pub struct Mirror(Vec<u8>);

impl Mirror {
    pub fn new(seed: u64) -> Self {
        Self((0..BYTES / 8).flat_map(|i| word(seed, i).to_le_bytes()).collect())
    }

    pub fn copy(&mut self, from: &Self, spans: &[Span]) {
        for span in spans {
            let (local, remote, len) = (span.local as usize, span.remote as usize, span.len as usize);
            self.0[remote..remote + len].copy_from_slice(&from.0[local..local + len]);
        }
    }

    /// What a read of `spans` from `peer` does.
    pub fn take(&mut self, peer: &Self, spans: &[Span]) {
        let turned: Vec<_> =
            spans.iter().map(|s| Span { local: s.remote, remote: s.local, len: s.len }).collect();
        self.copy(peer, &turned);
    }

    pub fn checksum(&self) -> u64 {
        xxh3_64(&self.0)
    }
}
