//! tests

pub mod golden;
