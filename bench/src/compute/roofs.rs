//! The machine's limits, measured while the kernels are.

use std::collections::BTreeMap;

use kernels::cpu::arena::{Arena, HugeSlice};
use kernels::cpu::{Isa, Precision, roof};
use serde::Serialize;

use super::seconds;
use crate::error::{BenchError, Result};

/// Words that are read for the memory's roof: 512 MiB, more than a share of any last-level cache.
const WORDS: usize = 128 << 20;

/// The best of all rounds so far.
pub struct Roofs {
    words: HugeSlice,
    read: f64,
    compute: BTreeMap<(Isa, &'static str), f64>,
}

/// GB/s (10^9 bytes) and GFLOP/s (or GOP/s) of all threads.
#[derive(Clone, Debug, Serialize)]
pub struct Measured {
    pub read_gb_s: f64,
    pub compute: Vec<Peak>,
}

#[derive(Clone, Debug, Serialize)]
pub struct Peak {
    pub isa: &'static str,
    pub precision: &'static str,
    pub gflop_s: f64,
}

impl Roofs {
    pub fn new() -> Result<Self> {
        let no_memory = BenchError::io("memory for the read roof");
        let mut words = Arena::default().alloc(WORDS).map_err(no_memory)?;
        // Untouched pages would all be one page of zeros.
        words.fill(1);
        Ok(Self { words, read: 0.0, compute: BTreeMap::new() })
    }

    /// Reads the memory once more; returns the best GB/s so far.
    pub fn read(&mut self) -> f64 {
        let seconds = seconds(|| roof::read(&self.words));
        self.read = self.read.max(size_of_val(&*self.words) as f64 / seconds / 1e9);
        self.read
    }

    /// Computes on registers once more; returns the best GFLOP/s so far.
    pub fn compute(&mut self, isa: Isa, precision: Precision) -> f64 {
        let mut operations = 0.0;
        let seconds = seconds(|| operations = roof::compute(isa, precision));
        let best = self.compute.entry((isa, name(precision))).or_default();
        *best = best.max(operations / seconds / 1e9);
        *best
    }

    pub fn measured(&self) -> Measured {
        let peak = |(&(isa, precision), &gflop_s): (&(Isa, &'static str), &f64)| Peak {
            isa: isa.as_str(),
            precision,
            gflop_s,
        };
        Measured { read_gb_s: self.read, compute: self.compute.iter().map(peak).collect() }
    }
}

pub fn name(precision: Precision) -> &'static str {
    match precision {
        Precision::Bf16 => "bf16",
        Precision::Int8 => "int8",
    }
}
