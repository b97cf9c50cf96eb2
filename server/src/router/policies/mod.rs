//! The modes of `--router-mode`.

mod kv;
mod plain;
mod select;
#[cfg(test)]
mod tests;

pub use kv::{KvPolicy, KvWeights};
pub use plain::{LeastLoaded, PowerOfTwo, Random, RoundRobin};
