//! What the measuring process and its two children say to each other: a line of JSON each.

use serde::{Deserialize, Serialize};
use transfer::{Direction, Lane, ProbeReport};

use super::baseline::Variant;
use super::case::Shape;

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    Metadata,
    Add {
        peer: u64,
        metadata: Vec<u8>,
    },
    Move {
        direction: Direction,
        shape: Shape,
        blocks: u32,
        repeats: u32,
    },
    /// Counts descriptors whose first or last word is not that of the pool filled with `source`, then restores the pool.
    /// `swapped`: the spans' local side is where the bytes went.
    Verify {
        shape: Shape,
        blocks: u32,
        source: u64,
        swapped: bool,
    },
    Memcpy {
        bytes: u64,
        repeats: u32,
    },
    TcpListen {
        bytes: u64,
        repeats: u32,
    },
    TcpSend {
        port: u16,
        bytes: u64,
        repeats: u32,
        variant: Variant,
    },
    Probe {
        peer: u64,
    },
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    Metadata {
        metadata: Vec<u8>,
    },
    Added,
    /// Of each repeat: from posting to settled, and posting alone.
    Moved {
        seconds: Vec<f64>,
        post_seconds: Vec<f64>,
        descriptors: u32,
        lane: Option<Lane>,
    },
    Verified {
        wrong: u64,
    },
    Copied {
        seconds: Vec<f64>,
    },
    Listening {
        port: u16,
    },
    Probed {
        report: ProbeReport,
    },
    Failed {
        reason: String,
    },
}
