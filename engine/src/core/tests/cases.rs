//! One test for each fault that was found.

use std::time::Duration;

use transfer::{Direction, PeerId};

use super::super::*;
use super::world::*;
use crate::api::{FinishReason, KvFault, PrefillBy, RequestError, SamplingParams};
use crate::handoff::{ToDecode, ToPrefill, Totals, WriteNote};
use crate::ticket::Ending;

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
    worker.apply(Input::Notified { bytes: b"noise".to_vec(), intact: true });
    worker.apply(Input::Settled { id: RequestId(5), result: Err("late".into()) });
    let counters = worker.core.counters();
    assert_eq!((counters.stale_duplicate, counters.stale_late, counters.stale_unknown), (0, 0, 9));
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
        direction: Direction::Write,
        checksum: false,
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
pub(super) fn granted_world() -> (World, TicketId) {
    let mut world = World::new(20, 20);
    world.d.submit(0, &[60; 9], 4);
    world.carry_out();
    let Some(ToPrefill::Open { ticket, .. }) = world.to_p.pop_front() else { panic!("no ticket") };
    world.d.apply(Input::FromPrefill(world.peer, ToDecode::Ask { ticket }));
    world.d.step();
    (world, ticket)
}

pub(super) fn first_token(ticket: TicketId) -> ToDecode {
    let token = reference(&[60; 9], 4).0[0];
    ToDecode::FirstToken { ticket, token, cached_tokens: 0, logprobs: None, timing: Default::default() }
}

pub(super) fn note(ticket: TicketId, first_block: u32, blocks: u32) -> Input {
    layers_note(ticket, first_block, blocks, 0, LAYERS as u16)
}

fn layers_note(ticket: TicketId, first_block: u32, blocks: u32, first_layer: u16, layers: u16) -> Input {
    let note = WriteNote { ticket, first_block, blocks, first_layer, layers, checksums: Vec::new() };
    Input::Notified { bytes: note.encode(), intact: true }
}

/// A completion or a notification that does not match the grant never decodes.
#[test]
fn kv_that_does_not_match_the_grant_is_recomputed() {
    let totals = |blocks, bytes| Totals { writes: 1, blocks, bytes, descriptors: 1 };
    let complete = |ticket, totals| ToDecode::Complete { ticket, totals, timing: Default::default() };
    type Fault = Box<dyn Fn(&mut World, TicketId)>;
    let faults: [(&str, Fault); 9] = [
        (
            "a layer twice",
            Box::new(move |w, t| {
                w.d.apply(layers_note(t, 0, 3, 0, 2));
                w.d.apply(layers_note(t, 2, 1, 1, 2));
            }),
        ),
        ("a layer beyond", Box::new(move |w, t| w.d.apply(layers_note(t, 0, 3, 2, 3)))),
        (
            "bytes without their checksums",
            Box::new(move |w, t| {
                let Input::Notified { bytes, .. } = note(t, 0, 3) else { unreachable!() };
                w.d.apply(Input::Notified { bytes, intact: false });
                assert_eq!(w.d.core.counters().checksum_mismatches, 1);
            }),
        ),
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
                w.d.apply(note(t, 0, 2));
                w.d.apply(note(t, 1, 2));
            }),
        ),
        ("a block beyond", Box::new(move |w, t| w.d.apply(note(t, 1, 3)))),
        ("an absurd range", Box::new(move |w, t| w.d.apply(note(t, u32::MAX, u32::MAX)))),
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
    world.d.apply(note(ticket, 1, 2));
    assert!(!world.d.step(), "a block is missing");
    world.d.apply(note(ticket, 0, 1));
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

/// A pulled prompt of 9 tokens whose blocks are being read.
pub(super) fn reading_world() -> World {
    let mut world = World::of(20, 20, Direction::Read);
    world.d.submit(0, &[60; 9], 4);
    world.carry_out();
    while let Some(message) = world.to_p.pop_front() {
        world.p.apply(Input::FromDecode(world.peer, message));
    }
    while world.p.step() {}
    world.carry_out();
    while let Some(message) = world.to_d.pop_front() {
        world.d.apply(Input::FromPrefill(world.peer, message));
    }
    world.d.step();
    world.carry_out();
    assert_eq!(world.reads.len(), 1, "all three blocks at once");
    world
}

/// What is read after the lease has ended may be another prompt's KV by now.
#[test]
fn bytes_read_after_the_lease_are_not_believed() {
    let mut world = reading_world();
    world.p.now += LEASE * 2;
    world.p.step();
    assert_eq!(world.p.core.account().running, 0, "given up");
    world.p.memory.fill([7; LAYERS]);
    world.d.now += LEASE * 2;
    world.settle_read(0, false);
    while world.d.step() {}
    world.carry_out();
    assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0);
    assert_eq!((world.d.core.counters().recomputed, world.d.core.account().quarantined), (1, 0));
}

/// The decode worker may not know yet that its link is lost: what it reads must stay what was offered until it must.
#[test]
fn blocks_being_read_stay_pinned_when_the_link_is_lost() {
    let mut world = reading_world();
    world.p.apply(Input::PeerDown(world.peer));
    assert!(world.p.core.is_idle_for(world.peer), "a new link need not wait for reads");
    assert_eq!(world.p.core.account().running, 3);
    world.settle_read(0, false);
    while world.d.step() {}
    world.carry_out();
    assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0);
    assert_eq!(world.d.core.counters().recomputed, 0);
    world.p.now += LEASE * 2;
    world.p.step();
    assert_eq!((world.p.core.account().running, world.p.core.is_empty()), (0, true));
}

/// Blocks that our own reads still write wait for these, not for the prefill worker's word.
#[test]
fn a_request_aborted_while_its_kv_is_read_keeps_its_blocks_until_the_read_settles() {
    let mut world = reading_world();
    world.d.apply(Input::Abort(RequestId(0)));
    world.d.apply(Input::PeerGone(world.peer));
    assert_eq!(world.d.core.account().quarantined, 3);
    world.settle_read(0, true);
    assert_eq!(world.d.core.account().quarantined, 0);
}

/// Layers are written while the next ones compute, and what is left after the last one is what the knob says.
#[test]
fn layers_are_written_within_a_step() {
    let mut world = World::new(20, 20);
    world.d.submit(0, &[60; 9], 4);
    world.carry_out();
    let open = world.to_p.pop_front().expect("a ticket");
    world.p.apply(Input::FromDecode(world.peer, open));
    let plan = world.p.begin().expect("a prompt");
    world.carry_out();
    // The grant comes after the first layer.
    let ask = world.to_d.pop_front().expect("a question");
    world.d.apply(Input::FromPrefill(world.peer, ask));
    world.d.step();
    world.carry_out();
    let grant = Input::FromDecode(world.peer, world.to_p.pop_front().expect("a grant"));
    assert!(world.p.core.may_apply_in_step(&grant));
    world.p.core.apply(grant, world.p.now);
    let mut posted = Vec::new();
    for layers in 1..=LAYERS {
        world.p.core.layers_done(&plan, layers, world.p.now);
        world.carry_out();
        posted.push(world.writes.len());
    }
    assert_eq!(posted, [0, 1, 1, 2], "two layers at a time");
    world.p.end(&plan);
    world.carry_out();
    assert_eq!(world.writes.len(), 2, "nothing is left for after the step");
    assert!(!world.p.core.may_apply_in_step(&Input::PeerDown(world.peer)));
}

/// A prompt that is too long for every prefill worker is computed here and counted, or refused if that is the rule.
#[test]
fn a_prompt_that_no_prefill_worker_takes_is_not_offered_to_any() {
    for (rule, failed) in [(KvFailure::Recompute, 0), (KvFailure::Fail, 1)] {
        let mut worker = alone(40);
        worker.core.config.kv_failure = rule;
        let link = crate::event::PrefillLink {
            direction: Direction::Write,
            max_prompt: 8,
            lease: LEASE,
            on_demand: false,
        };
        worker.apply(Input::PeerUp(PeerId(1), PeerRole::Prefill(link)));
        worker.submit(0, &[60; 9], 4);
        while worker.step() {}
        let refused = outputs(&mut worker).iter().filter(|o| matches!(o, Output::Failed(_))).count();
        let counters = worker.core.counters();
        assert_eq!((refused, counters.tickets_opened, counters.prompts_too_long_for_prefill), (failed, 0, 1));
    }
}

/// pd-15: an `Open` that comes again after its ticket is over would take the grant of the ticket's first life, and write
/// where other requests are by now.
#[test]
fn an_open_that_comes_twice_is_dropped_though_its_ticket_is_over() {
    let mut world = World::new(20, 20);
    world.d.submit(0, &[60; 9], 4);
    world.carry_out();
    let open = world.to_p.pop_front().expect("a ticket");
    let ToPrefill::Open { ticket, .. } = open else { panic!("{open:?}") };
    world.p.apply(Input::FromDecode(world.peer, open.clone()));
    world.p.apply(Input::FromDecode(world.peer, ToPrefill::Abort { ticket }));
    assert_eq!(world.p.core.num_pushes(), 0);
    world.p.apply(Input::FromDecode(world.peer, open));
    assert_eq!((world.p.core.num_pushes(), world.p.core.counters().stale_duplicate), (0, 1));
}

/// A prompt whose named prefill worker was not linked was computed here and only the log said so: no fault was counted,
/// the answer's timeline had none, and `--kv-failure fail` did not fail it.
#[test]
fn a_named_prefill_worker_without_a_link_was_passed_over_in_silence() {
    let prompt: Vec<TokenId> = (60..60 + 9).collect();
    let expected = reference(&prompt, 4).0;
    for by in [PrefillBy::Unlinked, PrefillBy::Peer(PeerId(7))] {
        for rule in [KvFailure::Recompute, KvFailure::Fail] {
            let mut worker = alone(40);
            worker.core.config.kv_failure = rule;
            let submit = Submit { prefill: by, ..worker.request(0, &prompt, 4) };
            worker.apply(Input::Submit(submit));
            while worker.step() {}
            let effects = worker.core.take_effects();
            let faults: Vec<_> = effects
                .iter()
                .filter_map(|effect| match effect {
                    Effect::TicketFailed { fault, recompute, .. } => Some((*fault, *recompute)),
                    _ => None,
                })
                .collect();
            assert_eq!(faults, [(KvFault::NotLinked, rule == KvFailure::Recompute)]);
            let said = effects.iter().filter_map(|effect| match effect {
                Effect::Output(_, output) => Some(output),
                _ => None,
            });
            match (rule, said.collect::<Vec<_>>().as_slice()) {
                (KvFailure::Fail, [Output::Failed(RequestError::RemotePrefill(reason))]) => {
                    assert!(reason.contains("not linked"), "{reason}");
                }
                (KvFailure::Recompute, [tokens @ .., Output::Finished { timeline, .. }]) => {
                    assert_eq!(tokens.len(), expected.len());
                    assert_eq!(timeline.recomputed, Some(KvFault::NotLinked));
                }
                (_, said) => panic!("{said:?}"),
            }
            // What is cached here needs nobody else.
            worker.core.config.kv_failure = KvFailure::Fail;
            if rule == KvFailure::Recompute {
                let submit = Submit { prefill: by, ..worker.request(1, &prompt, 4) };
                worker.apply(Input::Submit(submit));
                while worker.step() {}
                let failed = outputs(&mut worker).iter().any(|output| matches!(output, Output::Failed(_)));
                assert!(!failed);
            }
        }
    }
}
