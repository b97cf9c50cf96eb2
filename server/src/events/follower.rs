//! Following one worker's events: order, gaps, restarts, and its names made ours. Pure.

use std::collections::HashMap;

use engine::hash::{self, BlockHash};

use super::wire::{Batch, Domain, Event, Stored, Tier, WireHash};
use crate::router::policy::BlockKey;
use crate::router::shared::IndexChange;

/// Foreign names that are kept for one worker; no pool has more blocks than this.
const MAX_NAMES: usize = 1 << 22;

/// How a worker names blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Naming {
    /// As `engine::hash` does: its names are the index's.
    Ours,
    /// In its own way: blocks are named here from their token ids, and its names kept to know what it removes.
    Foreign,
}

/// What a batch means.
#[derive(Clone, Debug, PartialEq)]
pub enum Taken {
    /// It is the next one.
    Changes(Changes),
    /// It was taken already.
    Duplicate,
    /// Batches from `from` on were missed. Nothing was taken: repair, then offer it again.
    Gap { from: u64 },
    /// The worker started anew, and everything it said before is void: clear its index, then offer the batch again.
    Restarted,
    /// Its blocks have another size than those of the cluster.
    BlockSize { theirs: u32, ours: u32 },
}

/// What a batch changes in the index.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Changes {
    pub changes: Vec<IndexChange>,
    /// Blocks that cannot be named, since the block they follow is not known.
    pub orphans: usize,
    /// Events that make no sense, such as a wrong number of tokens.
    pub invalid: usize,
    /// The worker's block size, when this batch was the first to say it.
    pub block_size: Option<u32>,
}

/// What is known of one worker's stream.
#[derive(Debug)]
pub struct Follower {
    naming: Naming,
    block_size: Option<u32>,
    /// Number of the next batch; `None`: whichever comes first.
    next_seq: Option<u64>,
    /// Time of the last batch: a restarted worker counts from 0 again, but its clock goes on.
    last_timestamp: f64,
    names: HashMap<WireHash, BlockHash>,
}

impl Follower {
    /// Follows from the first batch that comes. `block_size` is the worker's, if it said.
    pub fn new(naming: Naming, block_size: Option<u32>) -> Self {
        Self { naming, block_size, next_seq: None, last_timestamp: 0.0, names: HashMap::new() }
    }

    /// Number of the next batch, if it is known.
    pub fn next_seq(&self) -> Option<u64> {
        self.next_seq
    }

    /// The index was brought to what it is before batch `next_seq`, or cleared: go on from there.
    pub fn restart_at(&mut self, next_seq: Option<u64>) {
        self.next_seq = next_seq;
        self.names.clear();
    }

    /// What is missing is missing for good: go on with the batch `seq`.
    pub fn skip_to(&mut self, seq: u64) {
        self.next_seq = Some(seq);
    }

    /// Looks at batch number `seq`.
    pub fn take(&mut self, seq: u64, batch: &Batch) -> Taken {
        let next = self.next_seq.unwrap_or(seq);
        if seq > next {
            return Taken::Gap { from: next };
        }
        if seq < next {
            if self.naming == Naming::Foreign && batch.timestamp > self.last_timestamp {
                self.restart_at(Some(0));
                return Taken::Restarted;
            }
            return Taken::Duplicate;
        }
        let mut changes = Changes::default();
        for event in &batch.events {
            match event {
                Event::BlockStored(stored) if stored.tier == Tier::Device => {
                    if let Some(misfit) = self.check_block_size(stored.block_size, &mut changes) {
                        return misfit;
                    }
                    self.stored(stored, &mut changes);
                }
                Event::BlockRemoved { block_hashes, tier: Tier::Device } => {
                    changes.changes.push(IndexChange::Remove(self.removed(block_hashes)));
                }
                Event::AllBlocksCleared => {
                    self.names.clear();
                    changes.changes.push(IndexChange::Clear);
                }
                // Slower tiers are not indexed.
                Event::BlockStored(_) | Event::BlockRemoved { .. } => {}
                Event::Unknown(_) => changes.invalid += 1,
            }
        }
        self.next_seq = Some(seq + 1);
        self.last_timestamp = self.last_timestamp.max(batch.timestamp);
        Taken::Changes(changes)
    }

    fn check_block_size(&mut self, theirs: u32, changes: &mut Changes) -> Option<Taken> {
        match self.block_size {
            Some(ours) => (ours != theirs).then_some(Taken::BlockSize { theirs, ours }),
            None => {
                self.block_size = Some(theirs);
                changes.block_size = Some(theirs);
                None
            }
        }
    }

    fn stored(&mut self, stored: &Stored, changes: &mut Changes) {
        let hashes = &stored.block_hashes;
        if self.naming == Naming::Ours {
            let parent = stored.parent.map(|parent| BlockKey(parent.0));
            let keys = hashes.iter().map(|hash| BlockKey(hash.0)).collect();
            changes.changes.push(IndexChange::Store { parent, keys });
            return;
        }
        let block_size = stored.block_size as usize;
        if block_size == 0 || stored.token_ids.len() != hashes.len() * block_size {
            changes.invalid += 1;
            return;
        }
        let above = match (stored.parent, &stored.domain) {
            // What no request of ours matches needs no name; when it is removed, it is not known.
            (_, Domain::Foreign) => return,
            (Some(parent), _) => self.names.get(&parent).copied(),
            (None, Domain::Salted(salt)) => Some(hash::root(Some(salt))),
            (None, Domain::Plain) => Some(hash::root(None)),
        };
        let Some(mut last) = above.filter(|_| self.names.len() + hashes.len() <= MAX_NAMES) else {
            changes.orphans += hashes.len();
            return;
        };
        let parent = stored.parent.map(|_| BlockKey(last.key()));
        let mut keys = Vec::with_capacity(hashes.len());
        for (hash, block) in hashes.iter().zip(stored.token_ids.chunks_exact(block_size)) {
            last = hash::chain(last, block);
            self.names.insert(*hash, last);
            keys.push(BlockKey(last.key()));
        }
        changes.changes.push(IndexChange::Store { parent, keys });
    }

    fn removed(&mut self, hashes: &[WireHash]) -> Vec<BlockKey> {
        match self.naming {
            Naming::Ours => hashes.iter().map(|hash| BlockKey(hash.0)).collect(),
            Naming::Foreign => hashes
                .iter()
                .filter_map(|hash| self.names.remove(hash))
                .map(|name| BlockKey(name.key()))
                .collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::router::Prompt;

    fn stored(hashes: &[u64], parent: Option<u64>, tokens: std::ops::Range<u32>, domain: Domain) -> Event {
        Event::BlockStored(Stored {
            block_hashes: hashes.iter().copied().map(WireHash).collect(),
            parent: parent.map(WireHash),
            token_ids: tokens.collect(),
            block_size: 16,
            tier: Tier::Device,
            domain,
        })
    }

    fn batch(timestamp: f64, events: Vec<Event>) -> Batch {
        Batch { timestamp, events, rank: None }
    }

    fn changes(taken: Taken) -> Changes {
        match taken {
            Taken::Changes(changes) => changes,
            other => panic!("{other:?}"),
        }
    }

    fn store(keys: &[BlockKey], parent: Option<BlockKey>) -> IndexChange {
        IndexChange::Store { parent, keys: keys.to_vec() }
    }

    /// Whatever a worker calls its blocks, they are found under the names that requests have.
    #[test]
    fn foreign_names_become_ours_through_the_tokens() {
        let mut follower = Follower::new(Naming::Foreign, None);
        let tokens: Vec<u32> = (0..64).collect();
        let names = Prompt::from_tokens(&tokens, None, 16).keys;
        let first = follower.take(0, &batch(1.0, vec![stored(&[11, 12], None, 0..32, Domain::Plain)]));
        let first = changes(first);
        assert_eq!((&first.changes[..], first.block_size), (&[store(&names[..2], None)][..], Some(16)));
        let more = vec![
            stored(&[13, 14], Some(12), 32..64, Domain::Plain),
            Event::BlockRemoved { block_hashes: vec![WireHash(14), WireHash(99)], tier: Tier::Device },
        ];
        let second = changes(follower.take(1, &batch(2.0, more)));
        assert_eq!(second.changes, [store(&names[2..], Some(names[1])), IndexChange::Remove(vec![names[3]])]);
        // kv-04: the same tokens under a salt are other blocks.
        let salted = Prompt::from_tokens(&tokens[..16], Some("t1"), 16).keys;
        let third = vec![stored(&[21], None, 0..16, Domain::Salted("t1".into()))];
        assert_eq!(changes(follower.take(2, &batch(3.0, third))).changes, [store(&salted, None)]);
        let fourth = vec![stored(&[31], None, 0..16, Domain::Foreign)];
        assert_eq!(changes(follower.take(3, &batch(4.0, fourth))), Changes::default());
    }

    #[test]
    fn our_names_are_taken_as_they_are() {
        let mut follower = Follower::new(Naming::Ours, Some(16));
        let events = vec![stored(&[1, 2], Some(7), 0..32, Domain::Plain), Event::AllBlocksCleared];
        let taken = changes(follower.take(5, &batch(1.0, events)));
        assert_eq!(
            taken.changes,
            [store(&[BlockKey(1), BlockKey(2)], Some(BlockKey(7))), IndexChange::Clear]
        );
    }

    #[test]
    fn a_gap_is_not_stepped_over() {
        let mut follower = Follower::new(Naming::Ours, Some(16));
        let empty = |timestamp| batch(timestamp, vec![]);
        assert!(matches!(follower.take(5, &empty(1.0)), Taken::Changes(_)));
        assert_eq!(follower.take(5, &empty(1.0)), Taken::Duplicate);
        assert_eq!(follower.take(8, &empty(4.0)), Taken::Gap { from: 6 });
        for seq in 6..=8 {
            assert!(matches!(follower.take(seq, &empty(seq as f64)), Taken::Changes(_)));
        }
        // After a snapshot, what it includes comes again.
        follower.restart_at(Some(20));
        assert_eq!(follower.take(12, &empty(12.0)), Taken::Duplicate);
        assert!(matches!(follower.take(20, &empty(20.0)), Taken::Changes(_)));
    }

    /// vLLM has no incarnation: a number that goes back is a restart if the clock went on, else a repetition.
    #[test]
    fn a_restart_voids_what_was_said_before() {
        let mut follower = Follower::new(Naming::Foreign, Some(16));
        for seq in 0..4 {
            changes(
                follower.take(seq, &batch(seq as f64, vec![stored(&[seq + 1], None, 0..16, Domain::Plain)])),
            );
        }
        assert_eq!(follower.take(2, &batch(2.0, vec![])), Taken::Duplicate);
        let anew = batch(100.0, vec![stored(&[9], Some(4), 16..32, Domain::Plain)]);
        assert_eq!(follower.take(1, &anew), Taken::Restarted);
        assert_eq!(follower.take(1, &anew), Taken::Gap { from: 0 });
        assert!(matches!(follower.take(0, &batch(99.0, vec![])), Taken::Changes(_)));
        // A parent of the old life is unknown in the new one.
        assert_eq!(changes(follower.take(1, &anew)).orphans, 1);
    }

    /// Batches as vLLM 0.32 sent them: 1,600 tokens in blocks of 32, then two removals and a store.
    #[test]
    fn vllm_0_32_s_own_batches_are_followed() {
        let read = |bytes: &[u8]| Batch::decode(bytes).unwrap();
        let first = read(include_bytes!("../../tests/fixtures/vllm_0.32_seq0.msgpack"));
        let fourth = read(include_bytes!("../../tests/fixtures/vllm_0.32_seq3.msgpack"));
        assert_eq!((first.rank, fourth.events.len()), (Some(0), 3));
        let mut follower = Follower::new(Naming::Foreign, None);
        let taken = changes(follower.take(0, &first));
        let prompt = |first| [first].into_iter().chain(1000..2599).collect::<Vec<u32>>();
        let names = Prompt::from_tokens(&prompt(101), None, 32).keys;
        assert_eq!((taken.block_size, taken.invalid, taken.orphans), (Some(32), 0, 0));
        assert_eq!(taken.changes, [store(&names, None)]);
        follower.skip_to(3);
        let taken = changes(follower.take(3, &fourth));
        let [IndexChange::Remove(one), IndexChange::Remove(other), stored] = &taken.changes[..] else {
            panic!("two removals and a store, found {:?}", taken.changes)
        };
        let removed: Vec<_> = one.iter().chain(other).collect();
        assert!(removed.len() == 2 && removed.iter().all(|key| names.contains(key)), "{removed:?}");
        let names = Prompt::from_tokens(&prompt(104), None, 32).keys;
        assert_eq!(*stored, store(&names, None));
    }

    /// rt-02: both values are there to be said.
    #[test]
    fn another_block_size_is_refused() {
        let mut follower = Follower::new(Naming::Foreign, Some(32));
        let taken = follower.take(0, &batch(1.0, vec![stored(&[1], None, 0..16, Domain::Plain)]));
        assert_eq!(taken, Taken::BlockSize { theirs: 16, ours: 32 });
    }

    #[test]
    fn events_that_make_no_sense_are_counted_and_left_out() {
        let mut follower = Follower::new(Naming::Foreign, Some(16));
        let events = vec![
            stored(&[1, 2], None, 0..31, Domain::Plain),
            Event::Unknown("BlockMoved".into()),
            stored(&[3], Some(404), 0..16, Domain::Plain),
            stored(&[4], None, 0..16, Domain::Plain),
        ];
        let taken = changes(follower.take(0, &batch(1.0, events)));
        assert_eq!((taken.invalid, taken.orphans, taken.changes.len()), (2, 1, 1));
    }
}
