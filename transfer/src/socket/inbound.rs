//! The receiving half: a listener and one thread for each writer's connection.

use std::collections::{HashMap, HashSet};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use socket2::SockRef;

use super::frame::{Frame, Greeting, Reply, Token, invalid};
use super::{CHUNK, lock, tune};
use crate::error::TransferError;
use crate::transport::{MAX_NOTIFICATION, Region};

/// A connection that has not said who it is by then is closed.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// Writers at once, each with a thread. A cluster has tens of workers.
const MAX_CONNECTIONS: usize = 256;

/// The listener. Dropping it closes every connection and joins every thread.
pub struct Inbound {
    listener: TcpListener,
    state: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    own: Token,
    pool: Region,
    notifications: SyncSender<Vec<u8>>,
    refused: AtomicU64,
    connections: Mutex<Connections>,
}

#[derive(Default)]
struct Connections {
    stopping: bool,
    next: u64,
    open: HashMap<u64, Arc<Connection>>,
    /// Writers that were removed here.
    fenced: HashSet<Token>,
}

struct Connection {
    stream: TcpStream,
    /// Who calls, once known, and whether it still may. Held during each copy into or out of the pool.
    gate: Mutex<Gate>,
}

#[derive(Default)]
struct Gate {
    writer: Option<Token>,
    closed: bool,
}

impl Connection {
    fn close(&self) {
        lock(&self.gate).closed = true;
        // Fails only when the other end closed first.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
}

impl Inbound {
    /// Listens on `host` at a free port.
    pub fn new(
        host: &str,
        own: Token,
        pool: Region,
        notifications: SyncSender<Vec<u8>>,
    ) -> Result<Self, TransferError> {
        let failed = |e: io::Error| TransferError::Unavailable {
            name: "socket".into(),
            why: format!("listening on {host}: {e}"),
        };
        let listener = TcpListener::bind((host, 0)).map_err(failed)?;
        let state = Arc::new(Shared {
            own,
            pool,
            notifications,
            refused: AtomicU64::new(0),
            connections: Mutex::default(),
        });
        let (accepting, shared) = (listener.try_clone().map_err(failed)?, state.clone());
        let thread = thread::Builder::new()
            .name("kv-socket-in".into())
            .spawn(move || accept_all(&accepting, &shared))
            .map_err(failed)?;
        Ok(Self { listener, state, thread: Some(thread) })
    }

    pub fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Connections closed because of what came over them.
    pub fn refused(&self) -> u64 {
        self.state.refused.load(Ordering::Relaxed)
    }

    /// After this returns nothing more that `writer` sent lands in the pool, nothing of the pool is sent to it, and it
    /// cannot connect again.
    pub fn fence(&self, writer: Token) {
        let mut connections = lock(&self.state.connections);
        connections.fenced.insert(writer);
        let open: Vec<_> = connections.open.values().cloned().collect();
        drop(connections);
        for connection in open {
            let of_writer = lock(&connection.gate).writer == Some(writer);
            if of_writer {
                connection.close();
            }
        }
    }

    /// Lets `writer` connect again.
    pub fn unfence(&self, writer: Token) {
        lock(&self.state.connections).fenced.remove(&writer);
    }
}

impl Drop for Inbound {
    fn drop(&mut self) {
        let open: Vec<_> = {
            let mut connections = lock(&self.state.connections);
            connections.stopping = true;
            connections.open.values().cloned().collect()
        };
        open.iter().for_each(|connection| connection.close());
        // On Linux this makes a waiting `accept` return.
        let _ = SockRef::from(&self.listener).shutdown(Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            // A panic in there was printed and is a bug; the sockets are closed either way.
            let _ = thread.join();
        }
    }
}

/// Accepts until the listener is shut down, then waits for the connections' threads.
fn accept_all(listener: &TcpListener, shared: &Arc<Shared>) {
    thread::scope(|scope| {
        loop {
            let accepted = listener.accept();
            if lock(&shared.connections).stopping {
                return;
            }
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    // Out of file descriptors, or a connection that broke before it was accepted.
                    tracing::warn!(%error, "socket transport could not accept a connection");
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            let Some((id, connection)) = shared.admit(stream) else { continue };
            let serve = move || {
                if let Err(error) = shared.serve(&connection) {
                    shared.closed_for(&error, from);
                }
                lock(&shared.connections).open.remove(&id);
                let _ = connection.stream.shutdown(Shutdown::Both);
            };
            let spawned = thread::Builder::new().name("kv-socket-in".into()).spawn_scoped(scope, serve);
            if let Err(error) = spawned {
                tracing::warn!(%error, "socket transport could not start a thread");
                lock(&shared.connections).open.remove(&id);
            }
        }
    });
}

impl Shared {
    fn admit(&self, stream: TcpStream) -> Option<(u64, Arc<Connection>)> {
        let mut connections = lock(&self.connections);
        if connections.stopping || connections.open.len() >= MAX_CONNECTIONS || tune(&stream).is_err() {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        connections.next += 1;
        let id = connections.next;
        let connection = Arc::new(Connection { stream, gate: Mutex::default() });
        connections.open.insert(id, connection.clone());
        Some((id, connection))
    }

    fn closed_for(&self, error: &io::Error, from: SocketAddr) {
        match error.kind() {
            io::ErrorKind::UnexpectedEof
            | io::ErrorKind::ConnectionReset
            | io::ErrorKind::ConnectionAborted => {
                tracing::debug!(%from, %error, "a writer's connection ended");
            }
            _ => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                tracing::warn!(%from, %error, "refused a connection to the KV socket");
            }
        }
    }

    /// Checks the greeting and then applies frames until the connection ends, always with an error.
    fn serve(&self, connection: &Connection) -> io::Result<()> {
        let mut stream = &connection.stream;
        stream.set_read_timeout(Some(GREETING_TIMEOUT))?;
        let greeting = Greeting::receive(&mut stream)?;
        if !self.welcome(greeting, connection) {
            Reply::NotForMe.send(&mut stream)?;
            return Err(invalid("it is meant for another process, or comes from a removed one"));
        }
        stream.set_read_timeout(None)?;
        Reply::Welcome { pool: self.pool.len() as u64 }.send(&mut stream)?;
        let mut staging = self.pool.staging(CHUNK).map_err(io::Error::other)?;
        let chunk = staging.bytes_mut();
        loop {
            match Frame::receive(&mut stream)? {
                Frame::Write { offset, len } => self.write(connection, offset, len, chunk)?,
                Frame::Read { offset, len } => self.read(connection, offset, len, chunk)?,
                Frame::Commit { xfer, notification } => self.commit(connection, xfer, notification)?,
            }
        }
    }

    /// Under the connections' lock, so that a fence either sees this writer here or is seen.
    fn welcome(&self, greeting: Greeting, connection: &Connection) -> bool {
        let connections = lock(&self.connections);
        if greeting.to != self.own || connections.fenced.contains(&greeting.from) {
            return false;
        }
        lock(&connection.gate).writer = Some(greeting.from);
        true
    }

    fn write(&self, connection: &Connection, offset: u64, len: u64, chunk: &mut [u8]) -> io::Result<()> {
        let mut stream = &connection.stream;
        self.check(stream, offset, len)?;
        let mut done = 0;
        while done < len {
            let want = (len - done).min(chunk.len() as u64) as usize;
            let got = stream.read(&mut chunk[..want])?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let gate = lock(&connection.gate);
            if gate.closed {
                return Err(io::ErrorKind::ConnectionAborted.into());
            }
            self.pool.write(offset + done, &chunk[..got]).map_err(io::Error::other)?;
            done += got as u64;
        }
        Ok(())
    }

    /// Sends what the caller asked for. A fence waits for the copy under way and stops the next one.
    fn read(&self, connection: &Connection, offset: u64, len: u64, chunk: &mut [u8]) -> io::Result<()> {
        let mut stream = &connection.stream;
        self.check(stream, offset, len)?;
        Reply::Data { offset, len }.send(&mut stream)?;
        let mut done = 0;
        while done < len {
            let part = &mut chunk[..(len - done).min(CHUNK as u64) as usize];
            {
                let gate = lock(&connection.gate);
                if gate.closed {
                    return Err(io::ErrorKind::ConnectionAborted.into());
                }
                self.pool.read(offset + done, part).map_err(io::Error::other)?;
            }
            stream.write_all(part)?;
            done += part.len() as u64;
        }
        Ok(())
    }

    /// Answers a span outside the pool and fails.
    fn check(&self, mut stream: &TcpStream, offset: u64, len: u64) -> io::Result<()> {
        let Err(error) = self.pool.checked(offset, len) else { return Ok(()) };
        Reply::OutOfRange { offset, len }.send(&mut stream)?;
        linger(stream);
        Err(invalid(error.to_string()))
    }

    fn commit(&self, connection: &Connection, xfer: u64, len: u64) -> io::Result<()> {
        let mut stream = &connection.stream;
        if len > MAX_NOTIFICATION as u64 {
            return Err(invalid(format!("a notification of {len} bytes")));
        }
        let mut payload = vec![0; len as usize];
        stream.read_exact(&mut payload)?;
        if lock(&connection.gate).closed || self.notifications.send(payload).is_err() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        Reply::Settled { xfer }.send(&mut stream)
    }
}

/// Closing with unread bytes resets the connection and may drop our last reply on the way: read on a little.
fn linger(mut stream: &TcpStream) {
    let _ = stream.shutdown(Shutdown::Write);
    let _ = stream.set_read_timeout(Some(Duration::from_millis(200)));
    let mut waste = [0; 4096];
    for _ in 0..1024 {
        if !matches!(stream.read(&mut waste), Ok(n) if n > 0) {
            return;
        }
    }
}
