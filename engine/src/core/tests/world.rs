//! The workers, the link and the data path, and the model that is a hash.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;
use transfer::PeerId;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::super::*;
use crate::api::FinishReason;
use crate::pool::Holder;
use crate::sampler::Sampled;

pub(super) const EOS: TokenId = 2;
pub(super) const BLOCK: usize = 4;

pub(super) fn config(num_blocks: usize, first_ticket: u64) -> CoreConfig {
    CoreConfig {
        block_size: BLOCK,
        num_blocks,
        block_bytes: 64,
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
    pub(super) memory: Vec<u64>,
    pub(super) now: Duration,
}

impl Worker {
    pub(super) fn new(num_blocks: usize, first_ticket: u64) -> Self {
        let mut core = Core::new(config(num_blocks, first_ticket));
        core.record_kv_events();
        Self {
            core,
            memory: vec![u64::MAX; num_blocks * BLOCK],
            now: Duration::ZERO,
        }
    }

    pub(super) fn apply(&mut self, input: Input) {
        self.now += Duration::from_micros(10);
        self.core.apply(input, self.now);
        self.core.check();
    }

    /// One step; false if there was nothing to compute.
    pub(super) fn step(&mut self) -> bool {
        self.now += Duration::from_millis(1);
        let Some(plan) = self.core.plan(self.now) else { return false };
        let mut rows = Vec::new();
        for seq in &plan.meta.seqs {
            for row in seq.q_start..seq.q_start + seq.q_len {
                let position = plan.meta.positions[row] as usize;
                let table = &plan.meta.block_tables[seq.table_start..];
                let slot = |position: usize| table[position / BLOCK] as usize * BLOCK + position % BLOCK;
                let before = if position == 0 { 0 } else { self.memory[slot(position - 1)] };
                assert_eq!(plan.meta.slot_mapping[row] as usize, slot(position));
                self.memory[slot(position)] = kv(before, plan.tokens[row]);
                rows.push(self.memory[slot(position)]);
            }
        }
        let next =
            |sample: &SampleRow| Sampled { token: next_token(rows[sample.row as usize]), logprobs: None };
        let sampled = plan.samples.iter().map(|sample| Ok(next(sample))).collect();
        self.core.commit(&plan, sampled, self.now);
        true
    }

    pub(super) fn submit(&mut self, id: u64, prompt: &[TokenId], max_tokens: usize) {
        let sampling = SamplingParams { max_tokens, ..Default::default() };
        self.apply(Input::Submit(Submit {
            id: RequestId(id),
            request_id: format!("r{id}"),
            prompt: prompt.to_vec(),
            sampling,
            cache_salt: None,
            seed: 0,
            arrival: self.now,
            deadline: self.now + Duration::from_secs(3600),
        }));
    }
}

pub(super) struct Write {
    pub(super) id: RequestId,
    pub(super) peer: PeerId,
    pub(super) spans: Vec<Span>,
    pub(super) note: Vec<u8>,
}

/// A decode worker `d`, a prefill worker `p` and everything that is on its way between them.
pub(super) struct World {
    pub(super) d: Worker,
    pub(super) p: Worker,
    pub(super) to_p: VecDeque<ToPrefill>,
    pub(super) to_d: VecDeque<ToDecode>,
    pub(super) writes: Vec<Write>,
    pub(super) notes: Vec<Vec<u8>>,
    pub(super) peer: PeerId,
    pub(super) up: bool,
    pub(super) dequeued: HashMap<RequestId, u32>,
    pub(super) outputs: HashMap<RequestId, Vec<Output>>,
}

impl World {
    pub(super) fn new(d_blocks: usize, p_blocks: usize) -> Self {
        let mut world = Self {
            d: Worker::new(d_blocks, 1000),
            p: Worker::new(p_blocks, 0),
            to_p: VecDeque::new(),
            to_d: VecDeque::new(),
            writes: Vec::new(),
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
        self.d.apply(Input::PeerUp(self.peer, PeerRole::Prefill));
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
                    Effect::Output(id, output) => self.outputs.entry(id).or_default().push(output),
                    Effect::Dequeued(id) => *self.dequeued.entry(id).or_default() += 1,
                    Effect::Send(peer, PeerMessage::ToPrefill(message)) if peer == self.peer && self.up => {
                        self.to_p.push_back(message);
                    }
                    Effect::Send(peer, PeerMessage::ToDecode(message)) if peer == self.peer && self.up => {
                        self.to_d.push_back(message);
                    }
                    Effect::Send(..) => {}
                    Effect::Post { id, peer, spans, note } => {
                        self.writes.push(Write { id, peer, spans, note })
                    }
                    Effect::DropPeer(peer) if peer == self.peer && self.up => self.disconnect(),
                    Effect::DropPeer(_) | Effect::Pushed(..) | Effect::Received { .. } => {}
                }
            }
        }
    }

    /// The bytes of a write land, whoever still wants them: never in a block that is not kept for them.
    pub(super) fn land(&mut self, write: &Write) {
        for span in &write.spans {
            for block in 0..span.len / 64 {
                let (from, to) = ((span.local / 64 + block) as usize, (span.remote / 64 + block) as usize);
                let holder = self.d.core.pool.holder(BlockId(to as u32));
                assert!(
                    matches!(holder, Some(Holder::Ticketed | Holder::Quarantined)),
                    "wrote into {holder:?}"
                );
                let source = self.p.memory[from * BLOCK..(from + 1) * BLOCK].to_vec();
                self.d.memory[to * BLOCK..(to + 1) * BLOCK].copy_from_slice(&source);
            }
        }
    }

    pub(super) fn settle(&mut self, index: usize, fails: bool) {
        let write = self.writes.swap_remove(index);
        let result = match fails {
            true => Err("the wire broke".to_owned()),
            false => {
                self.land(&write);
                if self.up && write.peer == self.peer {
                    self.notes.push(write.note);
                }
                Ok(Written { post: Duration::ZERO, wire: Duration::ZERO })
            }
        };
        self.p.apply(Input::Settled { id: write.id, result });
    }

    /// One thing that can happen, if it can.
    pub(super) fn happen(&mut self, rng: &mut StdRng, faults: bool) {
        match rng.random_range(0..if faults { 100 } else { 94 }) {
            0..20 => drop(self.d.step()),
            20..40 => drop(self.p.step()),
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
            70..80 if !self.writes.is_empty() => self.settle(rng.random_range(0..self.writes.len()), false),
            80..90 if !self.notes.is_empty() => {
                let note = self.notes.swap_remove(rng.random_range(0..self.notes.len()));
                self.d.apply(Input::Notified(note));
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
