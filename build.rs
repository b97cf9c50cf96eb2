//! The one build script; members name it with `build = "../build.rs"`.
//!
//! A member gets what its features ask for. Without features nothing is generated: the NIXL bindings
//! are committed, so an ordinary build needs no libclang; CUDA kernels are compiled with `--features cuda` only.
// Each member declares only its own features; the others' names are unknown to the compiler there.
#![allow(unexpected_cfgs)]

fn main() {
    println!("cargo::rerun-if-changed=../build.rs");
    #[cfg(feature = "bindgen")]
    nixl::generate();
    // The feature's name is enough: the members above `kernels` forward it and compile nothing.
    if std::env::var_os("CARGO_FEATURE_CUDA").is_some() && std::path::Path::new("cu/all.cu").is_file() {
        cuda::compile();
    }
}

mod cuda {
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use std::{env, fs};

    /// Ampere, Hopper and Blackwell; what lies between compiles the PTX of the first when it is loaded.
    const ARCHITECTURES: &str = "80,90,120";

    /// Writes `$OUT_DIR/kernels.fatbin` from `cu/all.cu`, and `$OUT_DIR/ptxas.txt`: registers and spills of each kernel.
    pub fn compile() {
        println!("cargo::rerun-if-changed=cu");
        for name in ["NVCC", "CUDA_HOME", "KVFERRY_CUDA_ARCHS"] {
            println!("cargo::rerun-if-env-changed={name}");
        }
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR"));
        let architectures = env::var("KVFERRY_CUDA_ARCHS").unwrap_or_else(|_| ARCHITECTURES.into());
        let mut nvcc = Command::new(compiler());
        nvcc.args([
            "-fatbin",
            "-O3",
            "-std=c++17",
            "--expt-extended-lambda",
            "-lineinfo",
            "--compress-mode=size",
        ]);
        nvcc.args(["--resource-usage", "--threads=0"]);
        for number in architectures.split(',') {
            nvcc.arg(format!("-gencode=arch=compute_{number},code=sm_{number}"));
        }
        let first = architectures.split(',').next().unwrap_or_default();
        nvcc.arg(format!("-gencode=arch=compute_{first},code=compute_{first}"));
        nvcc.arg("-o").arg(out.join("kernels.fatbin")).arg("cu/all.cu");
        let output = nvcc.output().unwrap_or_else(|error| {
            panic!("nvcc does not start ({error}): run scripts/cuda-setup, or set CUDA_HOME or NVCC")
        });
        let report = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "nvcc failed:\n{report}");
        fs::write(out.join("ptxas.txt"), report.as_bytes()).expect("OUT_DIR is writable");
    }

    fn compiler() -> PathBuf {
        let home = env::var_os("CUDA_HOME").map(|home| Path::new(&home).join("bin/nvcc"));
        let ours = Path::new("../.cuda/bin/nvcc").canonicalize().ok();
        env::var_os("NVCC").map(PathBuf::from).or(home).or(ours).unwrap_or_else(|| "nvcc".into())
    }
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
