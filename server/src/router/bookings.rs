//! The load that our own decisions put on each worker.
//!
//! A booking follows a choice, before the request is sent, so that the next decision sees it. Its prompt part ends with
//! the first token, all of it with the request. Invariants: what a booking added is what its end takes away, so a worker
//! without bookings has no load; blocks that several bookings share count once.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::policy::BlockKey;
use super::view::Load;
use super::worker::WorkerId;

/// A booking that is open, or was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct BookingId(u64);

/// What is booked.
#[derive(Clone, Debug)]
pub struct Order {
    pub serve: WorkerId,
    pub prefill: Option<WorkerId>,
    /// Names of the prompt's full blocks.
    pub keys: Arc<[BlockKey]>,
    pub num_tokens: usize,
    pub block_size: usize,
    /// Prompt tokens that the worker computing the prompt does not have.
    pub uncached_tokens: usize,
}

#[derive(Debug)]
struct Open {
    order: Order,
    /// Blocks beyond the full ones of the prompt: its partly filled tail and the answer.
    private_blocks: u64,
    generated: usize,
    /// The first token is still to come.
    prefilling: bool,
    deadline: Duration,
}

#[derive(Debug, Default)]
struct Active {
    load: Load,
    /// How many bookings hold each block.
    blocks: HashMap<BlockKey, u32>,
    last_turn: u64,
    /// The worker left: forgotten when its last booking ends. Should it come back before, its load is still right.
    gone: bool,
}

/// All bookings and the load they make.
#[derive(Debug)]
pub struct Bookings {
    workers: HashMap<WorkerId, Active>,
    open: HashMap<BookingId, Open>,
    next: u64,
    /// A booking that nobody ended for this long is given up: the last resort against a lost end.
    lease: Duration,
}

impl Bookings {
    pub fn new(lease: Duration) -> Self {
        Self { workers: HashMap::new(), open: HashMap::new(), next: 1, lease }
    }

    /// Books `order` as the decision of `turn`.
    pub fn book(&mut self, order: Order, turn: u64, now: Duration) -> BookingId {
        let id = BookingId(self.next);
        self.next += 1;
        let computing = self.workers.entry(order.prefill.unwrap_or(order.serve)).or_default();
        computing.load.prefill_tokens += order.uncached_tokens as u64;
        computing.last_turn = turn;
        computing.gone = false;
        if let Some(prefill) = order.prefill {
            self.workers.entry(prefill).or_default().load.active_requests += 1;
        }
        let serving = self.workers.entry(order.serve).or_default();
        serving.last_turn = turn;
        serving.gone = false;
        serving.load.active_requests += 1;
        for key in order.keys.iter() {
            let holders = serving.blocks.entry(*key).or_default();
            *holders += 1;
            serving.load.decode_blocks += u64::from(*holders == 1);
        }
        let private_blocks = private_blocks(&order, 0);
        serving.load.decode_blocks += private_blocks;
        let deadline = now + self.lease;
        self.open.insert(id, Open { order, private_blocks, generated: 0, prefilling: true, deadline });
        id
    }

    /// The first token came: the prompt is computed. A second call changes nothing.
    pub fn first_token(&mut self, id: BookingId, now: Duration) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.deadline = now + self.lease;
        if !std::mem::replace(&mut open.prefilling, false) {
            return;
        }
        let (serve, prefill) = (open.order.serve, open.order.prefill);
        let uncached = open.order.uncached_tokens as u64;
        self.booked(prefill.unwrap_or(serve)).load.prefill_tokens -= uncached;
        if let Some(prefill) = prefill {
            self.booked(prefill).load.active_requests -= 1;
            self.forget_if_gone(prefill);
        }
    }

    /// The answer has `generated` tokens now: its blocks count.
    pub fn generated(&mut self, id: BookingId, generated: usize, now: Duration) {
        let Some(open) = self.open.get_mut(&id) else { return };
        open.deadline = now + self.lease;
        open.generated = open.generated.max(generated);
        let blocks = private_blocks(&open.order, open.generated);
        let added = blocks - std::mem::replace(&mut open.private_blocks, blocks);
        let serve = open.order.serve;
        self.booked(serve).load.decode_blocks += added;
    }

    /// Ends a booking, however it went. A second call changes nothing.
    pub fn finish(&mut self, id: BookingId) {
        self.first_token(id, Duration::ZERO);
        let Some(open) = self.open.remove(&id) else { return };
        let active = self.booked(open.order.serve);
        active.load.active_requests -= 1;
        active.load.decode_blocks -= open.private_blocks;
        for key in open.order.keys.iter() {
            let holders = active.blocks.get_mut(key).expect("booked with the same names. This is a bug.");
            *holders -= 1;
            if *holders == 0 {
                active.blocks.remove(key);
                active.load.decode_blocks -= 1;
            }
        }
        self.forget_if_gone(open.order.serve);
    }

    /// Gives up bookings whose lease is over; how many there were.
    pub fn expire(&mut self, now: Duration) -> usize {
        let late: Vec<_> = self.open.iter().filter(|(_, open)| open.deadline <= now).map(|(id, _)| *id).collect();
        late.iter().for_each(|id| self.finish(*id));
        late.len()
    }

    /// A worker left. Its bookings stay open until their owners end them.
    pub fn remove_worker(&mut self, worker: WorkerId) {
        if let Some(active) = self.workers.get_mut(&worker) {
            active.gone = true;
        }
        self.forget_if_gone(worker);
    }

    pub fn load(&self, worker: WorkerId) -> Load {
        self.workers.get(&worker).map(|active| active.load).unwrap_or_default()
    }

    /// Turn of the last booking on the worker; 0 for none.
    pub fn last_turn(&self, worker: WorkerId) -> u64 {
        self.workers.get(&worker).map_or(0, |active| active.last_turn)
    }

    /// How many of `keys`, from the first on, running requests hold on the worker. Bookings hold whole prompts, so that
    /// the answer can be found by bisection.
    pub fn active_blocks(&self, worker: WorkerId, keys: &[BlockKey]) -> u32 {
        let Some(active) = self.workers.get(&worker).filter(|active| !active.blocks.is_empty()) else { return 0 };
        keys.partition_point(|key| active.blocks.contains_key(key)) as u32
    }

    pub fn num_open(&self) -> usize {
        self.open.len()
    }

    fn booked(&mut self, worker: WorkerId) -> &mut Active {
        self.workers.get_mut(&worker).expect("kept while it has bookings. This is a bug.")
    }

    fn forget_if_gone(&mut self, worker: WorkerId) {
        if self.workers.get(&worker).is_some_and(|active| active.gone && active.load.active_requests == 0) {
            self.workers.remove(&worker);
        }
    }
}

/// Blocks of a request that nobody shares.
fn private_blocks(order: &Order, generated: usize) -> u64 {
    let block_size = order.block_size.max(1);
    ((order.num_tokens + generated).div_ceil(block_size)).saturating_sub(order.keys.len()) as u64
}
