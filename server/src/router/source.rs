//! How one worker's index is fed, and the alarm when that is not as expected.
//!
//! In event mode a worker without events would have no overlap, ever, and its cache would go unused without anybody
//! seeing why. So it is degraded to the approximate index, and it shows until events come.

use std::time::Duration;

use serde::Serialize;

use super::view::IndexSource;

/// How often a standing alarm is repeated.
const REPEAT: Duration = Duration::from_secs(60);

/// What went wrong, or right again: the value of `code` in logs, `/health` and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
pub enum SourceCode {
    /// The worker says that it publishes no events.
    #[serde(rename = "kv_event_publisher_disabled")]
    PublisherDisabled,
    /// It says that it publishes events, and none came although it must have stored blocks.
    #[serde(rename = "kv_event_source_not_observed")]
    NotObserved,
    /// Events come again.
    #[serde(rename = "kv_event_source_recovered")]
    Recovered,
}

impl SourceCode {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::PublisherDisabled => "kv_event_publisher_disabled",
            Self::NotObserved => "kv_event_source_not_observed",
            Self::Recovered => "kv_event_source_recovered",
        }
    }
}

/// What is expected of all workers.
#[derive(Clone, Copy, Debug)]
pub struct Expectation {
    /// The mode looks at overlap at all.
    pub overlap: bool,
    /// Workers should publish events (`--router-kv-events`).
    pub events: bool,
    /// Without events, use the approximate index (`--router-kv-degrade`); else that worker has no overlap.
    pub degrade: bool,
    /// How long after blocks must have been stored their event may take.
    pub patience: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing came yet, and nothing is overdue.
    Waiting,
    Flowing,
    Missing(SourceCode),
}

/// The source of one worker's part of the index.
#[derive(Clone, Debug)]
pub struct Source {
    expectation: Expectation,
    state: State,
    /// Since when an event is due.
    due: Option<Duration>,
    /// When the standing alarm was last raised.
    raised: Duration,
}

impl Source {
    /// The source of a worker that says whether it `publishes` events. The code, if any, is to be raised.
    pub fn new(expectation: Expectation, publishes: bool, now: Duration) -> (Self, Option<SourceCode>) {
        let expected = expectation.overlap && expectation.events;
        let missing = (expected && !publishes).then_some(SourceCode::PublisherDisabled);
        let state = missing.map_or(State::Waiting, State::Missing);
        (Self { expectation, state, due: None, raised: now }, missing)
    }

    /// Where overlaps with this worker come from now.
    pub fn current(&self) -> IndexSource {
        if !self.expectation.overlap {
            return IndexSource::None;
        }
        match self.state {
            State::Flowing if self.expectation.events => IndexSource::Events,
            State::Missing(_) if !self.expectation.degrade => IndexSource::None,
            State::Waiting if self.expectation.events && !self.expectation.degrade => IndexSource::None,
            _ => IndexSource::Approximate,
        }
    }

    /// The standing alarm.
    pub fn alarm(&self) -> Option<SourceCode> {
        match self.state {
            State::Missing(code) => Some(code),
            State::Waiting | State::Flowing => None,
        }
    }

    /// The worker computed blocks that it did not hold as far as the index knows: an event is due.
    pub fn expect_event(&mut self, now: Duration) {
        if self.expectation.overlap && self.expectation.events && self.alarm().is_none() {
            self.due.get_or_insert(now);
        }
    }

    /// Events came, or what the worker holds was read as a whole.
    pub fn observed(&mut self, now: Duration) -> Option<SourceCode> {
        if !(self.expectation.overlap && self.expectation.events) {
            return None;
        }
        self.due = None;
        match std::mem::replace(&mut self.state, State::Flowing) {
            State::Missing(_) => {
                self.raised = now;
                Some(SourceCode::Recovered)
            }
            State::Waiting | State::Flowing => None,
        }
    }

    /// Events were lost and what the worker holds could not be read: its exact index was cleared and grows anew.
    pub fn lost(&mut self) {
        if self.state == State::Flowing {
            self.state = State::Waiting;
        }
    }

    /// Raises what is overdue, and repeats a standing alarm.
    pub fn tick(&mut self, now: Duration) -> Option<SourceCode> {
        if let State::Missing(code) = self.state {
            if now.saturating_sub(self.raised) < REPEAT {
                return None;
            }
            self.raised = now;
            return Some(code);
        }
        let overdue = self.due.is_some_and(|due| now.saturating_sub(due) >= self.expectation.patience);
        if !overdue {
            return None;
        }
        self.due = None;
        self.raised = now;
        self.state = State::Missing(SourceCode::NotObserved);
        Some(SourceCode::NotObserved)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EXPECTED: Expectation =
        Expectation { overlap: true, events: true, degrade: true, patience: Duration::from_secs(10) };

    fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    /// rt-01: a worker that says it publishes nothing is an alarm at once, and again every minute.
    #[test]
    fn a_worker_without_a_publisher_is_loud_and_approximate() {
        let (mut source, code) = Source::new(EXPECTED, false, secs(0));
        assert_eq!(code, Some(SourceCode::PublisherDisabled));
        assert_eq!((source.current(), source.alarm()), (IndexSource::Approximate, code));
        let raised: Vec<_> = (1..=180).filter(|now| source.tick(secs(*now)).is_some()).collect();
        assert_eq!(raised, [60, 120, 180]);
    }

    #[test]
    fn silence_is_an_alarm_only_when_an_event_is_due() {
        let (mut source, code) = Source::new(EXPECTED, true, secs(0));
        assert_eq!((code, source.tick(secs(1000)), source.alarm()), (None, None, None));
        source.expect_event(secs(1000));
        source.expect_event(secs(1009));
        assert_eq!(source.tick(secs(1009)), None);
        assert_eq!(source.tick(secs(1010)), Some(SourceCode::NotObserved));
        assert_eq!(source.current(), IndexSource::Approximate);
        assert_eq!(source.observed(secs(1020)), Some(SourceCode::Recovered));
        assert_eq!(
            (source.current(), source.alarm(), source.tick(secs(2000))),
            (IndexSource::Events, None, None)
        );
        // It was heard once and went silent: that is an alarm, too.
        source.expect_event(secs(2000));
        assert_eq!(source.observed(secs(2005)), None);
        assert_eq!(source.tick(secs(2015)), None);
        source.expect_event(secs(2020));
        assert_eq!(source.tick(secs(2030)), Some(SourceCode::NotObserved));
    }

    /// `--router-kv-degrade off`: the published fall, for comparison.
    #[test]
    fn without_degradation_there_is_no_overlap() {
        let off = Expectation { degrade: false, ..EXPECTED };
        assert_eq!(Source::new(off, false, secs(0)).0.current(), IndexSource::None);
        let mut source = Source::new(off, true, secs(0)).0;
        source.observed(secs(1));
        assert_eq!(source.current(), IndexSource::Events);
    }

    #[test]
    fn modes_that_need_no_events_raise_nothing() {
        for (expectation, current) in [
            (Expectation { events: false, ..EXPECTED }, IndexSource::Approximate),
            (Expectation { overlap: false, ..EXPECTED }, IndexSource::None),
        ] {
            let (mut source, code) = Source::new(expectation, false, secs(0));
            source.expect_event(secs(1));
            assert_eq!((code, source.observed(secs(2)), source.tick(secs(1000))), (None, None, None));
            assert_eq!(source.current(), current);
        }
    }
}
