//! Waiting for a state, with a limit.

use std::time::{Duration, Instant};

/// How often a state is looked at: often enough that tests lose no time, seldom enough that two cores do not notice.
const POLL: Duration = Duration::from_millis(10);

/// Polls `probe` until it yields a value, and returns that.
///
/// # Panics
/// When `limit` is over; the message has `what` and the last reason that `probe` gave.
pub async fn until<T, F>(limit: Duration, what: &str, mut probe: impl FnMut() -> F) -> T
where
    F: Future<Output = Result<T, String>>,
{
    let started = Instant::now();
    loop {
        match probe().await {
            Ok(value) => return value,
            Err(reason) if started.elapsed() > limit => {
                panic!("{what}: not within {limit:?}; last: {reason}")
            }
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}

/// Runs the futures at the same time and returns their results in order.
pub async fn all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    futures_util::future::join_all(futures).await
}
