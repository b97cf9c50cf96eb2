//! A frontend's end: one task for each worker that publishes events keeps its part of the index exact.
//!
//! Live batches come over SUB. What was missed is asked for over DEALER; what is not there any more is read as a snapshot
//! (kvferry's workers) or given up: the worker's index is cleared and grows anew from what comes.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use tokio::time::{Instant, sleep, timeout};
use zeromq::{DealerSocket, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use super::follower::{Changes, Follower, Naming, Taken};
use super::snapshot::Reader;
use super::wire::{Batch, END_OF_REPLAY};
use crate::discovery::WorkerRecord;
use crate::discovery::record::HASH_SCHEME;
use crate::router::Router;
use crate::router::shared::{Applied, IndexChange};

/// Pause before a worker's sockets are tried again; doubled up to the second.
const RETRY: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(5));

/// How long a worker may take for each part of an answer.
const ANSWER: Duration = Duration::from_secs(10);

/// A batch that was published while the subscription was on its way is asked for after this.
const FIRST_CHECK: Duration = Duration::from_millis(300);

/// After this long without a batch it is asked whether there was one.
const CHECK: Duration = Duration::from_secs(10);

/// Blocks of a snapshot at most: 4 million blocks of 16 tokens are more than any pool has.
const MAX_SNAPSHOT: usize = 1 << 22;

/// A snapshot is as long as these lines at most.
const MAX_LINE: usize = 1 << 20;

/// Orphans make a snapshot be taken again, but not more often than this.
const RESYNC_PAUSE: Duration = Duration::from_secs(1);

/// Why a worker's events cannot be followed now.
#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("{endpoint}: {source}")]
    Socket { endpoint: String, source: zeromq::ZmqError },
    #[error("{endpoint} closed the connection")]
    Lost { endpoint: String },
    #[error("{endpoint} gave no answer within {ANSWER:?}")]
    Silent { endpoint: String },
    #[error("{url}: {reason}")]
    Snapshot { url: String, reason: String },
    /// Trying again is of no use.
    #[error("its blocks have {theirs} tokens, those of the cluster {ours}")]
    BlockSize { theirs: u32, ours: u32 },
}

/// Follows the events of one worker until the task is aborted. Returns when the worker does not fit.
pub async fn follow(router: Arc<Router>, record: Arc<WorkerRecord>, http: reqwest::Client) {
    let naming = match record.hash_scheme.as_deref() {
        Some(HASH_SCHEME) => Naming::Ours,
        _ => Naming::Foreign,
    };
    let follower = Follower::new(naming, record.block_size);
    let mut subscriber = Subscriber { router, record, http, follower, missed: false, last_resync: None };
    let mut retry = RETRY.0;
    loop {
        let started = Instant::now();
        let Err(fault) = subscriber.run().await;
        let (worker, url) = (subscriber.record.incarnation, &subscriber.record.url);
        if let Fault::BlockSize { .. } = fault {
            subscriber.router.refuse(worker, fault.to_string());
            return;
        }
        tracing::warn!(%worker, url, %fault, "a worker's KV events cannot be followed; trying again");
        subscriber.router.lost(worker);
        if started.elapsed() > RETRY.1 {
            retry = RETRY.0;
        }
        sleep(retry).await;
        retry = (retry * 2).min(RETRY.1);
    }
}

struct Subscriber {
    router: Arc<Router>,
    record: Arc<WorkerRecord>,
    http: reqwest::Client,
    follower: Follower,
    /// Something was missed that a snapshot would show.
    missed: bool,
    last_resync: Option<Instant>,
}

enum Never {}

impl Subscriber {
    async fn run(&mut self) -> Result<Never, Fault> {
        let events =
            self.record.events.clone().expect("only workers with events are followed. This is a bug.");
        let at = |source| Fault::Socket { endpoint: events.endpoint.clone(), source };
        let mut socket = SubSocket::new();
        let mut monitor = socket.monitor();
        let connect = async {
            socket.connect(&events.endpoint).await?;
            socket.subscribe(&events.topic).await
        };
        match timeout(ANSWER, connect).await {
            Ok(connected) => connected.map_err(at)?,
            Err(_) => return Err(Fault::Silent { endpoint: events.endpoint.clone() }),
        }
        // What is published from here on waits in the socket, or is asked for at the first check.
        self.resync().await?;
        let mut quiet = FIRST_CHECK;
        loop {
            let patience = if self.missed { RESYNC_PAUSE } else { quiet };
            let message = tokio::select! {
                message = socket.recv() => message.map_err(at)?,
                // Who comes back may be another process that counts from 0 and has passed our number already.
                Some(SocketEvent::Disconnected(_)) = monitor.next() => {
                    return Err(Fault::Lost { endpoint: events.endpoint.clone() });
                }
                () = sleep(patience) => {
                    quiet = CHECK;
                    self.catch_up().await?;
                    continue;
                }
            };
            let Some((seq, batch)) = self.read(&message.into_vec()) else { continue };
            self.take(seq, batch).await?;
        }
    }

    /// Asks for what a silence may hide: a gap shows only with the next batch, and there may be none for long.
    async fn catch_up(&mut self) -> Result<(), Fault> {
        if self.missed {
            return self.resync().await;
        }
        let Some(next) = self.follower.next_seq() else { return Ok(()) };
        for (seq, batch) in self.replay(next).await? {
            self.take(seq, batch).await?;
        }
        Ok(())
    }

    /// A live message's number and batch; anything else is counted out, with the reason in the log.
    fn read(&self, frames: &[Bytes]) -> Option<(u64, Batch)> {
        let (worker, url) = (self.record.incarnation, &self.record.url);
        let [.., seq, payload] = frames else {
            tracing::warn!(%worker, url, frames = frames.len(), "a KV event message has too few frames, expected 3");
            return None;
        };
        let Ok(seq) = <[u8; 8]>::try_from(&seq[..]).map(u64::from_be_bytes) else {
            tracing::warn!(%worker, url, bytes = seq.len(), "a KV event number has a wrong length, expected 8 bytes");
            return None;
        };
        match Batch::decode(payload) {
            Ok(batch) => Some((seq, batch)),
            Err(error) => {
                // Its number is missing then, so that the next one is a gap.
                tracing::warn!(%worker, url, seq, %error, "a KV event message cannot be read");
                None
            }
        }
    }

    async fn take(&mut self, seq: u64, batch: Batch) -> Result<(), Fault> {
        // Each repair leaves fewer reasons for another: restart, gap, take.
        for _ in 0..3 {
            match self.follower.take(seq, &batch) {
                Taken::Duplicate => return Ok(()),
                Taken::Changes(changes) => return self.apply(changes).await,
                Taken::BlockSize { theirs, ours } => return Err(Fault::BlockSize { theirs, ours }),
                Taken::Restarted => {
                    tracing::info!(worker = %self.record.incarnation, url = self.record.url, "a worker started anew");
                    self.router.apply(self.record.incarnation, &[IndexChange::Clear]);
                }
                Taken::Gap { from } => self.fill(from, seq).await?,
            }
        }
        self.follower.skip_to(seq);
        match self.follower.take(seq, &batch) {
            Taken::Changes(changes) => self.apply(changes).await,
            Taken::BlockSize { theirs, ours } => Err(Fault::BlockSize { theirs, ours }),
            Taken::Duplicate | Taken::Gap { .. } | Taken::Restarted => Ok(()),
        }
    }

    /// Gets batches `from..to`: repeated ones if the worker still has them, else everything anew.
    async fn fill(&mut self, from: u64, to: u64) -> Result<(), Fault> {
        let (worker, url) = (self.record.incarnation, self.record.url.clone());
        tracing::info!(%worker, url, from, to, "KV events were missed");
        self.router.count_gap();
        for (seq, batch) in self.replay(from).await? {
            match self.follower.take(seq, &batch) {
                Taken::Changes(changes) => {
                    self.apply_now(changes)?;
                }
                Taken::BlockSize { theirs, ours } => return Err(Fault::BlockSize { theirs, ours }),
                Taken::Gap { .. } | Taken::Restarted => break,
                Taken::Duplicate => {}
            }
        }
        if self.follower.next_seq().is_some_and(|next| next >= to) {
            return Ok(());
        }
        self.resync().await?;
        if self.follower.next_seq().is_some_and(|next| next < to) {
            // Neither repeated nor in a snapshot: what the worker holds from that time stays unknown.
            self.follower.skip_to(to);
        }
        Ok(())
    }

    /// Brings the worker's index to what it holds, as well as it can be known: by a snapshot, or by all batches that
    /// it still has.
    async fn resync(&mut self) -> Result<(), Fault> {
        self.last_resync = Some(Instant::now());
        self.missed = false;
        let worker = self.record.incarnation;
        let events =
            self.record.events.as_ref().expect("only workers with events are followed. This is a bug.");
        if let Some(url) = events.snapshot_url.clone() {
            let (changes, next_seq) = self.snapshot(&url).await?;
            self.router.apply(worker, &[IndexChange::Clear]);
            self.router.apply(worker, &changes);
            self.follower.restart_at(Some(next_seq));
            self.router.observed(worker);
            return Ok(());
        }
        let replays = events.replay_endpoint.is_some();
        let batches = self.replay(0).await?;
        self.router.apply(worker, &[IndexChange::Clear]);
        self.follower.restart_at(batches.first().map(|(seq, _)| *seq));
        for (seq, batch) in batches {
            match self.follower.take(seq, &batch) {
                Taken::Changes(changes) => {
                    self.apply_now(changes)?;
                }
                Taken::BlockSize { theirs, ours } => return Err(Fault::BlockSize { theirs, ours }),
                // A hole in what is kept: what follows it is believed, what it hides is not known.
                Taken::Gap { .. } | Taken::Restarted => self.follower.skip_to(seq + 1),
                Taken::Duplicate => {}
            }
        }
        if replays {
            self.router.observed(worker);
        }
        Ok(())
    }

    async fn apply(&mut self, changes: Changes) -> Result<(), Fault> {
        let applied = self.apply_now(changes)?;
        let ours = self.record.events.as_ref().is_some_and(|events| events.snapshot_url.is_some());
        self.missed |= ours && (applied.orphans > 0 || applied.overfull);
        let rested = self.last_resync.is_none_or(|last| last.elapsed() >= RESYNC_PAUSE);
        if self.missed && rested {
            let (worker, orphans, overfull) = (self.record.incarnation, applied.orphans, applied.overfull);
            tracing::info!(%worker, orphans, overfull, "events were missed: reading what the worker holds");
            self.resync().await?;
        }
        Ok(())
    }

    fn apply_now(&mut self, changes: Changes) -> Result<Applied, Fault> {
        let worker = self.record.incarnation;
        if let Some(block_size) = changes.block_size {
            // A plain OpenAI server: its events are the first to say it.
            let record = WorkerRecord { block_size: Some(block_size), ..(*self.record).clone() };
            self.record = Arc::new(record.clone());
            // The router has the reason, and says it.
            let _ = self.router.join(record);
        }
        let applied = self.router.apply(worker, &changes.changes);
        self.router.count_orphans(worker, changes.orphans);
        if changes.invalid > 0 {
            tracing::warn!(%worker, invalid = changes.invalid, "KV events that make no sense were left out");
        }
        self.router.observed(worker);
        Ok(applied)
    }

    /// Batches from `from` on that the worker still has, if it repeats any.
    async fn replay(&self, from: u64) -> Result<Vec<(u64, Batch)>, Fault> {
        let events =
            self.record.events.as_ref().expect("only workers with events are followed. This is a bug.");
        let Some(endpoint) = &events.replay_endpoint else { return Ok(Vec::new()) };
        let at = |source| Fault::Socket { endpoint: endpoint.clone(), source };
        let silent = || Fault::Silent { endpoint: endpoint.clone() };
        let mut socket = DealerSocket::new();
        timeout(ANSWER, socket.connect(endpoint)).await.map_err(|_| silent())?.map_err(at)?;
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
        socket.send(request).await.map_err(at)?;
        let mut batches = Vec::new();
        loop {
            let message = timeout(ANSWER, socket.recv()).await.map_err(|_| silent())?.map_err(at)?;
            let frames = message.into_vec();
            if let [.., seq, _] = &frames[..]
                && seq[..] == END_OF_REPLAY
            {
                return Ok(batches);
            }
            // Before them the empty frame that a REQ socket would have taken off and, since vLLM 0.33, the topic.
            batches.extend(self.read(&frames));
        }
    }

    async fn snapshot(&self, url: &str) -> Result<(Vec<IndexChange>, u64), Fault> {
        let fault = |reason: String| Fault::Snapshot { url: url.to_owned(), reason };
        let response =
            timeout(ANSWER, self.http.get(url).send()).await.map_err(|_| fault("no answer".into()))?;
        let response = response.and_then(reqwest::Response::error_for_status);
        let mut body = response.map_err(|error| fault(error.to_string()))?.bytes_stream();
        let mut reader = Reader::new(self.record.incarnation, MAX_SNAPSHOT);
        let (mut changes, mut rest) = (Vec::new(), Vec::new());
        while let Some(piece) =
            timeout(ANSWER, body.next()).await.map_err(|_| fault("it broke off".into()))?
        {
            let piece = piece.map_err(|error| fault(error.to_string()))?;
            let mut lines = piece.split(|byte| *byte == b'\n');
            rest.extend_from_slice(lines.next().unwrap_or_default());
            for next in lines {
                let line = String::from_utf8_lossy(&rest).into_owned();
                changes.extend(reader.line(&line).map_err(|error| fault(error.to_string()))?);
                rest = next.to_vec();
            }
            if rest.len() > MAX_LINE {
                return Err(fault(format!("a line of more than {MAX_LINE} bytes")));
            }
        }
        let head = reader.finish().map_err(|error| fault(error.to_string()))?;
        Ok((changes, head.next_seq))
    }
}
