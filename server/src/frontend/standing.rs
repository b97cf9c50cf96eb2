//! Whether a worker may be given a request: what probes say, what requests have met, and for how long that counts.
//!
//! Pure: time comes in. Three things keep a worker out, each ended by something else: it cannot be reached (until a
//! probe succeeds), it kept failing (until the breaker closes), it said that it is full (until the time it named).

use std::time::{Duration, Instant};

/// A worker that says it is full and not for how long is left alone this long.
pub const DEFAULT_BUSY: Duration = Duration::from_secs(1);

/// A worker may not keep itself out for longer than this.
const MAX_BUSY: Duration = Duration::from_secs(30);

/// Connections that end within this time of each other are one failure: a process that dies takes all of its connections with it.
const AT_ONCE: Duration = Duration::from_millis(200);

/// When the circuit breaker opens and closes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BreakerConfig {
    /// Failures in a row that open it.
    pub failures: usize,
    /// Successes in a row that close it, once it lets requests through again.
    pub successes: usize,
    /// How long it lets none through.
    pub open: Duration,
}

/// What the last probe said, or a connection since.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reach {
    /// No probe has ended yet.
    Unknown,
    Up,
    /// It answers, but takes no requests: it loads, drains, or does not fit.
    Refusing(String),
    /// It cannot be reached, or does not answer.
    Down(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breaker {
    Closed {
        failures: usize,
    },
    Open {
        until: Instant,
    },
    /// Requests go through, and the first failure opens it again.
    HalfOpen {
        successes: usize,
    },
}

/// How a worker stands.
#[derive(Clone, Debug)]
pub struct Standing {
    config: BreakerConfig,
    reach: Reach,
    breaker: Breaker,
    busy_until: Option<Instant>,
    /// When a connection ended that was counted as a failure.
    lost: Option<Instant>,
}

impl Standing {
    pub fn new(config: BreakerConfig) -> Self {
        let breaker = Breaker::Closed { failures: 0 };
        Self { config, reach: Reach::Unknown, breaker, busy_until: None, lost: None }
    }

    pub fn reach(&self) -> &Reach {
        &self.reach
    }

    /// Why the worker gets no request now; `None` when it may.
    pub fn obstacle(&self, now: Instant) -> Option<Obstacle<'_>> {
        match &self.reach {
            Reach::Unknown => return Some(Obstacle::Unreachable("not asked yet")),
            Reach::Down(reason) => return Some(Obstacle::Unreachable(reason)),
            Reach::Refusing(reason) => return Some(Obstacle::Refusing(reason)),
            Reach::Up => {}
        }
        if let Breaker::Open { until } = self.breaker
            && now < until
        {
            return Some(Obstacle::Failing(until - now));
        }
        let busy = self.busy_until.filter(|until| now < *until)?;
        Some(Obstacle::Busy(busy - now))
    }

    /// What a probe found. True if the worker was not reachable before and is now.
    pub fn probed(&mut self, reach: Reach) -> bool {
        let came_up = reach == Reach::Up && self.reach != Reach::Up;
        self.reach = reach;
        came_up
    }

    /// A request met a connection that was refused or broke: nobody else needs to.
    pub fn quarantine(&mut self, reason: String, now: Instant) {
        self.reach = Reach::Down(reason);
        self.lost(now);
    }

    /// A connection ended before its time.
    pub fn lost(&mut self, now: Instant) {
        if self.lost.is_none_or(|lost| lost + AT_ONCE <= now) {
            self.lost = Some(now);
            self.failed(now);
        }
    }

    /// Another process answers here: what the last one did says nothing of it.
    pub fn reborn(&mut self) {
        self.breaker = Breaker::Closed { failures: 0 };
        self.busy_until = None;
    }

    /// The worker answered with an error of its own.
    pub fn failed(&mut self, now: Instant) {
        let open = Breaker::Open { until: now + self.config.open };
        self.breaker = match self.breaker {
            Breaker::Closed { failures } if failures + 1 < self.config.failures => {
                Breaker::Closed { failures: failures + 1 }
            }
            Breaker::Closed { .. } | Breaker::HalfOpen { .. } => open,
            Breaker::Open { until } if now < until => self.breaker,
            Breaker::Open { .. } => open,
        };
    }

    /// The worker answered as it should.
    pub fn succeeded(&mut self, now: Instant) {
        self.breaker = match self.breaker {
            Breaker::Closed { .. } => Breaker::Closed { failures: 0 },
            // An answer to a request from before.
            Breaker::Open { until } if now < until => self.breaker,
            Breaker::Open { .. } => self.half_open(1),
            Breaker::HalfOpen { successes } => self.half_open(successes + 1),
        };
    }

    /// The worker is full and says when to come back, if it does.
    pub fn busy(&mut self, retry_after: Option<Duration>, now: Instant) {
        self.busy_until = Some(now + retry_after.unwrap_or(DEFAULT_BUSY).min(MAX_BUSY));
    }

    fn half_open(&self, successes: usize) -> Breaker {
        match successes >= self.config.successes {
            true => Breaker::Closed { failures: 0 },
            false => Breaker::HalfOpen { successes },
        }
    }
}

/// Why a worker gets no request now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Obstacle<'a> {
    Unreachable(&'a str),
    Refusing(&'a str),
    /// The breaker is open for so long.
    Failing(Duration),
    /// It said that it is full, and to wait for so long.
    Busy(Duration),
}

impl Obstacle<'_> {
    /// For JSON and labels.
    pub fn label(&self) -> &'static str {
        match self {
            Obstacle::Unreachable(_) => "unreachable",
            Obstacle::Refusing(_) => "refusing",
            Obstacle::Failing(_) => "failing",
            Obstacle::Busy(_) => "busy",
        }
    }

    pub fn reason(&self) -> String {
        match self {
            Obstacle::Unreachable(reason) | Obstacle::Refusing(reason) => (*reason).to_owned(),
            Obstacle::Failing(left) => format!("it kept failing; tried again in {:.1} s", left.as_secs_f64()),
            Obstacle::Busy(left) => format!("it is full; tried again in {:.1} s", left.as_secs_f64()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    fn up() -> (Standing, Instant) {
        let config = BreakerConfig { failures: 3, successes: 2, open: 10 * S };
        let mut standing = Standing::new(config);
        assert!(standing.obstacle(Instant::now()).is_some());
        assert!(standing.probed(Reach::Up));
        (standing, Instant::now())
    }

    fn label(standing: &Standing, now: Instant) -> &'static str {
        standing.obstacle(now).map_or("usable", |obstacle| obstacle.label())
    }

    #[test]
    fn a_refused_connection_ends_with_the_next_good_probe() {
        let (mut standing, now) = up();
        standing.quarantine("connection refused".into(), now);
        assert_eq!(label(&standing, now + 100 * S), "unreachable");
        assert!(standing.probed(Reach::Up));
        assert_eq!(label(&standing, now), "usable");
        assert!(!standing.probed(Reach::Up));
    }

    /// A worker that died under ten streams and was back at once got nothing for a minute.
    #[test]
    fn a_death_under_many_requests_was_many_failures() {
        let (mut standing, now) = up();
        (0..30).for_each(|i| standing.quarantine("connection reset".into(), now + i * S / 1000));
        assert!(standing.probed(Reach::Up));
        assert_eq!(label(&standing, now + S), "usable");
        // One that keeps dying is still left alone.
        (1..3).for_each(|i| standing.lost(now + i * S));
        assert_eq!(label(&standing, now + 2 * S), "failing");
    }

    #[test]
    fn another_process_is_not_blamed_for_the_last_one() {
        let (mut standing, now) = up();
        (0..3).for_each(|_| standing.failed(now));
        standing.busy(Some(20 * S), now);
        assert_eq!(label(&standing, now), "failing");
        standing.reborn();
        assert_eq!(label(&standing, now), "usable");
    }

    #[test]
    fn the_breaker_opens_after_failures_in_a_row_and_closes_after_successes() {
        let (mut standing, now) = up();
        for _ in 0..10 {
            standing.failed(now);
            standing.failed(now);
            standing.succeeded(now);
        }
        assert_eq!(label(&standing, now), "usable");
        (0..3).for_each(|_| standing.failed(now));
        assert_eq!(label(&standing, now), "failing");
        standing.succeeded(now + S);
        assert_eq!(label(&standing, now + 2 * S), "failing");
        // Half open: one failure is enough.
        let later = now + 11 * S;
        assert_eq!(label(&standing, later), "usable");
        standing.succeeded(later);
        standing.failed(later);
        assert_eq!(label(&standing, later), "failing");
        let later = later + 11 * S;
        standing.succeeded(later);
        standing.succeeded(later);
        standing.failed(later);
        assert_eq!(label(&standing, later), "usable");
    }

    #[test]
    fn a_full_worker_is_left_alone_as_long_as_it_says_within_reason() {
        let (mut standing, now) = up();
        standing.busy(Some(5 * S), now);
        assert_eq!(label(&standing, now + 4 * S), "busy");
        assert_eq!(label(&standing, now + 6 * S), "usable");
        standing.busy(Some(3600 * S), now);
        assert_eq!(label(&standing, now + MAX_BUSY), "usable");
        standing.probed(Reach::Refusing("the server is shutting down".into()));
        assert_eq!(label(&standing, now), "refusing");
    }
}
