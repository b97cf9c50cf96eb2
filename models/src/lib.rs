//! What a model is made of, from the name that a user gives to the text that a token stands for.
//!
//! - [`resolve`]: a name to a folder (a path, the demo, the Hugging Face hub).
//! - [`ModelFiles`]: the folder loaded and checked: [`ModelConfig`], [`GenerationConfig`], [`Weights`],
//!   [`Tokenizer`], [`ChatTemplate`]. [`TextFiles`] is the same without weights, for a frontend.
//! - [`Detokenizer`] and [`StopMatcher`]: token ids to the text of a stream.
//! - [`model`]: the seam to what computes; [`qwen`] and [`rope`]: the forward pass on the CPU; [`gpu`]: on a CUDA device.
//!
//! Invariants:
//! - A model that loads can be computed: every tensor is there with its shape and a usable dtype, and a
//!   variant that the forward pass lacks (RoPE scaling, sliding window, another architecture) is refused by
//!   name. Nothing is guessed, skipped or left uninitialised.
//! - What is ignored is returned as a [`LoadWarning`] and logged.
//! - Streaming gives the same text as decoding at the end, for any token ids.
//!
//! Not here: sampling and scheduling (`engine`), the KV cache and kernels (`kernels`), HTTP (`server`). The
//! environment is read by `main` alone and comes in as options.

mod bpe;
mod chat;
mod config;
mod detokenize;
mod download;
mod eos;
mod error;
mod files;
mod generation;
pub mod gpu;
mod hub;
mod loader;
pub mod model;
mod model_files;
mod python_json;
pub mod qwen;
pub mod rope;
mod shards;
mod source;
mod stop;
mod strftime;
mod tensors;
mod tokenizer;
mod weights;
mod workspace;

pub use chat::{ChatInput, ChatTemplate};
pub use config::{Architecture, ModelConfig};
pub use detokenize::Detokenizer;
pub use error::{Listed, LoadWarning, ModelError};
pub use generation::{GenerationConfig, SamplingDefaults};
pub use hub::HubOptions;
pub use model_files::{ModelFiles, TextFiles, fingerprint};
pub use source::{DEMO, SourceOptions, resolve};
pub use stop::{StopMatcher, StopStep};
pub use tensors::{TensorSpec, required_tensors};
pub use tokenizer::{Tokenizer, TokenizerConfig};
pub use weights::{WeightDtype, WeightView, Weights};
