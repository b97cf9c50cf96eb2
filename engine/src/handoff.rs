//! The ticket protocol: one ticket is one request's KV on its way from a prefill to a decode worker.
//!
//! ```text
//! decode                         prefill
//!   Open  ------------------------>        queued there; holds no decode block
//!        <------------------------  Ask    about to start: where may I write?
//!   Grant ------------------------>        blocks by position in the prompt
//!        <==== writes + notifications ====  data path (transfer), as blocks are computed
//!        <------------------------  FirstToken
//!        <------------------------  Complete | Failed | Ended    exactly one, the last of a ticket
//!   Abort ------------------------>        any time; answered by one of the three
//! ```
//!
//! The decode worker goes on as soon as the notifications on the data path have named every granted block, without
//! waiting for `Complete`: they come straight from the transport, whatever the prefill worker's engine is busy with.
//!
//! The last message of a ticket is the promise that nothing is written for it any more; until then, or until the
//! prefill worker is known dead, the granted blocks stay out of use. Both directions are ordered. Messages about a ticket
//! that is not known (any more) are counted and dropped.

use serde::{Deserialize, Serialize};

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
    },
    /// `blocks[i]` of the decode worker's pool receives the prompt's block `first_block + i`; earlier blocks are cached there.
    Grant {
        ticket: TicketId,
        first_block: u32,
        blocks: Vec<u32>,
    },
    Abort {
        ticket: TicketId,
    },
}

/// From prefill to decode.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum ToDecode {
    Ask {
        ticket: TicketId,
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
    /// Sum over writes: handing over to the transport.
    pub post_us: u64,
    /// Sum over writes: from handing over to settled. Overlaps with compute.
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

/// What travels with each write on the data path: which of the prompt's blocks it brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WriteNote {
    pub ticket: TicketId,
    /// Index in the prompt of the first block.
    pub first_block: u32,
    pub blocks: u32,
}

impl WriteNote {
    /// Tells our notifications from anything else that may arrive.
    const MAGIC: [u8; 4] = *b"kvf1";

    pub fn encode(&self) -> Vec<u8> {
        let (first, blocks) = (self.first_block.to_le_bytes(), self.blocks.to_le_bytes());
        [&Self::MAGIC[..], &self.ticket.0.to_le_bytes(), &first, &blocks].concat()
    }

    /// `None` if the bytes are not a note.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 20] = bytes.try_into().ok()?;
        let (magic, rest) = bytes.split_first_chunk::<4>()?;
        let (ticket, rest) = rest.split_first_chunk::<8>()?;
        let (first, blocks) = rest.split_first_chunk::<4>()?;
        let blocks = u32::from_le_bytes(blocks.try_into().ok()?);
        let note = Self {
            ticket: TicketId(u64::from_le_bytes(*ticket)),
            first_block: u32::from_le_bytes(*first),
            blocks,
        };
        (*magic == Self::MAGIC).then_some(note)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_survives_the_wire_and_noise_is_no_note() {
        let note = WriteNote { ticket: TicketId(u64::MAX - 3), first_block: 7, blocks: 65 };
        assert_eq!(WriteNote::decode(&note.encode()), Some(note));
        for noise in [&b""[..], b"kvf1", &[0; 20], &[note.encode(), vec![0]].concat()] {
            assert_eq!(WriteNote::decode(noise), None);
        }
    }
}
