//! What the same bytes cost without any transport: a copy in memory, and a plain TCP stream over loopback.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::pool::Pool;

/// How a plain stream is written and read. The best of them counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Variant {
    /// Bytes of one call of write or read.
    pub chunk: usize,
    /// Size of the sockets' buffers; `None` leaves the system's.
    pub buffer: Option<usize>,
}

pub const VARIANTS: [Variant; 4] = [
    Variant { chunk: 256 << 10, buffer: None },
    Variant { chunk: 1 << 20, buffer: None },
    Variant { chunk: 1 << 20, buffer: Some(4 << 20) },
    Variant { chunk: 8 << 20, buffer: None },
];

/// Seconds of each of `repeats` copies of the pool's first bytes into `target`, after one that does not count.
pub fn memcpy(pool: &Pool, target: &mut Pool, bytes: u64, repeats: u32) -> Vec<f64> {
    let (from, to) = (pool.bytes(bytes), target.bytes_mut(bytes));
    let once = |_| {
        let start = Instant::now();
        to.copy_from_slice(from);
        std::hint::black_box(&mut *to);
        start.elapsed().as_secs_f64()
    };
    (0..=repeats).map(once).skip(1).collect()
}

/// A listener on a free loopback port.
pub fn listen() -> io::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Takes `repeats` + 1 times `bytes` bytes into the pool and says so each time.
pub fn receive(listener: &TcpListener, pool: &mut Pool, bytes: u64, repeats: u32) -> io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut header = [0; 16];
    stream.read_exact(&mut header)?;
    let ([chunk, buffer], []) = header.as_chunks::<8>() else { unreachable!("16 bytes") };
    let (chunk, buffer) = (u64::from_le_bytes(*chunk) as usize, u64::from_le_bytes(*buffer) as usize);
    set_buffer(&stream, (buffer > 0).then_some(buffer))?;
    for _ in 0..=repeats {
        for part in pool.bytes_mut(bytes).chunks_mut(chunk) {
            stream.read_exact(part)?;
        }
        stream.write_all(&[1])?;
    }
    Ok(())
}

/// Seconds of each repeat: from the first byte to the receiver's word that it has the last.
pub fn send(pool: &Pool, port: u16, bytes: u64, repeats: u32, variant: Variant) -> io::Result<Vec<f64>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    set_buffer(&stream, variant.buffer)?;
    let header = [variant.chunk as u64, variant.buffer.unwrap_or(0) as u64].map(u64::to_le_bytes);
    stream.write_all(header.as_flattened())?;
    let mut once = || {
        let start = Instant::now();
        for part in pool.bytes(bytes).chunks(variant.chunk) {
            stream.write_all(part)?;
        }
        stream.read_exact(&mut [0])?;
        Ok(start.elapsed().as_secs_f64())
    };
    once()?;
    (0..repeats).map(|_| once()).collect()
}

fn set_buffer(stream: &TcpStream, size: Option<usize>) -> io::Result<()> {
    let Some(size) = size else { return Ok(()) };
    let socket = socket2::SockRef::from(stream);
    socket.set_send_buffer_size(size)?;
    socket.set_recv_buffer_size(size)
}
