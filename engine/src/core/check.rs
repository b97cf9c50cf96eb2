//! Recounting everything, for tests and `--check-invariants`.

use std::collections::HashMap;

use super::Core;
use crate::api::TokenId;
use crate::pool::BlockId;
use crate::request::State;

impl Core {
    /// Panics, naming what is wrong.
    pub(super) fn check(&self) {
        if !self.config.check_invariants {
            return;
        }
        self.pool.check();
        let quarantined: usize = self.quarantine.values().map(|left| left.blocks.len()).sum();
        assert_eq!(quarantined, self.account().quarantined, "quarantine and account differ");
        for request in self.requests.values() {
            let covered = request.block_table.len() * self.config.block_size;
            assert!(request.num_computed <= covered, "{:?} computed beyond its blocks", request.id);
            assert!(
                request.state != State::Waiting || request.block_table.is_empty(),
                "a waiting request holds blocks"
            );
        }
        self.check_owners();
        for id in self.waiting.iter().chain(&self.ready).chain(&self.running).chain(&self.ungranted) {
            assert!(self.requests.contains_key(id), "{id:?} is listed but gone");
        }
    }

    /// Every hold on a block is that of one place in one block table, of a kept or pinned prompt, or of the quarantine;
    /// requests share a block only as the same full block of the same prefix.
    fn check_owners(&self) {
        type Content<'a> = (Option<&'a str>, &'a [TokenId]);
        let mut owners: HashMap<BlockId, (u32, Content<'_>)> = HashMap::new();
        for request in self.requests.values() {
            for (index, &block) in request.block_table.iter().enumerate() {
                let end = (index + 1) * self.config.block_size;
                let prefix = &request.tokens[..end.min(request.tokens.len())];
                let content = (request.cache_salt.as_deref(), prefix);
                let owner = owners.entry(block).or_insert((0, content));
                owner.0 += 1;
                let shareable = owner.1 == content && prefix.len() == end;
                assert!(owner.0 == 1 || shareable, "{block:?} is in two block tables with different content");
            }
        }
        let kept = self.kept.values().map(|kept| &kept.blocks);
        for block in kept.chain(self.pinned.iter().map(|pinned| &pinned.blocks)).flatten() {
            owners.entry(*block).or_insert((0, (None, &[]))).0 += 1;
        }
        for block in self.quarantine.values().flat_map(|left| &left.blocks) {
            assert!(
                owners.insert(*block, (1, (None, &[]))).is_none(),
                "{block:?} is in use and in quarantine"
            );
        }
        for block in (0..self.pool.capacity() as u32).map(BlockId) {
            let owners = owners.get(&block).map_or(0, |(count, _)| *count);
            assert_eq!(owners, self.pool.holders(block), "owners of {block:?} and its holders differ");
        }
    }
}
