//! NIXL over UCX: the library's bindings (`sys`), loading it, safe handles (`agent`, `arguments`), and the
//! transport.

mod agent;
mod arguments;
mod library;
mod status;
mod sys;
mod transport;

pub use library::{HOW_TO_GET, search_path};
pub use transport::{NixlConfig, NixlTransport, backend};
