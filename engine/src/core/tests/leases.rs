//! Leases, and renewals that cross what they ask about.

use super::super::*;
use super::cases::{first_token, granted_world, note, reading_world};
use super::world::*;
use crate::handoff::{TicketId, ToDecode, ToPrefill, Totals};

/// The decode worker's next renewal, which comes in time and is the only one.
fn renewal(world: &mut World) -> (u64, Vec<TicketId>) {
    world.d.now += LEASE / 5;
    world.d.step();
    world.carry_out();
    let renewals: Vec<_> = world.to_p.drain(..).filter(|m| matches!(m, ToPrefill::Renew { .. })).collect();
    let [ToPrefill::Renew { seq, tickets }] = &renewals[..] else { panic!("{renewals:?}") };
    (*seq, tickets.clone())
}

/// A ticket that nobody renews is given up: a decode worker that forgot it, or stands still, pins no blocks for ever.
#[test]
fn a_lease_that_is_not_renewed_ends_the_ticket_and_a_renewed_one_does_not() {
    for renewed in [false, true] {
        let mut world = World::new(20, 20);
        world.d.submit(0, &[60; 9], 4);
        world.carry_out();
        let open = world.to_p.pop_front().expect("a ticket");
        let ToPrefill::Open { ticket, .. } = open else { panic!("{open:?}") };
        world.p.apply(Input::FromDecode(world.peer, open));
        while world.p.step() {}
        assert_eq!(world.p.core.account().running, 3, "no grant came: the blocks are pinned");
        for seq in 0..20 {
            world.p.now += LEASE / 4;
            if renewed {
                let renew = ToPrefill::Renew { seq, tickets: vec![ticket, TicketId(1)] };
                world.p.apply(Input::FromDecode(world.peer, renew));
            }
            world.p.step();
        }
        assert_eq!(world.p.core.num_pushes(), usize::from(renewed));
        assert_eq!(world.p.core.counters().kv_expired, u64::from(!renewed));
        assert_eq!(world.p.core.account().running, if renewed { 3 } else { 0 });
        world.carry_out();
        let unknown = |message: &ToDecode| matches!(message, ToDecode::Renewed { unknown, .. } if *unknown == [TicketId(1)]);
        assert_eq!(
            world.to_d.iter().filter(|message| unknown(message)).count(),
            if renewed { 20 } else { 0 }
        );
    }
}

/// The decode worker renews what it waits for, and hears of what the prefill worker has forgotten.
#[test]
fn a_ticket_that_the_prefill_worker_does_not_know_any_more_is_recomputed() {
    let mut world = World::new(20, 20);
    world.d.submit(0, &[60; 9], 4);
    let (seq, unknown) = renewal(&mut world);
    assert_eq!(unknown.len(), 1);
    world.d.apply(Input::FromPrefill(world.peer, ToDecode::Renewed { seq, unknown }));
    while world.d.step() {}
    world.carry_out();
    assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0);
    assert_eq!(world.d.core.counters().recomputed, 1);
}

/// The renewal crossed the end of the ticket, and a prompt whose KV was all written was computed again: once in a hundred runs of
/// the fault table, whose leases are short and whose notifications are late.
#[test]
fn a_ticket_that_is_over_is_not_forgotten_while_its_last_notification_is_on_its_way() {
    let (mut world, ticket) = granted_world();
    world.d.apply(Input::FromPrefill(world.peer, first_token(ticket)));
    let (seq, unknown) = renewal(&mut world);
    assert_eq!(unknown, [ticket]);
    let totals = Totals { writes: 1, blocks: 3, bytes: 192, descriptors: 1 };
    let complete = ToDecode::Complete { ticket, totals, timing: Default::default() };
    world.d.apply(Input::FromPrefill(world.peer, complete));
    world.d.apply(Input::FromPrefill(world.peer, ToDecode::Renewed { seq, unknown }));
    world.d.apply(note(ticket, 0, 3));
    assert!(world.d.step(), "it decodes");
    assert_eq!(world.d.core.counters().recomputed, 0);
}

/// The same where the prefill worker has seen all reads end, and we have not.
#[test]
fn a_ticket_whose_blocks_are_all_being_read_is_not_forgotten() {
    let mut world = reading_world();
    assert!(!world.reads.is_empty());
    let (seq, unknown) = renewal(&mut world);
    world.d.apply(Input::FromPrefill(world.peer, ToDecode::Renewed { seq, unknown }));
    assert_eq!(world.d.core.counters().recomputed, 0);
    while !world.reads.is_empty() {
        world.settle_read(0, false);
    }
    while world.d.step() {}
    world.carry_out();
    assert_eq!(world.answer(RequestId(0)).0, reference(&[60; 9], 4).0);
    assert_eq!(world.d.core.counters().recomputed, 0);
}
