//! What two processes tell each other, and compare, before the first byte moves.

use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::registry::family;

/// Version of [`Hello`] and of the messages that follow it.
pub const PROTOCOL_VERSION: u32 = 2;

/// Two processes that must agree on a field do not.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{field} differs: ours is {ours}, the peer's is {theirs}")]
pub struct Mismatch {
    pub field: &'static str,
    pub ours: String,
    pub theirs: String,
}

fn same<T: PartialEq + fmt::Display>(field: &'static str, ours: &T, theirs: &T) -> Result<(), Mismatch> {
    if ours == theirs {
        return Ok(());
    }
    Err(Mismatch { field, ours: ours.to_string(), theirs: theirs.to_string() })
}

/// Everything that decides where a token's K and V lie in a block. Equal fingerprints make a block's bytes
/// mean the same in both processes.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct LayoutFingerprint {
    /// Version of the byte order within a block.
    pub version: u32,
    /// Name or hash of the model's configuration.
    pub model: String,
    pub dtype: String,
    pub num_layers: u32,
    pub num_kv_heads: u32,
    pub head_dim: u32,
    /// Tokens in a block.
    pub block_size: u32,
}

impl LayoutFingerprint {
    /// The first field that differs, with both values.
    pub fn check(&self, theirs: &Self) -> Result<(), Mismatch> {
        same("KV layout version", &self.version, &theirs.version)?;
        same("model", &self.model, &theirs.model)?;
        same("KV dtype", &self.dtype, &theirs.dtype)?;
        same("number of layers", &self.num_layers, &theirs.num_layers)?;
        same("number of KV heads", &self.num_kv_heads, &theirs.num_kv_heads)?;
        same("head dimension", &self.head_dim, &theirs.head_dim)?;
        same("block size", &self.block_size, &theirs.block_size)
    }
}

/// Says whether two transports, by name, reach each other: UCX, for one, chooses a lane that both ends have, so any NIXL
/// transport reaches any other. A name from a newer version reaches only itself.
pub fn check_transports(ours: &str, theirs: &str) -> Result<(), Mismatch> {
    let related = matches!((family(ours), family(theirs)), (Some(a), Some(b)) if a == b);
    if related || ours == theirs { Ok(()) } else { same("KV transport", &ours, &theirs) }
}

/// The first message each way on the control link between two workers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hello {
    pub protocol_version: u32,
    /// Random at each start of the process: a new one at an old address is another process.
    pub incarnation: u64,
    /// `prefill`, `decode` or `both`; for logs.
    #[serde(default)]
    pub role: Option<String>,
    pub fingerprint: LayoutFingerprint,
    /// The transport that opened, not `auto`.
    pub transport: String,
    pub pool_bytes: u64,
    /// [`crate::Transport::metadata`].
    #[serde(with = "serde_bytes")]
    pub metadata: Vec<u8>,
}

impl Hello {
    /// Says whether KV can move between the two. Pool sizes may differ.
    pub fn check(&self, theirs: &Self) -> Result<(), Mismatch> {
        same("protocol version", &self.protocol_version, &theirs.protocol_version)?;
        self.fingerprint.check(&theirs.fingerprint)?;
        check_transports(&self.transport, &theirs.transport)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hello() -> Hello {
        Hello {
            protocol_version: PROTOCOL_VERSION,
            incarnation: 7,
            role: Some("prefill".into()),
            fingerprint: LayoutFingerprint {
                version: 1,
                model: "Qwen3-0.6B".into(),
                dtype: "bf16".into(),
                num_layers: 28,
                num_kv_heads: 8,
                head_dim: 128,
                block_size: 16,
            },
            transport: "tcp".into(),
            pool_bytes: 1 << 30,
            metadata: vec![1, 2, 255],
        }
    }

    #[test]
    fn each_differing_field_is_named_with_both_values() {
        type Change = fn(&mut Hello);
        let cases: [(Change, &str); 9] = [
            (|h| h.protocol_version = 9, "protocol version differs: ours is 2, the peer's is 9"),
            (|h| h.fingerprint.version = 2, "KV layout version differs: ours is 1, the peer's is 2"),
            (
                |h| h.fingerprint.model = "other".into(),
                "model differs: ours is Qwen3-0.6B, the peer's is other",
            ),
            (|h| h.fingerprint.dtype = "f32".into(), "KV dtype differs: ours is bf16, the peer's is f32"),
            (|h| h.fingerprint.num_layers = 36, "number of layers differs: ours is 28, the peer's is 36"),
            (|h| h.fingerprint.num_kv_heads = 4, "number of KV heads differs: ours is 8, the peer's is 4"),
            (|h| h.fingerprint.head_dim = 64, "head dimension differs: ours is 128, the peer's is 64"),
            (|h| h.fingerprint.block_size = 32, "block size differs: ours is 16, the peer's is 32"),
            (|h| h.transport = "socket".into(), "KV transport differs: ours is tcp, the peer's is socket"),
        ];
        for (change, message) in cases {
            let mut theirs = hello();
            change(&mut theirs);
            assert_eq!(hello().check(&theirs).unwrap_err().to_string(), message);
        }
    }

    #[test]
    fn another_incarnation_role_or_pool_size_is_no_mismatch() {
        let theirs = Hello { incarnation: 8, role: None, pool_bytes: 1, metadata: vec![], ..hello() };
        assert_eq!(hello().check(&theirs), Ok(()));
    }

    #[test]
    fn transports_over_nixl_reach_one_another_and_nothing_else() {
        for (ours, theirs, ok) in [
            ("tcp", "shm", true),
            ("shm", "cuda_ipc", true),
            ("socket", "socket", true),
            ("socket", "shm", false),
            ("inproc", "socket", false),
            ("rdma", "tcp", true),
            ("carrier-pigeon", "carrier-pigeon", true),
            ("carrier-pigeon", "tcp", false),
        ] {
            assert_eq!(check_transports(ours, theirs).is_ok(), ok, "{ours} to {theirs}");
        }
    }

    #[test]
    fn hello_survives_json_and_messagepack() {
        let json = serde_json::to_string(&hello()).unwrap();
        assert_eq!(serde_json::from_str::<Hello>(&json).unwrap(), hello());
        let packed = rmp_serde::to_vec_named(&hello()).unwrap();
        assert_eq!(rmp_serde::from_slice::<Hello>(&packed).unwrap(), hello());
    }
}
