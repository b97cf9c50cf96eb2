//! The one build script; members name it with `build = "../build.rs"`.
//!
//! A member gets what its features ask for. Without features nothing is generated: the NIXL bindings
//! are committed, so an ordinary build needs no libclang.
// Each member declares only its own features; the others' names are unknown to the compiler there.
#![allow(unexpected_cfgs)]

fn main() {
    println!("cargo::rerun-if-changed=../build.rs");
    #[cfg(feature = "bindgen")]
    nixl::generate();
}

#[cfg(feature = "bindgen")]
mod nixl {
    use std::path::PathBuf;
    use std::process::Command;
    use std::{env, fs};

    const HEADER: &str = "nixl/nixl_capi.h";

    /// Writes `$OUT_DIR/nixl_capi.rs` from our header.
    pub fn generate() {
        println!("cargo::rerun-if-changed={HEADER}");
        println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
        let mut builder = bindgen::Builder::default()
            .header(HEADER)
            .clang_args(["-x", "c", "-std=c11"])
            .allowlist_function("nixl_capi_.*")
            .allowlist_type("nixl_capi_.*")
            .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false })
            .dynamic_library_name("NixlCapi")
            // A symbol that is absent is reported by name when the library is loaded, not all at once.
            .dynamic_link_require_all(false)
            .wrap_unsafe_ops(true)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .disable_header_comment();
        if let Some(include) = compiler_include_dir() {
            builder = builder.clang_args(["-isystem", &include]);
        }
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join("nixl_capi.rs");
        let bindings = builder.generate().expect("bindgen could not read transfer/nixl/nixl_capi.h");
        fs::write(&out, bindings.to_string()).expect("OUT_DIR is writable");
    }

    /// A libclang without its resource headers (stddef.h, stdbool.h) can use the C compiler's.
    fn compiler_include_dir() -> Option<String> {
        let cc = env::var("CC").unwrap_or_else(|_| "cc".into());
        let output = Command::new(cc).arg("-print-file-name=include").output().ok()?;
        let dir = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        dir.starts_with('/').then_some(dir)
    }
}
