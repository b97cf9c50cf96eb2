//! The workers, the link and the data path, and the model that is a hash.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use rand::Rng;
use transfer::{Direction, PeerId, Span};
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::super::*;
use crate::api::{FinishReason, KeptKv, SamplingParams};
use crate::event::PrefillLink;
use crate::handoff::{PeerMessage, ToDecode, ToPrefill, WriteNote};
use crate::pool::{BlockId, Holder};
use crate::sampler::Sampled;

pub(super) const EOS: TokenId = 2;
pub(super) const BLOCK: usize = 4;
pub(super) const LAYERS: usize = 4;
/// Bytes of a block: not that anything is stored in so many.
const BLOCK_BYTES: u64 = 64;
const LAYER_BYTES: u64 = BLOCK_BYTES / LAYERS as u64;
pub(super) const LEASE: Duration = Duration::from_secs(2);

pub(super) fn config(num_blocks: usize, first_ticket: u64) -> CoreConfig {
    CoreConfig {
        block_size: BLOCK,
        num_blocks,
        block_bytes: BLOCK_BYTES,
        num_layers: LAYERS,
        push_layers: 2,
        lease: LEASE,
        notification_time: Duration::from_secs(5),
        kv_checksum: false,
        max_model_len: 60,
        max_batched_tokens: 10,
        max_seqs: 4,
        eos: vec![EOS],
        kv_failure: KvFailure::Recompute,
        first_ticket,
        check_invariants: true,
    }
}

/// The KV of `token` after `before`.
pub(super) fn kv(before: u64, token: TokenId) -> u64 {
    xxh3_64_with_seed(&token.to_le_bytes(), before)
}

pub(super) fn next_token(kv: u64) -> TokenId {
    if kv.is_multiple_of(23) { EOS } else { 3 + (kv % 40) as TokenId }
}

/// What a request must answer, computed without any engine.
pub(super) fn reference(prompt: &[TokenId], max_tokens: usize) -> (Vec<TokenId>, FinishReason) {
    let mut state = prompt.iter().fold(0, |state, &token| kv(state, token));
    let mut answer = Vec::new();
    loop {
        let token = next_token(state);
        if token == EOS {
            return (answer, FinishReason::Stop);
        }
        answer.push(token);
        if answer.len() == max_tokens || prompt.len() + answer.len() == 60 {
            return (answer, FinishReason::Length);
        }
        state = kv(state, token);
    }
}

/// A core with the memory of its pool: one hash a slot.
pub(super) struct Worker {
    pub(super) core: Core,
    /// By slot, then layer: the hash, as each layer would have it.
    pub(super) memory: Vec<[u64; LAYERS]>,
    pub(super) now: Duration,
}

impl Worker {
    pub(super) fn new(num_blocks: usize, first_ticket: u64) -> Self {
        let mut core = Core::new(config(num_blocks, first_ticket));
        core.record_kv_events();
        Self { core, memory: vec![[u64::MAX; LAYERS]; num_blocks * BLOCK], now: Duration::ZERO }
    }

    pub(super) fn apply(&mut self, input: Input) {
        self.now += Duration::from_micros(10);
        self.core.apply(input, self.now);
        self.core.check();
    }

    /// One step; false if there was nothing to compute.
    pub(super) fn step(&mut self) -> bool {
        let Some(plan) = self.begin() else { return false };
        self.end(&plan);
        true
    }

    /// Plans a step and computes its first layer.
    pub(super) fn begin(&mut self) -> Option<Plan> {
        self.now += Duration::from_millis(1);
        let plan = self.core.plan(self.now)?;
        self.compute(&plan, 0);
        Some(plan)
    }

    /// Writes one layer of a step's KV; what each row has in it.
    pub(super) fn compute(&mut self, plan: &Plan, layer: usize) -> Vec<u64> {
        let mut rows = Vec::new();
        for seq in &plan.meta.seqs {
            for row in seq.q_start..seq.q_start + seq.q_len {
                let position = plan.meta.positions[row] as usize;
                let table = &plan.meta.block_tables[seq.table_start..];
                let slot = |position: usize| table[position / BLOCK] as usize * BLOCK + position % BLOCK;
                let before = if position == 0 { 0 } else { self.memory[slot(position - 1)][layer] };
                assert_eq!(plan.meta.slot_mapping[row] as usize, slot(position));
                self.memory[slot(position)][layer] = kv(before, plan.tokens[row]);
                rows.push(self.memory[slot(position)][layer]);
            }
        }
        rows
    }

    /// Computes the layers from the second on, and samples. A token is right only if all layers are.
    pub(super) fn end(&mut self, plan: &Plan) {
        let mut rows = self.compute(plan, 0);
        for layer in 1..LAYERS {
            let others = self.compute(plan, layer);
            rows.iter_mut().zip(others).for_each(|(row, other)| *row ^= row.abs_diff(other));
        }
        let next =
            |sample: &SampleRow| Sampled { token: next_token(rows[sample.row as usize]), logprobs: None };
        let sampled = plan.samples.iter().map(|sample| Ok(next(sample))).collect();
        self.core.commit(plan, sampled, self.now);
    }

    pub(super) fn submit(&mut self, id: u64, prompt: &[TokenId], max_tokens: usize) {
        self.submit_with(id, prompt, max_tokens, false, None);
    }

    /// A request whose KV is to be kept, or fetched.
    pub(super) fn submit_with(
        &mut self,
        id: u64,
        prompt: &[TokenId],
        max_tokens: usize,
        keep: bool,
        fetch: Option<Fetch>,
    ) {
        self.apply(Input::Submit(Submit { keep, fetch, ..self.request(id, prompt, max_tokens) }));
    }

    /// A request that wants nothing special.
    pub(super) fn request(&self, id: u64, prompt: &[TokenId], max_tokens: usize) -> Submit {
        Submit {
            id: RequestId(id),
            request_id: format!("r{id}"),
            prompt: prompt.to_vec(),
            sampling: SamplingParams { max_tokens, ..Default::default() },
            cache_salt: None,
            seed: 0,
            keep: false,
            fetch: None,
            prefill: Default::default(),
            arrival: self.now,
            deadline: self.now + Duration::from_secs(3600),
        }
    }
}

pub(super) struct Write {
    pub(super) id: RequestId,
    pub(super) peer: PeerId,
    pub(super) spans: Vec<Span>,
    pub(super) note: WriteNote,
}

/// A read that the decode worker has posted.
pub(super) struct Read {
    pub(super) range: ReadRange,
    pub(super) spans: Vec<Span>,
}

/// A decode worker `d`, a prefill worker `p` and everything that is on its way between them.
pub(super) struct World {
    pub(super) d: Worker,
    pub(super) p: Worker,
    pub(super) to_p: VecDeque<ToPrefill>,
    pub(super) to_d: VecDeque<ToDecode>,
    pub(super) writes: Vec<Write>,
    pub(super) reads: Vec<Read>,
    /// Whether the next link's tickets are read or written.
    pub(super) direction: Direction,
    /// What the prefill worker keeps, by the request that it was computed for.
    pub(super) kept: HashMap<RequestId, KeptKv>,
    pub(super) notes: Vec<Vec<u8>>,
    pub(super) peer: PeerId,
    pub(super) up: bool,
    pub(super) dequeued: HashMap<RequestId, u32>,
    pub(super) outputs: HashMap<RequestId, Vec<Output>>,
}

impl World {
    pub(super) fn new(d_blocks: usize, p_blocks: usize) -> Self {
        Self::of(d_blocks, p_blocks, Direction::Write)
    }

    pub(super) fn of(d_blocks: usize, p_blocks: usize, direction: Direction) -> Self {
        let mut world = Self {
            d: Worker::new(d_blocks, 1000),
            p: Worker::new(p_blocks, 0),
            to_p: VecDeque::new(),
            to_d: VecDeque::new(),
            writes: Vec::new(),
            reads: Vec::new(),
            direction,
            kept: HashMap::new(),
            notes: Vec::new(),
            peer: PeerId(0),
            up: false,
            dequeued: HashMap::new(),
            outputs: HashMap::new(),
        };
        world.connect();
        world
    }

    pub(super) fn connect(&mut self) {
        self.peer = PeerId(self.peer.0 + 1);
        self.up = true;
        let link = PrefillLink { direction: self.direction, max_prompt: 59, lease: LEASE, on_demand: false };
        self.d.apply(Input::PeerUp(self.peer, PeerRole::Prefill(link)));
        self.p.apply(Input::PeerUp(self.peer, PeerRole::Decode));
    }

    /// The link breaks: messages under way are lost, writes under way may still land.
    pub(super) fn disconnect(&mut self) {
        self.up = false;
        self.to_p.clear();
        self.to_d.clear();
        self.d.apply(Input::PeerDown(self.peer));
        self.p.apply(Input::PeerDown(self.peer));
        self.carry_out();
    }

    /// As the link does it: a new handshake succeeds only when the old tickets have ended.
    pub(super) fn reconnect(&mut self) {
        if !self.up && self.p.core.is_idle_for(self.peer) {
            self.d.apply(Input::PeerGone(self.peer));
            self.connect();
        }
    }

    pub(super) fn carry_out(&mut self) {
        loop {
            let (from_d, from_p) = (self.d.core.take_effects(), self.p.core.take_effects());
            if from_d.is_empty() && from_p.is_empty() {
                return;
            }
            for effect in from_d.into_iter().chain(from_p) {
                match effect {
                    Effect::Output(id, output) => {
                        if let Output::Finished { kept: Some(kept), .. } = &output {
                            self.kept.insert(id, (**kept).clone());
                        }
                        self.outputs.entry(id).or_default().push(output);
                    }
                    Effect::Dequeued(id) => *self.dequeued.entry(id).or_default() += 1,
                    Effect::Send(peer, PeerMessage::ToPrefill(message)) if peer == self.peer && self.up => {
                        self.to_p.push_back(message);
                    }
                    Effect::Send(peer, PeerMessage::ToDecode(message)) if peer == self.peer && self.up => {
                        self.to_d.push_back(message);
                    }
                    Effect::Send(..) => {}
                    Effect::Post { id, peer, spans, note, .. } => {
                        self.writes.push(Write { id, peer, spans, note })
                    }
                    Effect::Read { range, spans, .. } => self.reads.push(Read { range, spans }),
                    Effect::Offer { peer, ticket, first_block, blocks, last, .. } => {
                        if peer == self.peer && self.up {
                            let checksums = Vec::new();
                            self.to_d.push_back(ToDecode::Offer {
                                ticket,
                                first_block,
                                blocks,
                                checksums,
                                last,
                            });
                        }
                    }
                    Effect::DropPeer(peer) if peer == self.peer && self.up => self.disconnect(),
                    Effect::DropPeer(_)
                    | Effect::Pushed(..)
                    | Effect::Received { .. }
                    | Effect::TicketFailed { .. } => {}
                }
            }
        }
    }

    /// Copies a span, which is whole layers of one or more blocks.
    fn copy(from: &[[u64; LAYERS]], to: &mut [[u64; LAYERS]], source: u64, target: u64, len: u64) {
        for part in 0..len / LAYER_BYTES {
            let place = |offset: u64| {
                let offset = offset + part * LAYER_BYTES;
                ((offset / BLOCK_BYTES) as usize * BLOCK, (offset % BLOCK_BYTES / LAYER_BYTES) as usize)
            };
            let ((from_slot, layer), (to_slot, to_layer)) = (place(source), place(target));
            assert_eq!(layer, to_layer, "layers are not mixed up");
            for slot in 0..BLOCK {
                to[to_slot + slot][layer] = from[from_slot + slot][layer];
            }
        }
    }

    /// Bytes come in, whoever still wants them: never into a block that is not kept for them.
    fn arrives(&self, offset: u64, len: u64) {
        for block in offset / BLOCK_BYTES..(offset + len).div_ceil(BLOCK_BYTES) {
            let holder = self.d.core.pool.holder(BlockId(block as u32));
            assert!(matches!(holder, Some(Holder::Ticketed | Holder::Quarantined)), "wrote into {holder:?}");
        }
    }

    /// The bytes of a write land.
    pub(super) fn land(&mut self, write: &Write) {
        for span in &write.spans {
            self.arrives(span.remote, span.len);
            Self::copy(&self.p.memory, &mut self.d.memory, span.local, span.remote, span.len);
        }
    }

    pub(super) fn settle(&mut self, index: usize, fails: bool) {
        let write = self.writes.swap_remove(index);
        let result = match fails {
            true => Err("the wire broke".to_owned()),
            false => {
                self.land(&write);
                if self.up && write.peer == self.peer {
                    self.notes.push(write.note.encode());
                }
                Ok(Written { post: Duration::ZERO, wire: Duration::ZERO })
            }
        };
        self.p.apply(Input::Settled { id: write.id, result });
    }

    /// A read ends, with whatever the source blocks hold by now.
    pub(super) fn settle_read(&mut self, index: usize, fails: bool) {
        let read = self.reads.swap_remove(index);
        for span in &read.spans {
            self.arrives(span.local, span.len);
            Self::copy(&self.p.memory, &mut self.d.memory, span.remote, span.local, span.len);
        }
        let result = match fails {
            true => Err(ReadFault::Failed("the wire broke".to_owned())),
            false => Ok(Written::default()),
        };
        self.d.apply(Input::ReadSettled { range: read.range, result });
    }

    /// The prefill worker computes a step, and in the midst of it layers move and messages arrive.
    fn step_in_parts(&mut self, rng: &mut impl Rng) {
        let Some(plan) = self.p.begin() else { return };
        for layers in 1..=LAYERS {
            if layers > 1 {
                self.p.compute(&plan, layers - 1);
            }
            if rng.random_range(0..3) == 0 {
                let input = self.to_p.front().cloned().map(|message| Input::FromDecode(self.peer, message));
                if let Some(input) = input.filter(|input| self.p.core.may_apply_in_step(input)) {
                    self.to_p.pop_front();
                    self.p.core.apply(input, self.p.now);
                }
            }
            if rng.random_range(0..4) > 0 {
                self.p.core.layers_done(&plan, layers, self.p.now);
            }
            self.carry_out();
            if !self.writes.is_empty() && rng.random_range(0..3) == 0 {
                let index = rng.random_range(0..self.writes.len());
                self.settle(index, false);
                self.carry_out();
            }
        }
        self.p.end(&plan);
    }

    /// One thing that can happen, if it can.
    pub(super) fn happen(&mut self, rng: &mut impl Rng, faults: bool) {
        match rng.random_range(0..if faults { 100 } else { 94 }) {
            0..20 => drop(self.d.step()),
            20..40 => self.step_in_parts(rng),
            40..55 => {
                if let Some(message) = self.to_p.pop_front() {
                    self.p.apply(Input::FromDecode(self.peer, message));
                }
            }
            55..70 => {
                if let Some(message) = self.to_d.pop_front() {
                    self.d.apply(Input::FromPrefill(self.peer, message));
                }
            }
            70..75 if !self.reads.is_empty() => {
                self.settle_read(rng.random_range(0..self.reads.len()), false)
            }
            70..80 if !self.writes.is_empty() => self.settle(rng.random_range(0..self.writes.len()), false),
            80..90 if !self.notes.is_empty() => {
                let note = self.notes.swap_remove(rng.random_range(0..self.notes.len()));
                self.d.apply(Input::Notified { bytes: note, intact: true });
            }
            90 if faults && !self.to_p.is_empty() => {
                // A message twice.
                let again = self.to_p[rng.random_range(0..self.to_p.len())].clone();
                if !matches!(again, ToPrefill::Done { .. }) {
                    self.p.apply(Input::FromDecode(self.peer, again));
                }
            }
            91 if faults => {
                // Both clocks run on: leases end unless they are renewed in time.
                let pause = LEASE / rng.random_range(1..8);
                self.d.now += pause;
                self.p.now += pause;
            }
            92 if faults && !self.reads.is_empty() => {
                self.settle_read(rng.random_range(0..self.reads.len()), true)
            }
            93 if faults => {
                // The prefill worker stands still for longer than its lease.
                self.p.now += LEASE * 2;
                self.d.now = self.d.now.max(self.p.now);
            }
            94..96 if !self.writes.is_empty() => self.settle(rng.random_range(0..self.writes.len()), true),
            96 if self.up => self.disconnect(),
            97..100 => self.reconnect(),
            _ => {}
        }
        self.carry_out();
    }

    pub(super) fn is_quiet(&self) -> bool {
        self.d.core.is_empty()
            && self.p.core.is_empty()
            && self.writes.is_empty()
            && self.reads.is_empty()
            && self.d.core.quarantine.is_empty()
    }

    pub(super) fn answer(&self, id: RequestId) -> (Vec<TokenId>, Option<&Output>) {
        let outputs = &self.outputs[&id];
        let tokens = outputs.iter().filter_map(|output| match output {
            Output::Token { id, .. } => Some(*id),
            _ => None,
        });
        (tokens.collect(), outputs.last())
    }
}
