//! Tests of loading through the public API. Each fault of the case list has a test named after it.

mod bpe;
mod chat;
mod config;
mod generation;
mod heads;
mod source;
mod text;
mod tiny;
mod weights;
