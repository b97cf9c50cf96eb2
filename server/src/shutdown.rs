//! Leaving without cutting anybody off: first signal drains, the grace period's end cuts what still runs, a
//! second signal ends the process at once.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::readiness::{Readiness, State};

/// Status of a process that was told twice to stop: 128 + SIGTERM, as shells report it.
const FORCED_EXIT_STATUS: i32 = 143;

/// How long cut requests may take to send their error and close.
pub const CLOSE_TIME: Duration = Duration::from_secs(1);

/// Counts running requests and tells them when to stop.
#[derive(Clone, Debug)]
pub struct Drain {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    running: watch::Sender<usize>,
    cut: watch::Sender<bool>,
}

impl Default for Drain {
    fn default() -> Self {
        let shared = Shared { running: watch::Sender::new(0), cut: watch::Sender::new(false) };
        Self { shared: Arc::new(shared) }
    }
}

impl Drain {
    /// Counts one request until the guard is dropped.
    pub fn enter(&self) -> Running {
        self.shared.running.send_modify(|running| *running += 1);
        Running { drain: self.clone() }
    }

    /// Requests between their first byte in and their last byte out.
    pub fn running(&self) -> usize {
        *self.shared.running.borrow()
    }

    /// Resolves when the grace period is over and running requests must end.
    pub fn cut(&self) -> impl Future<Output = ()> + Send + 'static {
        let mut cut = self.shared.cut.subscribe();
        async move {
            // An error means that the sender is gone, and with it the server: that is a cut as well.
            let _ = cut.wait_for(|cut| *cut).await;
        }
    }

    /// Waits for `signal`, then refuses new requests and lets running ones finish within `grace`; those that do
    /// not are cut. Resolves when the listener may close.
    pub async fn run(self, signal: impl Future<Output = ()>, readiness: Readiness, grace: Duration) {
        signal.await;
        readiness.set(State::Draining);
        tracing::info!(running = self.running(), grace_secs = grace.as_secs_f64(), "shutting down");
        if timeout(grace, self.idle()).await.is_ok() {
            return;
        }
        tracing::warn!(running = self.running(), "grace period is over, ending what still runs");
        self.shared.cut.send_replace(true);
        let _ = timeout(CLOSE_TIME, self.idle()).await;
    }

    async fn idle(&self) {
        let _ = self.shared.running.subscribe().wait_for(|running| *running == 0).await;
    }
}

/// A request that runs.
#[derive(Debug)]
pub struct Running {
    drain: Drain,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.drain.shared.running.send_modify(|running| *running -= 1);
    }
}

/// SIGTERM and SIGINT, caught from the moment this is made.
pub struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Call inside the tokio runtime, before anything slow: until then a signal ends the process.
    pub fn catch() -> std::io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// The next signal.
    pub async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Resolves on the first signal; from then on the next one ends the process at once.
    pub async fn first(mut self) {
        self.next().await;
        tokio::spawn(async move {
            self.next().await;
            tracing::warn!("second signal, leaving at once");
            std::process::exit(FORCED_EXIT_STATUS);
        });
    }
}

#[cfg(test)]
mod tests {
    use std::future::ready;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn drain_ends_with_the_last_request() {
        let (drain, readiness) = (Drain::default(), Readiness::default());
        let (first, second) = (drain.enter(), drain.enter());
        let task = tokio::spawn(drain.clone().run(ready(()), readiness.clone(), Duration::from_secs(30)));
        tokio::task::yield_now().await;
        assert_eq!(readiness.get(), State::Draining);
        drop(first);
        tokio::task::yield_now().await;
        assert!(!task.is_finished());
        drop(second);
        task.await.unwrap();
        assert_eq!(drain.running(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_outlives_the_grace_period_is_cut() {
        let drain = Drain::default();
        let (running, cut) = (drain.enter(), drain.cut());
        let started = tokio::time::Instant::now();
        let task = tokio::spawn(drain.clone().run(ready(()), Readiness::default(), Duration::from_secs(2)));
        cut.await;
        assert_eq!(started.elapsed(), Duration::from_secs(2));
        drop(running);
        task.await.unwrap();
        assert_eq!(started.elapsed(), Duration::from_secs(2));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_never_ends_does_not_keep_the_process() {
        let drain = Drain::default();
        let _running = drain.enter();
        let started = tokio::time::Instant::now();
        drain.run(ready(()), Readiness::default(), Duration::from_secs(2)).await;
        assert_eq!(started.elapsed(), Duration::from_secs(2) + CLOSE_TIME);
    }
}
