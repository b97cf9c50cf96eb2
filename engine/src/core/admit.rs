//! Giving blocks to a request: cached ones first, then new ones.

use super::Core;
use crate::handle::RequestId;
use crate::pool::{BlockId, Holder};

impl Core {
    /// The cached blocks that a request's tokens begin with. The last token is always left to compute.
    pub(super) fn cached_prefix(&mut self, id: RequestId) -> Vec<BlockId> {
        let block_size = self.config.block_size;
        let request = self.requests.get_mut(&id).expect("looked up by the caller. This is a bug.");
        let full = (request.tokens.len() - 1) / block_size;
        let mut found = Vec::new();
        for index in 0..full {
            let (parent, hash) = request.block_hash(index, block_size);
            let tokens = &request.tokens[index * block_size..(index + 1) * block_size];
            match self.pool.find(parent, hash, tokens) {
                Some(block) => found.push(block),
                None => break,
            }
        }
        found
    }

    /// Blocks kept free when others run, so that a request admitted now is not preempted in the next step: one for each
    /// running request, which may need one more at any time.
    fn watermark(&self) -> usize {
        self.running.len()
    }

    /// Gives a request all blocks for its present tokens, or nothing: a holder of half its blocks could wait for another
    /// half-holder for ever. Returns how many of its blocks were cached.
    pub(super) fn take_blocks(&mut self, id: RequestId, holder: Holder) -> Option<usize> {
        let needed = self.blocks_for(self.requests[&id].tokens.len());
        let cached = self.cached_prefix(id);
        let idle_cached = cached.iter().filter(|&&block| self.pool.is_reusable(block)).count();
        if self.pool.reusable() < needed - cached.len() + idle_cached + self.watermark() {
            return None;
        }
        cached.iter().for_each(|&block| self.pool.share(block));
        let fresh = self.pool.allocate(needed - cached.len(), holder).expect("counted above. This is a bug.");
        let request = self.request(id);
        assert!(request.block_table.is_empty(), "{id:?} takes blocks twice. This is a bug.");
        let count = cached.len();
        request.block_table = cached;
        request.block_table.extend(fresh);
        Some(count)
    }

    /// Counts a look-up in the prefix cache for the metrics, once for each admission.
    pub(super) fn count_lookup(&mut self, tokens: usize, hits: usize) {
        self.counters.prefix_queries += tokens as u64;
        self.counters.prefix_hits += hits as u64;
    }
}
