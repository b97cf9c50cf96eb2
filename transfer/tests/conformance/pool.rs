//! Pools with known content, and what they should hold after transfers.

use std::ptr::NonNull;
use std::sync::Arc;

use transfer::{Region, Span};
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
    unsafe { Region::new(base, BYTES as usize, words) }
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
