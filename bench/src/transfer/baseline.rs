//! What the same bytes cost over a plain TCP stream on loopback, from host memory to host memory.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Instant;

use serde::{Deserialize, Serialize};

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

/// A listener on a free loopback port.
pub fn listen() -> io::Result<(TcpListener, u16)> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let port = listener.local_addr()?.port();
    Ok((listener, port))
}

/// Takes `bytes` bytes `repeats` + 1 times and says so each time.
pub fn receive(listener: &TcpListener, bytes: u64, repeats: u32) -> io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut header = [0; 16];
    stream.read_exact(&mut header)?;
    let ([chunk, buffer], []) = header.as_chunks::<8>() else { unreachable!("16 bytes") };
    let (chunk, buffer) = (u64::from_le_bytes(*chunk) as usize, u64::from_le_bytes(*buffer) as usize);
    set_buffer(&stream, (buffer > 0).then_some(buffer))?;
    let mut to = vec![0; bytes as usize];
    for _ in 0..=repeats {
        for part in to.chunks_mut(chunk) {
            stream.read_exact(part)?;
        }
        stream.write_all(&[1])?;
    }
    Ok(())
}

/// Seconds of each repeat: from the first byte to the receiver's word that it has the last.
pub fn send(port: u16, bytes: u64, repeats: u32, variant: Variant) -> io::Result<Vec<f64>> {
    let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, port))?;
    stream.set_nodelay(true)?;
    set_buffer(&stream, variant.buffer)?;
    let header = [variant.chunk as u64, variant.buffer.unwrap_or(0) as u64].map(u64::to_le_bytes);
    stream.write_all(header.as_flattened())?;
    let from = vec![1; bytes as usize];
    let mut once = || {
        let start = Instant::now();
        for part in from.chunks(variant.chunk) {
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
