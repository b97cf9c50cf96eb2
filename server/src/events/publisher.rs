//! A worker's end: batches out over PUB, and again over ROUTER to whoever missed some.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use engine::kv_events::{KvEvent, KvEventSink, KvMessage, KvSnapshot};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::options::PublishOptions;
use super::wire::{Batch, Domain, END_OF_REPLAY, Event, Stored, Tier, WireHash};
use crate::discovery::EventEndpoints;

/// Why events cannot be published.
#[derive(Debug, thiserror::Error)]
#[error("KV events cannot be published on {endpoint}: {source}")]
pub struct PublishError {
    pub endpoint: String,
    pub source: zeromq::ZmqError,
}

/// Batches that can be repeated, oldest first.
type Buffer = Arc<Mutex<VecDeque<(u64, Bytes)>>>;

/// A running publisher. Ends when the engine's end is dropped.
#[derive(Debug)]
pub struct Publisher {
    /// With the ports that were really taken.
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
    pub topic: String,
    thread: std::thread::JoinHandle<()>,
    replay: Option<JoinHandle<()>>,
}

impl Publisher {
    /// Opens the sockets; returns the engine's end, too. Must run within a tokio runtime.
    pub async fn open(
        options: &PublishOptions,
        block_size: u32,
    ) -> Result<(Self, KvEventSink), PublishError> {
        let mut socket = PubSocket::new();
        let endpoint = match options.bind {
            true => bind(&mut socket, &options.endpoint).await?,
            false => {
                let connected = socket.connect(&options.endpoint).await;
                connected.map_err(|source| PublishError { endpoint: options.endpoint.clone(), source })?;
                options.endpoint.clone()
            }
        };
        let buffer = Buffer::default();
        let (mut replay_endpoint, mut replay) = (None, None);
        if let Some(endpoint) = &options.replay_endpoint {
            let mut socket = RouterSocket::new();
            replay_endpoint = Some(bind(&mut socket, endpoint).await?);
            replay = Some(tokio::spawn(repeat(socket, buffer.clone(), options.topic.clone())));
        }
        let (sender, messages) = sync_channel(options.max_queue);
        let out = Out {
            socket,
            topic: Bytes::from(options.topic.clone()),
            block_size,
            buffer,
            buffer_steps: if replay.is_some() { options.buffer_steps } else { 0 },
            next_seq: 0,
        };
        let runtime = Handle::current();
        let thread =
            std::thread::Builder::new().name("kv-events".into()).spawn(move || out.run(&messages, &runtime));
        let thread = thread.expect("the system gives a thread at start");
        let topic = options.topic.clone();
        Ok((Self { endpoint, replay_endpoint, topic, thread, replay }, KvEventSink::new(sender)))
    }

    /// Where others find it, if they reach this worker as `host`.
    pub fn endpoints(&self, host: &str, snapshot_url: Option<String>) -> EventEndpoints {
        let host = if host.contains(':') { format!("[{host}]") } else { host.to_owned() };
        let reachable = |endpoint: &str| match endpoint.rsplit_once(':') {
            Some(("tcp://0.0.0.0" | "tcp://[::]", port)) => format!("tcp://{host}:{port}"),
            _ => endpoint.to_owned(),
        };
        EventEndpoints {
            endpoint: reachable(&self.endpoint),
            replay_endpoint: self.replay_endpoint.as_deref().map(reachable),
            topic: self.topic.clone(),
            snapshot_url,
        }
    }

    /// Waits until what the engine said last is on its way. Only after the engine's end is dropped; blocks.
    pub fn join(self) {
        if self.thread.join().is_err() {
            tracing::error!("the KV events' thread had panicked");
        }
        if let Some(replay) = self.replay {
            replay.abort();
        }
    }
}

async fn bind(socket: &mut impl Socket, endpoint: &str) -> Result<String, PublishError> {
    let bound = socket.bind(endpoint).await;
    let bound = bound.map_err(|source| PublishError { endpoint: endpoint.to_owned(), source })?;
    Ok(bound.to_string())
}

/// The thread's state: it turns the engine's batches into messages, off the engine's thread.
struct Out {
    socket: PubSocket,
    topic: Bytes,
    block_size: u32,
    buffer: Buffer,
    buffer_steps: usize,
    next_seq: u64,
}

impl Out {
    fn run(mut self, messages: &Receiver<KvMessage>, runtime: &Handle) {
        while let Ok(message) = messages.recv() {
            match message {
                KvMessage::Batch { events, lost } => {
                    self.skip(lost);
                    runtime.block_on(self.publish(events));
                }
                KvMessage::Snapshot { chains, lost, reply } => {
                    self.skip(lost);
                    // Whoever asked may have given up.
                    let _ = reply.send(KvSnapshot { next_seq: self.next_seq, chains });
                }
            }
        }
    }

    /// Lost batches leave a gap in the numbers, so that subscribers know.
    fn skip(&mut self, lost: u64) {
        if lost > 0 {
            tracing::warn!(lost, "KV events were lost: their queue was full");
            self.next_seq += lost;
        }
    }

    async fn publish(&mut self, events: Vec<KvEvent>) {
        let events = events.into_iter().map(|event| on_the_wire(event, self.block_size)).collect();
        let timestamp = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
        let payload = Bytes::from(Batch { timestamp, events, rank: Some(0) }.encode());
        let seq = self.next_seq;
        self.next_seq += 1;
        if self.buffer_steps > 0 {
            let mut buffer = self.buffer.lock().unwrap_or_else(PoisonError::into_inner);
            if buffer.len() == self.buffer_steps {
                buffer.pop_front();
            }
            buffer.push_back((seq, payload.clone()));
        }
        let message = multipart([self.topic.clone(), Bytes::copy_from_slice(&seq.to_be_bytes()), payload]);
        // Never waits: a subscriber that is too slow loses messages, and asks for them again.
        if let Err(error) = self.socket.send(message).await {
            tracing::warn!(%error, seq, "a batch of KV events was not sent");
        }
    }
}

/// An event with the names that readers of 64 bits can hold.
fn on_the_wire(event: KvEvent, block_size: u32) -> Event {
    let wire =
        |hashes: Vec<engine::hash::BlockHash>| hashes.iter().map(|hash| WireHash(hash.key())).collect();
    match event {
        KvEvent::Stored { parent, hashes, tokens, cache_salt } => Event::BlockStored(Stored {
            block_hashes: wire(hashes),
            parent: parent.map(|parent| WireHash(parent.key())),
            token_ids: tokens,
            block_size,
            tier: Tier::Device,
            domain: cache_salt.map_or(Domain::Plain, Domain::Salted),
        }),
        KvEvent::Removed(hashes) => Event::BlockRemoved { block_hashes: wire(hashes), tier: Tier::Device },
        KvEvent::Cleared => Event::AllBlocksCleared,
    }
}

fn multipart(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let frames: Vec<_> = frames.into_iter().collect();
    ZmqMessage::try_from(frames).expect("there are frames. This is a bug.")
}

/// Answers `["", first sequence number]` with every batch from there on that is kept, then the end mark.
async fn repeat(mut socket: RouterSocket, buffer: Buffer, topic: String) {
    let topic = Bytes::from(topic);
    loop {
        let request = match socket.recv().await {
            Ok(message) => message.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "a replay request was lost");
                // A peer that is gone is an error each time it is looked at: do not spin on it.
                tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                continue;
            }
        };
        let [identity, delimiter, start] = &request[..] else {
            tracing::warn!(
                frames = request.len(),
                "a replay request has a wrong number of frames, expected 3"
            );
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]).map(u64::from_be_bytes) else {
            tracing::warn!(
                bytes = start.len(),
                "a replay request's number has a wrong length, expected 8 bytes"
            );
            continue;
        };
        let kept: Vec<_> = {
            let buffer = buffer.lock().unwrap_or_else(PoisonError::into_inner);
            buffer.iter().filter(|(seq, _)| *seq >= start).cloned().collect()
        };
        let batches =
            kept.into_iter().map(|(seq, payload)| (Bytes::copy_from_slice(&seq.to_be_bytes()), payload));
        for (seq, payload) in batches.chain([(Bytes::from_static(&END_OF_REPLAY), Bytes::new())]) {
            let frames = [identity.clone(), delimiter.clone(), topic.clone(), seq, payload];
            if let Err(error) = socket.send(multipart(frames)).await {
                tracing::debug!(%error, "a replay broke off");
                break;
            }
        }
    }
}
