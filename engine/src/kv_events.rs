//! What happens to the names in the prefix cache, for whoever keeps an index of it elsewhere.
//!
//! The pool writes a log; the engine's thread hands it on after each step as a batch. The way out is bounded and never
//! waits: batches that do not fit are counted, and the next one that does says how many are missing.

use std::collections::HashMap;
use std::sync::mpsc::{SyncSender, TrySendError};

use tokio::sync::oneshot;

use crate::api::TokenId;
use crate::hash::BlockHash;

/// One change, as consecutive blocks of one chain where there are several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvent {
    /// Blocks that can be found from now on. `parent` is `None` for a prompt's first blocks.
    Stored {
        parent: Option<BlockHash>,
        hashes: Vec<BlockHash>,
        /// Token ids of the blocks, one after the other.
        tokens: Vec<TokenId>,
        /// Of the request that computed them; only with a prompt's first blocks.
        cache_salt: Option<String>,
    },
    Removed(Vec<BlockHash>),
    Cleared,
}

/// Names that are in the prefix cache: chains, each with the block that it follows.
pub type KvChains = Vec<(Option<BlockHash>, Vec<BlockHash>)>;

/// What leaves the engine's thread.
#[derive(Debug)]
pub enum KvMessage {
    Batch {
        events: Vec<KvEvent>,
        /// Batches before this one that found no room.
        lost: u64,
    },
    /// Everything that is in the cache after the batches so far.
    Snapshot {
        chains: KvChains,
        /// Batches that found no room since the last one that did.
        lost: u64,
        reply: oneshot::Sender<KvSnapshot>,
    },
}

/// The contents of the prefix cache at one moment of the stream of batches.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvSnapshot {
    /// Number of the first batch that is not in it.
    pub next_seq: u64,
    pub chains: KvChains,
}

/// The log that the pool writes. Off, it costs nothing.
#[derive(Debug, Default)]
pub struct KvLog {
    on: bool,
    events: Vec<KvEvent>,
}

impl KvLog {
    pub fn turn_on(&mut self) {
        self.on = true;
    }

    pub fn take(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// A block became findable. `salt` is the request's, `first` says that nothing comes before the block.
    pub fn stored(
        &mut self,
        parent: BlockHash,
        hash: BlockHash,
        block: &[TokenId],
        first: bool,
        salt: Option<&str>,
    ) {
        if !self.on {
            return;
        }
        if let Some(KvEvent::Stored { hashes, tokens, .. }) = self.events.last_mut()
            && hashes.last() == Some(&parent)
        {
            hashes.push(hash);
            tokens.extend_from_slice(block);
            return;
        }
        self.events.push(KvEvent::Stored {
            parent: (!first).then_some(parent),
            hashes: vec![hash],
            tokens: block.to_vec(),
            cache_salt: salt.filter(|_| first).map(str::to_owned),
        });
    }

    pub fn removed(&mut self, hash: BlockHash) {
        if !self.on {
            return;
        }
        match self.events.last_mut() {
            Some(KvEvent::Removed(hashes)) => hashes.push(hash),
            _ => self.events.push(KvEvent::Removed(vec![hash])),
        }
    }

    pub fn cleared(&mut self) {
        if self.on {
            self.events.push(KvEvent::Cleared);
        }
    }
}

/// The engine's end of the way out.
#[derive(Debug)]
pub struct KvEventSink {
    sender: SyncSender<KvMessage>,
    lost: u64,
}

impl KvEventSink {
    pub fn new(sender: SyncSender<KvMessage>) -> Self {
        Self { sender, lost: 0 }
    }

    /// Hands on a batch, or counts it as lost if there is no room.
    pub fn publish(&mut self, events: Vec<KvEvent>) {
        if events.is_empty() {
            return;
        }
        match self.sender.try_send(KvMessage::Batch { events, lost: self.lost }) {
            Ok(()) => self.lost = 0,
            // With no reader left there is nobody to miss it.
            Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) => self.lost += 1,
        }
    }

    /// Sends `chains` the way of the batches, so that it is known which of them they include. Without room the
    /// reply is dropped, and whoever asked may ask again.
    pub fn snapshot(&mut self, chains: KvChains, reply: oneshot::Sender<KvSnapshot>) {
        if self.sender.try_send(KvMessage::Snapshot { chains, lost: self.lost, reply }).is_ok() {
            self.lost = 0;
        }
    }
}

/// Links `(block, parent)` pairs to chains; a parent comes before what follows it.
pub fn chains(blocks: impl Iterator<Item = (BlockHash, BlockHash)>) -> KvChains {
    let parents: HashMap<BlockHash, BlockHash> = blocks.collect();
    let mut children: HashMap<BlockHash, Vec<BlockHash>> = HashMap::new();
    for (block, parent) in &parents {
        children.entry(*parent).or_default().push(*block);
    }
    let mut begin: Vec<(Option<BlockHash>, BlockHash)> = parents
        .iter()
        .filter(|(_, parent)| !parents.contains_key(parent))
        .map(|(block, _)| (None, *block))
        .collect();
    let mut chains = Vec::new();
    while let Some((parent, first)) = begin.pop() {
        let mut chain = vec![first];
        let mut last = first;
        while let Some(next) = children.remove(&last) {
            let (main, branches) = next.split_first().expect("listed with a child. This is a bug.");
            begin.extend(branches.iter().map(|branch| (Some(last), *branch)));
            chain.push(*main);
            last = *main;
        }
        chains.push((parent, chain));
    }
    chains
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    fn hash(value: u128) -> BlockHash {
        BlockHash(value)
    }

    #[test]
    fn consecutive_blocks_are_one_event() {
        let mut log = KvLog::default();
        log.stored(hash(0), hash(1), &[1], true, Some("s"));
        assert!(log.take().is_empty(), "the log is off");
        log.turn_on();
        log.stored(hash(0), hash(1), &[1, 2], true, Some("s"));
        log.stored(hash(1), hash(2), &[3, 4], false, Some("s"));
        log.stored(hash(7), hash(8), &[5, 6], false, Some("s"));
        log.removed(hash(1));
        log.removed(hash(2));
        log.cleared();
        let stored = |parent, hashes: &[u128], tokens: &[TokenId], salt: Option<&str>| KvEvent::Stored {
            parent,
            hashes: hashes.iter().copied().map(hash).collect(),
            tokens: tokens.to_vec(),
            cache_salt: salt.map(str::to_owned),
        };
        let events = [
            stored(None, &[1, 2], &[1, 2, 3, 4], Some("s")),
            stored(Some(hash(7)), &[8], &[5, 6], None),
            KvEvent::Removed(vec![hash(1), hash(2)]),
            KvEvent::Cleared,
        ];
        assert_eq!(log.take(), events);
    }

    /// The engine never waits for a reader; what is missing is said.
    #[test]
    fn a_full_queue_loses_batches_and_says_how_many() {
        let (sender, receiver) = sync_channel(1);
        let mut sink = KvEventSink::new(sender);
        (0..4).for_each(|_| sink.publish(vec![KvEvent::Cleared]));
        assert!(matches!(receiver.recv().unwrap(), KvMessage::Batch { lost: 0, .. }));
        sink.publish(vec![KvEvent::Cleared]);
        assert!(matches!(receiver.recv().unwrap(), KvMessage::Batch { lost: 3, .. }));
        sink.publish(vec![KvEvent::Cleared]);
        assert!(matches!(receiver.recv().unwrap(), KvMessage::Batch { lost: 0, .. }));
    }

    #[test]
    fn chains_hold_every_block_once_with_its_parent() {
        // Two prompts that share 1 -> 2, one that lost its head (its parent 90 is not cached).
        let pairs = [(1, 0), (2, 1), (3, 2), (4, 3), (13, 2), (91, 90), (92, 91)];
        let chains = chains(pairs.iter().map(|(block, parent)| (hash(*block), hash(*parent))));
        let mut seen = Vec::new();
        for (parent, chain) in &chains {
            if let Some(parent) = parent {
                assert!(seen.iter().any(|(block, _)| block == parent), "{parent:?} comes later");
            }
            let mut last = *parent;
            for block in chain {
                seen.push((*block, last));
                last = Some(*block);
            }
        }
        seen.sort_unstable();
        let mut expected: Vec<_> = pairs
            .iter()
            .map(|(block, parent)| {
                (hash(*block), Some(hash(*parent)).filter(|parent| ![0, 90].contains(&parent.0)))
            })
            .collect();
        expected.sort_unstable();
        assert_eq!(seen, expected);
    }
}
