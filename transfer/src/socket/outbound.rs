//! The calling half: one connection to one peer, opened by its own thread at the first transfer.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::frame::{Frame, Greeting, Reply, invalid};
use super::{CHUNK, lock, tune};
use crate::error::TransferError;
use crate::transport::{Direction, Region, Span};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Unsettled transfers for one peer. More means that it does not take what is sent; the caller is told.
pub const MAX_QUEUED: usize = 1024;

/// One transfer to be made.
pub struct Job {
    pub xfer: u64,
    pub direction: Direction,
    pub spans: Vec<Span>,
    pub notification: Vec<u8>,
}

/// What the calling thread does next.
enum Step {
    Start(Job),
    /// Every byte is where it belongs: tell the peer.
    Commit(Job),
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
    link: Arc<Link>,
    thread: Option<JoinHandle<()>>,
}

struct Link {
    state: Mutex<State>,
}

struct State {
    /// `None` once closed. Its length is bounded by [`MAX_QUEUED`], which `post` checks.
    steps: Option<Sender<Step>>,
    stream: Option<TcpStream>,
    /// Reads that the peer was asked for, in the order in which it answers.
    reads: VecDeque<Job>,
}

impl Outbound {
    /// Starts the thread; nothing is connected yet.
    pub fn new(target: Target, pool: Region, reports: SyncSender<Report>) -> io::Result<Self> {
        let (steps, queue) = channel();
        let state = State { steps: Some(steps), stream: None, reads: VecDeque::new() };
        let link = Arc::new(Link { state: Mutex::new(state) });
        let shared = link.clone();
        let thread = thread::Builder::new()
            .name("kv-socket-out".into())
            .spawn(move || Caller { target, pool, reports, link: shared }.run(&queue))?;
        Ok(Self { link, thread: Some(thread) })
    }

    /// Queues a transfer. A connection that is gone takes it in silence: its loss was or will be reported.
    pub fn push(&self, job: Job) {
        self.link.push(Step::Start(job));
    }

    /// As [`Self::push`], for a transfer whose bytes are where they belong.
    pub fn commit(&self, job: Job) {
        self.link.push(Step::Commit(job));
    }

    /// Whether the thread has ended, so that dropping does not wait.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// After this returns no thread touches the pool for this peer again, and nothing more is sent.
    pub fn close(&mut self) {
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
    fn push(&self, step: Step) {
        if let Some(steps) = &lock(&self.state).steps {
            // Fails when the thread has ended, which it reports.
            let _ = steps.send(step);
        }
    }

    fn close(&self) {
        let mut state = lock(&self.state);
        state.steps = None;
        if let Some(stream) = &state.stream {
            // Fails only when the other end closed first.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    /// Takes a second handle on the stream for `close`; false when closed already.
    fn opened(&self, stream: &TcpStream) -> io::Result<bool> {
        let mut state = lock(&self.state);
        state.stream = Some(stream.try_clone()?);
        Ok(state.steps.is_some())
    }

    /// Touches the pool unless closed. `close` waits for the copy, which is what its promise rests on.
    fn copy(&self, copy: impl FnOnce() -> Result<(), TransferError>) -> io::Result<()> {
        let state = lock(&self.state);
        if state.steps.is_none() {
            return Err(io::ErrorKind::ConnectionAborted.into());
        }
        copy().map_err(io::Error::other)
    }
}

struct Caller {
    target: Target,
    pool: Region,
    reports: SyncSender<Report>,
    link: Arc<Link>,
}

impl Caller {
    /// Connects at the first job, then starts jobs until the queue closes or the connection breaks.
    fn run(self, queue: &Receiver<Step>) {
        let Ok(first) = queue.recv() else { return };
        let stream = match self.connect() {
            Ok(stream) => stream,
            Err(error) => return self.lost(format!("{}: {error}", self.target.address)),
        };
        thread::scope(|scope| {
            let replies = scope.spawn(|| self.read_replies(&stream));
            let outcome = self.take_steps(first, queue, &stream);
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

    fn take_steps(&self, first: Step, queue: &Receiver<Step>, stream: &TcpStream) -> io::Result<()> {
        let mut staging = self.pool.staging(CHUNK).map_err(io::Error::other)?;
        let mut next = Some(first);
        while let Some(step) = next {
            match step {
                Step::Start(job) if job.direction == Direction::Read => self.ask(job, stream)?,
                Step::Start(job) => {
                    self.write(&job, stream, staging.bytes_mut())?;
                    commit(&job, stream)?;
                }
                Step::Commit(job) => commit(&job, stream)?,
            }
            next = queue.recv().ok();
        }
        Ok(())
    }

    fn write(&self, job: &Job, mut stream: &TcpStream, chunk: &mut [u8]) -> io::Result<()> {
        for span in &job.spans {
            Frame::Write { offset: span.remote, len: span.len }.send(&mut stream)?;
            let mut done = 0;
            while done < span.len {
                let part = &mut chunk[..(span.len - done).min(CHUNK as u64) as usize];
                self.link.copy(|| self.pool.read(span.local + done, part))?;
                stream.write_all(part)?;
                done += part.len() as u64;
            }
        }
        Ok(())
    }

    /// Asks for a read's spans. The answers are awaited before the first question leaves.
    fn ask(&self, job: Job, mut stream: &TcpStream) -> io::Result<()> {
        let mut questions = Vec::with_capacity(job.spans.len() * 24);
        for span in &job.spans {
            Frame::Read { offset: span.remote, len: span.len }.send(&mut questions)?;
        }
        lock(&self.link.state).reads.push_back(job);
        stream.write_all(&questions)
    }

    /// Takes what a read asked for; the commit goes out by the other thread, because this one must never wait for
    /// the peer to take something.
    fn receive(
        &self,
        reading: &mut Option<(Job, usize)>,
        (offset, len): (u64, u64),
        stream: &TcpStream,
        chunk: &mut [u8],
    ) -> io::Result<()> {
        let (job, index) = match reading.take() {
            Some(reading) => reading,
            None => match lock(&self.link.state).reads.pop_front() {
                Some(job) => (job, 0),
                None => return Err(invalid("data that nobody asked for")),
            },
        };
        let span = job.spans[index];
        if (span.remote, span.len) != (offset, len) {
            return Err(invalid(format!("{len} bytes at offset {offset} in place of {span:?}")));
        }
        self.read_into(span, stream, chunk)?;
        if index + 1 < job.spans.len() {
            *reading = Some((job, index + 1));
        } else {
            self.link.push(Step::Commit(job));
        }
        Ok(())
    }

    fn read_into(&self, span: Span, mut stream: &TcpStream, chunk: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < span.len {
            let want = (span.len - done).min(CHUNK as u64) as usize;
            let got = stream.read(&mut chunk[..want])?;
            if got == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            self.link.copy(|| self.pool.write(span.local + done, &chunk[..got]))?;
            done += got as u64;
        }
        Ok(())
    }

    /// Reports settled transfers until the connection ends, then why.
    fn read_replies(&self, mut stream: &TcpStream) {
        let mut staging = match self.pool.staging(CHUNK) {
            Ok(staging) => staging,
            Err(error) => {
                let _ = stream.shutdown(Shutdown::Both);
                return self.lost(error.to_string());
            }
        };
        let (mut reading, chunk) = (None, staging.bytes_mut());
        let why = loop {
            match Reply::receive(&mut stream) {
                Ok(Reply::Settled { xfer }) => {
                    let connection = self.target.connection;
                    if self.reports.send(Report::Settled { connection, xfer }).is_err() {
                        return;
                    }
                }
                Ok(Reply::Data { offset, len }) => {
                    if let Err(error) = self.receive(&mut reading, (offset, len), stream, chunk) {
                        break error.to_string();
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

fn commit(job: &Job, mut stream: &TcpStream) -> io::Result<()> {
    Frame::Commit { xfer: job.xfer, notification: job.notification.len() as u64 }.send(&mut stream)?;
    stream.write_all(&job.notification)
}
