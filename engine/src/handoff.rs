//! The ticket protocol: one ticket is one request's KV on its way from a prefill to a decode worker.
//!
//! ```text
//! decode                         prefill
//!   Open  ------------------------>        queued there; holds no decode block
//!        <------------------------  Ask    about to start: where may I write?
//!   Grant ------------------------>        blocks by position in the prompt
//!        <==== writes + notifications ====  data path (transfer), as layers and blocks are computed
//!        <------------------------  FirstToken
//!        <------------------------  Complete | Failed | Ended    exactly one, the last of a ticket
//!   Abort ------------------------>        any time; answered by one of the three
//! ```
//!
//! Pulled, the decode worker reads instead. `Claim` asks for a prompt that an HTTP client had computed before
//! (`kv_transfer_params`); then there is no `FirstToken`.
//!
//! ```text
//!   Open (read) | Claim ---------->
//!        <------------------------  Offer   here are my blocks, as they are computed; the last offer says so
//!        ==== reads ==============>
//!   Done  ------------------------>        all is read, answered by Complete
//! ```
//!
//! The decode worker goes on as soon as the notifications on the data path have named every layer of every granted block,
//! without waiting for `Complete`: they come straight from the transport, whatever the prefill worker's engine is busy
//! with. So it does when its own reads have settled within the lease.
//!
//! The last message of a ticket is the promise that nothing is written for it any more; until then, or until the
//! prefill worker is known dead, the granted blocks stay out of use. Both directions are ordered. Messages about a ticket
//! that is not known (any more) are counted and dropped.
//!
//! Every ticket has a lease on the prefill worker, which gives up a ticket's blocks when it runs out. The decode worker
//! renews it, and counts it from the sending of the last message that was answered: so its own clock always runs out
//! first, and bytes read before that came from blocks that were still pinned.

use serde::{Deserialize, Serialize};
use transfer::Direction;

use crate::api::{Logprobs, SamplingParams, TokenId};

/// One handoff. Made by the decode worker, unique in its life and random in its upper half.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TicketId(pub u64);

/// From decode to prefill.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToPrefill {
    Open {
        ticket: TicketId,
        /// For logs on both sides.
        request_id: String,
        tokens: Vec<TokenId>,
        sampling: SamplingParams,
        /// Drawn by the decode worker if the client gave none.
        seed: u64,
        cache_salt: Option<String>,
        /// How long the decode worker will wait, from now.
        deadline_ms: u64,
        /// Who moves the KV: the prefill worker writes, or the decode worker reads.
        direction: Direction,
        /// Send a checksum with each block.
        checksum: bool,
    },
    /// The KV of a prompt that this prefill worker computed before and keeps under `kept`. `tokens` must be that prompt.
    Claim {
        ticket: TicketId,
        request_id: String,
        kept: String,
        tokens: Vec<TokenId>,
        cache_salt: Option<String>,
        deadline_ms: u64,
        checksum: bool,
    },
    /// `blocks[i]` of the decode worker's pool receives the prompt's block `first_block + i`; earlier blocks are cached there.
    Grant {
        ticket: TicketId,
        first_block: u32,
        blocks: Vec<u32>,
    },
    /// Everything that was offered and lacking is read.
    Done {
        ticket: TicketId,
        totals: Totals,
    },
    Abort {
        ticket: TicketId,
    },
    /// These tickets are still wanted: their leases start anew. Answered by `Renewed`.
    Renew {
        seq: u64,
        tickets: Vec<TicketId>,
    },
}

/// From prefill to decode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDecode {
    Ask {
        ticket: TicketId,
    },
    /// The prompt's blocks from `first_block` on may be read; further ones follow unless `last`.
    Offer {
        ticket: TicketId,
        first_block: u32,
        blocks: Vec<u32>,
        /// One a block (xxh3 of its bytes) if they were asked for, else none.
        checksums: Vec<u64>,
        last: bool,
    },
    FirstToken {
        ticket: TicketId,
        token: TokenId,
        /// Prompt tokens that the prefill worker did not compute.
        cached_tokens: u32,
        logprobs: Option<Box<Logprobs>>,
        /// Queue and compute; nothing of the writes yet.
        timing: PrefillTiming,
    },
    /// Everything is written. Checked against what the data path's notifications said.
    Complete {
        ticket: TicketId,
        totals: Totals,
        timing: PrefillTiming,
    },
    /// No KV will come. `clean`: no write of this ticket is under way, so the blocks may be used at once.
    Failed {
        ticket: TicketId,
        reason: String,
        clean: bool,
    },
    /// The answer to an abort, or to a first token that ended the request.
    Ended {
        ticket: TicketId,
    },
    /// The answer to `Renew`. `unknown`: those of its tickets that are not here.
    Renewed {
        seq: u64,
        unknown: Vec<TicketId>,
    },
}

/// What one ticket moved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Totals {
    /// Posted writes; as many notifications come on the data path.
    pub writes: u32,
    pub blocks: u32,
    pub bytes: u64,
    pub descriptors: u32,
}

/// Where a ticket's time went on the prefill worker, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PrefillTiming {
    /// From the ticket's arrival to its first step.
    pub queue_us: u64,
    /// From its first step to its first token.
    pub compute_us: u64,
    /// Sum over transfers: handing over to the transport.
    pub post_us: u64,
    /// Time during which a transfer was under way: from handing over to settled, overlaps counted once. Most of it overlaps
    /// with compute.
    pub wire_us: u64,
    /// From the first token to all KV there: what overlap did not hide. On the decode worker, as it saw both arrive.
    pub exposed_us: u64,
}

/// A message on the link between two workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum PeerMessage {
    ToPrefill(ToPrefill),
    ToDecode(ToDecode),
}

/// What travels with each write on the data path: which layers of which of the prompt's blocks it brought.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteNote {
    pub ticket: TicketId,
    /// Index in the prompt of the first block.
    pub first_block: u32,
    pub blocks: u32,
    pub first_layer: u16,
    pub layers: u16,
    /// One a block (xxh3 of the bytes written into it) if they were asked for, else none.
    pub checksums: Vec<u64>,
}

impl WriteNote {
    /// Tells our notifications from anything else that may arrive.
    const MAGIC: [u8; 4] = *b"kvf2";

    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Self::MAGIC.to_vec();
        bytes.extend(self.ticket.0.to_le_bytes());
        bytes.extend(self.first_block.to_le_bytes());
        bytes.extend(self.blocks.to_le_bytes());
        bytes.extend(self.first_layer.to_le_bytes());
        bytes.extend(self.layers.to_le_bytes());
        bytes.extend(self.checksums.iter().flat_map(|sum| sum.to_le_bytes()));
        bytes
    }

    /// `None` if the bytes are not a note.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (ticket, rest) = rest.split_first_chunk::<8>()?;
        let (first_block, rest) = rest.split_first_chunk::<4>()?;
        let (blocks, rest) = rest.split_first_chunk::<4>()?;
        let (first_layer, rest) = rest.split_first_chunk::<2>()?;
        let (layers, rest) = rest.split_first_chunk::<2>()?;
        let (checksums, []) = rest.as_chunks::<8>() else { return None };
        let note = Self {
            ticket: TicketId(u64::from_le_bytes(*ticket)),
            first_block: u32::from_le_bytes(*first_block),
            blocks: u32::from_le_bytes(*blocks),
            first_layer: u16::from_le_bytes(*first_layer),
            layers: u16::from_le_bytes(*layers),
            checksums: checksums.iter().map(|sum| u64::from_le_bytes(*sum)).collect(),
        };
        (*magic == Self::MAGIC).then_some(note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_survives_the_wire_and_noise_is_no_note() {
        let note = WriteNote {
            ticket: TicketId(u64::MAX - 3),
            first_block: 7,
            blocks: 65,
            first_layer: 24,
            layers: 4,
            checksums: vec![1, u64::MAX],
        };
        assert_eq!(WriteNote::decode(&note.encode()), Some(note.clone()));
        let plain = WriteNote { checksums: Vec::new(), ..note.clone() };
        assert_eq!(WriteNote::decode(&plain.encode()), Some(plain));
        for noise in [&b""[..], b"kvf2", &[0; 24], &[note.encode(), vec![0]].concat()] {
            assert_eq!(WriteNote::decode(noise), None);
        }
    }
}
