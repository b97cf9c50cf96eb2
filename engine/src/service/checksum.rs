//! Checksums of KV bytes: xxh3 of each block's part, so that a mismatch names few of them.

use xxhash_rust::xxh3::xxh3_64;

use super::Service;
use crate::handoff::WriteNote;

impl Service {
    /// Sums of a write's source, cut into the parts of one block each.
    pub(super) fn sums_of_spans(&self, spans: &[transfer::Span], part: u64) -> Vec<u64> {
        let parts = spans.iter().flat_map(|span| (span.local..span.local + span.len).step_by(part as usize));
        parts.map(|offset| self.sum(offset, part)).collect()
    }

    /// Sums of whole blocks.
    pub(super) fn sums_of_blocks(&self, blocks: &[u32]) -> Vec<u64> {
        let len = self.block_bytes;
        blocks.iter().map(|&block| self.sum(u64::from(block) * len, len)).collect()
    }

    /// Whether what a note names has arrived as it was sent. True if it brings no checksums, or does not fit a ticket: then
    /// the core says what is wrong with it.
    pub(super) fn is_intact(&self, note: &[u8]) -> bool {
        let Some(note) = WriteNote::decode(note).filter(|note| !note.checksums.is_empty()) else {
            return true;
        };
        let Some(spans) = self.core.note_spans(&note) else { return true };
        spans.len() == note.checksums.len()
            && spans.iter().zip(&note.checksums).all(|(&(offset, len), &sum)| self.sum(offset, len) == sum)
    }

    fn sum(&self, offset: u64, len: u64) -> u64 {
        let pool = self.pool.as_ref().expect("a worker with a transport has a pool. This is a bug.");
        pool.inspect(offset as usize, len as usize, xxh3_64)
    }
}
