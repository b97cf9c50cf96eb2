//! The raw bindings. Committed, so that a build needs no libclang; `scripts/check-bindings` compares them with
//! what bindgen makes of `transfer/nixl/nixl_capi.h`.

#[cfg(feature = "bindgen")]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case, missing_debug_implementations)]
#[allow(dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings {
    include!(concat!(env!("OUT_DIR"), "/nixl_capi.rs"));
}

#[cfg(not(feature = "bindgen"))]
#[path = "bindings.rs"]
#[allow(non_camel_case_types, non_upper_case_globals, non_snake_case, missing_debug_implementations)]
#[allow(dead_code, clippy::all, clippy::undocumented_unsafe_blocks)]
mod bindings;

pub use bindings::*;
