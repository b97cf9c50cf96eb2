//! Whether a request sent now would be served. Written by whoever loads, degrades or stops the worker; read
//! by `/health`, `/v1/models` and the gate in front of every request.

use std::sync::Arc;

use tokio::sync::watch;

/// Where a worker is in its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Weights are on their way.
    Loading,
    Ready,
    /// Serves, but not as it was told to: for instance computes prompts itself since no prefill worker answers.
    Degraded(String),
    /// Loaded, but a request would fail now.
    Unavailable(String),
    /// Running requests finish, new ones are refused. Final.
    Draining,
}

impl State {
    /// Whether new requests are taken.
    pub fn serves(&self) -> bool {
        matches!(self, State::Ready | State::Degraded(_))
    }

    /// One word for JSON and logs.
    pub fn label(&self) -> &'static str {
        match self {
            State::Loading => "loading",
            State::Ready => "ready",
            State::Degraded(_) => "degraded",
            State::Unavailable(_) => "unavailable",
            State::Draining => "draining",
        }
    }

    /// A sentence for whoever waits; `None` when there is nothing to say.
    pub fn reason(&self) -> Option<&str> {
        match self {
            State::Loading => Some("the model is being loaded"),
            State::Ready => None,
            State::Degraded(reason) | State::Unavailable(reason) => Some(reason),
            State::Draining => Some("the server is shutting down"),
        }
    }
}

/// The shared state; starts as `Loading`.
#[derive(Clone, Debug)]
pub struct Readiness(Arc<watch::Sender<State>>);

impl Default for Readiness {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(State::Loading)))
    }
}

impl Readiness {
    pub fn get(&self) -> State {
        self.0.borrow().clone()
    }

    /// Moves on to `next`. Nothing leaves `Draining`, so that a load or a peer that comes up late cannot
    /// make a worker ready that is about to exit.
    pub fn set(&self, next: State) {
        self.0.send_if_modified(|state| {
            if *state == State::Draining || *state == next {
                return false;
            }
            let (from, to, reason) = (state.label(), next.label(), next.reason());
            // Reasons may tell a time that is left, and are asked for often.
            match from == to {
                true => tracing::debug!(state = to, reason, "another reason for the same readiness"),
                false => tracing::info!(from, to, reason, "readiness changed"),
            }
            *state = next;
            true
        });
    }

    /// Resolves when the process is told to stop.
    pub async fn draining(&self) {
        // The sender lives as long as this handle.
        let _ = self.0.subscribe().wait_for(|state| *state == State::Draining).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_leaves_draining() {
        let readiness = Readiness::default();
        assert!(!readiness.get().serves());
        readiness.set(State::Degraded("no prefill worker answers".into()));
        assert!(readiness.get().serves());
        readiness.set(State::Draining);
        readiness.set(State::Ready);
        assert_eq!(readiness.get(), State::Draining);
    }
}
