//! The raw bindings of UCP. Committed; `scripts/check-bindings` compares them with what bindgen makes of UCX's headers.

#[path = "bindings.rs"]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case, missing_debug_implementations)]
#[allow(dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings;

pub use bindings::*;
