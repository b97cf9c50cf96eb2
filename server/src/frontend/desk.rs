//! The router behind one lock.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::args::RouterMode;
use super::config::FrontendConfig;
use super::request::PromptBlocks;
use crate::router::bookings::{BookingId, Bookings, Order};
use crate::router::policies::{KvPolicy, KvWeights, LeastLoaded, PowerOfTwo, Random, RoundRobin};
use crate::router::{
    Choice, ClusterView, Condition, Draw, IndexSource, Load, NoWorker, RequestBlocks, RoutePolicy, WorkerId, WorkerRole,
    WorkerView,
};

/// A booking that nobody ended for this long is given up.
const LEASE: Duration = Duration::from_secs(300);

pub struct Desk {
    policy: Box<dyn RoutePolicy>,
    books: Mutex<Books>,
}

struct Books {
    bookings: Bookings,
    turn: u64,
}

impl Desk {
    pub fn new(config: &FrontendConfig) -> Self {
        let policy: Box<dyn RoutePolicy> = match config.mode {
            RouterMode::RoundRobin => Box::new(RoundRobin),
            RouterMode::Random => Box::new(Random),
            RouterMode::LeastLoaded => Box::new(LeastLoaded),
            RouterMode::PowerOfTwo => Box::new(PowerOfTwo),
            RouterMode::Kv => Box::new(KvPolicy { weights: KvWeights::default() }),
        };
        Self { policy, books: Mutex::new(Books { bookings: Bookings::new(LEASE), turn: 0 }) }
    }

    pub fn load(&self, worker: WorkerId) -> Load {
        self.books().bookings.load(worker)
    }

    pub fn book(
        self: &Arc<Self>,
        prompt: &PromptBlocks,
        workers: impl Iterator<Item = (WorkerId, WorkerRole, Condition, Option<u64>)>,
        now: Duration,
    ) -> Result<(Choice, Booking), NoWorker> {
        let mut books = self.books();
        let view = |(id, role, condition, capacity_blocks)| WorkerView {
            id,
            role,
            condition,
            load: books.bookings.load(id),
            capacity_blocks,
            cached_blocks: 0,
            overlap_blocks: 0,
            active_blocks: books.bookings.active_blocks(id, &prompt.keys),
            last_turn: books.bookings.last_turn(id),
            index: IndexSource::None,
        };
        let cluster = ClusterView { workers: workers.map(view).collect() };
        books.turn += 1;
        let draw = Draw { turn: books.turn, seed: rand::random() };
        let request =
            RequestBlocks { keys: &prompt.keys, num_tokens: prompt.num_tokens, block_size: prompt.block_size };
        let choice = self.policy.choose(&request, &cluster, draw)?;
        let order = Order {
            serve: choice.serve,
            prefill: choice.prefill,
            keys: prompt.keys.clone(),
            num_tokens: prompt.num_tokens,
            block_size: prompt.block_size,
            uncached_tokens: prompt.num_tokens,
        };
        let turn = books.turn;
        let id = books.bookings.book(order, turn, now);
        Ok((choice, Booking { desk: self.clone(), id }))
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends when dropped.
pub struct Booking {
    desk: Arc<Desk>,
    id: BookingId,
}

impl Booking {
    pub fn first_token(&self, now: Duration) {
        self.desk.books().bookings.first_token(self.id, now);
    }
}

impl Drop for Booking {
    fn drop(&mut self) {
        self.desk.books().bookings.finish(self.id);
    }
}
