//! What arrives over the socket from anyone but a well-behaved writer.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::ptr::NonNull;
use std::sync::Arc;

use super::frame::{Frame, Reply};
use super::*;

const POOL: usize = 4096;

fn transport() -> (SocketTransport, Region) {
    let words = Arc::new(vec![0u64; POOL / 8]);
    let base = NonNull::new(words.as_ptr() as *mut u8).unwrap();
    // SAFETY: the vector lives as long as the region and nothing else touches it.
    let pool = unsafe { Region::new(base, POOL, words) };
    let config = SocketConfig { bind_host: "127.0.0.1".into(), advertise_host: None };
    (SocketTransport::new(&config, pool.clone(), false).unwrap(), pool)
}

fn metadata(transport: &SocketTransport) -> Metadata {
    rmp_serde::from_slice(&transport.metadata()).unwrap()
}

fn connect(transport: &SocketTransport) -> TcpStream {
    let Metadata { host, port, .. } = metadata(transport);
    let stream = TcpStream::connect((host, port)).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    stream
}

/// A connection that greeted as a writer with the token `from`, and what it was answered.
fn greet(transport: &SocketTransport, to: Token, from: Token) -> (TcpStream, Reply) {
    let mut stream = connect(transport);
    Greeting { to, from }.send(&mut stream).unwrap();
    let reply = Reply::receive(&mut stream).unwrap();
    (stream, reply)
}

fn writer(transport: &SocketTransport) -> TcpStream {
    let (stream, reply) = greet(transport, transport.own, 1);
    assert_eq!(reply, Reply::Welcome { pool: POOL as u64 });
    stream
}

/// Returns when the receiver has closed the connection.
fn await_close(stream: &mut TcpStream) {
    let mut rest = Vec::new();
    let closed = stream.read_to_end(&mut rest);
    assert!(closed.is_ok() || closed.unwrap_err().kind() == io::ErrorKind::ConnectionReset);
}

/// Polls until something happened; the connections' threads bring it about.
fn next_events(transport: &mut SocketTransport) -> Vec<Event> {
    let deadline = Instant::now() + Duration::from_secs(10);
    let mut events = Vec::new();
    while events.is_empty() {
        assert!(Instant::now() < deadline, "nothing happened");
        transport.poll(&mut events).unwrap();
        std::thread::yield_now();
    }
    events
}

fn untouched(pool: &Region) -> bool {
    let mut bytes = vec![1; POOL];
    pool.read(0, &mut bytes).unwrap();
    bytes.iter().all(|&b| b == 0)
}

#[test]
fn garbage_closes_only_its_own_connection_and_is_counted() {
    let (mut receiver, pool) = transport();
    let mut good = writer(&receiver);
    let mut garbage = connect(&receiver);
    garbage.write_all(&[0x5a; 4096]).unwrap();
    await_close(&mut garbage);
    let mut bad_frame = writer(&receiver);
    bad_frame.write_all(&[0x5a; 4096]).unwrap();
    await_close(&mut bad_frame);
    assert_eq!(receiver.refused(), 2);
    assert!(untouched(&pool));

    Frame::Write { offset: 8, len: 3 }.send(&mut good).unwrap();
    good.write_all(b"abc").unwrap();
    Frame::Commit { xfer: 5, notification: 2 }.send(&mut good).unwrap();
    good.write_all(b"ok").unwrap();
    assert_eq!(Reply::receive(&mut good).unwrap(), Reply::Settled { xfer: 5 });
    assert!(matches!(&next_events(&mut receiver)[..], [Event::Notified { payload }] if payload == b"ok"));
    let mut got = [0; 3];
    pool.read(8, &mut got).unwrap();
    assert_eq!(&got, b"abc");
}

#[test]
fn bytes_meant_for_another_process_are_refused() {
    let (receiver, _pool) = transport();
    let (mut stream, reply) = greet(&receiver, receiver.own ^ 1, 1);
    assert_eq!(reply, Reply::NotForMe);
    await_close(&mut stream);
    assert_eq!(receiver.refused(), 1);
}

#[test]
fn a_write_outside_the_pool_is_refused_by_the_receiver() {
    let (receiver, pool) = transport();
    for (offset, len) in [(POOL as u64 - 1, 2), (u64::MAX, 1), (0, u64::MAX)] {
        let mut stream = writer(&receiver);
        Frame::Write { offset, len }.send(&mut stream).unwrap();
        stream.write_all(&[7; 64]).unwrap();
        assert_eq!(Reply::receive(&mut stream).unwrap(), Reply::OutOfRange { offset, len });
    }
    assert!(untouched(&pool));
}

#[test]
fn a_huge_notification_closes_the_connection() {
    let (receiver, _pool) = transport();
    let mut stream = writer(&receiver);
    Frame::Commit { xfer: 1, notification: u64::MAX }.send(&mut stream).unwrap();
    await_close(&mut stream);
    assert_eq!(receiver.refused(), 1);
}

#[test]
fn what_a_removed_peer_still_sends_does_not_land() {
    let (mut receiver, pool) = transport();
    let (mut sender, _) = transport();
    let peer = PeerId(1);
    receiver.add_peer(peer, &sender.metadata()).unwrap();
    let (mut stream, _) = greet(&receiver, receiver.own, sender.own);
    Frame::Write { offset: 0, len: 64 }.send(&mut stream).unwrap();
    receiver.remove_peer(peer);
    // The connection is closed by now, so that this may fail as well as be lost.
    let _ = stream.write_all(&[7; 64]);
    await_close(&mut stream);
    assert!(untouched(&pool));
    assert_eq!(greet(&receiver, receiver.own, sender.own).1, Reply::NotForMe);

    receiver.add_peer(peer, &sender.metadata()).unwrap();
    sender.add_peer(peer, &receiver.metadata()).unwrap();
    sender.post(Direction::Write, peer, &[Span { local: 0, remote: 0, len: 8 }], b"again").unwrap();
    assert!(matches!(&next_events(&mut receiver)[..], [Event::Notified { payload }] if payload == b"again"));
}

#[test]
fn a_peer_with_a_smaller_pool_than_it_said_fails_the_transfer() {
    let (mut sender, _) = transport();
    let (receiver, pool) = transport();
    let lie = Metadata { pool: 1 << 40, ..metadata(&receiver) };
    let peer = PeerId(3);
    sender.add_peer(peer, &rmp_serde::to_vec(&lie).unwrap()).unwrap();
    let xfer =
        sender.post(Direction::Write, peer, &[Span { local: 0, remote: 1 << 30, len: 64 }], b"").unwrap();
    let events = next_events(&mut sender);
    let [Event::Settled { xfer: failed, result: Err(why), .. }, Event::PeerLost { peer: lost, .. }] =
        &events[..]
    else {
        panic!("{events:?}");
    };
    assert_eq!((*failed, *lost), (xfer, peer));
    assert!(why.to_string().contains("outside its pool"), "{why}");
    assert!(untouched(&pool));
}

#[test]
fn a_peer_that_is_not_there_is_lost() {
    let (mut sender, _) = transport();
    let gone = transport().0.metadata();
    let peer = PeerId(3);
    sender.add_peer(peer, &gone).unwrap();
    sender.post(Direction::Write, peer, &[Span { local: 0, remote: 0, len: 64 }], b"").unwrap();
    let events = next_events(&mut sender);
    assert!(
        matches!(&events[..], [Event::Settled { result: Err(_), .. }, Event::PeerLost { .. }]),
        "{events:?}"
    );
}
