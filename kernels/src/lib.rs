//! KV cache storage and the compute kernels that read and write it.
//!
//! * [`layout`] is the only code that turns (block, layer, K/V) into bytes.
//! * [`pool`] is the one allocation that holds all blocks of a process.
//! * [`ops`] are candle custom ops over activations and the pool; [`cpu`] is what they run.
//! * [`cuda`] is the same work on a GPU, by kernels of our own (`cu/`).
//!
//! Invariants: a pool is zeroed, never moves and lives as long as anybody holds it; kernels touch only the blocks that
//! the batch's slot mapping and block tables name. Who may name a block is the engine's business, not ours.
//!
//! Not here: which block belongs to whom (engine), how bytes travel (transfer), what a model is (models).

pub mod batch;
pub mod cpu;
pub mod cuda;
pub mod layout;
pub mod ops;
pub mod pool;

pub use batch::{BatchMeta, SeqSpan};
pub use layout::{KvDtype, KvLayout};
pub use pool::KvPool;
