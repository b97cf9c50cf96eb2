//! A request's place on its workers.

use std::fmt;
use std::sync::Arc;

use super::Router;
use crate::router::bookings::BookingId;
use crate::router::disagg::Estimate;
use crate::router::index::recent::Used;
use crate::router::policy::Choice;
use crate::router::prompt::Prompt;
use crate::router::view::IndexSource;
use crate::router::worker::WorkerId;

/// A request's place on its workers, given up when dropped.
pub struct Booking {
    pub(super) router: Arc<Router>,
    pub(super) id: BookingId,
    pub(super) prompt: Prompt,
    pub(super) choice: Choice,
    pub(super) estimate: Option<Estimate>,
    pub(super) index: IndexSource,
    pub(super) predicted_tokens: usize,
    pub(super) used: Vec<(WorkerId, Used)>,
    pub(super) open: bool,
}

impl fmt::Debug for Booking {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Booking").field("id", &self.id).field("choice", &self.choice).finish_non_exhaustive()
    }
}

impl Booking {
    pub fn choice(&self) -> &Choice {
        &self.choice
    }

    /// Who computes the prompt and why, where there was a prefill worker for it.
    pub fn estimate(&self) -> Option<&Estimate> {
        self.estimate.as_ref()
    }

    /// Where the overlap with the worker that computes the prompt came from: the `x-kv-index` header.
    pub fn index(&self) -> IndexSource {
        self.index
    }

    /// Prompt tokens that the worker should have cached, to be compared with what it says.
    pub fn predicted_tokens(&self) -> usize {
        self.predicted_tokens
    }

    /// The first token came.
    pub fn first_token(&self) {
        let now = self.router.now();
        let mut state = self.router.lock();
        state.bookings.first_token(self.id, now);
        // Blocks that the worker did not have are stored there by now, and their event is due.
        let full = self.prompt.num_tokens / self.prompt.block_size;
        if self.predicted_tokens / self.prompt.block_size + 1 < full {
            let computing = self.choice.prefill.unwrap_or(self.choice.serve);
            if let Some(entry) = state.workers.get_mut(&computing) {
                entry.source.expect_event(now);
            }
        }
    }

    /// The answer has `tokens` tokens by now. Cheap, but not needed for each: once a block is enough.
    pub fn generated(&self, tokens: usize) {
        let now = self.router.now();
        self.router.lock().bookings.generated(self.id, tokens, now);
    }

    /// The request never reached the worker: its load goes, and what the approximate index learnt from it.
    pub fn undo(&mut self) {
        if !std::mem::replace(&mut self.open, false) {
            return;
        }
        let mut state = self.router.lock();
        state.bookings.finish(self.id);
        for (worker, used) in &self.used {
            state.recent.untouch(*worker, &self.prompt.keys, *used);
        }
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        if self.open {
            self.router.lock().bookings.finish(self.id);
        }
    }
}
