//! The steps of a self-test. No clock and no transport: both come in, what to post comes out.

use std::time::{Duration, Instant};

use super::{Measured, Note, ProbeReport, Scratch};
use crate::error::TransferError;
use crate::transport::{Direction, Span, XferStats};

/// A self-test that has not ended by then has failed.
const PATIENCE: Duration = Duration::from_secs(5);

/// Blocks of the long transfers, where the link is fast enough for [`LONG`].
const MANY: u32 = 64;

/// What one long transfer may take, so that the whole self-test stays below 200 ms.
const LONG: Duration = Duration::from_millis(25);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    Ping,
    Move(Direction, Size),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Size {
    One,
    Many,
}

/// In this order. The first of each kind pays for what is made once (connection, keys, page tables), and the best counts.
const STEPS: &[Step] = &[
    Step::Ping,
    Step::Ping,
    Step::Ping,
    Step::Ping,
    Step::Move(Direction::Write, Size::One),
    Step::Move(Direction::Write, Size::One),
    Step::Move(Direction::Write, Size::Many),
    Step::Move(Direction::Write, Size::Many),
    Step::Move(Direction::Read, Size::One),
    Step::Move(Direction::Read, Size::One),
    Step::Move(Direction::Read, Size::Many),
    Step::Move(Direction::Read, Size::Many),
];

/// What the driver is to do next.
#[derive(Debug, PartialEq)]
pub enum Action {
    Post {
        direction: Direction,
        spans: Vec<Span>,
        note: Note,
    },
    /// The measurements are made; the lanes are the driver's to fill in.
    Done(ProbeReport),
}

/// One self-test under way.
#[derive(Debug)]
pub struct Prober {
    own: Scratch,
    theirs: Scratch,
    incarnation: u64,
    nonce: u64,
    started: Instant,
    step: usize,
    stepped: Instant,
    report: ProbeReport,
}

impl Prober {
    /// `incarnation` is ours, `nonce` a number that no other self-test of ours has.
    pub fn new(own: Scratch, theirs: Scratch, incarnation: u64, nonce: u64, now: Instant) -> Self {
        let report = ProbeReport { block_bytes: theirs.block_bytes, ..Default::default() };
        Self { own, theirs, incarnation, nonce, started: now, step: 0, stepped: now, report }
    }

    pub fn nonce(&self) -> u64 {
        self.nonce
    }

    /// The error of a self-test that takes too long.
    pub fn overdue(&self, now: Instant) -> Option<TransferError> {
        (now - self.started > PATIENCE).then_some(TransferError::NoAnswer(PATIENCE))
    }

    /// The step under way; [`Action::Done`] when there is none.
    pub fn action(&mut self, now: Instant) -> Action {
        self.stepped = now;
        let Some(step) = STEPS.get(self.step) else {
            let took = now - self.started;
            return Action::Done(ProbeReport { took, ..std::mem::take(&mut self.report) });
        };
        match *step {
            Step::Ping => Action::Post {
                direction: Direction::Write,
                spans: vec![Span { local: self.own.offset, remote: self.theirs.offset, len: PING_BYTES }],
                note: Note::Ping { from: self.incarnation, nonce: self.nonce },
            },
            Step::Move(direction, size) => {
                let spans = (0..self.blocks(direction, size)).map(|i| self.span(i)).collect();
                Action::Post { direction, spans, note: Note::Load }
            }
        }
    }

    /// The answer to a ping came. True when it ends the step.
    pub fn ponged(&mut self, now: Instant) -> bool {
        if STEPS.get(self.step) != Some(&Step::Ping) {
            return false;
        }
        let time = now - self.stepped;
        match self.step {
            0 => self.report.connect = time,
            1 => self.report.round_trip = time,
            _ => self.report.round_trip = self.report.round_trip.min(time),
        }
        self.step += 1;
        true
    }

    /// The posted transfer settled. True when it ends the step: a ping waits for its answer.
    pub fn settled(&mut self, stats: &XferStats) -> bool {
        let Some(Step::Move(direction, _)) = STEPS.get(self.step).copied() else { return false };
        let blocks = stats.descriptors;
        let seconds = stats.wire.as_secs_f64().max(1e-9);
        let same = |m: &&mut Measured| m.direction == direction && m.blocks == blocks;
        match self.report.measured.iter_mut().find(same) {
            Some(known) => known.seconds = known.seconds.min(seconds),
            None => self.report.measured.push(Measured { direction, blocks, bytes: stats.bytes, seconds }),
        }
        self.step += 1;
        true
    }

    fn blocks(&self, direction: Direction, size: Size) -> u32 {
        let one = self.report.measured.iter().find(|m| m.direction == direction && m.blocks == 1);
        match (size, one) {
            (Size::Many, Some(one)) => ((LONG.as_secs_f64() / one.seconds) as u32).clamp(1, MANY),
            (Size::Many, None) => MANY,
            (Size::One, _) => 1,
        }
    }

    fn span(&self, index: u32) -> Span {
        let len = self.own.block_bytes.min(self.theirs.block_bytes);
        Span { local: self.own.block(index), remote: self.theirs.block(index), len }
    }
}

/// What a ping and its answer write.
pub const PING_BYTES: u64 = 8;

#[cfg(test)]
mod tests {
    use super::*;

    fn prober(now: Instant) -> Prober {
        let scratch = |offset| Scratch { offset, block_bytes: 1000, blocks: 2 };
        Prober::new(scratch(4000), scratch(8000), 7, 1, now)
    }

    /// Plays a peer with a round trip of 10 us (100 at first) that moves a block in `block`.
    fn play(block: Duration) -> (ProbeReport, Vec<usize>) {
        let mut now = Instant::now();
        let (mut prober, mut first, mut sizes) = (prober(now), true, Vec::new());
        loop {
            match prober.action(now) {
                Action::Done(report) => return (report, sizes),
                Action::Post { note: Note::Ping { from: 7, nonce: 1 }, spans, .. } => {
                    assert_eq!(spans, [Span { local: 4000, remote: 8000, len: 8 }]);
                    assert!(!prober.settled(&XferStats::default()), "a ping waits for its answer");
                    now += Duration::from_micros(if std::mem::take(&mut first) { 100 } else { 10 });
                    assert!(prober.ponged(now));
                }
                Action::Post { direction, spans, .. } => {
                    assert!(!prober.ponged(now), "a late answer ends nothing");
                    sizes.push(spans.len());
                    let wire = block * spans.len() as u32;
                    let (bytes, descriptors) = (1000 * spans.len() as u64, spans.len() as u32);
                    now += wire;
                    let stats = XferStats { direction, bytes, descriptors, wire, ..Default::default() };
                    assert!(prober.settled(&stats));
                }
            }
        }
    }

    #[test]
    fn a_fast_link_is_measured_with_one_and_64_blocks() {
        let (report, sizes) = play(Duration::from_micros(100));
        assert_eq!(sizes, [1, 1, 64, 64, 1, 1, 64, 64]);
        assert_eq!(
            (report.connect, report.round_trip),
            (Duration::from_micros(100), Duration::from_micros(10))
        );
        assert_eq!(report.measured.len(), 4);
        assert!((report.gb_per_s(Direction::Read).unwrap() - 0.01).abs() < 1e-9);
        assert!(report.took < Duration::from_millis(200), "{:?}", report.took);
    }

    #[test]
    fn a_slow_link_is_not_held_up() {
        let (report, sizes) = play(Duration::from_millis(10));
        assert_eq!(sizes, [1, 1, 2, 2, 1, 1, 2, 2]);
        assert!(report.took < Duration::from_millis(200), "{:?}", report.took);
    }

    #[test]
    fn spans_stay_in_the_scratch_blocks() {
        let prober = prober(Instant::now());
        for index in 0..MANY {
            let span = prober.span(index);
            assert!(span.local >= 4000 && span.local + span.len <= 6000, "{span:?}");
            assert!(span.remote >= 8000 && span.remote + span.len <= 10_000, "{span:?}");
        }
    }

    #[test]
    fn silence_is_an_error() {
        let now = Instant::now();
        let prober = prober(now);
        assert_eq!(prober.overdue(now + PATIENCE), None);
        let late = prober.overdue(now + PATIENCE * 2);
        assert_eq!(late, Some(TransferError::NoAnswer(PATIENCE)));
    }
}
