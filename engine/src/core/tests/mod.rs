//! Two cores, a link and a data path between them, driven by random events.
//!
//! The model is a hash: a token's "KV" is a hash of the KV before it and of the token, read from the block table, and
//! the next token is a function of the last KV. So an answer is right only if every block that was read held the right
//! content, wherever it came from.
//!
//! `world` is the machinery, `choices` the randomness that can be shrunk, `random` the random sequences of two workers,
//! `local` those of one alone, `cases` the faults that were found, `leases` those
//! of leases.

mod cases;
mod choices;
mod leases;
mod local;
mod random;
mod world;
