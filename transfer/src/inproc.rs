//! Transport between pools of one process, for tests. Bytes move when the poster polls.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock};
use std::time::Instant;

use crate::error::TransferError;
use crate::registry::Backend;
use crate::transport::{Direction, Event, PeerId, Region, Span, Transport, XferId, XferStats, check_spans};

/// For tests.
pub const BACKEND: Backend = Backend {
    name: "inproc",
    what: "between pools of one process, for tests",
    family: "inproc",
    lanes: None,
    device_memory: false,
    unusable: |_, _| None,
    open: |_, _, pool| Ok(Box::new(InProcTransport::new(Hub::of_process(), pool))),
};

/// Where the transports of one process find one another.
#[derive(Clone, Default)]
pub struct Hub(Arc<Mutex<HashMap<u64, Endpoint>>>);

struct Endpoint {
    pool: Region,
    inbox: VecDeque<Vec<u8>>,
    /// Peers that this endpoint has removed: they no longer write here or read from here.
    fenced: Vec<u64>,
}

impl Hub {
    /// The hub that [`crate::registry::open`] uses.
    pub fn of_process() -> &'static Self {
        static HUB: OnceLock<Hub> = OnceLock::new();
        HUB.get_or_init(Self::default)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Endpoint>> {
        self.0.lock().unwrap_or_else(|e| e.into_inner())
    }
}

struct Pending {
    id: XferId,
    peer: PeerId,
    spans: Vec<Span>,
    notification: Vec<u8>,
    stats: XferStats,
    posted: Instant,
}

/// One endpoint of a [`Hub`].
pub struct InProcTransport {
    hub: Hub,
    token: u64,
    pool: Region,
    peers: HashMap<PeerId, (u64, u64)>,
    pending: VecDeque<Pending>,
    ready: Vec<Event>,
    next: u64,
}

impl InProcTransport {
    pub fn new(hub: &Hub, pool: Region) -> Self {
        let token = rand::random();
        let endpoint = Endpoint { pool: pool.clone(), inbox: VecDeque::new(), fenced: Vec::new() };
        hub.lock().insert(token, endpoint);
        Self {
            hub: hub.clone(),
            token,
            pool,
            peers: HashMap::new(),
            pending: VecDeque::new(),
            ready: Vec::new(),
            next: 0,
        }
    }

    /// Copies under the hub's lock: an endpoint that is dropped or fences us waits, and is untouched afterwards.
    fn deliver(&self, transfer: &Pending) -> Result<XferStats, TransferError> {
        let &(token, _) = self.peers.get(&transfer.peer).ok_or(TransferError::Aborted(transfer.peer))?;
        let mut endpoints = self.hub.lock();
        let target = endpoints
            .get_mut(&token)
            .filter(|t| !t.fenced.contains(&self.token))
            .ok_or_else(|| TransferError::Wire("the peer is gone".into()))?;
        let mut bytes = Vec::new();
        for span in &transfer.spans {
            bytes.resize(span.len as usize, 0);
            match transfer.stats.direction {
                Direction::Write => {
                    self.pool.read(span.local, &mut bytes)?;
                    target.pool.write(span.remote, &bytes)?;
                }
                Direction::Read => {
                    target.pool.read(span.remote, &mut bytes)?;
                    self.pool.write(span.local, &bytes)?;
                }
            }
        }
        target.inbox.push_back(transfer.notification.clone());
        Ok(XferStats { wire: transfer.posted.elapsed(), ..transfer.stats })
    }

    fn fence(&self, writer: u64, fenced: bool) {
        if let Some(own) = self.hub.lock().get_mut(&self.token) {
            own.fenced.retain(|&w| w != writer);
            if fenced {
                own.fenced.push(writer);
            }
        }
    }

    fn abort_pending(&mut self, peer: PeerId, error: &TransferError) {
        let ready = &mut self.ready;
        self.pending.retain(|transfer| {
            let aborted = transfer.peer == peer;
            if aborted {
                ready.push(Event::Settled { xfer: transfer.id, peer, result: Err(error.clone()) });
            }
            !aborted
        });
    }
}

impl Transport for InProcTransport {
    fn name(&self) -> &'static str {
        "inproc"
    }

    /// The endpoint's token and the pool's length, both little-endian u64.
    fn metadata(&self) -> Vec<u8> {
        [self.token.to_le_bytes(), (self.pool.len() as u64).to_le_bytes()].concat()
    }

    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError> {
        let (words, rest) = metadata.as_chunks::<8>();
        let ([token, pool], []) = (words, rest) else {
            return Err(TransferError::BadMetadata(format!("16 bytes expected, got {}", metadata.len())));
        };
        self.remove_peer(peer);
        let token = u64::from_le_bytes(*token);
        self.fence(token, false);
        self.peers.insert(peer, (token, u64::from_le_bytes(*pool)));
        Ok(())
    }

    fn remove_peer(&mut self, peer: PeerId) {
        if let Some((token, _)) = self.peers.remove(&peer) {
            self.fence(token, true);
            self.abort_pending(peer, &TransferError::Aborted(peer));
        }
    }

    fn post(
        &mut self,
        direction: Direction,
        peer: PeerId,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<XferId, TransferError> {
        let &(_, remote_pool) = self.peers.get(&peer).ok_or(TransferError::UnknownPeer(peer))?;
        let bytes = check_spans(spans, notification, &self.pool, remote_pool)?;
        self.next += 1;
        let id = XferId(self.next);
        let stats = XferStats { direction, bytes, descriptors: spans.len() as u32, ..Default::default() };
        let (spans, notification) = (spans.to_vec(), notification.to_vec());
        self.pending.push_back(Pending { id, peer, spans, notification, stats, posted: Instant::now() });
        Ok(id)
    }

    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransferError> {
        while let Some(transfer) = self.pending.pop_front() {
            let result = self.deliver(&transfer);
            let (peer, lost) = (transfer.peer, result.as_ref().err().cloned());
            self.ready.push(Event::Settled { xfer: transfer.id, peer, result });
            if let Some(error) = lost {
                self.abort_pending(peer, &error);
                self.peers.remove(&peer);
                self.ready.push(Event::PeerLost { peer, error });
            }
        }
        events.append(&mut self.ready);
        if let Some(own) = self.hub.lock().get_mut(&self.token) {
            events.extend(own.inbox.drain(..).map(|payload| Event::Notified { payload }));
        }
        Ok(())
    }
}

impl Drop for InProcTransport {
    fn drop(&mut self) {
        self.hub.lock().remove(&self.token);
    }
}
