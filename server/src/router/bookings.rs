//! The load that our own decisions put on each worker.
//!
//! A booking follows a choice, before the request is sent, so that the next decision sees it. Its prompt part ends with
//! the first token, all of it with the request. Invariants: what a booking added is what its end takes away, so a worker
//! without bookings has no load; blocks that several bookings share count once.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

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
    blocks: FxHashMap<BlockKey, u32>,
    last_turn: u64,
    /// The worker left: forgotten when its last booking ends. Should it come back before, its load is still right.
    gone: bool,
}

/// All bookings and the load they make.
#[derive(Debug)]
pub struct Bookings {
    workers: FxHashMap<WorkerId, Active>,
    open: FxHashMap<BookingId, Open>,
    next: u64,
    /// A booking that nobody ended for this long is given up: the last resort against a lost end.
    lease: Duration,
}

impl Bookings {
    pub fn new(lease: Duration) -> Self {
        Self { workers: FxHashMap::default(), open: FxHashMap::default(), next: 1, lease }
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
        serving.blocks.reserve(order.keys.len());
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
            let Entry::Occupied(mut holders) = active.blocks.entry(*key) else {
                unreachable!("it was booked with the same names. This is a bug.")
            };
            *holders.get_mut() -= 1;
            if *holders.get() == 0 {
                holders.remove();
                active.load.decode_blocks -= 1;
            }
        }
        self.forget_if_gone(open.order.serve);
    }

    /// Gives up bookings whose lease is over; how many there were.
    pub fn expire(&mut self, now: Duration) -> usize {
        let late: Vec<_> =
            self.open.iter().filter(|(_, open)| open.deadline <= now).map(|(id, _)| *id).collect();
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
        let Some(active) = self.workers.get(&worker).filter(|active| !active.blocks.is_empty()) else {
            return 0;
        };
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::*;

    const BLOCK: usize = 16;

    #[derive(Clone, Debug)]
    enum Step {
        Book { serve: u64, prefill: Option<u64>, family: u64, tokens: usize, cached: usize },
        FirstToken(usize),
        Generated(usize, usize),
        Finish(usize),
        Leave(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let book = (0_u64..3, prop::option::of(3_u64..5), 0_u64..4, 1_usize..200, 0_usize..200);
        let step = prop_oneof![
            4 => book.prop_map(|(serve, prefill, family, tokens, cached)| Step::Book { serve, prefill, family, tokens, cached }),
            2 => (0_usize..40).prop_map(Step::FirstToken),
            2 => (0_usize..40, 0_usize..100).prop_map(|(which, tokens)| Step::Generated(which, tokens)),
            3 => (0_usize..40).prop_map(Step::Finish),
            1 => (0_u64..5).prop_map(Step::Leave),
        ];
        prop::collection::vec(step, 1..150)
    }

    fn keys(family: u64, tokens: usize) -> Arc<[BlockKey]> {
        (0..(tokens / BLOCK) as u64).map(|at| BlockKey(family * 1000 + at)).collect()
    }

    fn order(serve: u64, prefill: Option<u64>, family: u64, num_tokens: usize, cached: usize) -> Order {
        Order {
            serve: WorkerId(serve),
            prefill: prefill.map(WorkerId),
            keys: keys(family, num_tokens),
            num_tokens,
            block_size: BLOCK,
            uncached_tokens: num_tokens.saturating_sub(cached),
        }
    }

    /// A booking as simple as can be.
    struct Simple {
        id: BookingId,
        order: Order,
        first_token: bool,
        generated: usize,
    }

    fn load(open: &[Simple], worker: WorkerId) -> Load {
        let mut blocks = HashSet::new();
        let mut load = Load::default();
        for booking in open {
            let order = &booking.order;
            if order.serve == worker {
                load.active_requests += 1;
                blocks.extend(order.keys.iter().copied());
                let all = (order.num_tokens + booking.generated).div_ceil(BLOCK);
                load.decode_blocks += (all - order.keys.len()) as u64;
            }
            let computes = order.prefill.unwrap_or(order.serve) == worker;
            if computes && !booking.first_token {
                load.prefill_tokens += order.uncached_tokens as u64;
                load.active_requests += u64::from(order.prefill.is_some());
            }
        }
        load.decode_blocks += blocks.len() as u64;
        load
    }

    proptest! {
        /// rt-11: whatever the order in which requests start, answer, end and workers leave, the load is that of the open
        /// bookings, and nothing when none is open.
        #[test]
        fn load_is_that_of_the_open_bookings(steps in steps()) {
            let mut bookings = Bookings::new(Duration::from_secs(300));
            let mut open: Vec<Simple> = Vec::new();
            let now = Duration::ZERO;
            for (turn, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Book { serve, prefill, family, tokens, cached } => {
                        let order = order(serve, prefill, family, tokens, cached);
                        let id = bookings.book(order.clone(), turn as u64, now);
                        open.push(Simple { id, order, first_token: false, generated: 0 });
                    }
                    Step::FirstToken(which) if which < open.len() => {
                        open[which].first_token = true;
                        bookings.first_token(open[which].id, now);
                    }
                    Step::Generated(which, tokens) if which < open.len() => {
                        open[which].generated = open[which].generated.max(tokens);
                        bookings.generated(open[which].id, tokens, now);
                    }
                    Step::Finish(which) if which < open.len() => {
                        let over = open.swap_remove(which);
                        bookings.finish(over.id);
                        bookings.finish(over.id);
                        bookings.first_token(over.id, now);
                        bookings.generated(over.id, 1000, now);
                    }
                    Step::Leave(worker) => bookings.remove_worker(WorkerId(worker)),
                    _ => {}
                }
                for worker in (0..5).map(WorkerId) {
                    prop_assert_eq!(bookings.load(worker), load(&open, worker));
                }
                for family in 0..4 {
                    let asked = keys(family, 200);
                    let held = |worker: u64, key: &BlockKey| {
                        open.iter().any(|booking| booking.order.serve == WorkerId(worker) && booking.order.keys.contains(key))
                    };
                    for worker in 0..3 {
                        let blocks = asked.iter().take_while(|key| held(worker, key)).count();
                        prop_assert_eq!(bookings.active_blocks(WorkerId(worker), &asked), blocks as u32);
                    }
                }
            }
            open.iter().for_each(|booking| bookings.finish(booking.id));
            prop_assert_eq!(bookings.num_open(), 0);
            prop_assert!((0..5).all(|worker| bookings.load(WorkerId(worker)) == Load::default()));
            prop_assert!(bookings.workers.values().all(|active| active.blocks.is_empty()));
        }
    }

    /// rt-11: an end that never comes is made up for, but not while the request shows signs of life.
    #[test]
    fn a_booking_without_a_sign_of_life_is_given_up() {
        let secs = Duration::from_secs;
        let mut bookings = Bookings::new(secs(300));
        let lost = bookings.book(order(1, Some(3), 0, 100, 0), 1, secs(0));
        let alive = bookings.book(order(1, None, 1, 100, 0), 2, secs(0));
        bookings.generated(alive, 5, secs(299));
        assert_eq!(bookings.expire(secs(299)), 0);
        assert_eq!(bookings.expire(secs(300)), 1);
        assert_eq!(
            (bookings.load(WorkerId(1)).active_requests, bookings.load(WorkerId(3))),
            (1, Load::default())
        );
        bookings.finish(lost);
        assert_eq!(bookings.expire(secs(599)), 1);
        assert_eq!(bookings.load(WorkerId(1)), Load::default());
    }
}
