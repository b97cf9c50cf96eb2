//! `GET /kv_events/snapshot`: what a worker's prefix cache holds, as lines of JSON.
//!
//! ```text
//! {"incarnation":"00c0ffee00c0ffee","block_size":16,"next_seq":42,"blocks":3}
//! {"parent":null,"hashes":[1,2]}
//! {"parent":1,"hashes":[3]}
//! {"end":true,"blocks":3}
//! ```
//!
//! `next_seq` is the first batch of events that is not in it. A parent comes before what follows it; one that is not cached
//! is null. The last line tells a whole snapshot from one that broke off.

use engine::kv_events::KvSnapshot;
use serde::{Deserialize, Serialize};

use crate::router::WorkerId;
use crate::router::policy::BlockKey;
use crate::router::shared::IndexChange;

/// Where a worker serves it.
pub const SNAPSHOT_PATH: &str = "/kv_events/snapshot";

/// Names in one line: some 10 KB, so that neither side holds the whole as text.
const LINE: usize = 512;

/// The first line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Head {
    pub incarnation: WorkerId,
    pub block_size: u32,
    pub next_seq: u64,
    pub blocks: usize,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(untagged)]
enum Line {
    Chain { parent: Option<u64>, hashes: Vec<u64> },
    End { end: bool, blocks: usize },
}

/// Why a snapshot cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BadSnapshot {
    #[error("line {line:?}: {source}")]
    Line { line: String, source: serde_json::Error },
    #[error("it is of worker {found}, expected {expected}")]
    Incarnation { found: WorkerId, expected: WorkerId },
    #[error("it has {found} blocks, its first line says {expected}")]
    Count { found: usize, expected: usize },
    #[error("more than {max} blocks")]
    TooLarge { max: usize },
    #[error("it broke off after {blocks} blocks")]
    BrokeOff { blocks: usize },
}

/// The lines of a snapshot, each with its newline.
pub fn lines(snapshot: KvSnapshot, incarnation: WorkerId, block_size: u32) -> impl Iterator<Item = String> {
    let blocks = snapshot.chains.iter().map(|(_, chain)| chain.len()).sum();
    let head = Head { incarnation, block_size, next_seq: snapshot.next_seq, blocks };
    let chains = snapshot.chains.into_iter().flat_map(|(parent, chain)| {
        let keys: Vec<u64> = chain.iter().map(|hash| hash.key()).collect();
        let mut parent = parent.map(|hash| hash.key());
        let pieces: Vec<_> = keys
            .chunks(LINE)
            .map(|hashes| {
                let line = Line::Chain { parent, hashes: hashes.to_vec() };
                parent = hashes.last().copied();
                text(&line)
            })
            .collect();
        pieces
    });
    std::iter::once(text(&head)).chain(chains).chain(std::iter::once(text(&Line::End { end: true, blocks })))
}

fn text(line: &impl Serialize) -> String {
    serde_json::to_string(line).expect("lines are plain data. This is a bug.") + "\n"
}

/// Reads a snapshot line by line.
#[derive(Debug)]
pub struct Reader {
    expected: WorkerId,
    max_blocks: usize,
    head: Option<Head>,
    blocks: usize,
    ended: bool,
}

impl Reader {
    /// Reads a snapshot of `expected` with at most `max_blocks` blocks.
    pub fn new(expected: WorkerId, max_blocks: usize) -> Self {
        Self { expected, max_blocks, head: None, blocks: 0, ended: false }
    }

    /// Takes one line; what it adds to the index, if anything.
    pub fn line(&mut self, line: &str) -> Result<Option<IndexChange>, BadSnapshot> {
        let bad = |source| BadSnapshot::Line { line: line.chars().take(80).collect(), source };
        let Some(head) = &self.head else {
            let head: Head = serde_json::from_str(line).map_err(bad)?;
            if head.incarnation != self.expected {
                return Err(BadSnapshot::Incarnation { found: head.incarnation, expected: self.expected });
            }
            self.head = Some(head);
            return Ok(None);
        };
        match serde_json::from_str(line).map_err(bad)? {
            Line::Chain { parent, hashes } => {
                self.blocks += hashes.len();
                if self.blocks > self.max_blocks {
                    return Err(BadSnapshot::TooLarge { max: self.max_blocks });
                }
                let keys = hashes.into_iter().map(BlockKey).collect();
                Ok(Some(IndexChange::Store { parent: parent.map(BlockKey), keys }))
            }
            Line::End { blocks, .. } if blocks == self.blocks && blocks == head.blocks => {
                self.ended = true;
                Ok(None)
            }
            Line::End { .. } => Err(BadSnapshot::Count { found: self.blocks, expected: head.blocks }),
        }
    }

    /// The snapshot is over: its first line, if it was whole.
    pub fn finish(self) -> Result<Head, BadSnapshot> {
        self.head.filter(|_| self.ended).ok_or(BadSnapshot::BrokeOff { blocks: self.blocks })
    }
}

#[cfg(test)]
mod tests {
    use engine::hash::BlockHash;

    use super::*;

    fn snapshot() -> KvSnapshot {
        let chain = |from: u128, len: u128| (from..from + len).map(BlockHash).collect::<Vec<_>>();
        KvSnapshot {
            next_seq: 42,
            chains: vec![(None, chain(1, 1200)), (Some(BlockHash(5)), chain(9000, 2))],
        }
    }

    fn read(
        lines: impl IntoIterator<Item = String>,
        max: usize,
    ) -> Result<(Vec<IndexChange>, Head), BadSnapshot> {
        let mut reader = Reader::new(WorkerId(7), max);
        let mut changes = Vec::new();
        for line in lines {
            changes.extend(reader.line(line.trim_end())?);
        }
        Ok((changes, reader.finish()?))
    }

    #[test]
    fn what_is_written_is_read() {
        let (changes, head) = read(lines(snapshot(), WorkerId(7), 16), 2000).unwrap();
        assert_eq!(head, Head { incarnation: WorkerId(7), block_size: 16, next_seq: 42, blocks: 1202 });
        let mut index = crate::router::index::ExactIndex::new(1 << 20);
        for change in changes {
            let IndexChange::Store { parent, keys } = change else { panic!("{change:?}") };
            assert!(!index.store(WorkerId(7), parent, &keys).orphan);
        }
        assert_eq!(index.len(), 1202);
    }

    #[test]
    fn half_a_snapshot_and_another_workers_are_refused() {
        let whole: Vec<_> = lines(snapshot(), WorkerId(7), 16).collect();
        for len in 0..whole.len() {
            assert!(
                matches!(read(whole[..len].to_vec(), 2000), Err(BadSnapshot::BrokeOff { .. })),
                "{len} lines"
            );
        }
        assert!(matches!(
            read(lines(snapshot(), WorkerId(8), 16), 2000),
            Err(BadSnapshot::Incarnation { .. })
        ));
        assert!(matches!(read(whole.clone(), 100), Err(BadSnapshot::TooLarge { max: 100 })));
        let mut short = whole.clone();
        short.remove(2);
        assert!(matches!(read(short, 2000), Err(BadSnapshot::Count { .. })));
        let mut noise = whole;
        noise[2] = "<html>".into();
        assert!(matches!(read(noise, 2000), Err(BadSnapshot::Line { .. })));
    }
}
