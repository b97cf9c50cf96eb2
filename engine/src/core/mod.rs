//! The pure engine: events in, plans and effects out.
//!
//! `apply(input, now)` changes state; `plan(now)` picks the tokens of one step; `commit(plan, sampled, now)` takes the
//! results. What the outside must do comes out of [`Core::take_effects`]. Time is a `Duration` since the engine's start.

mod admit;
mod check;
mod commit;
mod decode_side;
mod in_step;
mod io;
mod keep;
mod lease;
mod prefill_side;
mod pull;
mod quarantine;
mod schedule;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use rustc_hash::FxHashMap;
use transfer::PeerId;

use crate::api::{FinishReason, Output, RequestError, TokenId, Usage};
use crate::event::{PeerRole, PrefillLink};
use crate::handle::RequestId;
use crate::handoff::{TicketId, Totals};
use crate::kv_events::{KvChains, KvEvent};
use crate::pool::{Account, BlockPool};
use crate::request::{NewRequest, Origin, Request, State};

use self::keep::Kept;
use self::lease::Pinned;
use self::quarantine::Quarantined;

pub use io::{Counters, Effect, Input, ReadFault, Submit, Written};
pub use pull::{Fetch, ReadRange};
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
    /// Layers of a block, each an equal share of its bytes.
    pub num_layers: usize,
    /// Layers whose KV is written together while the next ones compute; `num_layers`: a chunk's KV once it is computed.
    pub push_layers: usize,
    /// How long a ticket's blocks are kept for a decode worker that does not renew its lease.
    pub lease: Duration,
    /// How long notifications may follow `Complete`. They are on their way already when it is sent, and their thread never
    /// computes; seconds are for a machine that swaps.
    pub notification_time: Duration,
    /// Ask for a checksum of each block that comes from a prefill worker, and compare it.
    pub kv_checksum: bool,
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

impl CoreConfig {
    /// Bytes of one layer of a block.
    pub fn layer_bytes(&self) -> u64 {
        self.block_bytes / self.num_layers as u64
    }
}

/// A message that finds nothing that waits for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stale {
    /// It came before.
    Duplicate,
    /// What it is about was here, and is over.
    Late,
    /// Nothing of its name was here, as far as is remembered.
    Unknown,
}

/// Requests whose KV comes from a prefill worker, by how far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fetching {
    pub without_blocks: usize,
    /// Blocks are granted, and being written or read into.
    pub under_way: usize,
    /// All is here; a running slot is not.
    pub without_slot: usize,
}

/// A linked prefill worker.
#[derive(Debug)]
struct PrefillPeer {
    link: PrefillLink,
    /// Tickets that it has from us.
    load: usize,
}

/// What is left of a ticket once its KV is here.
#[derive(Clone, Debug)]
struct Settling {
    id: RequestId,
    peer: PeerId,
    request_id: String,
    blocks: u32,
    exposed: Duration,
    /// What we read, and the time that posting and the wire took, if we did.
    read: Option<(Totals, Duration, Duration)>,
}

/// The engine's state.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    pool: BlockPool,
    requests: FxHashMap<RequestId, Request>,
    /// First come, first served: in order of arrival, preempted requests too.
    waiting: VecDeque<RequestId>,
    /// KV is here, all that lacks is a running slot.
    ready: VecDeque<RequestId>,
    /// In order of arrival.
    running: Vec<RequestId>,
    /// Tickets whose prefill worker asked and that get no blocks yet.
    ungranted: VecDeque<RequestId>,
    /// Prefill workers that we are linked to.
    prefill_peers: BTreeMap<PeerId, PrefillPeer>,
    /// Our tickets (decode side).
    tickets: HashMap<TicketId, RequestId>,
    /// Tickets that others opened here (prefill side).
    pushes: HashMap<(PeerId, TicketId), RequestId>,
    /// The newest ticket of each decode worker (prefill side).
    newest_opened: HashMap<PeerId, TicketId>,
    /// Tickets of ours whose KV is here and whose last message is still to come.
    settling: HashMap<TicketId, Settling>,
    /// Granted blocks whose request is over or computed here instead, until the writer is done.
    quarantine: HashMap<TicketId, Quarantined>,
    /// Computed prompts that wait to be claimed (prefill side), by name.
    kept: HashMap<String, Kept>,
    /// Blocks that a decode worker may still be reading (prefill side).
    pinned: Vec<Pinned>,
    /// The last tickets that ended here (prefill side).
    ended_pushes: VecDeque<(PeerId, TicketId)>,
    /// Renewals that are not answered: number and when they were sent.
    renewals: HashMap<PeerId, VecDeque<(u64, Duration)>>,
    next_renewal: u64,
    last_renewal: Duration,
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
            requests: FxHashMap::default(),
            waiting: VecDeque::new(),
            ready: VecDeque::new(),
            running: Vec::new(),
            ungranted: VecDeque::new(),
            prefill_peers: BTreeMap::new(),
            tickets: HashMap::new(),
            pushes: HashMap::new(),
            newest_opened: HashMap::new(),
            settling: HashMap::new(),
            quarantine: HashMap::new(),
            kept: HashMap::new(),
            pinned: Vec::new(),
            ended_pushes: VecDeque::new(),
            renewals: HashMap::new(),
            next_renewal: 0,
            last_renewal: Duration::ZERO,
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
            Input::Finish(id) if self.requests.contains_key(&id) => self.finish(id, FinishReason::Stop, now),
            Input::Finish(_) => {}
            Input::PeerUp(peer, PeerRole::Prefill(link)) => {
                self.prefill_peers.insert(peer, PrefillPeer { link, load: 0 });
            }
            Input::PeerUp(_, PeerRole::Decode) => {}
            Input::PeerDown(peer) => self.peer_down(peer),
            Input::PeerGone(peer) => self.peer_gone(peer),
            Input::FromDecode(peer, message) => self.decode_says(peer, message, now),
            Input::FromPrefill(peer, message) => self.prefill_says(peer, message, now),
            Input::Settled { id, result } => self.settled(id, result),
            Input::Notified { bytes, intact } => self.notified(&bytes, intact, now),
            Input::ReadSettled { range, result } => self.read_settled(range, result, now),
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

    /// How far those are, and those whose KV has come.
    pub fn fetching(&self) -> Fetching {
        let granted = |id: &&RequestId| {
            self.requests[*id].remote.as_ref().is_some_and(|remote| remote.granted_from.is_some())
        };
        let under_way = self.tickets.values().filter(granted).count();
        Fetching { without_blocks: self.tickets.len() - under_way, under_way, without_slot: self.ready.len() }
    }

    /// Tickets that decode workers have open here.
    pub fn num_pushes(&self) -> usize {
        self.pushes.len()
    }

    /// True while a peer may write here or read from here: the transfer thread should poll often.
    pub fn expects_traffic(&self) -> bool {
        let offered = |id: &RequestId| {
            let push = self.requests[id].push();
            push.is_some_and(|push| push.direction == transfer::Direction::Read && push.pushed > 0)
        };
        !self.tickets.is_empty() || !self.quarantine.is_empty() || self.pushes.values().any(offered)
    }

    /// Prompts that wait to be claimed.
    pub fn num_kept(&self) -> usize {
        self.kept.len()
    }

    /// True if nothing of this peer's is left: its tickets here have ended.
    pub fn is_idle_for(&self, peer: PeerId) -> bool {
        self.pushes.keys().all(|(other, _)| *other != peer)
    }

    /// True if there is no request at all: nothing can happen before the next event.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.kept.is_empty() && self.pinned.is_empty()
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
            keep: submit.keep,
            arrival: submit.arrival,
            deadline: submit.deadline,
        });
        let id = request.id;
        self.requests.insert(id, request);
        match submit.fetch {
            Some(fetch) => self.claim(id, fetch, now),
            None if self.try_remote(id, submit.prefill, now) => {}
            None => self.enqueue(id),
        }
    }

    fn stale(&mut self, kind: Stale) {
        match kind {
            Stale::Duplicate => self.counters.stale_duplicate += 1,
            Stale::Late => self.counters.stale_late += 1,
            Stale::Unknown => self.counters.stale_unknown += 1,
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
            Origin::Ticket(_) => self.end_push(id, crate::ticket::Ending::Failed(error.to_string())),
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
        self.expire_leases(now);
        self.expire_notifications(now);
        self.renew(now);
    }

    fn request(&mut self, id: RequestId) -> &mut Request {
        self.requests.get_mut(&id).expect("lists hold ids of living requests. This is a bug.")
    }

    /// Blocks that `tokens` tokens fill.
    fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.config.block_size)
    }
}
