//! Blocks: who owns each, and which cached content can be found again.
//!
//! Invariants: every block is in exactly one state; a block is in the list of reusable blocks exactly when nobody holds
//! it; a cached block is found under its name until it is reused. All operations are O(1) per block.

use std::collections::HashMap;

use crate::api::TokenId;
use crate::hash::BlockHash;
use crate::kv_events::{self, KvChains, KvLog};

/// A block of the KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BlockId(pub u32);

/// Blocks by state; the sum is the capacity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Account {
    pub free: usize,
    /// Held by nobody, content still findable.
    pub cached: usize,
    pub running: usize,
    /// Granted to a prefill worker that has not settled yet.
    pub ticketed: usize,
    /// Of a request that is over, while a prefill worker may still write.
    pub quarantined: usize,
}

impl Account {
    pub fn sum(&self) -> usize {
        self.free + self.cached + self.running + self.ticketed + self.quarantined
    }
}

/// What a held block is held for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    Running,
    Ticketed,
    Quarantined,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// In the list; cached if it has content.
    Reusable,
    Held(Holder),
}

/// What a sealed block holds.
#[derive(Debug)]
struct Content {
    hash: BlockHash,
    parent: BlockHash,
    tokens: Box<[TokenId]>,
}

#[derive(Debug)]
struct Block {
    state: State,
    holders: u32,
    content: Option<Content>,
    previous: Option<u32>,
    next: Option<u32>,
}

/// All blocks of a worker. Reuse is in least-recently-released order, blocks without content first.
#[derive(Debug)]
pub struct BlockPool {
    blocks: Vec<Block>,
    names: HashMap<BlockHash, BlockId>,
    first: Option<u32>,
    last: Option<u32>,
    account: Account,
    /// What became findable and what can be found no more.
    pub log: KvLog,
}

impl BlockPool {
    pub fn new(num_blocks: usize) -> Self {
        let block =
            |_| Block { state: State::Reusable, holders: 0, content: None, previous: None, next: None };
        let mut pool = Self {
            blocks: (0..num_blocks).map(block).collect(),
            names: HashMap::new(),
            first: None,
            last: None,
            account: Account::default(),
            log: KvLog::default(),
        };
        for id in 0..num_blocks as u32 {
            pool.append(id);
            pool.account.free += 1;
        }
        pool
    }

    pub fn capacity(&self) -> usize {
        self.blocks.len()
    }

    pub fn account(&self) -> Account {
        self.account
    }

    /// Blocks that `allocate` could hand out now.
    pub fn reusable(&self) -> usize {
        self.account.free + self.account.cached
    }

    /// The block that holds `tokens` after `parent`, if it is cached. Compares the token ids, not only the name.
    pub fn find(&self, parent: BlockHash, hash: BlockHash, tokens: &[TokenId]) -> Option<BlockId> {
        let id = *self.names.get(&hash)?;
        let content = self.blocks[id.0 as usize].content.as_ref()?;
        (content.parent == parent && *content.tokens == *tokens).then_some(id)
    }

    /// True if nobody holds the block now, so that holding it takes from [`Self::reusable`].
    pub fn is_reusable(&self, id: BlockId) -> bool {
        self.blocks[id.0 as usize].state == State::Reusable
    }

    /// Holds a block found in the cache for one more running request.
    pub fn share(&mut self, id: BlockId) {
        if self.is_reusable(id) {
            self.unlink(id.0);
            self.account.cached -= 1;
            self.set_held(id, Holder::Running);
        }
        let block = &mut self.blocks[id.0 as usize];
        assert!(
            block.state == State::Held(Holder::Running),
            "{id:?} is {:?}, not shareable. This is a bug.",
            block.state
        );
        block.holders += 1;
    }

    /// `count` blocks with no content, or `None` and no change if there are not so many. The least recently released
    /// cached content is forgotten first.
    pub fn allocate(&mut self, count: usize, holder: Holder) -> Option<Vec<BlockId>> {
        if count > self.reusable() {
            return None;
        }
        let taken = (0..count).map(|_| {
            let id = self.first.expect("the list is as long as the account says. This is a bug.");
            self.unlink(id);
            match self.blocks[id as usize].content.take() {
                Some(content) => {
                    self.names.remove(&content.hash);
                    self.log.removed(content.hash);
                    self.account.cached -= 1;
                }
                None => self.account.free -= 1,
            }
            self.set_held(BlockId(id), holder);
            self.blocks[id as usize].holders = 1;
            BlockId(id)
        });
        Some(taken.collect())
    }

    /// Changes what an unshared held block is held for.
    pub fn reassign(&mut self, id: BlockId, holder: Holder) {
        assert_eq!(self.blocks[id.0 as usize].holders, 1, "{id:?} is shared. This is a bug.");
        self.leave_holder(id);
        self.set_held(id, holder);
    }

    /// Makes a running block's content findable. If the same content is cached in another block, that one stays, and
    /// the answer is false.
    pub fn seal(&mut self, id: BlockId, parent: BlockHash, hash: BlockHash, tokens: &[TokenId]) -> bool {
        let block = &mut self.blocks[id.0 as usize];
        assert!(
            block.state == State::Held(Holder::Running),
            "sealing {id:?}, {:?}. This is a bug.",
            block.state
        );
        let new = block.content.is_none() && !self.names.contains_key(&hash);
        if new {
            block.content = Some(Content { hash, parent, tokens: tokens.into() });
            self.names.insert(hash, id);
        }
        new
    }

    /// Gives up one hold. With the last one the block becomes cached, or free if it has no content.
    pub fn release(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        assert!(block.holders > 0, "{id:?} is held by nobody. This is a bug.");
        block.holders -= 1;
        if block.holders > 0 {
            return;
        }
        self.leave_holder(id);
        self.blocks[id.0 as usize].state = State::Reusable;
        if self.blocks[id.0 as usize].content.is_some() {
            self.append(id.0);
            self.account.cached += 1;
        } else {
            self.prepend(id.0);
            self.account.free += 1;
        }
    }

    /// Gives up a request's blocks, the tail first, so that a chain's head is the last to be forgotten.
    pub fn release_chain(&mut self, table: &[BlockId]) {
        table.iter().rev().for_each(|&id| self.release(id));
    }

    /// Forgets all cached content. Blocks in use keep theirs, but it cannot be found any more.
    pub fn reset_cache(&mut self) {
        self.names.clear();
        self.log.cleared();
        for block in &mut self.blocks {
            if block.content.take().is_some() && block.state == State::Reusable {
                self.account.cached -= 1;
                self.account.free += 1;
            }
        }
    }

    /// All that can be found, as chains.
    pub fn chains(&self) -> KvChains {
        let content = |id: &BlockId| self.blocks[id.0 as usize].content.as_ref();
        kv_events::chains(
            self.names.values().filter_map(content).map(|content| (content.hash, content.parent)),
        )
    }

    /// What the block is held for; `None` if nobody holds it.
    pub fn holder(&self, id: BlockId) -> Option<Holder> {
        match self.blocks[id.0 as usize].state {
            State::Held(holder) => Some(holder),
            State::Reusable => None,
        }
    }

    /// How many block tables hold the block.
    pub fn holders(&self, id: BlockId) -> u32 {
        self.blocks[id.0 as usize].holders
    }

    /// Recounts everything from the blocks themselves. Panics, naming what differs: for tests and `--check-invariants`.
    pub fn check(&self) {
        let mut recount = Account::default();
        for block in &self.blocks {
            match block.state {
                State::Reusable if block.content.is_some() => recount.cached += 1,
                State::Reusable => recount.free += 1,
                State::Held(Holder::Running) => recount.running += 1,
                State::Held(Holder::Ticketed) => recount.ticketed += 1,
                State::Held(Holder::Quarantined) => recount.quarantined += 1,
            }
            assert_eq!(
                block.holders == 0,
                block.state == State::Reusable,
                "holders and state differ: {block:?}"
            );
        }
        assert_eq!(recount, self.account, "the account differs from the blocks");
        assert_eq!(recount.sum(), self.capacity(), "the account does not add up");
        let (mut at, mut length) = (self.first, 0);
        while let Some(id) = at {
            length += 1;
            assert!(length <= self.capacity(), "the list of reusable blocks has a loop");
            assert_eq!(self.blocks[id as usize].state, State::Reusable, "a held block is in the list");
            at = self.blocks[id as usize].next;
        }
        assert_eq!(length, self.reusable(), "the list misses reusable blocks");
        for (hash, id) in &self.names {
            let content = self.blocks[id.0 as usize].content.as_ref();
            assert_eq!(content.map(|content| content.hash), Some(*hash), "a name points at other content");
        }
    }

    fn count(&mut self, holder: Holder) -> &mut usize {
        match holder {
            Holder::Running => &mut self.account.running,
            Holder::Ticketed => &mut self.account.ticketed,
            Holder::Quarantined => &mut self.account.quarantined,
        }
    }

    fn set_held(&mut self, id: BlockId, holder: Holder) {
        self.blocks[id.0 as usize].state = State::Held(holder);
        *self.count(holder) += 1;
    }

    fn leave_holder(&mut self, id: BlockId) {
        let State::Held(holder) = self.blocks[id.0 as usize].state else {
            panic!("{id:?} is not held. This is a bug.");
        };
        *self.count(holder) -= 1;
    }

    fn append(&mut self, id: u32) {
        self.blocks[id as usize].previous = self.last;
        self.blocks[id as usize].next = None;
        match self.last.replace(id) {
            Some(last) => self.blocks[last as usize].next = Some(id),
            None => self.first = Some(id),
        }
    }

    fn prepend(&mut self, id: u32) {
        self.blocks[id as usize].previous = None;
        self.blocks[id as usize].next = self.first;
        match self.first.replace(id) {
            Some(first) => self.blocks[first as usize].previous = Some(id),
            None => self.last = Some(id),
        }
    }

    fn unlink(&mut self, id: u32) {
        let (previous, next) = (self.blocks[id as usize].previous, self.blocks[id as usize].next);
        match previous {
            Some(previous) => self.blocks[previous as usize].next = next,
            None => self.first = next,
        }
        match next {
            Some(next) => self.blocks[next as usize].previous = previous,
            None => self.last = previous,
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
