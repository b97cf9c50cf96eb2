//! vLLM's KV events as MessagePack (`vllm/distributed/kv_events.py`).
//!
//! Written: tagged maps, as vLLM does since 0.11. Read: those, the positional arrays of older releases, and SGLang's
//! variant (`cache_salt`); names as signed or unsigned integers or as bytes; what is not known is skipped.

mod read;

use serde::ser::SerializeSeq;
use serde::{Serialize, Serializer};

/// The sequence number that ends a replay: -1.
pub const END_OF_REPLAY: [u8; 8] = [0xff; 8];

/// Blocks in one batch at most; a longer one is not believed. vLLM's largest pools have a few million blocks.
const MAX_LEN: usize = 1 << 24;

/// A block's name as its worker says it; bytes are reduced to 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct WireHash(pub u64);

/// A batch of events.
#[derive(Clone, Debug, PartialEq)]
pub struct Batch {
    /// Seconds of Unix time.
    pub timestamp: f64,
    pub events: Vec<Event>,
    pub rank: Option<u32>,
}

/// One event.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    BlockStored(Stored),
    BlockRemoved {
        block_hashes: Vec<WireHash>,
        tier: Tier,
    },
    AllBlocksCleared,
    /// A kind that is not known here, by name.
    Unknown(String),
}

/// Blocks that a worker stored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stored {
    pub block_hashes: Vec<WireHash>,
    pub parent: Option<WireHash>,
    pub token_ids: Vec<u32>,
    pub block_size: u32,
    pub tier: Tier,
    pub domain: Domain,
}

/// Where blocks are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tier {
    /// In the memory that the model computes in: "GPU", whatever the device.
    #[default]
    Device,
    /// Anywhere slower, or in a group of layers that is not the first.
    Other,
}

/// What beside the tokens makes a block different.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Domain {
    #[default]
    Plain,
    Salted(String),
    /// An adapter, an image: requests that are routed here never match it.
    Foreign,
}

/// The bytes are not a batch.
#[derive(Debug, thiserror::Error)]
#[error("not a batch of KV events: {0}")]
pub struct BadBatch(#[from] rmp_serde::decode::Error);

impl Batch {
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut serializer = rmp_serde::Serializer::new(&mut bytes).with_struct_map();
        self.serialize(&mut serializer).expect("batches are plain data. This is a bug.");
        bytes
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, BadBatch> {
        Ok(rmp_serde::from_slice(bytes)?)
    }
}

impl Serialize for Batch {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut batch = serializer.serialize_seq(Some(2 + usize::from(self.rank.is_some())))?;
        batch.serialize_element(&self.timestamp)?;
        batch.serialize_element(&self.events)?;
        if let Some(rank) = self.rank {
            batch.serialize_element(&rank)?;
        }
        batch.end()
    }
}

/// The fields that vLLM writes for plain blocks.
#[derive(Serialize)]
#[serde(tag = "type")]
enum Written<'a> {
    BlockStored {
        block_hashes: &'a [WireHash],
        parent_block_hash: Option<WireHash>,
        token_ids: &'a [u32],
        block_size: u32,
        lora_id: Option<u32>,
        medium: &'static str,
        lora_name: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        extra_keys: Option<Vec<Option<[&'a str; 1]>>>,
        #[serde(skip_serializing_if = "Option::is_none")]
        cache_salt: Option<&'a str>,
    },
    BlockRemoved {
        block_hashes: &'a [WireHash],
        medium: &'static str,
    },
    AllBlocksCleared {},
}

impl Serialize for WireHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_u64(self.0)
    }
}

impl Serialize for Event {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let medium = |tier: Tier| if tier == Tier::Device { "GPU" } else { "CPU" };
        match self {
            Self::BlockStored(stored) => {
                let salt = match &stored.domain {
                    Domain::Salted(salt) => Some(salt.as_str()),
                    Domain::Plain | Domain::Foreign => None,
                };
                // vLLM's place for a salt is the first block of a prompt.
                let keys =
                    |salt| (0..stored.block_hashes.len()).map(|at| (at == 0).then_some([salt])).collect();
                Written::BlockStored {
                    block_hashes: &stored.block_hashes,
                    parent_block_hash: stored.parent,
                    token_ids: &stored.token_ids,
                    block_size: stored.block_size,
                    lora_id: None,
                    medium: medium(stored.tier),
                    lora_name: None,
                    extra_keys: salt.map(keys),
                    cache_salt: salt,
                }
                .serialize(serializer)
            }
            Self::BlockRemoved { block_hashes, tier } => {
                Written::BlockRemoved { block_hashes, medium: medium(*tier) }.serialize(serializer)
            }
            Self::AllBlocksCleared => Written::AllBlocksCleared {}.serialize(serializer),
            Self::Unknown(kind) => Err(serde::ser::Error::custom(format!("{kind:?} is not an event"))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pack(value: serde_json::Value) -> Vec<u8> {
        rmp_serde::to_vec(&value).unwrap()
    }

    fn decode(value: serde_json::Value) -> Batch {
        Batch::decode(&pack(value)).unwrap()
    }

    fn stored(domain: Domain) -> Event {
        Event::BlockStored(Stored {
            block_hashes: vec![WireHash(u64::MAX), WireHash(2)],
            parent: Some(WireHash(7)),
            token_ids: vec![1, 2, 3, 4],
            block_size: 2,
            tier: Tier::Device,
            domain,
        })
    }

    #[test]
    fn what_is_written_is_read() {
        let removed = Event::BlockRemoved { block_hashes: vec![WireHash(1 << 63)], tier: Tier::Device };
        let events =
            vec![stored(Domain::Plain), stored(Domain::Salted("s".into())), removed, Event::AllBlocksCleared];
        for rank in [None, Some(3)] {
            let batch = Batch { timestamp: 1.5, events: events.clone(), rank };
            let bytes = batch.encode();
            assert_eq!(Batch::decode(&bytes).unwrap(), batch);
            // vLLM leaves a missing rank off.
            assert_eq!(bytes[0], if rank.is_none() { 0x92 } else { 0x93 });
        }
    }

    /// Older vLLM: positional arrays; a signed name is the same as its unsigned one.
    #[test]
    fn arrays_and_signed_names_are_read() {
        let batch = decode(serde_json::json!([
            2.0,
            [
                ["BlockStored", [-1, 2], 7, [1, 2, 3, 4], 2, null],
                ["BlockRemoved", [5]],
                ["AllBlocksCleared"],
                ["New", {}]
            ],
            null
        ]));
        let removed = Event::BlockRemoved { block_hashes: vec![WireHash(5)], tier: Tier::Device };
        assert_eq!(
            batch.events,
            [stored(Domain::Plain), removed, Event::AllBlocksCleared, Event::Unknown("New".into())]
        );
    }

    #[test]
    fn names_of_bytes_are_read() {
        let mut bytes = vec![0x92, 0xca, 0, 0, 0, 0, 0x91, 0x92, 0xac];
        bytes.extend(b"BlockRemoved");
        bytes.extend([0x92, 0xc4, 2, 1, 2, 0xc4, 2, 1, 3]);
        let Event::BlockRemoved { block_hashes, .. } = &Batch::decode(&bytes).unwrap().events[0] else {
            panic!()
        };
        assert!(block_hashes.len() == 2 && block_hashes[0] != block_hashes[1]);
    }

    #[test]
    fn the_rest_of_the_world_has_its_own_fields() {
        let event = |more: serde_json::Value| {
            let mut event = serde_json::json!({
                "type": "BlockStored", "block_hashes": [u64::MAX, 2], "parent_block_hash": 7,
                "token_ids": [1, 2, 3, 4], "block_size": 2, "lora_id": null, "medium": "GPU",
            });
            event.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            decode(serde_json::json!({"ts": 1.0, "events": [event], "attn_dp_rank": 1})).events.remove(0)
        };
        let domain = |more| match event(more) {
            Event::BlockStored(stored) => stored.domain,
            other => panic!("{other:?}"),
        };
        let salted = Domain::Salted("t1".into());
        assert_eq!(domain(serde_json::json!({"session_id": "x", "locality": "LOCAL"})), Domain::Plain);
        assert_eq!(domain(serde_json::json!({"cache_salt": "t1"})), salted);
        assert_eq!(domain(serde_json::json!({"extra_keys": [["t1"], null]})), salted);
        assert_eq!(domain(serde_json::json!({"extra_keys": [null, []]})), Domain::Plain);
        assert_eq!(domain(serde_json::json!({"extra_keys": [[["image", 3]], null]})), Domain::Foreign);
        assert_eq!(domain(serde_json::json!({"extra_keys": [["a"], ["b"]]})), Domain::Foreign);
        assert_eq!(domain(serde_json::json!({"lora_name": "adapter"})), Domain::Foreign);
        for other in [serde_json::json!({"medium": "CPU"}), serde_json::json!({"group_idx": 1})] {
            assert!(matches!(event(other), Event::BlockStored(Stored { tier: Tier::Other, .. })));
        }
    }

    #[test]
    fn noise_is_an_error_and_never_a_panic() {
        for noise in [&b""[..], b"\xc1", b"\x93\xc0\xc0\xc0", &[0xdd, 0xff, 0xff, 0xff, 0xff], &[0x92; 100]] {
            assert!(Batch::decode(noise).is_err());
        }
        let whole = Batch { timestamp: 1.0, events: vec![stored(Domain::Plain)], rank: Some(0) }.encode();
        for len in 0..whole.len() - 1 {
            assert!(Batch::decode(&whole[..len]).is_err(), "{len} bytes");
        }
    }
}
