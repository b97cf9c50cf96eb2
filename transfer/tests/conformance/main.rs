//! What every backend must do, run over each that this machine can use.
//!
//! Each endpoint is a process of its own (a thread for `inproc`) that the test drives by lines of text, so peers
//! can be stopped and killed. Without NIXL the tests of `tcp` and `shm` fail, unless KVFERRY_ALLOW_NO_NIXL=1.

mod endpoint;
mod host;
mod pool;

use std::collections::HashSet;
use std::time::{Duration, Instant};

use endpoint::Answer;
use host::Host;
use pool::{BLOCK, Mirror};
use transfer::{Direction, Span, coalesce};

/// A killed peer must be noticed within this.
const NOTICED: Duration = Duration::from_secs(5);

/// Not a test: the process that `Host` starts to be an endpoint. Alone it does nothing.
#[test]
fn endpoint_process() {
    host::run_if_endpoint();
}

/// `count` whole blocks: scattered ones have a gap after each, on either side.
fn spans(count: u32, scattered: bool) -> Vec<Span> {
    let step = if scattered { 2 } else { 1 };
    coalesce((0..count).map(|i| (i * step, i * step + 1)), BLOCK)
}

/// A writer (seeded 1) that knows a receiver (seeded 2) as peer 1.
fn pair(transport: &str) -> (Host, Host) {
    let (mut writer, mut receiver) = (Host::start(transport, 1), Host::start(transport, 2));
    let metadata = receiver.metadata();
    assert_eq!(writer.add(1, &metadata), Answer::Ok);
    (writer, receiver)
}

fn writes_of_any_shape_arrive_before_their_notification(transport: &str) {
    let (mut writer, mut receiver) = pair(transport);
    let mut mirror = Mirror::new(2);
    for (count, scattered) in [(1, true), (64, true), (65, true), (65, false)] {
        let spans = spans(count, scattered);
        assert_eq!(spans.len(), if scattered { count as usize } else { 1 });
        let name = format!("{count}-{scattered}");
        let xfer = writer.post(1, &name, &spans).xfer();
        mirror.copy(&Mirror::new(1), &spans);
        let bytes = u64::from(count) * BLOCK;
        let descriptors = spans.len() as u32;
        // The receiver takes the checksum the moment it sees the notification.
        let expected = Answer::Notified { payload: name, checksum: mirror.checksum() };
        let receiving = receiver.begin_event();
        assert_eq!(writer.event(), Answer::Settled { xfer, bytes, descriptors });
        assert_eq!(receiving.wait(), expected);
        writer.fill(1);
    }
}

fn reads_of_any_shape_are_complete_when_they_settle(transport: &str) {
    let (mut reader, mut owner) = pair(transport);
    let mut mirror = Mirror::new(1);
    for (count, scattered) in [(1, true), (64, true), (65, true), (65, false)] {
        let spans = spans(count, scattered);
        let name = format!("{count}-{scattered}");
        let xfer = reader.transfer(Direction::Read, 1, &name, &spans).xfer();
        mirror.take(&Mirror::new(2), &spans);
        let bytes = u64::from(count) * BLOCK;
        let descriptors = spans.len() as u32;
        let notified = owner.begin_event();
        let checksum = mirror.checksum();
        assert_eq!(reader.event(), Answer::Read { xfer, bytes, descriptors, checksum });
        // The owner's own pool is as it was.
        assert_eq!(notified.wait(), Answer::Notified { payload: name, checksum: Mirror::new(2).checksum() });
    }
}

fn reads_and_writes_of_one_pair_at_once(transport: &str) {
    let (mut caller, mut peer) = pair(transport);
    let (mut ours, mut theirs) = (Mirror::new(1), Mirror::new(2));
    let mut posted = Vec::new();
    for i in 0..20 {
        // Our blocks 0.. go to theirs 40.., theirs 0.. come to our 80..
        let there = coalesce([(2 * i, 40 + i)].into_iter(), BLOCK);
        let here = coalesce([(80 + i, 2 * i)].into_iter(), BLOCK);
        posted.push(caller.transfer(Direction::Write, 1, &format!("w{i}"), &there).xfer());
        posted.push(caller.transfer(Direction::Read, 1, &format!("r{i}"), &here).xfer());
        theirs.copy(&Mirror::new(1), &there);
        ours.take(&Mirror::new(2), &here);
    }
    let notified = peer.begin_events(40);
    let mut settled: Vec<u64> = (0..40).map(|_| caller.event().settled()).collect();
    settled.sort_unstable();
    posted.sort_unstable();
    assert_eq!(settled, posted);
    let payloads: HashSet<_> = notified.wait_all().into_iter().map(Answer::payload).collect();
    assert_eq!(payloads, (0..20).flat_map(|i| [format!("w{i}"), format!("r{i}")]).collect());
    assert_eq!((caller.checksum(), peer.checksum()), (ours.checksum(), theirs.checksum()));
}

fn the_lane_that_carried_the_bytes_is_known(transport: &str) {
    let (mut caller, _peer) = pair(transport);
    for direction in [Direction::Write, Direction::Read] {
        let xfer = caller.transfer(direction, 1, "x", &spans(4, true)).xfer();
        assert_eq!(caller.event().settled(), xfer);
        let lane = caller.lane(direction);
        let Some(lane) = lane else {
            assert_eq!(transfer::registry::lanes(transport), None, "UCX says what it uses");
            continue;
        };
        assert!(transfer::registry::is_as_asked(transport, &lane), "{lane:?} for {transport}");
        assert_eq!(lane.emulated(), transport.ends_with("tcp") && direction == Direction::Read, "{lane:?}");
    }
}

/// pd-14: what the sender does with its blocks once the transfer has settled does not reach the receiver.
fn a_source_may_be_overwritten_once_its_transfer_has_settled(transport: &str) {
    let (mut writer, mut receiver) = pair(transport);
    let mut mirror = Mirror::new(2);
    for round in 1..=12u32 {
        let spans = spans(round * 5, round % 2 == 0);
        let name = round.to_string();
        let xfer = writer.post(1, &name, &spans).xfer();
        mirror.copy(&Mirror::new(u64::from(round)), &spans);
        assert_eq!(writer.event().settled(), xfer);
        // The next round's content, before the receiver has looked.
        writer.fill(u64::from(round) + 1);
        let expected = Answer::Notified { payload: name, checksum: mirror.checksum() };
        assert_eq!(receiver.event(), expected);
    }
}

/// The next transfer that settled; some backends notice by themselves that an earlier peer is gone.
fn next_settled(host: &mut Host) -> u64 {
    loop {
        match host.event() {
            Answer::Lost { .. } => {}
            event => break event.settled(),
        }
    }
}

/// pd-20: peers come and go for ever, and what goes to another one is not touched by it.
fn peers_that_come_and_go_leave_the_others_alone(transport: &str) {
    let (mut writer, mut steady) = pair(transport);
    let spans = spans(20, true);
    let mut in_steady = Mirror::new(2);
    in_steady.copy(&Mirror::new(1), &spans);
    for round in 0..4u64 {
        let mut passing = Host::start(transport, 10 + round);
        let number = 2 + round % 2;
        assert_eq!(writer.add(number, &passing.metadata()), Answer::Ok);
        let posted = [writer.post(1, "steady", &spans).xfer(), writer.post(number, "passing", &spans).xfer()];
        let (of_steady, of_passing) = (steady.begin_event(), passing.begin_event());
        let mut settled = [next_settled(&mut writer), next_settled(&mut writer)];
        settled.sort_unstable();
        assert_eq!(settled, posted);
        let mut in_passing = Mirror::new(10 + round);
        in_passing.copy(&Mirror::new(1), &spans);
        let notified = |payload: &str, mirror: &Mirror| Answer::Notified {
            payload: payload.into(),
            checksum: mirror.checksum(),
        };
        assert_eq!(of_passing.wait(), notified("passing", &in_passing));
        assert_eq!(of_steady.wait(), notified("steady", &in_steady));
        // Every other one is removed before it goes, the others just vanish.
        if round % 2 == 0 {
            writer.remove(number);
        }
        passing.kill();
    }
}

fn many_transfers_at_once_all_settle_and_notify(transport: &str) {
    let (mut writer, mut receiver) = pair(transport);
    let mut mirror = Mirror::new(2);
    let mut posted: Vec<u64> = Vec::new();
    for i in 0..40 {
        let spans = coalesce([(i, i + 50), (i + 1, i + 50)].into_iter(), BLOCK);
        posted.push(writer.post(1, &i.to_string(), &spans[..1]).xfer());
        mirror.copy(&Mirror::new(1), &spans[..1]);
    }
    let mut settled: Vec<u64> = (0..40).map(|_| writer.event().settled()).collect();
    settled.sort_unstable();
    assert_eq!(settled, posted);
    let mut notified: Vec<u32> = (0..40).map(|_| receiver.event().payload().parse().unwrap()).collect();
    notified.sort_unstable();
    assert_eq!(notified, (0..40).collect::<Vec<_>>());
    assert_eq!(receiver.checksum(), mirror.checksum());
}

fn wrong_requests_are_refused_and_change_nothing(transport: &str) {
    let (mut writer, mut receiver) = pair(transport);
    let pool = pool::BYTES;
    let span = |local, remote, len| [Span { local, remote, len }];
    for (spans, label) in [
        (span(0, pool - 1, 2), "out_of_range"),
        (span(pool - 1, 0, 2), "out_of_range"),
        (span(0, u64::MAX, 2), "out_of_range"),
        (span(u64::MAX, 0, u64::MAX), "out_of_range"),
        (span(0, 0, 0), "empty_transfer"),
    ] {
        for direction in [Direction::Write, Direction::Read] {
            let refused = writer.transfer(direction, 1, "no", &spans);
            assert_eq!(refused, Answer::Error(label.into()), "{direction:?} {spans:?}");
        }
    }
    assert_eq!(writer.post(1, "no", &[]), Answer::Error("empty_transfer".into()));
    assert_eq!(writer.post(9, "no", &span(0, 0, 1)), Answer::Error("unknown_peer".into()));
    assert_eq!(writer.add(2, "00ff"), Answer::Error("bad_metadata".into()));
    let long = "x".repeat(transfer::transport::MAX_NOTIFICATION + 1);
    assert_eq!(writer.post(1, &long, &span(0, 0, 1)), Answer::Error("notification_too_long".into()));
    assert_eq!(receiver.checksum(), Mirror::new(2).checksum());

    let spans = span(0, pool - 1, 1);
    let xfer = writer.post(1, "last-byte", &spans).xfer();
    let receiving = receiver.begin_event();
    assert_eq!(writer.event().settled(), xfer);
    assert_eq!(receiving.wait().payload(), "last-byte");
}

fn two_peers_and_both_directions_at_once(transport: &str) {
    let (mut a, mut b) = pair(transport);
    let mut c = Host::start(transport, 3);
    assert_eq!(a.add(2, &c.metadata()), Answer::Ok);
    assert_eq!(b.add(7, &a.metadata()), Answer::Ok);
    let low: Vec<_> = spans(20, true);
    // Of what b writes nothing overlaps what a sends meanwhile.
    let high: Vec<_> = coalesce((100..110).map(|i| (i, i)), BLOCK);
    let sent = [a.post(1, "to-b", &low).xfer(), a.post(2, "to-c", &low).xfer()];
    b.post(7, "to-a", &high).xfer();

    let (of_b, of_c) = (b.begin_events(2), c.begin_event());
    let of_a: Vec<_> = (0..3).map(|_| a.event()).collect();
    let mut settled: Vec<_> =
        of_a.iter().filter(|e| matches!(e, Answer::Settled { .. })).map(Answer::settled).collect();
    settled.sort_unstable();
    assert_eq!(settled, sent);
    assert!(
        of_a.iter().any(|e| matches!(e, Answer::Notified { payload, .. } if payload == "to-a")),
        "{of_a:?}"
    );
    assert!(
        of_b.wait_all().iter().any(|e| matches!(e, Answer::Notified { payload, .. } if payload == "to-b"))
    );

    let mut in_c = Mirror::new(3);
    in_c.copy(&Mirror::new(1), &low);
    assert_eq!(of_c.wait(), Answer::Notified { payload: "to-c".into(), checksum: in_c.checksum() });
    let mut in_a = Mirror::new(1);
    in_a.copy(&Mirror::new(2), &high);
    assert_eq!(a.checksum(), in_a.checksum());
}

fn a_killed_peer_fails_its_transfers_and_its_successor_works(transport: &str) {
    killed_with_transfers(transport, Direction::Write);
}

fn a_killed_peer_fails_what_was_read_from_it(transport: &str) {
    killed_with_transfers(transport, Direction::Read);
}

fn killed_with_transfers(transport: &str, direction: Direction) {
    let (mut writer, mut receiver) = pair(transport);
    let spans = spans(65, true);
    receiver.pause();
    writer.transfer(direction, 1, "never", &spans).xfer();
    receiver.kill();

    let killed = Instant::now();
    let mut failed = 0;
    loop {
        match writer.event() {
            // What had left before the peer died may settle; then the next one must not.
            Answer::Settled { .. } | Answer::Read { .. } => {
                writer.fill(1);
                writer.transfer(direction, 1, "never", &spans).xfer();
            }
            Answer::Failed { .. } => failed += 1,
            Answer::Lost { peer } => break assert_eq!(peer, 1),
            other => panic!("{other:?}"),
        }
        assert!(
            killed.elapsed() < NOTICED,
            "{failed} failures in {:?} and the peer is not lost",
            killed.elapsed()
        );
    }
    assert!(failed > 0, "the peer was lost before its transfer failed");
    assert_eq!(writer.post(1, "gone", &spans), Answer::Error("unknown_peer".into()));

    // Of a failed read anything may have come.
    writer.fill(1);
    let mut successor = Host::start(transport, 4);
    assert_eq!(writer.add(2, &successor.metadata()), Answer::Ok);
    let xfer = writer.post(2, "again", &spans).xfer();
    let mut mirror = Mirror::new(4);
    mirror.copy(&Mirror::new(1), &spans);
    let receiving = successor.begin_event();
    assert_eq!(writer.event().settled(), xfer);
    assert_eq!(receiving.wait(), Answer::Notified { payload: "again".into(), checksum: mirror.checksum() });
}

fn removing_a_peer_aborts_what_is_under_way(transport: &str) {
    removed_with_transfers(transport, Direction::Write);
}

fn removing_a_peer_aborts_what_is_read_from_it(transport: &str) {
    removed_with_transfers(transport, Direction::Read);
}

fn removed_with_transfers(transport: &str, direction: Direction) {
    let (mut writer, mut receiver) = pair(transport);
    receiver.pause();
    let xfer = writer.transfer_then_remove(direction, 1, &spans(65, true)).xfer();
    receiver.resume();
    assert_eq!(writer.event(), Answer::Failed { xfer, label: "aborted".into() });
    assert_eq!(writer.post(1, "gone", &spans(1, true)), Answer::Error("unknown_peer".into()));

    // The same process under its old number or a new one.
    assert_eq!(writer.add(1, &receiver.metadata()), Answer::Ok);
    let xfer = writer.post(1, "back", &spans(1, true)).xfer();
    let receiving = receiver.begin_event();
    assert_eq!(writer.event().settled(), xfer);
    // The aborted transfer may have been complete at the receiver all the same.
    let first = receiving.wait().payload();
    assert!(first == "back" || receiver.event().payload() == "back");
}

macro_rules! conformance {
    ($($backend:ident)*) => {$(
        mod $backend {
            conformance!(@tests $backend
                writes_of_any_shape_arrive_before_their_notification
                reads_of_any_shape_are_complete_when_they_settle
                reads_and_writes_of_one_pair_at_once
                the_lane_that_carried_the_bytes_is_known
                a_source_may_be_overwritten_once_its_transfer_has_settled
                peers_that_come_and_go_leave_the_others_alone
                many_transfers_at_once_all_settle_and_notify
                wrong_requests_are_refused_and_change_nothing
                two_peers_and_both_directions_at_once
                a_killed_peer_fails_its_transfers_and_its_successor_works
                a_killed_peer_fails_what_was_read_from_it
                removing_a_peer_aborts_what_is_under_way
                removing_a_peer_aborts_what_is_read_from_it
            );
        }
    )*};
    (@tests $backend:ident $($test:ident)*) => {$(
        #[test]
        fn $test() {
            // Names of modules have no colon.
            let backend = stringify!($backend).replace("ucx_", "ucx:").replace("device_", "device:");
            if crate::host::can_run(&backend) {
                super::$test(&backend);
            }
        }
    )*};
}

conformance! { inproc socket device_socket mmap tcp shm ucx_tcp ucx_shm }
