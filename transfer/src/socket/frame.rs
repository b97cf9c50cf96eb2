//! The socket backend's bytes on the wire. All integers are little-endian.
//!
//! Caller to receiver: one greeting, then frames. A frame is a header of 24 bytes (kind, a, b); `Write` is followed
//! by b bytes for offset a of the receiver's pool, `Read` asks for b bytes at offset a of it, `Commit` ends transfer a
//! and is followed by its notification of b bytes. The commit of a read is sent when its last byte has come.
//! Receiver to caller: replies of 24 bytes; `Data` is followed by the bytes that a `Read` asked for, in its order.

use std::io::{self, Read, Write};

/// First bytes of a connection; the digit is the protocol's version.
const MAGIC: [u8; 8] = *b"KVFERRY2";

/// A transport's random name, so that a connection to a reused address is refused.
pub type Token = u128;

/// How a connection begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// The transport that the writer means to reach.
    pub to: Token,
    pub from: Token,
}

impl Greeting {
    pub fn send(self, out: &mut impl Write) -> io::Result<()> {
        let mut bytes = [0; 40];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24..].copy_from_slice(&self.from.to_le_bytes());
        out.write_all(&bytes)
    }

    /// Fails with `InvalidData` for anything that is not a greeting.
    pub fn receive(input: &mut impl Read) -> io::Result<Self> {
        let mut magic = [0; 8];
        input.read_exact(&mut magic)?;
        if magic != MAGIC {
            return Err(invalid("the connection does not begin as kvferry's does"));
        }
        let (mut to, mut from) = ([0; 16], [0; 16]);
        input.read_exact(&mut to)?;
        input.read_exact(&mut from)?;
        Ok(Self { to: Token::from_le_bytes(to), from: Token::from_le_bytes(from) })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    Write { offset: u64, len: u64 },
    Read { offset: u64, len: u64 },
    Commit { xfer: u64, notification: u64 },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The greeting was right; frames may follow.
    Welcome { pool: u64 },
    /// Every byte of the transfer is where it belongs and its notification was taken.
    Settled { xfer: u64 },
    /// A span outside the pool; nothing of it was written and the connection closes.
    OutOfRange { offset: u64, len: u64 },
    /// The greeting's token is not ours, or the caller was removed here.
    NotForMe,
    /// What a `Read` asked for follows.
    Data { offset: u64, len: u64 },
}

impl Frame {
    pub fn send(self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&match self {
            Self::Write { offset, len } => words(1, offset, len),
            Self::Commit { xfer, notification } => words(2, xfer, notification),
            Self::Read { offset, len } => words(3, offset, len),
        })
    }

    pub fn receive(input: &mut impl Read) -> io::Result<Self> {
        match read_words(input)? {
            [1, offset, len] => Ok(Self::Write { offset, len }),
            [2, xfer, notification] => Ok(Self::Commit { xfer, notification }),
            [3, offset, len] => Ok(Self::Read { offset, len }),
            [kind, ..] => Err(invalid(format!("unknown frame kind {kind}"))),
        }
    }
}

impl Reply {
    pub fn send(self, out: &mut impl Write) -> io::Result<()> {
        out.write_all(&match self {
            Self::Welcome { pool } => words(1, pool, 0),
            Self::Settled { xfer } => words(2, xfer, 0),
            Self::OutOfRange { offset, len } => words(3, offset, len),
            Self::NotForMe => words(4, 0, 0),
            Self::Data { offset, len } => words(5, offset, len),
        })
    }

    pub fn receive(input: &mut impl Read) -> io::Result<Self> {
        match read_words(input)? {
            [1, pool, _] => Ok(Self::Welcome { pool }),
            [2, xfer, _] => Ok(Self::Settled { xfer }),
            [3, offset, len] => Ok(Self::OutOfRange { offset, len }),
            [4, ..] => Ok(Self::NotForMe),
            [5, offset, len] => Ok(Self::Data { offset, len }),
            [kind, ..] => Err(invalid(format!("unknown reply kind {kind}"))),
        }
    }
}

fn words(kind: u64, a: u64, b: u64) -> [u8; 24] {
    let mut bytes = [0; 24];
    for (slot, word) in bytes.chunks_exact_mut(8).zip([kind, a, b]) {
        slot.copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn read_words(input: &mut impl Read) -> io::Result<[u64; 3]> {
    let mut words = [[0; 8]; 3];
    input.read_exact(words.as_flattened_mut())?;
    Ok(words.map(u64::from_le_bytes))
}

pub fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_sent_is_received() {
        let greeting = Greeting { to: 1 << 100, from: 7 };
        let mut bytes = Vec::new();
        greeting.send(&mut bytes).unwrap();
        assert_eq!(Greeting::receive(&mut bytes.as_slice()).unwrap(), greeting);

        for frame in [
            Frame::Write { offset: u64::MAX, len: 1 },
            Frame::Read { offset: 1, len: u64::MAX },
            Frame::Commit { xfer: 3, notification: 4 },
        ] {
            let mut bytes = Vec::new();
            frame.send(&mut bytes).unwrap();
            assert_eq!(Frame::receive(&mut bytes.as_slice()).unwrap(), frame);
        }
        for reply in [
            Reply::Welcome { pool: 9 },
            Reply::Settled { xfer: 5 },
            Reply::OutOfRange { offset: 1, len: 2 },
            Reply::NotForMe,
            Reply::Data { offset: 6, len: 7 },
        ] {
            let mut bytes = Vec::new();
            reply.send(&mut bytes).unwrap();
            assert_eq!(Reply::receive(&mut bytes.as_slice()).unwrap(), reply);
        }
    }

    #[test]
    fn unknown_kinds_and_other_protocols_are_invalid() {
        assert_eq!(Frame::receive(&mut [9; 24].as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        assert_eq!(Reply::receive(&mut [9; 24].as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
        let http = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n............";
        assert_eq!(Greeting::receive(&mut http.as_slice()).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
