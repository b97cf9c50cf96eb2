//! Self-tests on the driver's thread: its own, and answers to its peers'.

use std::sync::mpsc::SyncSender;
use std::time::Instant;

use super::{Driver, Owner, PROBED};
use crate::error::TransferError;
use crate::probe::{Action, Note, PING_BYTES, ProbeReport, Prober, Scratch};
use crate::socket::mapped;
use crate::transport::{Direction, PeerId, Span, XferStats};

/// What a peer said of itself.
#[derive(Clone, Copy, Debug)]
pub struct Known {
    pub incarnation: u64,
    pub scratch: Option<Scratch>,
}

/// A self-test of ours.
pub struct Probe {
    peer: PeerId,
    prober: Prober,
    /// Whether it has mapped our pool, once it has said so.
    mapped_by_peer: Option<bool>,
    reply: SyncSender<Result<ProbeReport, TransferError>>,
}

impl Probe {
    fn end(self, result: Result<ProbeReport, TransferError>) {
        // Whoever asked may have given up.
        let _ = self.reply.send(result);
    }
}

impl Driver {
    pub(super) fn begin_probe(
        &mut self,
        peer: PeerId,
        reply: SyncSender<Result<ProbeReport, TransferError>>,
    ) {
        let scratch = |side: Option<Scratch>, whose: &str| {
            side.ok_or_else(|| TransferError::BadMetadata(format!("{whose} pool has no scratch blocks")))
        };
        let begin = || {
            let known = self.known.get(&peer).ok_or(TransferError::UnknownPeer(peer))?;
            Ok((scratch(self.identity.scratch, "our")?, scratch(known.scratch, "the peer's")?))
        };
        let (own, theirs) = match begin() {
            Ok(both) => both,
            Err(error) => return drop(reply.send(Err(error))),
        };
        self.next_nonce = self.next_nonce.wrapping_add(1);
        let prober = Prober::new(own, theirs, self.identity.incarnation, self.next_nonce, Instant::now());
        self.advance(Probe { peer, prober, mapped_by_peer: None, reply });
    }

    /// Posts the next step, or ends the self-test.
    fn advance(&mut self, mut probe: Probe) {
        match probe.prober.action(Instant::now()) {
            Action::Post { direction, spans, note } => {
                match self.transport.post(direction, probe.peer, &spans, &note.encode()) {
                    Ok(xfer) => {
                        self.owners.insert(xfer, Owner::Probe(probe.prober.nonce()));
                        self.probes.push(probe);
                    }
                    Err(error) => probe.end(Err(error)),
                }
            }
            Action::Done(report) => {
                let mut lane = |direction| self.lane(probe.peer, direction).map(|lane| (*lane).clone());
                let (write_lane, read_lane) = (lane(Direction::Write), lane(Direction::Read));
                // What the peer pushes, it copies.
                let write_lane = probe.mapped_by_peer.map(mapped::lane).or(write_lane);
                probe.end(Ok(ProbeReport { write_lane, read_lane, ..report }));
            }
        }
    }

    pub(super) fn probe_settled(&mut self, nonce: u64, result: Result<XferStats, TransferError>) {
        let Some(index) = self.probes.iter().position(|probe| probe.prober.nonce() == nonce) else { return };
        match result {
            Ok(stats) => {
                if self.probes[index].prober.settled(&stats) {
                    let probe = self.probes.swap_remove(index);
                    self.advance(probe);
                }
            }
            Err(error) => self.probes.swap_remove(index).end(Err(error)),
        }
    }

    /// A notification of a self-test, a peer's or ours.
    pub(super) fn noted(&mut self, note: Note) {
        match note {
            Note::Ping { from, nonce } => {
                self.stay_warm(PROBED);
                self.answer(from, nonce);
            }
            Note::Pong { nonce, mapped } => {
                let now = Instant::now();
                let asked = |probe: &Probe| probe.prober.nonce() == nonce;
                let Some(index) = self.probes.iter().position(asked) else { return };
                self.probes[index].mapped_by_peer = mapped;
                if self.probes[index].prober.ponged(now) {
                    let probe = self.probes.swap_remove(index);
                    self.advance(probe);
                }
            }
            Note::Load => {}
        }
    }

    /// Answers a ping; one from a peer that is not (or no longer) known stays unanswered, which the asker notices.
    fn answer(&mut self, from: u64, nonce: u64) {
        let peers = self.known.iter().filter(|(_, known)| known.incarnation == from);
        let Some((&peer, &Known { scratch: Some(theirs), .. })) = peers.max_by_key(|(peer, _)| **peer) else {
            return;
        };
        let Some(own) = self.identity.scratch else { return };
        let spans = [Span { local: own.offset, remote: theirs.offset, len: PING_BYTES }];
        let pong = Note::Pong { nonce, mapped: self.transport.has_mapped(peer) };
        match self.transport.post(Direction::Write, peer, &spans, &pong.encode()) {
            Ok(xfer) => drop(self.owners.insert(xfer, Owner::Pong)),
            Err(error) => tracing::debug!(?peer, %error, "cannot answer a self-test"),
        }
    }

    /// Ends the self-tests with one peer, or all.
    pub(super) fn fail_probes(&mut self, peer: Option<PeerId>, error: &TransferError) {
        for probe in self.probes.extract_if(.., |probe| peer.is_none_or(|peer| probe.peer == peer)) {
            probe.end(Err(error.clone()));
        }
    }

    pub(super) fn drop_overdue_probes(&mut self) {
        if self.probes.is_empty() {
            return;
        }
        let now = Instant::now();
        let overdue = |probe: &mut Probe| probe.prober.overdue(now).is_some();
        for probe in self.probes.extract_if(.., overdue) {
            let error = probe.prober.overdue(now).expect("found overdue just now");
            probe.end(Err(error));
        }
    }
}
