//! Two cores, a link and a data path between them, driven by random events.
//!
//! The model is a hash: a token's "KV" is a hash of the KV before it and of the token, read from the block table, and
//! the next token is a function of the last KV. So an answer is right only if every block that was read held the right
//! content, wherever it came from.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use transfer::PeerId;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::*;
use crate::api::FinishReason;
use crate::handoff::{Totals, WriteNote};
use crate::pool::Holder;
use crate::request::Ending;
use crate::sampler::Sampled;

const EOS: TokenId = 2;
const BLOCK: usize = 4;

fn config(num_blocks: usize, first_ticket: u64) -> CoreConfig {
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
fn kv(before: u64, token: TokenId) -> u64 {
    xxh3_64_with_seed(&token.to_le_bytes(), before)
}

fn next_token(kv: u64) -> TokenId {
    if kv.is_multiple_of(23) { EOS } else { 3 + (kv % 40) as TokenId }
}

/// What a request must answer, computed without any engine.
fn reference(prompt: &[TokenId], max_tokens: usize) -> (Vec<TokenId>, FinishReason) {
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
struct Worker {
    core: Core,
    memory: Vec<u64>,
    now: Duration,
}

impl Worker {
    fn new(num_blocks: usize, first_ticket: u64) -> Self {
        Self {
            core: Core::new(config(num_blocks, first_ticket)),
            memory: vec![u64::MAX; num_blocks * BLOCK],
            now: Duration::ZERO,
        }
    }

    fn apply(&mut self, input: Input) {
        self.now += Duration::from_micros(10);
        self.core.apply(input, self.now);
        self.core.check();
    }

    /// One step; false if there was nothing to compute.
    fn step(&mut self) -> bool {
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

    fn submit(&mut self, id: u64, prompt: &[TokenId], max_tokens: usize) {
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

struct Write {
    id: RequestId,
    peer: PeerId,
    spans: Vec<Span>,
    note: Vec<u8>,
}

/// A decode worker `d`, a prefill worker `p` and everything that is on its way between them.
struct World {
    d: Worker,
    p: Worker,
    to_p: VecDeque<ToPrefill>,
    to_d: VecDeque<ToDecode>,
    writes: Vec<Write>,
    notes: Vec<Vec<u8>>,
    peer: PeerId,
    up: bool,
    dequeued: HashMap<RequestId, u32>,
    outputs: HashMap<RequestId, Vec<Output>>,
}

impl World {
    fn new(d_blocks: usize, p_blocks: usize) -> Self {
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

    fn connect(&mut self) {
        self.peer = PeerId(self.peer.0 + 1);
        self.up = true;
        self.d.apply(Input::PeerUp(self.peer, PeerRole::Prefill));
        self.p.apply(Input::PeerUp(self.peer, PeerRole::Decode));
    }

    /// The link breaks: messages under way are lost, writes under way may still land.
    fn disconnect(&mut self) {
        self.up = false;
        self.to_p.clear();
        self.to_d.clear();
        self.d.apply(Input::PeerDown(self.peer));
        self.p.apply(Input::PeerDown(self.peer));
        self.carry_out();
    }

    /// As the link does it: a new handshake succeeds only when the old tickets have ended.
    fn reconnect(&mut self) {
        if !self.up && self.p.core.is_idle_for(self.peer) {
            self.d.apply(Input::PeerGone(self.peer));
            self.connect();
        }
    }

    fn carry_out(&mut self) {
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
    fn land(&mut self, write: &Write) {
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

    fn settle(&mut self, index: usize, fails: bool) {
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
    fn happen(&mut self, rng: &mut StdRng, faults: bool) {
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

    fn is_quiet(&self) -> bool {
        self.d.core.is_empty()
            && self.p.core.is_empty()
            && self.writes.is_empty()
            && self.d.core.quarantine.is_empty()
    }

    fn answer(&self, id: RequestId) -> (Vec<TokenId>, Option<&Output>) {
        let outputs = &self.outputs[&id];
        let tokens = outputs.iter().filter_map(|output| match output {
            Output::Token { id, .. } => Some(*id),
            _ => None,
        });
        (tokens.collect(), outputs.last())
    }
}

/// Prompts that share prefixes of many lengths.
fn prompt(rng: &mut StdRng) -> Vec<TokenId> {
    let family = rng.random_range(0..3);
    let shared = rng.random_range(0..30);
    let own = rng.random_range(1..12);
    let tail = rng.random_range(50..60);
    (0..shared).map(|i| 100 + family * 50 + i).chain((0..own).map(|i| tail + i % 3)).collect()
}

fn run(seed: u64, faults: bool, d_blocks: usize, p_blocks: usize) -> Counters {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut world = World::new(d_blocks, p_blocks);
    let mut wanted: HashMap<RequestId, (Vec<TokenId>, usize)> = HashMap::new();
    let mut aborted = Vec::new();
    for id in 0..rng.random_range(1..12u64) {
        let (prompt, max_tokens) = (prompt(&mut rng), rng.random_range(1..12));
        world.d.submit(id, &prompt, max_tokens);
        world.carry_out();
        wanted.insert(RequestId(id), (prompt, max_tokens));
        for _ in 0..rng.random_range(0..60) {
            world.happen(&mut rng, faults);
            if rng.random_range(0..150) == 0 {
                let victim = RequestId(rng.random_range(0..=id));
                world.d.apply(Input::Abort(victim));
                world.carry_out();
                aborted.push(victim);
            }
        }
    }
    let mut events = 0;
    while !world.is_quiet() {
        world.happen(&mut rng, faults && events < 200);
        world.reconnect();
        events += 1;
        assert!(events < 40_000, "seed {seed}: no progress; {:#?}", world.d.core);
    }
    for (id, (prompt, max_tokens)) in &wanted {
        assert_eq!(
            world.dequeued.get(id),
            Some(&1),
            "seed {seed}: {id:?} left the queue more or less than once"
        );
        let Some(_) = world.outputs.get(id) else {
            assert!(aborted.contains(id), "seed {seed}: {id:?} has no answer");
            continue;
        };
        let (tokens, last) = world.answer(*id);
        let (expected, expected_reason) = reference(prompt, *max_tokens);
        match last {
            Some(Output::Finished { reason, .. }) => {
                assert_eq!((&tokens, reason), (&expected, &expected_reason), "seed {seed}: {id:?}");
            }
            _ => {
                assert!(aborted.contains(id), "seed {seed}: {id:?} ended with {last:?}");
                assert!(expected.starts_with(&tokens), "seed {seed}: {id:?}");
            }
        }
    }
    assert!(
        world.d.core.tickets.is_empty() && world.p.core.pushes.is_empty(),
        "seed {seed}: tickets are left"
    );
    for worker in [&world.d, &world.p] {
        let account = worker.core.account();
        assert_eq!(account.free + account.cached, worker.core.config.num_blocks, "seed {seed}: {account:?}");
    }
    world.d.core.counters()
}

#[test]
fn random_handoffs_give_the_right_tokens_and_every_block_back() {
    let mut transferred = 0;
    for seed in 0..3000 {
        let counters = run(seed, false, 40, 40);
        transferred += counters.prompt_tokens_transferred;
        assert_eq!(counters.recomputed, 0, "seed {seed}: nothing failed, nothing is computed twice");
    }
    assert!(transferred > 10_000, "most prompts came from the prefill worker: {transferred}");
}

#[test]
fn random_faults_give_the_right_tokens_and_every_block_back() {
    let recomputed: u64 = (0..5000).map(|seed| run(seed, true, 40, 40).recomputed).sum();
    assert!(recomputed > 1000, "faults were met: {recomputed}");
}

#[test]
fn small_pools_preempt_and_wait_but_never_deadlock() {
    let preempted: u64 = (0..4000).map(|seed| run(seed, seed % 2 == 1, 15, 15).preemptions).sum();
    assert!(preempted > 100, "the pools were short: {preempted}");
}

fn alone(num_blocks: usize) -> Worker {
    Worker::new(num_blocks, 0)
}

fn outputs(worker: &mut Worker) -> Vec<Output> {
    let effects = worker.core.take_effects().into_iter();
    effects
        .filter_map(|effect| if let Effect::Output(_, output) = effect { Some(output) } else { None })
        .collect()
}

fn run_alone(worker: &mut Worker, id: u64, prompt: &[TokenId], max_tokens: usize) -> (Vec<TokenId>, Output) {
    worker.submit(id, prompt, max_tokens);
    while worker.step() {}
    let mut outputs = outputs(worker);
    let last = outputs.pop().expect("a request ends with an output");
    let tokens = outputs.iter().map(|output| match output {
        Output::Token { id, .. } => *id,
        other => panic!("{other:?} before the end"),
    });
    (tokens.collect(), last)
}

fn cached(last: &Output) -> usize {
    let Output::Finished { usage, .. } = last else { panic!("{last:?} instead of an end") };
    usage.cached_tokens
}

/// kv-01: a prompt that is cached as a whole still computes its last token, whatever its length.
#[test]
fn a_fully_cached_prompt_still_computes_its_last_token() {
    for len in 1..=5 * BLOCK {
        let prompt: Vec<TokenId> = (0..len as TokenId).map(|i| 60 + i).collect();
        let mut worker = alone(40);
        let (cold, first) = run_alone(&mut worker, 0, &prompt, 5);
        let (warm, second) = run_alone(&mut worker, 1, &prompt, 5);
        assert_eq!(cold, warm);
        assert_eq!((cached(&first), cached(&second)), (0, (len - 1) / BLOCK * BLOCK), "length {len}");
    }
}

/// Decoded blocks are cached too: the next turn of a chat finds its own answer.
#[test]
fn a_second_turn_hits_the_first_answer() {
    let prompt: Vec<TokenId> = (60..60 + 10).collect();
    let mut worker = alone(40);
    let (answer, _) = run_alone(&mut worker, 0, &prompt, 9);
    let turn: Vec<TokenId> = prompt.iter().chain(&answer).copied().chain([7, 8, 9]).collect();
    let (_, last) = run_alone(&mut worker, 1, &turn, 2);
    // The last answered token was never fed back, so its KV is not there.
    assert_eq!(cached(&last), (prompt.len() + answer.len() - 1) / BLOCK * BLOCK);
}

/// sch-01: a request that fills the pool and can grow no further ends with `length`; it does not wait for ever.
#[test]
fn a_request_that_outgrows_the_pool_ends_with_length() {
    let prompt: Vec<TokenId> = (0..14).map(|i| 61 + i % 2).collect();
    let mut worker = alone(4);
    let (tokens, last) = run_alone(&mut worker, 0, &prompt, 1000);
    let (expected, _) = reference(&prompt, 1000);
    assert!(expected.len() > 3, "the test needs a long answer");
    // 16 slots: two tokens are fed back into the pool, the one after them has its logits but no slot.
    assert_eq!(tokens, expected[..3]);
    assert!(matches!(last, Output::Finished { reason: FinishReason::Length, .. }));
}

/// sch-04: a running stream gets a token in every step, however many prompts arrive.
#[test]
fn decodes_are_never_starved_by_prompts() {
    let mut worker = alone(100);
    let streaming: Vec<TokenId> = vec![61, 62, 61, 61];
    assert!(reference(&streaming, 30).0.len() >= 8, "the test needs a long answer");
    worker.submit(0, &streaming, 30);
    worker.step();
    let before = outputs(&mut worker).len();
    for id in 1..4 {
        worker.submit(id, &[70 + id as TokenId; 40], 1);
    }
    for step in 0..6 {
        worker.step();
        let tokens = worker
            .core
            .take_effects()
            .into_iter()
            .filter(|effect| matches!(effect, Effect::Output(RequestId(0), _)));
        assert_eq!(tokens.count(), 1, "step {step} after {before} outputs");
    }
}

/// sch-04: a short prompt does not wait behind a long one, which is slowed by a quarter at most.
#[test]
fn a_short_prompt_does_not_wait_behind_a_long_one() {
    let mut worker = alone(200);
    worker.core.config.max_model_len = 300;
    worker.core.config.max_batched_tokens = 16;
    worker.submit(0, &(0..240).map(|i| 100 + i).collect::<Vec<_>>(), 2);
    worker.step();
    worker.submit(1, &(0..200).map(|i| 400 + i).collect::<Vec<_>>(), 2);
    worker.submit(2, &[61, 62, 63], 1);
    worker.step();
    let first = worker.core.take_effects().into_iter().find_map(|effect| match effect {
        Effect::Output(id, Output::Token { .. }) => Some(id),
        _ => None,
    });
    assert_eq!(first, Some(RequestId(2)));
    let mut steps = 2;
    while !worker.core.take_effects().iter().any(|effect| matches!(effect, Effect::Output(RequestId(0), _))) {
        assert!(worker.step() && steps < 21, "240 tokens at 12 or more a step");
        steps += 1;
    }
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let mut worker = alone(10);
    worker.submit(0, &[60; 20], 30);
    worker.submit(1, &[61; 20], 30);
    worker.step();
    worker.now += Duration::from_secs(3601);
    worker.core.plan(worker.now);
    let failed = outputs(&mut worker);
    assert_eq!(
        failed.iter().filter(|o| matches!(o, Output::Failed(RequestError::DeadlineExceeded(_)))).count(),
        2
    );
    assert!(worker.core.is_empty());
    assert_eq!(worker.core.account().free + worker.core.account().cached, 10);
}

/// pd-15: duplicate, unknown and late messages change nothing but a counter.
#[test]
fn made_up_messages_are_counted_and_dropped() {
    let mut worker = alone(10);
    let ticket = TicketId(77);
    let peer = PeerId(9);
    for message in [
        ToDecode::Ask { ticket },
        ToDecode::FirstToken {
            ticket,
            token: 5,
            cached_tokens: 0,
            logprobs: None,
            timing: Default::default(),
        },
        ToDecode::Ended { ticket },
        ToDecode::Failed { ticket, reason: "no".into(), clean: true },
        ToDecode::Complete { ticket, totals: Default::default(), timing: Default::default() },
    ] {
        worker.apply(Input::FromPrefill(peer, message));
    }
    worker.apply(Input::FromDecode(peer, ToPrefill::Abort { ticket }));
    worker.apply(Input::FromDecode(peer, ToPrefill::Grant { ticket, first_block: 0, blocks: vec![1] }));
    worker.apply(Input::Notified(b"noise".to_vec()));
    worker.apply(Input::Settled { id: RequestId(5), result: Err("late".into()) });
    assert_eq!(worker.core.counters().stale_messages, 9);
    assert!(worker.core.take_effects().is_empty() && worker.core.is_empty());
}

#[test]
fn a_grant_of_the_wrong_size_fails_the_ticket() {
    let mut world = World::new(20, 20);
    let open = ToPrefill::Open {
        ticket: TicketId(1),
        request_id: "r".into(),
        tokens: vec![60; 9],
        sampling: SamplingParams::default(),
        seed: 0,
        cache_salt: None,
        deadline_ms: 1000,
    };
    world.p.apply(Input::FromDecode(world.peer, open));
    world.p.apply(Input::FromDecode(
        world.peer,
        ToPrefill::Grant { ticket: TicketId(1), first_block: 0, blocks: vec![1] },
    ));
    world.carry_out();
    let Some(ToDecode::Failed { reason, clean: true, .. }) = world.to_d.pop_back() else {
        panic!("{:?}", world.to_d)
    };
    assert_eq!(reason, "granted 1 blocks from block 0 on, the prompt has 3");
    assert!(world.p.core.is_empty());
    assert_ne!(Ending::Ended, Ending::PeerLost);
}

/// A decode worker with one ticket open and granted, its prompt of 9 tokens in 3 blocks.
fn granted_world() -> (World, TicketId) {
    let mut world = World::new(20, 20);
    world.d.submit(0, &[60; 9], 4);
    world.carry_out();
    let Some(ToPrefill::Open { ticket, .. }) = world.to_p.pop_front() else { panic!("no ticket") };
    world.d.apply(Input::FromPrefill(world.peer, ToDecode::Ask { ticket }));
    world.d.step();
    (world, ticket)
}

fn first_token(ticket: TicketId) -> ToDecode {
    let token = reference(&[60; 9], 4).0[0];
    ToDecode::FirstToken { ticket, token, cached_tokens: 0, logprobs: None, timing: Default::default() }
}

/// A completion or a notification that does not match the grant never decodes.
#[test]
fn kv_that_does_not_match_the_grant_is_recomputed() {
    let totals = |blocks, bytes| Totals { writes: 1, blocks, bytes, descriptors: 1 };
    let complete = |ticket, totals| ToDecode::Complete { ticket, totals, timing: Default::default() };
    let note = |ticket, first_block, blocks| WriteNote { ticket, first_block, blocks }.encode();
    type Fault = Box<dyn Fn(&mut World, TicketId)>;
    let faults: [(&str, Fault); 6] = [
        (
            "too few blocks",
            Box::new(move |w, t| w.d.apply(Input::FromPrefill(w.peer, complete(t, totals(2, 128))))),
        ),
        (
            "too few bytes",
            Box::new(move |w, t| w.d.apply(Input::FromPrefill(w.peer, complete(t, totals(3, 190))))),
        ),
        (
            "a block twice",
            Box::new(move |w, t| {
                w.d.apply(Input::Notified(note(t, 0, 2)));
                w.d.apply(Input::Notified(note(t, 1, 2)));
            }),
        ),
        ("a block beyond", Box::new(move |w, t| w.d.apply(Input::Notified(note(t, 1, 3))))),
        ("an absurd range", Box::new(move |w, t| w.d.apply(Input::Notified(note(t, u32::MAX, u32::MAX))))),
        (
            "failed",
            Box::new(|w, ticket| {
                w.d.apply(Input::FromPrefill(
                    w.peer,
                    ToDecode::Failed { ticket, reason: "no".into(), clean: true },
                ));
            }),
        ),
    ];
    for (name, fault) in faults {
        let (mut world, ticket) = granted_world();
        world.d.apply(Input::FromPrefill(world.peer, first_token(ticket)));
        fault(&mut world, ticket);
        assert_eq!(world.d.core.counters().recomputed, 1, "{name}");
        while world.d.step() {}
        world.carry_out();
        assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0, "{name}");
    }
}

/// The prefill worker's engine may be busy with other prompts for long: decoding must not wait for its `Complete`.
#[test]
fn decoding_starts_with_the_last_notification_not_with_complete() {
    let (mut world, ticket) = granted_world();
    world.d.apply(Input::FromPrefill(world.peer, first_token(ticket)));
    world.d.apply(Input::Notified(WriteNote { ticket, first_block: 1, blocks: 2 }.encode()));
    assert!(!world.d.step(), "a block is missing");
    world.d.apply(Input::Notified(WriteNote { ticket, first_block: 0, blocks: 1 }.encode()));
    assert!(world.d.step());
    let totals = Totals { writes: 2, blocks: 3, bytes: 192, descriptors: 2 };
    let complete = ToDecode::Complete { ticket, totals, timing: Default::default() };
    world.d.apply(Input::FromPrefill(world.peer, complete));
    let received = |effect: &Effect| matches!(effect, Effect::Received { totals: t, .. } if *t == totals);
    assert!(world.d.core.take_effects().iter().any(received));
    assert!(world.d.core.settling.is_empty());
}

/// pd-14: the prefill worker is done but its notification never arrives. The request must not wait for its deadline.
#[test]
fn a_lost_notification_is_recomputed_after_seconds() {
    let (mut world, ticket) = granted_world();
    world.d.apply(Input::FromPrefill(world.peer, first_token(ticket)));
    let totals = Totals { writes: 1, blocks: 3, bytes: 192, descriptors: 1 };
    let complete = ToDecode::Complete { ticket, totals, timing: Default::default() };
    world.d.apply(Input::FromPrefill(world.peer, complete));
    assert!(!world.d.step() && world.d.core.counters().recomputed == 0);
    world.d.now += Duration::from_secs(6);
    while world.d.step() {}
    world.carry_out();
    assert_eq!(world.d.core.counters().recomputed, 1);
    assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0);
    assert_eq!(world.d.core.account().quarantined, 0);
}
