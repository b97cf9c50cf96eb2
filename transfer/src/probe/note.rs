//! The self-test's notifications.

/// What travels with the self-test's writes of a few bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Note {
    /// Answer me: the asker's incarnation, and the number of the question.
    Ping { from: u64, nonce: u64 },
    Pong {
        nonce: u64,
        /// Whether who answers has mapped the asker's pool, and so copies into it; nothing where its transport maps none.
        mapped: Option<bool>,
    },
    /// With what is only there to be measured.
    Load,
}

impl Note {
    /// Tells the self-test's notifications from the engine's.
    const MAGIC: [u8; 4] = *b"kvp1";

    pub fn encode(self) -> Vec<u8> {
        let (kind, a, b) = match self {
            Self::Ping { from, nonce } => (1u8, from, nonce),
            Self::Pong { nonce, mapped } => (2, nonce, mapped.map_or(0, |mapped| 1 + u64::from(mapped))),
            Self::Load => (3, 0, 0),
        };
        [&Self::MAGIC[..], &[kind], &a.to_le_bytes(), &b.to_le_bytes()].concat()
    }

    /// `None` if the bytes are the engine's.
    pub fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; 21] = bytes.try_into().ok()?;
        let (kind, rest) = bytes.strip_prefix(&Self::MAGIC)?.split_first()?;
        let (a, b) = rest.split_first_chunk::<8>()?;
        let (a, b) = (u64::from_le_bytes(*a), u64::from_le_bytes(b.try_into().ok()?));
        match kind {
            1 => Some(Self::Ping { from: a, nonce: b }),
            2 => Some(Self::Pong { nonce: a, mapped: (b > 0).then_some(b > 1) }),
            3 => Some(Self::Load),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_survive_the_wire_and_others_are_not_ours() {
        let pongs = [None, Some(false), Some(true)].map(|mapped| Note::Pong { nonce: 4, mapped });
        for note in [Note::Ping { from: u64::MAX, nonce: 3 }, Note::Load].into_iter().chain(pongs) {
            assert_eq!(Note::decode(&note.encode()), Some(note));
        }
        for other in [&b""[..], b"kvp1", &[0; 21], b"kvp1\x09aaaaaaaabbbbbbbb"] {
            assert_eq!(Note::decode(other), None);
        }
    }
}
