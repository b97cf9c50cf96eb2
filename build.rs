//! The one build script; members name it with `build = "../build.rs"`.
//!
//! A member gets what its features ask for. Without features nothing is generated: the bindings of NIXL
//! and UCX are committed, so an ordinary build needs no libclang; CUDA kernels are compiled with `--features cuda` only.
// Each member declares only its own features; the others' names are unknown to the compiler there.
#![allow(unexpected_cfgs)]

fn main() {
    println!("cargo::rerun-if-changed=../build.rs");
    #[cfg(feature = "bindgen")]
    bindings::generate();
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
mod bindings {
    use std::path::PathBuf;
    use std::process::Command;
    use std::{env, fs};

    const NIXL: &str = "nixl/nixl_capi.h";

    /// The functions of UCP that we call, and the constants that go with them; types follow by themselves.
    const UCP_FUNCTIONS: &str = "ucp_(get_version|init_version|cleanup|worker_create|worker_destroy|worker_progress|\
        worker_get_address|worker_release_address|worker_set_am_recv_handler|ep_create|ep_close_nbx|ep_flush_nbx|mem_map|\
        mem_unmap|rkey_pack|rkey_buffer_release|ep_rkey_unpack|rkey_destroy|put_nbx|get_nbx|am_send_nbx|\
        request_check_status|request_free)|ucs_status_string";
    const UCP_TYPES: &str = "ucp_(params_field|feature|worker_params_field|ep_params_field|err_handling_mode_t|\
        mem_map_params_field|op_attr_t|am_handler_param_field|am_cb_flags|send_am_flags|am_recv_attr_t|\
        ep_close_flags_t)|ucs_(thread_mode_t|memory_type_t|status_t)";

    /// Writes `$OUT_DIR/nixl_capi.rs` from our header and, where `UCX_INCLUDE` names UCX's headers, `$OUT_DIR/ucp.rs`.
    pub fn generate() {
        println!("cargo::rerun-if-changed={NIXL}");
        println!("cargo::rerun-if-env-changed=LIBCLANG_PATH");
        println!("cargo::rerun-if-env-changed=UCX_INCLUDE");
        let nixl = common("NixlCapi")
            .header(NIXL)
            .allowlist_function("nixl_capi_.*")
            .allowlist_type("nixl_capi_.*")
            .default_enum_style(bindgen::EnumVariation::NewType { is_bitfield: false, is_global: false });
        write(nixl, "nixl_capi.rs");
        if let Ok(include) = env::var("UCX_INCLUDE") {
            let ucp = common("UcpApi")
                .header_contents("ucp.h", "#include <ucp/api/ucp.h>\n")
                .clang_arg(format!("-I{include}"))
                .allowlist_function(UCP_FUNCTIONS)
                .allowlist_type(UCP_TYPES)
                .allowlist_var("UCP_API_MAJOR|UCP_API_MINOR")
                .generate_comments(false)
                .layout_tests(false)
                .prepend_enum_name(false)
                .default_enum_style(bindgen::EnumVariation::Consts);
            write(ucp, "ucp.rs");
        }
    }

    fn common(library: &str) -> bindgen::Builder {
        let mut builder = bindgen::Builder::default()
            .clang_args(["-x", "c", "-std=c11"])
            .dynamic_library_name(library)
            // A symbol that is absent is reported by name when the library is loaded, not all at once.
            .dynamic_link_require_all(false)
            .wrap_unsafe_ops(true)
            .rust_edition(bindgen::RustEdition::Edition2024)
            .disable_header_comment();
        if let Some(include) = compiler_include_dir() {
            builder = builder.clang_args(["-isystem", &include]);
        }
        builder
    }

    fn write(builder: bindgen::Builder, file: &str) {
        let out = PathBuf::from(env::var("OUT_DIR").expect("cargo sets OUT_DIR")).join(file);
        let bindings = builder.generate().expect("bindgen could not read the headers");
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
