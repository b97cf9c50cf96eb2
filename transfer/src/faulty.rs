//! A transport with faults, on purpose: for tests of what must hold although the wire fails. Self-tests are spared.

use std::collections::{HashMap, VecDeque};
use std::str::FromStr;
use std::time::{Duration, Instant};

use crate::error::TransferError;
use crate::lane::Lane;
use crate::probe::Note;
use crate::transport::{Direction, Event, PeerId, Span, Transport, XferId};
use crate::ucx::Setting;

/// What goes wrong, and how often. Written as `delay-ms=100,lose-note=3,mix-up=5`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Every transfer begins this much late.
    pub delay: Duration,
    /// Every notification of this number that arrives is lost.
    pub lose_note: Option<u64>,
    /// Every transfer of this number brings the bytes of other blocks.
    pub mix_up: Option<u64>,
}

impl FromStr for Faults {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut faults = Self::default();
        for part in text.split(',') {
            let number =
                part.split_once('=').and_then(|(name, value)| Some((name, value.parse::<u64>().ok()?)));
            match number {
                Some(("delay-ms", ms)) => faults.delay = Duration::from_millis(ms),
                Some(("lose-note", n @ 1..)) => faults.lose_note = Some(n),
                Some(("mix-up", n @ 1..)) => faults.mix_up = Some(n),
                _ => {
                    return Err(format!(
                        "{part:?} is not a fault, expected delay-ms=N, lose-note=N or mix-up=N with N of at least 1"
                    ));
                }
            }
        }
        Ok(faults)
    }
}

/// A transfer that is held back.
struct Held {
    xfer: XferId,
    due: Instant,
    direction: Direction,
    peer: PeerId,
    spans: Vec<Span>,
    notification: Vec<u8>,
}

/// Wraps a transport.
pub struct Faulty {
    inner: Box<dyn Transport>,
    faults: Faults,
    held: VecDeque<Held>,
    /// Ours by the inner transport's.
    ids: HashMap<XferId, XferId>,
    next: u64,
    transfers: u64,
    notes: u64,
}

impl Faulty {
    pub fn new(inner: Box<dyn Transport>, faults: Faults) -> Self {
        tracing::warn!(?faults, "the KV transport fails on purpose");
        Self { inner, faults, held: VecDeque::new(), ids: HashMap::new(), next: 0, transfers: 0, notes: 0 }
    }

    /// Hands on what is due; what cannot be posted has settled.
    fn release(&mut self, events: &mut Vec<Event>) {
        let now = Instant::now();
        let (due, held): (VecDeque<_>, VecDeque<_>) =
            std::mem::take(&mut self.held).into_iter().partition(|held| held.due <= now);
        self.held = held;
        for held in due {
            match self.inner.post(held.direction, held.peer, &held.spans, &held.notification) {
                Ok(inner) => drop(self.ids.insert(inner, held.xfer)),
                Err(error) => {
                    events.push(Event::Settled { xfer: held.xfer, peer: held.peer, result: Err(error) });
                }
            }
        }
    }

    fn every(count: u64, nth: Option<u64>) -> bool {
        nth.is_some_and(|nth| count.is_multiple_of(nth))
    }
}

impl Transport for Faulty {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    fn enter_thread(&mut self) -> Result<(), TransferError> {
        self.inner.enter_thread()
    }

    fn metadata(&self) -> Vec<u8> {
        self.inner.metadata()
    }

    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError> {
        self.inner.add_peer(peer, metadata)
    }

    fn remove_peer(&mut self, peer: PeerId) {
        // What is held back is posted to a peer that is not there any more, and so fails.
        self.held.iter_mut().filter(|held| held.peer == peer).for_each(|held| held.due = Instant::now());
        self.inner.remove_peer(peer);
    }

    fn post(
        &mut self,
        direction: Direction,
        peer: PeerId,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<XferId, TransferError> {
        let xfer = XferId(self.next);
        self.next += 1;
        let mut spans = spans.to_vec();
        let spared = Note::decode(notification).is_some();
        self.transfers += u64::from(!spared);
        if !spared
            && Self::every(self.transfers, self.faults.mix_up)
            && let Some(span) = spans.first_mut()
        {
            // The neighbour's bytes, or for the last block those before.
            let source = if direction == Direction::Write { &mut span.local } else { &mut span.remote };
            *source = if *source >= span.len { *source - span.len } else { *source + span.len };
        }
        let due = Instant::now() + if spared { Duration::ZERO } else { self.faults.delay };
        let notification = notification.to_vec();
        self.held.push_back(Held { xfer, due, direction, peer, spans, notification });
        Ok(xfer)
    }

    fn lane(&mut self, direction: Direction) -> Option<Lane> {
        self.inner.lane(direction)
    }

    fn has_mapped(&self, peer: PeerId) -> Option<bool> {
        self.inner.has_mapped(peer)
    }

    fn settings(&self) -> Vec<Setting> {
        self.inner.settings()
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransferError> {
        self.release(events);
        let mut news = Vec::new();
        let outcome = self.inner.poll(&mut news);
        for event in news {
            match event {
                Event::Settled { xfer, peer, result } => {
                    let xfer = self.ids.remove(&xfer).expect("each transfer settles once. This is a bug.");
                    events.push(Event::Settled { xfer, peer, result });
                }
                Event::Notified { payload } => {
                    let spared = Note::decode(&payload).is_some();
                    self.notes += u64::from(!spared);
                    if spared || !Self::every(self.notes, self.faults.lose_note) {
                        events.push(Event::Notified { payload });
                    }
                }
                lost => events.push(lost),
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn faults_are_read_or_named() {
        let faults: Faults = "delay-ms=100,lose-note=3".parse().unwrap();
        assert_eq!(
            (faults.delay, faults.lose_note, faults.mix_up),
            (Duration::from_millis(100), Some(3), None)
        );
        for bad in ["", "delay-ms", "lose-note=0", "delay-ms=-1", "noise=1"] {
            assert!(bad.parse::<Faults>().unwrap_err().contains(&format!("{bad:?} is not a fault")), "{bad}");
        }
    }
}
