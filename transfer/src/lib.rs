//! Moves KV bytes between worker processes.
//!
//! A [`Transport`] writes spans of this process's registered pool into a peer's pool, or reads them from it, and
//! carries a notification that arrives after the last byte. Backends: NIXL over UCX (`tcp`, `shm`, `cuda_ipc`,
//! `rdma`), UCX without NIXL (`ucx`), mapped pools (`mmap`), plain TCP (`socket`), and `inproc` for tests;
//! [`registry::open`] picks one by its `KV_TRANSPORT` name. A [`driver::DriverHandle`] owns the chosen one on its own
//! thread. [`plan`] turns block pairs into few spans, [`wire`] is what two processes compare before the first byte moves,
//! [`probe`] what they measure then.
//!
//! Invariants:
//! - The pool is one region, registered once. Every span is checked against both pools before a byte moves, and
//!   again by the receiver where there is code of ours there (`socket`).
//! - A settled transfer no longer touches local memory: not by reading it late, not after a failure. Where the
//!   library below cannot cancel, the transfer is reported only once it has really ended.
//! - A notification attached to a write arrives after all bytes of that write, one attached to a read after the
//!   reader has all bytes: then the owner may reuse the source.
//! - One thread calls a transport; nothing in it blocks, and an idle one does not spin.
//!
//! A transfer that was reported *failed* at the sender may still have bytes on the way: the receiver must not
//! reuse the target blocks before it has dropped that peer ([`Transport::remove_peer`] fences its writes in
//! `socket` and `inproc`) or seen the process dead and polled once more (NIXL, UCX, `mmap`).
//!
//! Not here: requests, tickets, blocks and who may free them (engine); how metadata reaches the peer (server);
//! what the bytes mean (kernels).

pub mod driver;
pub mod error;
pub mod faulty;
pub mod inproc;
pub mod lane;
mod leave;
pub mod nixl;
mod one_sided;
pub mod plan;
pub mod probe;
pub mod registry;
pub mod socket;
pub mod summary;
pub mod transport;
pub mod ucx;
pub mod wire;

pub use driver::{DriverEvent, DriverHandle, Identity};
pub use error::TransferError;
pub use lane::Lane;
pub use leave::leave;
pub use plan::coalesce;
pub use probe::{ProbeReport, Scratch};
pub use registry::{TransportConfig, open};
pub use summary::Summary;
pub use transport::{
    DeviceMemory, Direction, Event, HostMemory, Memory, PeerId, Region, Span, Staging, Transport, XferId,
    XferStats,
};
pub use ucx::{Setting, UcxLanes};
pub use wire::{Hello, LayoutFingerprint, Mismatch};
