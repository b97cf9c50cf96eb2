//! Which worker holds which blocks.
//!
//! Blocks are known by the name of their whole chain, so an index is flat: name -> the workers that hold the block. A
//! request's overlap with a worker is how many of its blocks, from the first on, that worker holds.
//!
//! * [`exact`]: fed by KV events; what a worker stored and has not removed.
//! * [`recent`]: fed by our own decisions; a block lives for a time after its last use, and a prompt's head outlives its tail.
//! * [`holdings`]: name -> workers, shared by both; [`table`]: the flat hash table beneath.
//!
//! Invariants: a worker is removed in time proportional to its own blocks; memory is bounded, and what is given up for
//! that is the end of chains, never their beginning while the end is kept.

pub mod exact;
pub mod holdings;
pub mod recent;
mod slots;
pub mod table;
#[cfg(test)]
mod tests;

pub use exact::ExactIndex;
pub use holdings::Overlaps;
pub use recent::RecentIndex;
