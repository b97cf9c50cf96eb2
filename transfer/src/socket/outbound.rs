//! The writing half: one connection to one peer, opened by its own thread at the first transfer.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::frame::{Frame, Greeting, Reply, invalid};
use super::{CHUNK, lock, tune};
use crate::error::TransferError;
use crate::transport::{Region, Span};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Transfers waiting for one peer. More means that it does not take what is sent; the caller is told.
pub const MAX_QUEUED: usize = 1024;

/// One transfer to be written.
pub struct Job {
    pub xfer: u64,
    pub spans: Vec<Span>,
    pub notification: Vec<u8>,
}

/// What a connection's threads tell the transport.
pub enum Report {
    Settled { connection: u64, xfer: u64 },
    Lost { connection: u64, error: TransferError },
}

/// A peer to connect to.
pub struct Target {
    pub connection: u64,
    pub address: String,
    pub greeting: Greeting,
}

/// The handle of a connection. Dropping it closes the connection and joins its thread.
pub struct Outbound {
    jobs: Option<SyncSender<Job>>,
    link: Arc<Link>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Link {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    closed: bool,
    stream: Option<TcpStream>,
}

impl Outbound {
    /// Starts the thread; nothing is connected yet.
    pub fn new(target: Target, pool: Region, reports: SyncSender<Report>) -> io::Result<Self> {
        let (jobs, queue) = sync_channel(MAX_QUEUED);
        let link = Arc::new(Link::default());
        let shared = link.clone();
        let thread = thread::Builder::new()
            .name("kv-socket-out".into())
            .spawn(move || Writer { target, pool, reports, link: shared }.run(&queue))?;
        Ok(Self { jobs: Some(jobs), link, thread: Some(thread) })
    }

    /// Queues a transfer; false when [`MAX_QUEUED`] wait already. A connection that is gone takes it in silence:
    /// its loss was or will be reported.
    pub fn push(&self, job: Job) -> bool {
        let jobs = self.jobs.as_ref().expect("nobody pushes after closing. This is a bug.");
        !matches!(jobs.try_send(job), Err(TrySendError::Full(_)))
    }

    /// Whether the thread has ended, so that dropping does not wait.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// After this returns no thread reads the pool for this peer again, and nothing more is sent.
    pub fn close(&mut self) {
        self.jobs = None;
        self.link.close();
    }
}

impl Drop for Outbound {
    fn drop(&mut self) {
        self.close();
        if let Some(thread) = self.thread.take() {
            // A panic in there was printed and is a bug; the connection is closed either way.
            let _ = thread.join();
        }
    }
}

impl Link {
    fn close(&self) {
        let mut state = lock(&self.state);
        state.closed = true;
        if let Some(stream) = &state.stream {
            // Fails only when the other end closed first.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes a second handle on the stream for `close`; false when closed already.
    fn opened(&self, stream: &TcpStream) -> io::Result<bool> {
        let mut state = lock(&self.state);
        state.stream = Some(stream.try_clone()?);
        Ok(!state.closed)
    }

    /// Copies from the pool unless closed. `close` waits for the copy, which is what its promise rests on.
    fn read(&self, pool: &Region, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = lock(&self.state);
        if state.closed {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        pool.read(offset, out).map_err(io::Error::other)
    }
}

struct Writer {
    target: Target,
    pool: Region,
    reports: SyncSender<Report>,
    link: Arc<Link>,
}

impl Writer {
    /// Connects at the first job, then writes jobs until the queue closes or the connection breaks.
    fn run(self, queue: &Receiver<Job>) {
        let Ok(first) = queue.recv() else { return };
        let stream = match self.connect() {
            Ok(stream) => stream,
            Err(error) => return self.lost(format!("{}: {error}", self.target.address)),
        };
        thread::scope(|scope| {
            let replies = scope.spawn(|| self.read_replies(&stream));
            let outcome = self.write_all(first, queue, &stream);
            if outcome.is_err() {
                // What the peer had to say about it can still be read after this; then the reader ends.
                let _ = stream.shutdown(Shutdown::Both);
            }
            let _ = replies.join();
        });
    }

    fn connect(&self) -> io::Result<TcpStream> {
        let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
        for address in self.target.address.to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, CONNECT_TIMEOUT) {
                Ok(stream) => return self.greet(stream),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn greet(&self, mut stream: TcpStream) -> io::Result<TcpStream> {
        tune(&stream)?;
        if !self.link.opened(&stream)? {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        self.target.greeting.send(&mut stream)?;
        stream.set_read_timeout(Some(CONNECT_TIMEOUT))?;
        match Reply::receive(&mut stream)? {
            Reply::Welcome { .. } => {}
            Reply::NotForMe => return Err(invalid("another process is there, or it has removed this one")),
            other => return Err(invalid(format!("{other:?} in place of a welcome"))),
        }
        stream.set_read_timeout(None)?;
        Ok(stream)
    }

    fn write_all(&self, first: Job, queue: &Receiver<Job>, mut stream: &TcpStream) -> io::Result<()> {
        let mut chunk = vec![0; CHUNK];
        let mut next = Some(first);
        while let Some(job) = next {
            for span in &job.spans {
                Frame::Write { offset: span.remote, len: span.len }.send(&mut stream)?;
                let mut done = 0;
                while done < span.len {
                    let part = &mut chunk[..(span.len - done).min(CHUNK as u64) as usize];
                    self.link.read(&self.pool, span.local + done, part)?;
                    stream.write_all(part)?;
                    done += part.len() as u64;
                }
            }
            Frame::Commit { xfer: job.xfer, notification: job.notification.len() as u64 }
                .send(&mut stream)?;
            stream.write_all(&job.notification)?;
            next = queue.recv().ok();
        }
        Ok(())
    }

    /// Reports settled transfers until the connection ends, then why.
    fn read_replies(&self, mut stream: &TcpStream) {
        let why = loop {
            match Reply::receive(&mut stream) {
                Ok(Reply::Settled { xfer }) => {
                    let connection = self.target.connection;
                    if self.reports.send(Report::Settled { connection, xfer }).is_err() {
                        return;
                    }
                }
                Ok(Reply::OutOfRange { offset, len }) => {
                    break format!("the peer refused {len} bytes at offset {offset}: outside its pool");
                }
                Ok(other) => break format!("{other:?} in place of an acknowledgement"),
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    break "the peer closed it".into();
                }
                Err(error) => break error.to_string(),
            }
        };
        // Wakes a writer that waits for the peer to take bytes or for the next job's first byte to fail.
        let _ = stream.shutdown(Shutdown::Both);
        self.lost(why);
    }

    fn lost(&self, why: String) {
        let report = Report::Lost { connection: self.target.connection, error: TransferError::Wire(why) };
        // The transport is being dropped when nobody listens any more.
        let _ = self.reports.send(report);
    }
}
