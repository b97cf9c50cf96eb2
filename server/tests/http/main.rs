//! The HTTP server on a real port, in front of an engine that the tests play.

mod life;
mod refusals;
mod shapes;
mod streams;
mod support;
mod text;
