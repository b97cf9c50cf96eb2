//! Leases: a prefill worker gives up a ticket's blocks when nobody has asked for them for long enough.

use std::collections::BTreeMap;
use std::time::Duration;

use transfer::PeerId;

use super::{Core, Effect, Stale};
use crate::api::KvFault;
use crate::handoff::{PeerMessage, TicketId, ToDecode, ToPrefill};
use crate::pool::BlockId;
use crate::ticket::{Ending, Remote};

/// Renewals in a lease's time, so that a lost or late one does not end it: as vLLM's heartbeats.
const RENEWALS: u32 = 6;

/// Renewals to a peer that are remembered until they are answered.
const UNANSWERED: usize = 64;

/// (Prefill worker) blocks that a decode worker may still be reading although their ticket is over.
#[derive(Debug)]
pub(super) struct Pinned {
    pub(super) until: Duration,
    pub(super) blocks: Vec<BlockId>,
}

impl Core {
    /// (Decode worker) renews all open tickets' leases when it is time to.
    pub(super) fn renew(&mut self, now: Duration) {
        let shortest = self.prefill_peers.values().map(|peer| peer.link.lease).min();
        let Some(lease) = shortest.filter(|_| !self.tickets.is_empty()) else { return };
        if now < self.last_renewal + lease / RENEWALS {
            return;
        }
        self.last_renewal = now;
        let mut tickets: BTreeMap<PeerId, Vec<TicketId>> = BTreeMap::new();
        for (ticket, id) in &self.tickets {
            if let Some(remote) = &self.requests[id].remote {
                tickets.entry(remote.peer).or_default().push(*ticket);
            }
        }
        for (peer, tickets) in tickets {
            let seq = self.next_renewal;
            self.next_renewal += 1;
            let sent = self.renewals.entry(peer).or_default();
            sent.push_back((seq, now));
            if sent.len() > UNANSWERED {
                sent.pop_front();
            }
            let renew = PeerMessage::ToPrefill(ToPrefill::Renew { seq, tickets });
            self.effects.push(Effect::Send(peer, renew));
        }
    }

    /// (Decode worker) a prefill worker has renewed the leases of `seq`.
    pub(super) fn renewed(&mut self, peer: PeerId, seq: u64, unknown: &[TicketId]) {
        let sent = self.renewals.get_mut(&peer);
        let at = sent.and_then(|sent| {
            let index = sent.iter().position(|(number, _)| *number == seq)?;
            sent.drain(..=index).next_back()
        });
        let Some((_, at)) = at else { return self.stale(Stale::Unknown) };
        for request in self.requests.values_mut() {
            let known = |remote: &&mut Remote| remote.peer == peer && !unknown.contains(&remote.ticket);
            if let Some(remote) = request.remote.as_mut().filter(known) {
                remote.renewed_at = remote.renewed_at.max(at);
            }
        }
        for ticket in unknown {
            let Some(&id) = self.tickets.get(ticket) else { continue };
            let wanted = self.wanted_blocks(id);
            // One that may be done with it has not forgotten it: what tells us is still on its way on the data path.
            let forgotten = |remote: &Remote| remote.peer == peer && !remote.may_be_over(wanted);
            if self.requests[&id].remote.as_ref().is_some_and(forgotten) {
                let reason = "the prefill worker does not know the ticket any more";
                self.remote_failed(id, KvFault::LeaseExpired, reason, true);
            }
        }
    }

    /// (Prefill worker) the decode worker still wants these tickets.
    pub(super) fn renew_pushes(&mut self, peer: PeerId, seq: u64, tickets: Vec<TicketId>, now: Duration) {
        let lease_until = now + self.config.lease;
        let mut unknown = Vec::new();
        for ticket in tickets {
            match self.pushes.get(&(peer, ticket)) {
                Some(id) => {
                    let push = self.requests.get_mut(id).and_then(|request| request.push_mut());
                    push.expect("listed as a push. This is a bug.").lease_until = lease_until;
                }
                None => unknown.push(ticket),
            }
        }
        let renewed = PeerMessage::ToDecode(ToDecode::Renewed { seq, unknown });
        self.effects.push(Effect::Send(peer, renewed));
    }

    /// (Prefill worker) gives up what nobody has asked for within its lease.
    pub(super) fn expire_leases(&mut self, now: Duration) {
        let late = |id: &crate::handle::RequestId| {
            let push = self.requests[id].push();
            push.is_some_and(|push| push.ending.is_none() && now >= push.lease_until)
        };
        let late: Vec<_> = self.pushes.values().filter(|id| late(id)).copied().collect();
        for id in late {
            self.counters.kv_expired += 1;
            self.end_push(id, Ending::Failed(format!("its lease of {:?} ran out", self.config.lease)));
        }
        for pinned in self.pinned.extract_if(.., |pinned| now >= pinned.until) {
            self.pool.release_chain(&pinned.blocks);
        }
        let expired: Vec<_> =
            self.kept.iter().filter(|(_, kept)| now >= kept.until).map(|(name, _)| name.clone()).collect();
        for name in expired {
            self.counters.kv_expired += 1;
            if let Some(kept) = self.kept.remove(&name) {
                self.pool.release_chain(&kept.blocks);
            }
        }
    }
}
