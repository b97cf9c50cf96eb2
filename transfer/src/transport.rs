//! The seam behind which transports are swapped.
//!
//! A transport moves bytes between this process's registered pool and a peer's, in either direction, and tells both
//! sides when they have arrived. It knows nothing of requests, blocks or layers. All calls come from one thread
//! ([`crate::driver`]), none of them blocks for longer than a connection attempt to a new peer.

use std::any::Any;
use std::fmt;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::error::TransferError;
use crate::lane::Lane;
use crate::ucx::Setting;

/// A peer process, numbered by the caller; a peer that restarts gets a new number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PeerId(pub u64);

/// One posted transfer, unique within a transport's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct XferId(pub u64);

/// Which way bytes move, seen from the side that posts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Direction {
    /// From our pool into the peer's (push).
    #[default]
    Write,
    /// From the peer's pool into ours (pull).
    Read,
}

impl Direction {
    /// The metric label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// One contiguous copy of `len` bytes between offset `local` of our pool and offset `remote` of the peer's pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    pub local: u64,
    pub remote: u64,
    pub len: u64,
}

/// What one settled transfer cost.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct XferStats {
    pub direction: Direction,
    pub bytes: u64,
    /// Descriptors handed to the transport (one a span).
    pub descriptors: u32,
    /// Waiting for the thread that owns the transport; filled in by [`crate::driver`].
    pub queue: Duration,
    /// From the call of `post` to its return.
    pub post: Duration,
    /// From the call of `post` until the transport saw it settle.
    pub wire: Duration,
}

/// What a transport reports from [`Transport::poll`].
#[derive(Debug)]
pub enum Event {
    /// Every byte of the transfer is in its destination pool, or none may be relied on.
    Settled { xfer: XferId, peer: PeerId, result: Result<XferStats, TransferError> },
    /// The peer's notification. One attached to a write arrives after all bytes of that write; one attached to a
    /// read after all bytes have left our pool for the peer's.
    Notified { payload: Vec<u8> },
    /// Nothing more can be sent to the peer; its unsettled transfers were reported failed before this.
    PeerLost { peer: PeerId, error: TransferError },
}

/// A way to move KV bytes between processes.
pub trait Transport: Send {
    /// The name that `KV_TRANSPORT` has for it: one of [`crate::registry::names`], never `auto`.
    fn name(&self) -> &'static str;

    /// Called once, first, on the thread that all later calls come from.
    ///
    /// Errors: the pool's device cannot be reached from here.
    fn enter_thread(&mut self) -> Result<(), TransferError> {
        Ok(())
    }

    /// What the peer needs to reach our pool: opaque bytes, carried by the control link's handshake.
    /// Valid once the pool is registered (construction takes the [`Region`]).
    fn metadata(&self) -> Vec<u8>;

    /// Makes the peer known from the metadata it sent.
    fn add_peer(&mut self, peer: PeerId, metadata: &[u8]) -> Result<(), TransferError>;

    /// Forgets the peer. Its unsettled transfers are reported failed by `poll`, each as soon as nothing touches the
    /// pool for it any more: at once where it can be called back (`socket`, `inproc`), when it has ended where it
    /// cannot (NIXL). Where the peer's transfers run through code of ours in this process (`socket`, `inproc`), nothing
    /// more that it writes lands in our pool and it reads nothing more from it after this returns. Unknown peers are ignored.
    fn remove_peer(&mut self, peer: PeerId);

    /// Starts moving `spans`; `notification` reaches the peer after the last byte is where it belongs: in the peer's
    /// pool for a write, in ours for a read.
    ///
    /// A read is served by the peer's side: over lanes that emulate it (NIXL over TCP) it goes on only while the peer
    /// polls.
    ///
    /// Errors: unknown (or lost) peer, empty `spans`, a span outside either pool, a notification over
    /// [`MAX_NOTIFICATION`]. Failures of the wire come as [`Event::Settled`].
    fn post(
        &mut self,
        direction: Direction,
        peer: PeerId,
        spans: &[Span],
        notification: &[u8],
    ) -> Result<XferId, TransferError>;

    /// Makes progress on both sides' transfers and appends what happened. Never blocks.
    fn poll(&mut self, events: &mut Vec<Event>) -> Result<(), TransferError>;

    /// What really carries transfers of this direction to the peers; `None` where nothing tells, or none was made yet.
    fn lane(&mut self, _direction: Direction) -> Option<Lane> {
        None
    }

    /// Whether this peer's pool is mapped here, and its transfers are copies; `None` for transports that map none.
    fn has_mapped(&self, _peer: PeerId) -> Option<bool> {
        None
    }

    /// The settings of the library below that this transport was opened with.
    fn settings(&self) -> Vec<Setting> {
        Vec::new()
    }
}

/// Bytes that a notification may have. The longest of ours is a few hundred.
pub const MAX_NOTIFICATION: usize = 64 << 10;

/// The checks that every backend makes before it posts; the result is the number of bytes.
pub(crate) fn check_spans(
    spans: &[Span],
    notification: &[u8],
    local: &Region,
    remote_pool: u64,
) -> Result<u64, TransferError> {
    if spans.is_empty() || spans.iter().any(|s| s.len == 0) {
        return Err(TransferError::EmptyTransfer);
    }
    if notification.len() > MAX_NOTIFICATION {
        return Err(TransferError::NotificationTooLong { len: notification.len(), max: MAX_NOTIFICATION });
    }
    for span in spans {
        local.checked(span.local, span.len)?;
        if span.remote.checked_add(span.len).is_none_or(|end| end > remote_pool) {
            return Err(TransferError::OutOfRange { offset: span.remote, len: span.len, pool: remote_pool });
        }
    }
    Ok(spans.iter().map(|s| s.len).sum())
}

/// Where the bytes of a pool lie.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Memory {
    #[default]
    Host,
    /// Memory of the CUDA device with this number; addresses are the device's.
    Cuda(u32),
}

/// Copies between host memory and a pool that the processor cannot reach, for transports that need the bytes in host memory.
/// Ranges are inside the pool.
///
/// Errors: what the device says.
pub trait DeviceMemory: Send + Sync {
    fn read(&self, offset: usize, to: &mut [u8]) -> Result<(), String>;
    fn write(&self, offset: usize, from: &[u8]) -> Result<(), String>;

    /// Makes the device current on the calling thread: libraries that reach its memory themselves (UCX) ask the driver
    /// for the thread's device.
    fn bind_thread(&self) -> Result<(), String>;

    /// Whether other processes can map the pool.
    ///
    /// Errors: why they cannot.
    fn check_export(&self) -> Result<(), String>;

    /// Host memory of `bytes` that the device copies to and from directly (pinned).
    fn staging(&self, bytes: usize) -> Result<Box<dyn HostMemory>, String>;
}

/// Host memory of a device's making.
pub trait HostMemory: Send {
    fn bytes_mut(&mut self) -> &mut [u8];
}

/// Where bytes wait between a pool and a socket.
pub enum Staging {
    Plain(Vec<u8>),
    Pinned(Box<dyn HostMemory>),
}

impl Staging {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        match self {
            Self::Plain(bytes) => bytes,
            Self::Pinned(memory) => memory.bytes_mut(),
        }
    }
}

/// The KV pool as a transport sees it: a range of bytes that outlives the transport.
///
/// Who may touch which bytes when is settled by tickets (engine): a block named in a ticket is written by the
/// transport only, a source block is read-only until its writes settle. So reads and writes here race with nothing.
#[derive(Clone)]
pub struct Region {
    base: NonNull<u8>,
    len: usize,
    memory: Memory,
    /// Bytes of a piece: spans are as a rule whole pieces of the pool.
    piece: u64,
    /// How to copy where the processor cannot.
    copier: Option<Arc<dyn DeviceMemory>>,
    /// What other processes can map.
    file: Option<Arc<OwnedFd>>,
    _owner: Arc<dyn Any + Send + Sync>,
}

// SAFETY: `Region` is a pointer into memory kept alive by `_owner`, which is itself Send + Sync; the contract of
// `Region::new` puts the exclusion of concurrent access on the ticket protocol, not on threads.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` gives out nothing but bounds-checked copies and the raw address.
unsafe impl Sync for Region {}

impl Region {
    /// # Safety
    /// `base..base + len` must be readable and writable for as long as `owner` lives, and the caller must see to it
    /// that bytes being transferred are not accessed elsewhere at the same time.
    pub unsafe fn new(base: NonNull<u8>, len: usize, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { base, len, memory: Memory::Host, piece: 0, copier: None, file: None, _owner: owner }
    }

    /// The same range of bytes, most of whose transfers will be of whole pieces of `bytes`: a transport may prepare them.
    /// Other spans stay allowed.
    pub fn in_pieces_of(self, bytes: u64) -> Self {
        Self { piece: bytes, ..self }
    }

    /// Bytes of a piece; `None` where nothing is known of the spans to come.
    pub fn piece(&self) -> Option<NonZeroU64> {
        NonZeroU64::new(self.piece)
    }

    /// The same range of bytes, which is the whole of `file`, in memory, whose length is sealed: other processes can map it.
    pub fn in_file(self, file: Arc<OwnedFd>) -> Self {
        Self { file: Some(file), ..self }
    }

    /// The file that other processes can map.
    pub fn file(&self) -> Option<&OwnedFd> {
        self.file.as_deref()
    }

    /// The same range of bytes, said to lie in `memory`.
    pub fn in_memory(self, memory: Memory) -> Self {
        Self { memory, ..self }
    }

    /// The same range of bytes, which a device has and `copier` copies. They lie in [`Memory::Host`] where the device is an
    /// emulated one, whose memory the processor reaches, too.
    pub fn on_device(self, memory: Memory, copier: Arc<dyn DeviceMemory>) -> Self {
        Self { memory, copier: Some(copier), ..self }
    }

    /// Makes the pool's device current on the calling thread.
    pub fn bind_thread(&self) -> Result<(), TransferError> {
        let bound = self.copier.as_ref().map_or(Ok(()), |copier| copier.bind_thread());
        bound.map_err(|reason| self.device_failed(reason))
    }

    /// Why other processes cannot map the pool as device memory; `None` where they can.
    pub fn unexportable(&self) -> Option<String> {
        match (self.memory, &self.copier) {
            (Memory::Host, _) => Some("the KV pool lies in host memory".into()),
            (Memory::Cuda(_), None) => None,
            (Memory::Cuda(device), Some(copier)) => copier
                .check_export()
                .err()
                .map(|why| format!("CUDA device {device} does not export the KV pool: {why}")),
        }
    }

    /// Memory of `bytes` for copies to and from the pool; pinned where a device copies.
    pub fn staging(&self, bytes: usize) -> Result<Staging, TransferError> {
        match &self.copier {
            None => Ok(Staging::Plain(vec![0; bytes])),
            Some(copier) => {
                copier.staging(bytes).map(Staging::Pinned).map_err(|reason| self.device_failed(reason))
            }
        }
    }

    /// Whether [`Region::read`] and [`Region::write`] work.
    pub fn can_copy(&self) -> bool {
        self.memory == Memory::Host || self.copier.is_some()
    }

    pub fn memory(&self) -> Memory {
        self.memory
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address for registration with a library.
    pub fn base(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    /// Copies `out.len()` bytes at `offset` out of the pool.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<(), TransferError> {
        if let Some(copier) = &self.copier {
            let range = self.checked(offset, out.len() as u64)?;
            return copier.read(range.start, out).map_err(|reason| self.device_failed(reason));
        }
        let range = self.on_host(offset, out.len() as u64)?;
        // SAFETY: `on_host` proved the range inside the region, in host memory, which `_owner` keeps alive.
        unsafe {
            std::ptr::copy_nonoverlapping(self.base.as_ptr().add(range.start), out.as_mut_ptr(), out.len())
        };
        Ok(())
    }

    /// Copies `bytes` into the pool at `offset`.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), TransferError> {
        if let Some(copier) = &self.copier {
            let range = self.checked(offset, bytes.len() as u64)?;
            return copier.write(range.start, bytes).map_err(|reason| self.device_failed(reason));
        }
        let range = self.on_host(offset, bytes.len() as u64)?;
        // SAFETY: `on_host` proved the range inside the region, in host memory, which `_owner` keeps alive.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.base.as_ptr().add(range.start), bytes.len())
        };
        Ok(())
    }

    fn device_failed(&self, reason: String) -> TransferError {
        TransferError::DeviceCopy { memory: self.memory, reason }
    }

    /// As [`Region::checked`]; the processor cannot copy a device's memory.
    fn on_host(&self, offset: u64, len: u64) -> Result<Range<usize>, TransferError> {
        match self.memory {
            Memory::Host => self.checked(offset, len),
            Memory::Cuda(device) => Err(TransferError::DeviceMemory { device }),
        }
    }

    /// The range as indices, if it lies inside the region.
    pub fn checked(&self, offset: u64, len: u64) -> Result<Range<usize>, TransferError> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len as u64 => Ok(offset as usize..end as usize),
            _ => Err(TransferError::OutOfRange { offset, len, pool: self.len as u64 }),
        }
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Region").field("len", &self.len).finish()
    }
}
