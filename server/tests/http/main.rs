//! The HTTP server on a real port, in front of an engine that the tests play.

mod life;
mod logprobs;
mod refusals;
mod sampling;
mod shapes;
mod streams;
mod support;
mod text;
mod timeline;
