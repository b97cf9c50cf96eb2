//! What may happen while a step computes: layers become ready to move, and messages that end no running request.

use std::time::Duration;

use transfer::PeerId;

use super::{Core, Input, Plan};
use crate::handle::RequestId;
use crate::handoff::{TicketId, ToPrefill};
use crate::request::State;

impl Core {
    /// Layers `..layers` of the step's KV are in the pool: posts what tickets lack of them. Nothing is posted for fewer
    /// than `push_layers` layers, the last ones apart.
    pub fn layers_done(&mut self, plan: &Plan, layers: usize, now: Duration) {
        for item in &plan.items {
            let Some(request) = self.requests.get(&item.id) else { continue };
            if request.push().is_some() {
                let done = self.complete_blocks(item.id, request.num_computed + item.len);
                self.post_layers(item.id, done, layers, now);
            }
        }
    }

    /// Whether an input may be applied between [`Core::plan`] and [`Core::commit`]: it must not end a request that the
    /// plan has tokens of, and those are all running.
    pub fn may_apply_in_step(&self, input: &Input) -> bool {
        match input {
            Input::Submit(_)
            | Input::FromPrefill(..)
            | Input::Notified { .. }
            | Input::ReadSettled { .. } => true,
            Input::FromDecode(peer, message) => self.may_say_in_step(*peer, message),
            Input::Settled { id, result } => result.is_ok() || !self.is_running(*id),
            Input::Abort(id) | Input::Finish(id) => !self.is_running(*id),
            Input::PeerUp(..) | Input::PeerDown(_) | Input::PeerGone(_) | Input::ResetPrefixCache => false,
        }
    }

    /// [`Core::may_apply_in_step`] for a message from a decode worker.
    pub fn may_say_in_step(&self, peer: PeerId, message: &ToPrefill) -> bool {
        let running =
            |ticket: TicketId| self.pushes.get(&(peer, ticket)).is_some_and(|id| self.is_running(*id));
        match message {
            ToPrefill::Open { .. } | ToPrefill::Claim { .. } | ToPrefill::Renew { .. } => true,
            ToPrefill::Grant { ticket, first_block, blocks } => {
                let fits = self.grant_fits(peer, *ticket, *first_block as usize, blocks.len());
                fits || !running(*ticket)
            }
            ToPrefill::Done { ticket, .. } | ToPrefill::Abort { ticket } => !running(*ticket),
        }
    }

    /// Whether the plan of a step may have tokens of the request.
    pub fn is_running(&self, id: RequestId) -> bool {
        self.requests.get(&id).is_some_and(|request| request.state == State::Running)
    }
}
