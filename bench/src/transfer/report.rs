//! What was measured, as a table and as JSON.

use std::fmt;

use serde::Serialize;
use transfer::{Direction, Lane};

use super::Args;
use super::baseline::Variant;
use super::case::Shape;
use crate::machine::{Load, Machine};
use crate::stats::median;
use crate::table::{Table, grouped, or_dash};

/// What the same bytes cost without a transport. Seconds of each repeat.
#[derive(Clone, Debug, Serialize)]
pub struct Baseline {
    pub memcpy: Vec<f64>,
    pub tcp: Vec<(Variant, Vec<f64>)>,
}

impl Baseline {
    pub fn memcpy_seconds(&self) -> f64 {
        median(&self.memcpy).unwrap_or(f64::NAN)
    }

    /// The best variant's.
    pub fn tcp_seconds(&self) -> f64 {
        let medians = self.tcp.iter().filter_map(|(_, seconds)| median(seconds));
        medians.min_by(f64::total_cmp).unwrap_or(f64::NAN)
    }
}

/// One transport, direction, shape and size.
#[derive(Clone, Debug, Serialize)]
pub struct Point {
    pub transport: String,
    pub direction: Direction,
    pub shape: Shape,
    pub tokens: u32,
    pub bytes: u64,
    pub descriptors: u32,
    pub seconds: Vec<f64>,
    /// Of these: in the call that hands the transfer to the library.
    pub post_seconds: Vec<f64>,
    pub lane: Option<Lane>,
    pub baseline: Baseline,
}

impl Point {
    pub fn median(&self) -> f64 {
        median(&self.seconds).unwrap_or(f64::NAN)
    }

    pub fn gb_per_s(&self) -> f64 {
        self.bytes as f64 / self.median() / 1e9
    }
}

/// Everything.
#[derive(Debug, Serialize)]
pub struct Report {
    pub settings: Args,
    pub machine: Machine,
    pub load_before: Option<Load>,
    pub load_after: Option<Load>,
    pub points: Vec<Point>,
}

impl Report {
    pub fn new(args: &Args, machine: Machine, load_before: Option<Load>) -> Self {
        Self { settings: args.clone(), machine, load_before, load_after: None, points: Vec::new() }
    }

    /// The rate of the same transfer in descriptors of 32 KiB.
    fn vllm_rate(&self, point: &Point) -> Option<f64> {
        let same = |other: &&Point| {
            other.shape == Shape::Vllm
                && (&other.transport, other.direction, other.tokens)
                    == (&point.transport, point.direction, point.tokens)
        };
        self.points.iter().find(same).map(Point::gb_per_s)
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&[
            "<transport",
            "<direction",
            "<shape",
            "tokens",
            "MB",
            "descriptors",
            "us",
            "post us",
            "GB/s",
            "best",
            "of memcpy",
            "of TCP",
            "to 32k",
            "<lane",
        ]);
        let us = |seconds: f64| grouped((seconds * 1e6).round() as u64);
        for point in &self.points {
            let best = point.seconds.iter().copied().min_by(f64::total_cmp).unwrap_or(f64::NAN);
            let share = |baseline: f64| format!("{:.0} %", 100.0 * baseline / point.median());
            table.row([
                point.transport.clone(),
                point.direction.as_str().to_owned(),
                point.shape.name().to_owned(),
                grouped(u64::from(point.tokens)),
                format!("{:.1}", point.bytes as f64 / 1e6),
                grouped(u64::from(point.descriptors)),
                us(point.median()),
                us(median(&point.post_seconds).unwrap_or(0.0)),
                format!("{:.2}", point.gb_per_s()),
                format!("{:.2}", point.bytes as f64 / best / 1e9),
                share(point.baseline.memcpy_seconds()),
                share(point.baseline.tcp_seconds()),
                or_dash(self.vllm_rate(point).map(|rate| format!("{:.1}x", point.gb_per_s() / rate))),
                or_dash(point.lane.as_ref().map(ToString::to_string)),
            ]);
        }
        writeln!(f, "{table}")?;
        self.baselines(f)
    }
}

impl Report {
    fn baselines(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new(&["tokens", "MB", "memcpy GB/s", "plain TCP GB/s"]);
        for &tokens in &self.settings.tokens {
            let of_size: Vec<_> = self.points.iter().filter(|p| p.tokens == tokens).collect();
            let Some(first) = of_size.first() else { continue };
            let rate = |seconds: fn(&Baseline) -> f64| {
                let all: Vec<f64> = of_size.iter().map(|p| seconds(&p.baseline)).collect();
                format!("{:.2}", first.bytes as f64 / median(&all).unwrap_or(f64::NAN) / 1e9)
            };
            let (memcpy, tcp) = (rate(Baseline::memcpy_seconds), rate(Baseline::tcp_seconds));
            table.row([grouped(u64::from(tokens)), format!("{:.1}", first.bytes as f64 / 1e6), memcpy, tcp]);
        }
        write!(f, "{table}")
    }
}
