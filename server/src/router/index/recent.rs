//! What workers probably hold: the prompts that were sent to them lately.
//!
//! Each worker has its blocks in order of use. A use touches a whole prompt, the tail first and the head last, so that
//! every block was used after all blocks that follow it: whatever is dropped from the old end, for its age or for room, is
//! the end of a chain.

use std::time::Duration;

use super::holdings::{Holdings, Overlaps, TOGETHER};
use super::slots::{Slot, Slots};
use crate::router::policy::BlockKey;
use crate::router::worker::WorkerId;

/// Upper estimate of the bytes of a block: its node, its entry, and slack.
const BLOCK_BYTES: usize = 40 + 25;

#[derive(Debug)]
struct Node {
    key: BlockKey,
    /// Milliseconds of the last use.
    used: u64,
    older: Option<u32>,
    newer: Option<u32>,
}

#[derive(Debug, Default)]
struct Chain {
    oldest: Option<u32>,
    newest: Option<u32>,
    len: usize,
    capacity: Option<usize>,
}

/// Index of what our own decisions put where.
#[derive(Debug)]
pub struct RecentIndex {
    holdings: Holdings,
    workers: Slots<Chain>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    ttl: Duration,
    max_blocks: usize,
    len: usize,
}

/// A use that can be taken back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Used {
    /// Blocks `..known` were there before.
    pub known: usize,
    at: u64,
}

impl RecentIndex {
    /// Blocks live for `ttl` after their last use; all together take at most about `max_bytes`.
    pub fn new(ttl: Duration, max_bytes: usize) -> Self {
        Self {
            holdings: Holdings::default(),
            workers: Slots::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            ttl,
            max_blocks: (max_bytes / BLOCK_BYTES).max(1),
            len: 0,
        }
    }

    /// Blocks of all workers together.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        self.holdings.bytes() + self.nodes.capacity() * size_of::<Node>() + self.free.capacity() * 4
    }

    pub fn blocks_of(&self, worker: WorkerId) -> usize {
        self.workers.find(worker).map_or(0, |slot| self.workers.get(slot).len)
    }

    /// A worker with a pool of `capacity` blocks is never believed to hold more: its least recently used are dropped.
    pub fn set_capacity(&mut self, worker: WorkerId, capacity: Option<u64>) {
        if let Some(slot) = self.workers.find_or_add(worker) {
            self.workers.get_mut(slot).capacity = capacity.map(|blocks| blocks as usize);
        }
    }

    /// Leading blocks of `keys` that were sent to each worker within the time to live.
    pub fn matches(&mut self, keys: &[BlockKey], now: Duration) -> Overlaps {
        self.expire(now);
        let found = self.holdings.matches(keys);
        let mut overlaps: Vec<_> =
            found.into_iter().map(|(slot, blocks)| (self.workers.worker(slot), blocks)).collect();
        overlaps.sort_unstable();
        Overlaps(overlaps)
    }

    /// How many of the first `overlap` blocks were used after `since`: blocks near the head were used last.
    pub fn used_since(&self, worker: WorkerId, keys: &[BlockKey], overlap: u32, since: Duration) -> u32 {
        let Some(slot) = self.workers.find(worker) else { return 0 };
        let since = since.as_millis() as u64;
        let used = |key: &BlockKey| self.holdings.get(*key, slot).map(|node| self.nodes[node as usize].used);
        keys[..keys.len().min(overlap as usize)].partition_point(|key| used(key) > Some(since)) as u32
    }

    /// A prompt goes to the worker.
    pub fn touch(&mut self, worker: WorkerId, keys: &[BlockKey], now: Duration) -> Used {
        self.expire(now);
        let at = now.as_millis() as u64;
        let Some(slot) = self.workers.find_or_add(worker) else { return Used { known: keys.len(), at } };
        let mut known = keys.len();
        for (index, key) in keys.iter().enumerate().rev() {
            if (index + 1) % TOGETHER == 0 || index + 1 == keys.len() {
                self.holdings.prefetch(&keys[index / TOGETHER * TOGETHER..=index]);
            }
            match self.holdings.get(*key, slot) {
                Some(node) => {
                    self.unlink(slot, node);
                    self.append(slot, node, at);
                }
                None => {
                    known = index;
                    let node = self.new_node(*key);
                    self.holdings.insert(*key, slot, node);
                    self.append(slot, node, at);
                    self.len += 1;
                }
            }
        }
        self.stay_within_limits(slot);
        Used { known, at }
    }

    /// Takes back a use of a prompt that never reached the worker: what it added and nobody used since goes.
    pub fn untouch(&mut self, worker: WorkerId, keys: &[BlockKey], used: Used) {
        let Some(slot) = self.workers.find(worker) else { return };
        // From the tail on, and no further than the first block that was used since: what leads to it stays.
        for key in keys.get(used.known..).unwrap_or_default().iter().rev() {
            let Some(node) = self.holdings.get(*key, slot) else { continue };
            if self.nodes[node as usize].used != used.at {
                return;
            }
            self.drop_node(slot, node);
        }
    }

    /// Drops what was not used for the time to live.
    pub fn expire(&mut self, now: Duration) {
        let Some(limit) = now.checked_sub(self.ttl) else { return };
        let limit = limit.as_millis() as u64;
        let slots: Vec<_> = self.workers.iter().map(|(slot, ..)| slot).collect();
        for slot in slots {
            while let Some(oldest) = self.workers.get(slot).oldest
                && self.nodes[oldest as usize].used <= limit
            {
                self.drop_node(slot, oldest);
            }
        }
    }

    /// The worker holds nothing any more.
    pub fn clear(&mut self, worker: WorkerId) {
        let Some(slot) = self.workers.find(worker) else { return };
        while let Some(oldest) = self.workers.get(slot).oldest {
            self.drop_node(slot, oldest);
        }
    }

    /// The worker left.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        self.clear(worker);
        self.workers.remove(worker);
    }

    fn stay_within_limits(&mut self, slot: Slot) {
        let capacity = self.workers.get(slot).capacity.unwrap_or(usize::MAX);
        while self.workers.get(slot).len > capacity {
            let oldest = self.workers.get(slot).oldest.expect("it is not empty. This is a bug.");
            self.drop_node(slot, oldest);
        }
        while self.len > self.max_blocks {
            let oldest = self.workers.iter().filter_map(|(slot, _, chain)| Some((slot, chain.oldest?)));
            let (slot, node) = oldest
                .min_by_key(|(_, node)| self.nodes[*node as usize].used)
                .expect("the index is not empty. This is a bug.");
            self.drop_node(slot, node);
        }
    }

    fn new_node(&mut self, key: BlockKey) -> u32 {
        let node = Node { key, used: 0, older: None, newer: None };
        match self.free.pop() {
            Some(at) => {
                self.nodes[at as usize] = node;
                at
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        }
    }

    fn drop_node(&mut self, slot: Slot, node: u32) {
        self.unlink(slot, node);
        self.holdings.remove(self.nodes[node as usize].key, slot);
        self.free.push(node);
        self.len -= 1;
        if self.len == 0 {
            (self.nodes, self.free) = (Vec::new(), Vec::new());
        }
    }

    fn append(&mut self, slot: Slot, node: u32, used: u64) {
        let chain = self.workers.get_mut(slot);
        let older = chain.newest.replace(node);
        chain.oldest.get_or_insert(node);
        chain.len += 1;
        if let Some(older) = older {
            self.nodes[older as usize].newer = Some(node);
        }
        let entry = &mut self.nodes[node as usize];
        (entry.used, entry.older, entry.newer) = (used, older, None);
    }

    fn unlink(&mut self, slot: Slot, node: u32) {
        let (older, newer) = (self.nodes[node as usize].older, self.nodes[node as usize].newer);
        let chain = self.workers.get_mut(slot);
        chain.len -= 1;
        if older.is_none() {
            chain.oldest = newer;
        }
        if newer.is_none() {
            chain.newest = older;
        }
        if let Some(older) = older {
            self.nodes[older as usize].newer = newer;
        }
        if let Some(newer) = newer {
            self.nodes[newer as usize].older = older;
        }
    }
}
