//! `serve --role frontend`: no weights; sends each request to the worker that is best for it, and relays its answer.
//!
//! * [`config`]: what it was told. [`state`]: what handlers and tasks share.
//! * [`fleet`], [`found`], [`standing`], [`probe`], [`sample`]: which workers there are, whether they take requests, how fast they are.
//! * [`request`], [`decide`]: the names of a prompt's blocks, and the worker that the router picks for them.
//! * [`deliver`], [`upstream`], [`relay`], [`pair`]: the request on its way and the answer back.
//! * [`ops`], [`explain`], [`audit`], [`page`], [`metrics`], [`recent`]: what people and their tools see.
//!
//! Invariants: bodies and streams pass unchanged; another worker is tried only while the client has seen no byte; a
//! stream that breaks ends with an error event, never as if it were whole; whatever way a request ends, its booking ends
//! with it; labels of metrics have few values whatever clients send.
//!
//! Not here: how a worker is picked ([`crate::router`]), where workers are found ([`crate::discovery`]).

pub mod args;
pub mod audit;
pub mod config;
pub mod decide;
pub mod deliver;
pub mod explain;
pub mod fleet;
pub mod flight;
pub mod found;
pub mod headers;
pub mod life;
pub mod metrics;
pub mod ops;
pub mod page;
pub mod pair;
pub mod probe;
pub mod recent;
pub mod relay;
pub mod request;
pub mod routes;
pub mod sample;
pub mod standing;
pub mod state;
pub mod stream_watch;
pub mod upstream;

pub use config::Config;
pub use life::run;
