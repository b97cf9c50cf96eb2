//! The self-test of a pair of peers: how fast each direction is, how long a notification takes, which lane carries the
//! bytes.
//!
//! It runs on the drivers' threads over the pools' scratch blocks, which no request ever uses, before the link takes
//! requests. The scratch blocks stay in the processor's caches, so that where memory is the limit the figures are
//! somewhat above what a handoff sees; they are for comparing directions and noticing a wrong lane. `bench transfer`
//! measures over pools of full size.

mod note;
mod prober;

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::lane::Lane;
use crate::registry;
use crate::transport::Direction;
pub(crate) use note::Note;
pub(crate) use prober::{Action, PING_BYTES, Prober};

/// The blocks at the end of a pool that belong to no request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Scratch {
    /// Where the first one begins.
    pub offset: u64,
    pub block_bytes: u64,
    pub blocks: u32,
}

impl Scratch {
    /// Scratch for blocks of `block_bytes` after `blocks` ordinary ones.
    pub fn after(blocks: u64, block_bytes: u64) -> Self {
        Self { offset: blocks * block_bytes, block_bytes, blocks: Self::blocks_of(block_bytes) }
    }

    /// How many blocks a pool sets aside: enough that not all lie in the nearest cache, at most 8 MiB, at least one.
    pub fn blocks_of(block_bytes: u64) -> u32 {
        const BYTES: u64 = 8 << 20;
        (BYTES / block_bytes.max(1)).clamp(1, 4) as u32
    }

    fn block(&self, index: u32) -> u64 {
        self.offset + u64::from(index % self.blocks.max(1)) * self.block_bytes
    }
}

/// What a driver tells the peer's about itself, beside the transport's own metadata.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Introduction {
    pub incarnation: u64,
    pub scratch: Option<Scratch>,
    #[serde(with = "serde_bytes")]
    pub metadata: Vec<u8>,
}

/// One measured transfer.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    pub direction: Direction,
    /// Descriptors, each one block.
    pub blocks: u32,
    pub bytes: u64,
    /// The best of a few.
    pub seconds: f64,
}

impl Measured {
    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.seconds / 1e9
    }
}

/// What a self-test found.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProbeReport {
    /// To the answer of the first notification: connecting and whatever is made at the first use.
    pub connect: Duration,
    /// A notification there and one back, each after a write of 8 bytes; the best of a few.
    pub round_trip: Duration,
    pub block_bytes: u64,
    /// One block and many, written and read.
    pub measured: Vec<Measured>,
    pub write_lane: Option<Lane>,
    pub read_lane: Option<Lane>,
    /// The whole self-test.
    pub took: Duration,
}

impl ProbeReport {
    /// The best rate of a direction in GB/s: that of many blocks, where latency does not matter.
    pub fn gb_per_s(&self, direction: Direction) -> Option<f64> {
        let rates = self.measured.iter().filter(|m| m.direction == direction).map(Measured::gb_per_s);
        rates.max_by(f64::total_cmp)
    }

    pub fn lane(&self, direction: Direction) -> Option<&Lane> {
        match direction {
            Direction::Write => self.write_lane.as_ref(),
            Direction::Read => self.read_lane.as_ref(),
        }
    }

    /// Where the bytes do not go as `transport` promises by its name; empty if they do or nothing tells.
    pub fn complaints(&self, transport: &str) -> Vec<String> {
        let one = |direction: Direction| {
            let lane = self.lane(direction)?;
            let as_asked = registry::is_as_asked(transport, lane);
            let what = direction.as_str().to_uppercase();
            (!as_asked)
                .then(|| format!("KV transport {transport} was asked for, but {what} goes over {lane}"))
        };
        [Direction::Write, Direction::Read].into_iter().filter_map(one).collect()
    }
}

impl std::fmt::Display for ProbeReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let us = |time: Duration| time.as_secs_f64() * 1e6;
        write!(f, "round trip {:.0} us, connect {:.0} us", us(self.round_trip), us(self.connect))?;
        for m in &self.measured {
            let what = m.direction.as_str().to_uppercase();
            write!(f, ", {what} of {} blocks {:.2} GB/s", m.blocks, m.gb_per_s())?;
        }
        for direction in [Direction::Write, Direction::Read] {
            let what = direction.as_str().to_uppercase();
            match self.lane(direction) {
                Some(lane) => write!(f, ", {what} over {lane}")?,
                None => write!(f, ", {what} over a lane that nothing tells")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lane(carrier: &str) -> Option<Lane> {
        Some(Lane { carrier: carrier.into(), how: "zero-copy".into() })
    }

    #[test]
    fn a_lane_that_was_not_asked_for_is_complained_about() {
        let report =
            ProbeReport { write_lane: lane("cma/memory"), read_lane: lane("tcp/lo"), ..Default::default() };
        assert_eq!(
            report.complaints("shm"),
            ["KV transport shm was asked for, but READ goes over tcp/lo (zero-copy)"]
        );
        assert_eq!(report.complaints("tcp").len(), 1);
        let mixed = ProbeReport { write_lane: lane("tcp/lo and cma/memory"), ..Default::default() };
        assert_eq!(mixed.complaints("shm").len(), 1);
        let unknown = ProbeReport::default();
        assert_eq!(unknown.complaints("shm"), [""; 0]);
        assert_eq!(report.complaints("socket"), [""; 0]);
        assert_eq!(report.complaints("mmap").len(), 2);
        let mapped = ProbeReport { write_lane: lane("mmap/memory"), ..Default::default() };
        assert_eq!(mapped.complaints("mmap"), [""; 0]);
    }

    #[test]
    fn scratch_is_small_and_there() {
        assert_eq!(Scratch::blocks_of(1_835_008), 4);
        assert_eq!(Scratch::blocks_of(64 << 20), 1);
        assert_eq!(Scratch::after(10, 100), Scratch { offset: 1000, block_bytes: 100, blocks: 4 });
    }
}
