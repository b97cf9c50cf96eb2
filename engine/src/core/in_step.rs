//! What may happen while a step computes: layers become ready to move, and messages that end no running request.

use std::time::Duration;

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
            Input::Submit(_) | Input::FromPrefill(..) | Input::Notified { .. } | Input::ReadSettled { .. } => true,
            Input::FromDecode(peer, message) => {
                let running = |ticket: &TicketId| {
                    self.pushes.get(&(*peer, *ticket)).is_some_and(|id| self.is_running(*id))
                };
                match message {
                    ToPrefill::Open { .. } | ToPrefill::Claim { .. } | ToPrefill::Renew { .. } => true,
                    ToPrefill::Grant { ticket, first_block, blocks } => {
                        let fits = self.grant_fits(*peer, *ticket, *first_block as usize, blocks.len());
                        fits || !running(ticket)
                    }
                    ToPrefill::Done { ticket, .. } | ToPrefill::Abort { ticket } => !running(ticket),
                }
            }
            Input::Settled { id, result } => result.is_ok() || !self.is_running(*id),
            Input::Abort(id) => !self.is_running(*id),
            Input::PeerUp(..) | Input::PeerDown(_) | Input::PeerGone(_) | Input::ResetPrefixCache => false,
        }
    }

    fn is_running(&self, id: RequestId) -> bool {
        self.requests.get(&id).is_some_and(|request| request.state == State::Running)
    }
}
