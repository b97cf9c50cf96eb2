//! Which worker gets a request.
//!
//! * [`worker`], [`view`]: what is known of each worker, and the snapshot that a decision sees.
//! * [`policy`]: the seam, a pure function of (request's blocks, cluster) -> [`policy::Choice`]; [`policies`] are the modes.
//! * [`index`]: which worker holds which blocks, by events (exact) or by our own decisions (approximate).
//! * [`disagg`]: who computes a prompt where there are prefill workers.
//! * [`bookings`]: the load that our own decisions put on each worker.
//! * [`source`]: how a worker's index is fed, and the alarm when it is not fed as expected.
//! * [`shared`]: all of it behind one handle for request tasks; a booking is a guard that gives up its load when dropped.
//!
//! Invariants: policies, index, bookings and sources have no clock, RNG, IO or lock: time and chance are passed in. A
//! worker that left is in no view, so it cannot be chosen. Every cost is finite.

pub mod bookings;
pub mod disagg;
pub mod index;
pub mod policies;
pub mod policy;
pub mod prompt;
pub mod shared;
pub mod source;
pub mod view;
pub mod worker;

pub use policy::{Choice, Draw, NoWorker, RequestBlocks, RoutePolicy};
pub use prompt::Prompt;
pub use shared::{Booking, Router, RouterConfig};
pub use view::{ClusterView, IndexSource, Load, WorkerView};
pub use worker::{Condition, WorkerId, WorkerRole};
