//! The pure engine: events in, plans and effects out.
//!
//! `apply(input, now)` changes state; `plan(now)` picks the tokens of one step; `commit(plan, sampled, now)` takes the
//! results. What the outside must do comes out of [`Core::take_effects`]. Time is a `Duration` since the engine's start.

mod admit;
mod commit;
mod decode_side;
mod prefill_side;
mod schedule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use transfer::{PeerId, Span};

use crate::api::{Output, RequestError, SamplingParams, TokenId, Usage};
use crate::event::PeerRole;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, TicketId, ToDecode, ToPrefill};
use crate::kv_events::{KvChains, KvEvent};
use crate::pool::{Account, BlockId, BlockPool};
use crate::request::{NewRequest, Origin, Request, State};

pub use schedule::{Plan, PlanItem, SampleRow};

/// What to do when a prefill worker fails a ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvFailure {
    /// Compute the prompt here.
    Recompute,
    /// Fail the request.
    Fail,
}

/// Sizes and rules of one engine.
#[derive(Clone, Debug)]
pub struct CoreConfig {
    /// Tokens in a block.
    pub block_size: usize,
    pub num_blocks: usize,
    pub block_bytes: u64,
    pub max_model_len: usize,
    /// Tokens computed in one step at most.
    pub max_batched_tokens: usize,
    /// Requests that run at once at most.
    pub max_seqs: usize,
    pub eos: Vec<TokenId>,
    pub kv_failure: KvFailure,
    /// Ticket ids count up from here; random, so that a late message of another life is not taken for ours.
    pub first_ticket: u64,
    /// Recount all blocks after each step.
    pub check_invariants: bool,
}

/// Something that happened outside.
#[derive(Clone, Debug)]
pub enum Input {
    Submit(Submit),
    Abort(RequestId),
    PeerUp(PeerId, PeerRole),
    PeerDown(PeerId),
    PeerGone(PeerId),
    FromDecode(PeerId, ToPrefill),
    FromPrefill(PeerId, ToDecode),
    /// A write posted for `id` is over.
    Settled {
        id: RequestId,
        result: Result<Written, String>,
    },
    /// A notification on the data path.
    Notified(Vec<u8>),
    ResetPrefixCache,
}

/// A client's request.
#[derive(Clone, Debug)]
pub struct Submit {
    pub id: RequestId,
    pub request_id: String,
    pub prompt: Vec<TokenId>,
    pub sampling: SamplingParams,
    pub cache_salt: Option<String>,
    pub seed: u64,
    pub arrival: Duration,
    pub deadline: Duration,
}

/// What one settled write cost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    pub post: Duration,
    pub wire: Duration,
}

/// Something the outside must do.
#[derive(Clone, Debug, PartialEq)]
pub enum Effect {
    Output(RequestId, Output),
    /// The request left the queue (or never entered it): it no longer counts against the queue's limit.
    Dequeued(RequestId),
    Send(PeerId, PeerMessage),
    Post {
        id: RequestId,
        peer: PeerId,
        spans: Vec<Span>,
        note: Vec<u8>,
    },
    /// The peer failed us on the data path: close its link.
    DropPeer(PeerId),
    /// A ticket ended here with `Complete` (prefill side), for metrics and logs.
    Pushed(crate::handoff::Totals, crate::handoff::PrefillTiming),
    /// A ticket of ours ended well (decode side).
    Received {
        request_id: String,
        totals: crate::handoff::Totals,
        timing: crate::handoff::PrefillTiming,
    },
}

/// What is left of a ticket once its KV is here.
#[derive(Clone, Debug)]
struct Settling {
    peer: PeerId,
    request_id: String,
    blocks: u32,
    exposed: Duration,
}

/// Events counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub preemptions: u64,
    pub prompt_tokens_computed: u64,
    pub prompt_tokens_cached: u64,
    /// Offered to a prefill worker, the part cached here apart.
    pub prompt_tokens_offered: u64,
    pub prompt_tokens_transferred: u64,
    pub generated_tokens: u64,
    pub steps: u64,
    pub step_tokens: u64,
    pub tickets_opened: u64,
    pub tickets_failed: u64,
    /// Requests computed here because a prefill worker failed.
    pub recomputed: u64,
    /// Messages and notifications about tickets that are not known (any more).
    pub stale_messages: u64,
}

/// The engine's state.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    pool: BlockPool,
    requests: HashMap<RequestId, Request>,
    /// First come, first served; preempted requests come back at the front.
    waiting: VecDeque<RequestId>,
    /// KV is here, all that lacks is a running slot.
    ready: VecDeque<RequestId>,
    /// In order of admission.
    running: Vec<RequestId>,
    /// Tickets whose prefill worker asked and that get no blocks yet.
    ungranted: VecDeque<RequestId>,
    /// Prefill workers and how many tickets each has from us.
    prefill_peers: BTreeMap<PeerId, usize>,
    /// Our tickets (decode side).
    tickets: HashMap<TicketId, RequestId>,
    /// Tickets that others opened here (prefill side).
    pushes: HashMap<(PeerId, TicketId), RequestId>,
    /// Tickets of ours whose KV is here and whose last message is still to come.
    settling: HashMap<TicketId, Settling>,
    /// Granted blocks whose request is over or computed here instead, until the writer is done.
    quarantine: HashMap<TicketId, (PeerId, Vec<BlockId>)>,
    next_ticket: u64,
    next_push: u64,
    effects: Vec<Effect>,
    counters: Counters,
    last_expiry: Duration,
}

impl Core {
    pub fn new(config: CoreConfig) -> Self {
        Self {
            pool: BlockPool::new(config.num_blocks),
            requests: HashMap::new(),
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            ungranted: VecDeque::new(),
            prefill_peers: BTreeMap::new(),
            tickets: HashMap::new(),
            pushes: HashMap::new(),
            settling: HashMap::new(),
            quarantine: HashMap::new(),
            next_ticket: config.first_ticket,
            next_push: 0,
            effects: Vec::new(),
            counters: Counters::default(),
            last_expiry: Duration::ZERO,
            config,
        }
    }

    /// Takes one event.
    pub fn apply(&mut self, input: Input, now: Duration) {
        match input {
            Input::Submit(submit) => self.submit(submit, now),
            Input::Abort(id) => self.abort(id),
            Input::PeerUp(peer, PeerRole::Prefill) => drop(self.prefill_peers.insert(peer, 0)),
            Input::PeerUp(_, PeerRole::Decode) => {}
            Input::PeerDown(peer) => self.peer_down(peer),
            Input::PeerGone(peer) => self.peer_gone(peer),
            Input::FromDecode(peer, message) => self.decode_says(peer, message, now),
            Input::FromPrefill(peer, message) => self.prefill_says(peer, message, now),
            Input::Settled { id, result } => self.settled(id, result),
            Input::Notified(bytes) => self.notified(&bytes, now),
            Input::ResetPrefixCache => self.pool.reset_cache(),
        }
    }

    /// What the outside must do, in order.
    pub fn take_effects(&mut self) -> Vec<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// From now on the prefix cache's changes are in [`Self::take_kv_events`].
    pub fn record_kv_events(&mut self) {
        self.pool.log.turn_on();
    }

    /// What happened in the prefix cache since the last call.
    pub fn take_kv_events(&mut self) -> Vec<KvEvent> {
        self.pool.log.take()
    }

    /// What is in the prefix cache.
    pub fn kv_chains(&self) -> KvChains {
        self.pool.chains()
    }

    pub fn account(&self) -> Account {
        self.pool.account()
    }

    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Requests that hold a running slot.
    pub fn num_running(&self) -> usize {
        self.running.len()
    }

    /// Requests in the queue.
    pub fn num_waiting(&self) -> usize {
        self.waiting.len() + self.ready.len()
    }

    /// Requests whose KV is being made elsewhere.
    pub fn num_remote(&self) -> usize {
        self.tickets.len()
    }

    /// Tickets that decode workers have open here.
    pub fn num_pushes(&self) -> usize {
        self.pushes.len()
    }

    /// True while a peer may write here or our writes are under way: the transfer thread should poll often.
    pub fn expects_traffic(&self) -> bool {
        !self.tickets.is_empty() || !self.quarantine.is_empty()
    }

    /// True if nothing of this peer's is left: its tickets here have ended.
    pub fn is_idle_for(&self, peer: PeerId) -> bool {
        self.pushes.keys().all(|(other, _)| *other != peer)
    }

    /// True if there is no request at all: nothing can happen before the next event.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Fails every request: the engine is about to end.
    pub fn fail_all(&mut self, error: &RequestError) {
        let ids: Vec<_> = self.requests.keys().copied().collect();
        for id in ids {
            self.fail(id, error.clone());
        }
    }

    fn submit(&mut self, submit: Submit, now: Duration) {
        let request = Request::new(NewRequest {
            id: submit.id,
            request_id: submit.request_id,
            origin: Origin::Client,
            tokens: submit.prompt,
            sampling: submit.sampling,
            cache_salt: submit.cache_salt,
            seed: submit.seed,
            arrival: submit.arrival,
            deadline: submit.deadline,
        });
        let id = request.id;
        self.requests.insert(id, request);
        if !self.try_remote(id, now) {
            self.waiting.push_back(id);
        }
    }

    /// The client left.
    fn abort(&mut self, id: RequestId) {
        if self.requests.contains_key(&id) {
            self.close(id);
        }
    }

    /// Ends a request with an error for its client (or its ticket).
    fn fail(&mut self, id: RequestId, error: RequestError) {
        let Some(request) = self.requests.get(&id) else { return };
        match request.origin {
            Origin::Client => {
                self.effects.push(Effect::Output(id, Output::Failed(error)));
                self.close(id);
            }
            Origin::Ticket(_) => self.end_push(id, crate::request::Ending::Failed(error.to_string())),
        }
    }

    /// Forgets a client's request and gives up all it holds. A ticket that is open is aborted; its granted blocks go
    /// into quarantine.
    fn close(&mut self, id: RequestId) {
        self.leave_queues(id);
        self.drop_remote(id, true);
        let request = self.requests.remove(&id).expect("looked up by the caller. This is a bug.");
        self.pool.release_chain(&request.block_table);
    }

    /// Takes a request out of whatever list it is in.
    fn leave_queues(&mut self, id: RequestId) {
        let request = &self.requests[&id];
        match request.state {
            State::Waiting => {
                self.waiting.retain(|other| *other != id);
                self.dequeued(id);
            }
            State::Remote => {
                self.ungranted.retain(|other| *other != id);
                self.dequeued(id);
            }
            State::Ready => self.ready.retain(|other| *other != id),
            State::Running => self.running.retain(|other| *other != id),
            State::Pushing => {}
        }
    }

    /// Says, once for each client's request, that it no longer waits for its first step.
    fn dequeued(&mut self, id: RequestId) {
        let request = self.request(id);
        if !std::mem::replace(&mut request.dequeued, true) && matches!(request.origin, Origin::Client) {
            self.effects.push(Effect::Dequeued(id));
        }
    }

    fn usage(&self, request: &Request) -> Usage {
        Usage {
            prompt_tokens: request.prompt_len,
            completion_tokens: request.num_generated(),
            cached_tokens: request.cached_tokens.unwrap_or(0),
            transferred_tokens: request.transferred_tokens,
        }
    }

    /// Ends requests whose time is over. Looks at all of them, so at most every 10 ms.
    fn expire(&mut self, now: Duration) {
        if now < self.last_expiry + Duration::from_millis(10) {
            return;
        }
        self.last_expiry = now;
        let late: Vec<_> = self
            .requests
            .values()
            .filter(|request| now >= request.deadline && request.state != State::Pushing)
            .map(|request| (request.id, request.deadline - request.arrival))
            .collect();
        for (id, timeout) in late {
            self.fail(id, RequestError::DeadlineExceeded(timeout));
        }
        self.expire_pushes(now);
        self.expire_notifications(now);
    }

    fn request(&mut self, id: RequestId) -> &mut Request {
        self.requests.get_mut(&id).expect("lists hold ids of living requests. This is a bug.")
    }

    /// Blocks that `tokens` tokens fill.
    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.block_size)
    }

    fn check(&self) {
        if !self.config.check_invariants {
            return;
        }
        self.pool.check();
        let quarantined: usize = self.quarantine.values().map(|(_, blocks)| blocks.len()).sum();
        assert_eq!(quarantined, self.account().quarantined, "quarantine and account differ");
        for request in self.requests.values() {
            let covered = request.block_table.len() * self.config.block_size;
            assert!(request.num_computed <= covered, "{:?} computed beyond its blocks", request.id);
            assert!(
                request.state != State::Waiting || request.block_table.is_empty(),
                "a waiting request holds blocks"
            );
        }
        for id in self.waiting.iter().chain(&self.ready).chain(&self.running).chain(&self.ungranted) {
            assert!(self.requests.contains_key(id), "{id:?} is listed but gone");
        }
    }
}
