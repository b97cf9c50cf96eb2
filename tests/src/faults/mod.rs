//! The fault table: every fault in every stage of a request's life, on real processes. `bin/faults` runs it as often as it
//! is told, `it/fault_table.rs` once.
//!
//! Whatever happens, the client gets the right text or a clean error in time, no block is lost on either worker, and the
//! next request is answered as if nothing had been. Blocks have checksums, and KV of the simulated device is torn or wrong
//! if a byte of another request gets into it.

mod cell;
mod judge;
mod report;
mod run;
mod startup;

pub use cell::{Cell, Direction, Fault, Stage, Victim};
pub use report::Report;
pub use run::{Setup, run};
