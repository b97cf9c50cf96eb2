//! What can go wrong while moving bytes.

use std::time::Duration;

use thiserror::Error;

use crate::transport::{Memory, PeerId};
use crate::wire::Mismatch;

/// Why a transfer, a peer or a whole transport is not usable.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum TransferError {
    #[error("{len} bytes at offset {offset} lie outside the pool of {pool} bytes")]
    OutOfRange { offset: u64, len: u64, pool: u64 },
    #[error("peer {} is not known here", .0.0)]
    UnknownPeer(PeerId),
    #[error("a transfer needs at least one span of at least one byte")]
    EmptyTransfer,
    #[error("the notification has {len} bytes, at most {max} are carried")]
    NotificationTooLong { len: usize, max: usize },
    #[error("peer {} already has {queued} transfers waiting", .peer.0)]
    Backlogged { peer: PeerId, queued: usize },
    #[error("peer {} was removed before the transfer settled", .0.0)]
    Aborted(PeerId),
    #[error("connection to the peer failed: {0}")]
    Wire(String),
    #[error("the peer's transport metadata is not usable: {0}")]
    BadMetadata(String),
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
    #[error(
        "transport {transport} needs {library}, which was not found; {how_to_get}, or use the transport socket; searched: {}",
        .searched.join(", ")
    )]
    LibraryMissing { transport: String, library: String, searched: Vec<String>, how_to_get: String },
    #[error("{call} failed: {status}")]
    Library { call: &'static str, status: String },
    #[error("KV transport {name:?} is not known; valid: {valid}")]
    UnknownTransport { name: String, valid: String },
    #[error("transport {name} cannot be used: {why}")]
    Unavailable { name: String, why: String },
    #[error("the pool lies on CUDA device {device}, which this transport cannot reach")]
    DeviceMemory { device: u32 },
    #[error("the device of the pool ({memory:?} memory) failed: {reason}")]
    DeviceCopy { memory: Memory, reason: String },
    #[error("no answer to the self-test within {0:?}")]
    NoAnswer(Duration),
    #[error("the transfer thread has stopped")]
    Stopped,
}

impl TransferError {
    /// The stable metric label of this kind of error.
    pub fn label(&self) -> &'static str {
        match self {
            Self::OutOfRange { .. } => "out_of_range",
            Self::UnknownPeer(_) => "unknown_peer",
            Self::EmptyTransfer => "empty_transfer",
            Self::NotificationTooLong { .. } => "notification_too_long",
            Self::Backlogged { .. } => "backlogged",
            Self::Aborted(_) => "aborted",
            Self::Wire(_) => "wire",
            Self::BadMetadata(_) => "bad_metadata",
            Self::Mismatch(_) => "mismatch",
            Self::LibraryMissing { .. } => "library_missing",
            Self::Library { .. } => "library",
            Self::UnknownTransport { .. } => "unknown_transport",
            Self::Unavailable { .. } => "unavailable",
            Self::DeviceMemory { .. } => "device_memory",
            Self::DeviceCopy { .. } => "device_copy",
            Self::NoAnswer(_) => "no_answer",
            Self::Stopped => "stopped",
        }
    }
}
