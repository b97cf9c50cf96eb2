//! What travels on the link, as MessagePack in binary WebSocket messages.

use bytes::Bytes;
use engine::handoff::PeerMessage;
use serde::{Deserialize, Serialize};
use transfer::Hello;

/// The first words of each side.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Greeting {
    pub hello: Hello,
    /// (Prefill worker) the longest prompt that it takes.
    pub max_prompt_tokens: u64,
    /// (Prefill worker) how long it keeps a ticket's blocks after the last renewal.
    pub lease_ms: u64,
    /// (Decode worker) the link is for KV that is kept here: nothing is to be written over it.
    pub on_demand: bool,
}

/// One message of the link.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[expect(clippy::large_enum_variant, reason = "nearly all frames are messages, and none is kept")]
pub enum Frame {
    /// The first frame of each side.
    Hello(Box<Greeting>),
    /// Instead of a `Hello`: the two do not fit. `permanent`: trying again with the same processes is of no use.
    Refused {
        reason: String,
        permanent: bool,
    },
    Message(PeerMessage),
}

impl Frame {
    pub fn encode(&self) -> Bytes {
        rmp_serde::to_vec_named(self).expect("frames are plain data. This is a bug.").into()
    }

    /// Errors: the bytes are not a frame.
    pub fn decode(bytes: &[u8]) -> Result<Self, rmp_serde::decode::Error> {
        rmp_serde::from_slice(bytes)
    }
}

#[cfg(test)]
mod tests {
    use engine::SamplingParams;
    use engine::api::Logprobs;
    use engine::handoff::{PrefillTiming, TicketId, ToDecode, ToPrefill, Totals};

    use super::*;

    #[test]
    fn every_message_survives_the_wire() {
        let ticket = TicketId(u64::MAX);
        let open = ToPrefill::Open {
            ticket,
            request_id: "r".into(),
            tokens: vec![0, 151_935],
            sampling: SamplingParams { top_k: Some(3), stop_token_ids: vec![7], ..Default::default() },
            seed: 1 << 63,
            cache_salt: Some("s".into()),
            deadline_ms: 5,
            direction: transfer::Direction::Read,
            checksum: true,
        };
        let claim = ToPrefill::Claim {
            ticket,
            request_id: "r".into(),
            kept: "k".into(),
            tokens: vec![5],
            cache_salt: None,
            deadline_ms: 5,
            checksum: false,
        };
        let offer = ToDecode::Offer {
            ticket,
            first_block: 1,
            blocks: vec![7],
            checksums: vec![u64::MAX],
            last: true,
        };
        let timing = PrefillTiming { wire_us: 9, ..Default::default() };
        for message in [
            PeerMessage::ToPrefill(open),
            PeerMessage::ToPrefill(claim),
            PeerMessage::ToDecode(offer),
            PeerMessage::ToPrefill(ToPrefill::Renew { seq: 3, tickets: vec![ticket] }),
            PeerMessage::ToDecode(ToDecode::Renewed { seq: 3, unknown: vec![ticket] }),
            PeerMessage::ToPrefill(ToPrefill::Done { ticket, totals: Totals::default() }),
            PeerMessage::ToPrefill(ToPrefill::Grant { ticket, first_block: 2, blocks: vec![9, 10] }),
            PeerMessage::ToDecode(ToDecode::FirstToken {
                ticket,
                token: 3,
                cached_tokens: 16,
                logprobs: Some(Box::new(Logprobs { logprob: -0.5, top: vec![(3, -0.5)] })),
                timing,
            }),
            PeerMessage::ToDecode(ToDecode::Complete { ticket, totals: Totals::default(), timing }),
            PeerMessage::ToDecode(ToDecode::Failed { ticket, reason: "é".into(), clean: false }),
        ] {
            let frame = Frame::Message(message);
            assert_eq!(Frame::decode(&frame.encode()).unwrap(), frame);
        }
    }

    #[test]
    fn noise_is_an_error() {
        for noise in [&b""[..], b"\xc1", b"hello", &[0xff; 64]] {
            assert!(Frame::decode(noise).is_err());
        }
    }
}
