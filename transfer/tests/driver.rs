//! The driver's thread: tags, events, and how it spends its time.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use kernels::{KvDtype, KvLayout, KvPool};
use transfer::driver::Driver;
use transfer::inproc::{Hub, InProcTransport};
use transfer::socket::{SocketConfig, SocketTransport};
use transfer::{
    Direction, DriverEvent, DriverHandle, Event, Identity, PeerId, Region, Scratch, Span, TransferError,
    Transport, XferId,
};

const PATIENCE: Duration = Duration::from_secs(10);

fn pool(fill: u64) -> Region {
    let words = Arc::new(vec![fill; 512]);
    let base = NonNull::new(words.as_ptr() as *mut u8).unwrap();
    // SAFETY: the vector lives as long as the region and nothing else touches it.
    unsafe { Region::new(base, 4096, words) }
}

fn spans_of(local: u64, remote: u64) -> Vec<Span> {
    vec![Span { local, remote, len: 8 }]
}

fn spawn(transport: impl Transport + 'static) -> (DriverHandle, Receiver<DriverEvent>) {
    let (sender, events) = channel();
    let scratch = Some(Scratch { offset: 2048, block_bytes: 512, blocks: 4 });
    let identity = Identity { incarnation: rand::random(), scratch };
    (Driver::spawn(Box::new(transport), identity, Box::new(move |event| drop(sender.send(event)))), events)
}

#[test]
fn writes_are_reported_with_their_tag_and_reach_the_peer() {
    let hub = Hub::default();
    let (own, to) = (pool(7), pool(0));
    let target = PeerId(5);
    let (writer, written) = spawn(InProcTransport::new(&hub, own.clone()));
    let (receiver, received) = spawn(InProcTransport::new(&hub, to.clone()));

    writer.add_peer(target, receiver.metadata().to_vec()).unwrap();
    receiver.expect_traffic(1).unwrap();
    let spans = spans_of(0, 8);
    writer.post_write(target, spans.clone(), b"hi".to_vec(), 77).unwrap();
    let event = written.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(event, DriverEvent::Settled { tag: 77, peer, result: Ok(s), .. } if peer == target && s.bytes == 8)
    );
    let event = received.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, DriverEvent::Notified { payload } if payload == b"hi"));
    let mut got = [0; 8];
    to.read(8, &mut got).unwrap();
    assert_eq!(u64::from_le_bytes(got), 7);

    to.write(0, &9u64.to_le_bytes()).unwrap();
    writer.post_read(target, spans_of(16, 0), b"read".to_vec(), 79).unwrap();
    let event = written.recv_timeout(PATIENCE).unwrap();
    assert!(
        matches!(event, DriverEvent::Settled { tag: 79, result: Ok(s), .. } if s.direction == Direction::Read)
    );
    let event = received.recv_timeout(PATIENCE).unwrap();
    assert!(matches!(event, DriverEvent::Notified { payload } if payload == b"read"));
    own.read(16, &mut got).unwrap();
    assert_eq!(u64::from_le_bytes(got), 9);

    writer.remove_peer(target).unwrap();
    writer.post_write(target, spans, Vec::new(), 78).unwrap();
    let event = written.recv_timeout(PATIENCE).unwrap();
    let unknown = Err(TransferError::UnknownPeer(target));
    assert!(matches!(event, DriverEvent::Settled { tag: 78, result, .. } if result == unknown));
}

#[test]
fn a_peer_that_went_away_is_reported_lost() {
    let hub = Hub::default();
    let ((receiver, _), receiver_pool) = (spawn(InProcTransport::new(&hub, pool(0))), PeerId(5));
    let (writer, events) = spawn(InProcTransport::new(&hub, pool(1)));
    writer.add_peer(receiver_pool, receiver.metadata().to_vec()).unwrap();
    receiver.stop();
    writer.post_write(receiver_pool, vec![Span { local: 0, remote: 0, len: 1 }], Vec::new(), 1).unwrap();
    assert!(matches!(
        events.recv_timeout(PATIENCE).unwrap(),
        DriverEvent::Settled { tag: 1, result: Err(_), .. }
    ));
    assert!(matches!(events.recv_timeout(PATIENCE).unwrap(), DriverEvent::PeerLost { .. }));
}

#[test]
fn a_self_test_measures_both_directions_and_leaves_the_blocks_of_requests_alone() {
    let hub = Hub::default();
    let (own, theirs) = (pool(1), pool(2));
    let (asker, _events) = spawn(InProcTransport::new(&hub, own.clone()));
    let (answerer, of_answerer) = spawn(InProcTransport::new(&hub, theirs.clone()));
    asker.add_peer(PeerId(1), answerer.metadata().to_vec()).unwrap();
    answerer.add_peer(PeerId(9), asker.metadata().to_vec()).unwrap();
    let report = asker.probe(PeerId(1)).unwrap();
    for direction in [Direction::Write, Direction::Read] {
        assert!(report.gb_per_s(direction).unwrap() > 0.0, "{report}");
        assert!(report.measured.iter().any(|m| m.direction == direction && m.blocks == 1));
    }
    assert!(report.round_trip > Duration::ZERO && report.round_trip <= report.took);
    for (pool, fill) in [(&own, 1u64), (&theirs, 2)] {
        let mut bytes = vec![0; 2048];
        pool.read(0, &mut bytes).unwrap();
        assert!(bytes.as_chunks::<8>().0.iter().all(|word| u64::from_le_bytes(*word) == fill));
    }
    // What the self-test said to the peer's driver its engine never sees.
    assert!(of_answerer.try_recv().is_err());
    assert_eq!(asker.probe(PeerId(2)), Err(TransferError::UnknownPeer(PeerId(2))));
}

#[test]
fn a_self_test_with_a_peer_that_does_not_know_us_fails() {
    let hub = Hub::default();
    let (asker, _events) = spawn(InProcTransport::new(&hub, pool(1)));
    let (stranger, _its_events) = spawn(InProcTransport::new(&hub, pool(2)));
    asker.add_peer(PeerId(1), stranger.metadata().to_vec()).unwrap();
    assert_eq!(asker.probe(PeerId(1)).unwrap_err().label(), "no_answer");
    // One that is removed meanwhile ends it at once.
    let other = asker.clone();
    let probing = std::thread::spawn(move || other.probe(PeerId(1)));
    std::thread::yield_now();
    asker.remove_peer(PeerId(1)).unwrap();
    let error = probing.join().unwrap().unwrap_err();
    assert!(["aborted", "unknown_peer"].contains(&error.label()), "{error}");
}

#[test]
fn a_stopped_driver_answers_so() {
    let (driver, _events) = spawn(InProcTransport::new(&Hub::default(), pool(0)));
    let clone = driver.clone();
    driver.stop();
    driver.stop();
    assert_eq!(clone.expect_traffic(1), Err(TransferError::Stopped));
    assert_eq!(clone.add_peer(PeerId(1), Vec::new()), Err(TransferError::Stopped));
}

/// Tells of each poll, and of its end.
struct Polled(Sender<()>);

impl Transport for Polled {
    fn name(&self) -> &'static str {
        "polled"
    }
    fn metadata(&self) -> Vec<u8> {
        Vec::new()
    }
    fn add_peer(&mut self, _: PeerId, _: &[u8]) -> Result<(), TransferError> {
        Ok(())
    }
    fn remove_peer(&mut self, _: PeerId) {}
    fn post(&mut self, _: Direction, _: PeerId, _: &[Span], _: &[u8]) -> Result<XferId, TransferError> {
        Ok(XferId(1))
    }
    fn poll(&mut self, _: &mut Vec<Event>) -> Result<(), TransferError> {
        let _ = self.0.send(());
        Ok(())
    }
}

fn time_of_polls(polls: &Receiver<()>, count: usize) -> Duration {
    let start = Instant::now();
    (0..count).for_each(|_| polls.recv_timeout(PATIENCE).unwrap());
    start.elapsed()
}

#[test]
fn an_idle_driver_sleeps_and_one_that_expects_traffic_polls_often() {
    let (sender, polls) = channel();
    let (driver, _events) = spawn(Polled(sender));
    let idle = time_of_polls(&polls, 30);
    assert!(idle > Duration::from_millis(30), "30 idle polls in {idle:?}: it spins");

    driver.expect_traffic(1).unwrap();
    // Past the polls that only yield each fruitless one sleeps a little, and longer with the time: it does not spin here either.
    time_of_polls(&polls, 20);
    let expecting = time_of_polls(&polls, 30);
    assert!(expecting > Duration::from_micros(800), "30 polls in {expecting:?}: it spins");
    assert!(expecting < idle, "30 polls in {expecting:?}, 30 idle ones in {idle:?}");

    driver.expect_traffic(0).unwrap();
    drop(driver);
    // The thread ends with its last handle, and the transport with it.
    while polls.recv_timeout(PATIENCE).is_ok() {}
    assert!(matches!(polls.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected)));
}

/// A pool that others can map.
fn shared_pool() -> Region {
    let layout =
        KvLayout { num_layers: 1, num_kv_heads: 1, head_dim: 8, block_size: 16, dtype: KvDtype::Bf16 };
    let pool = Arc::new(KvPool::shared(layout, 8, 0).unwrap());
    let file = pool.file().unwrap().clone();
    // SAFETY: the pool lives as long as the region and nothing else touches it.
    unsafe { Region::new(pool.base(), pool.len(), pool) }.in_file(file)
}

/// The asker's own view was taken for the peer's, and one peer that cannot be mapped for all.
#[test]
fn the_lane_of_a_mapped_pool_is_that_of_the_side_that_copies_and_of_each_peer() {
    let config = SocketConfig { bind_host: "127.0.0.1".into(), advertise_host: None };
    let mapping = |pool: Region| spawn(SocketTransport::new(&config, pool, true).unwrap()).0;
    let (both, other, unmappable) = (mapping(shared_pool()), mapping(shared_pool()), mapping(pool(0)));
    let link = |a: &DriverHandle, a_calls: u64, b: &DriverHandle, b_calls: u64| {
        a.add_peer(PeerId(a_calls), b.metadata().to_vec()).unwrap();
        b.add_peer(PeerId(b_calls), a.metadata().to_vec()).unwrap();
    };
    link(&both, 1, &unmappable, 9);
    link(&both, 2, &other, 9);
    let lanes = |asker: &DriverHandle, peer: u64| {
        let report = asker.probe(PeerId(peer)).unwrap();
        [Direction::Write, Direction::Read].map(|way| report.lane(way).unwrap().carrier.clone())
    };
    // What is pushed to us the peer copies, what is pulled we copy ourselves.
    assert_eq!(lanes(&both, 1), ["mmap/memory", "tcp/socket"]);
    assert_eq!(lanes(&both, 2), ["mmap/memory", "mmap/memory"]);
    assert_eq!(lanes(&unmappable, 9), ["tcp/socket", "mmap/memory"]);
}
