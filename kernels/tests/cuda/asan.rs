//! All of these tests again with kernels compiled for AddressSanitizer: an access beyond any buffer ends the process.

use std::process::Command;

use crate::support::{ASAN, runs_on_gpu};

#[test]
fn no_kernel_accesses_memory_beyond_its_buffers() {
    if runs_on_gpu() || std::env::var_os(ASAN).is_some() {
        return;
    }
    let runtime = Command::new("g++").arg("-print-file-name=libasan.so").output().expect("g++ starts");
    let runtime = String::from_utf8(runtime.stdout).expect("a path").trim().to_owned();
    assert!(runtime.starts_with('/'), "g++ has no AddressSanitizer: {runtime:?}");
    let output = Command::new(std::env::current_exe().expect("this program has a path"))
        // Faults have compilers of their own to wait for and nothing to add here.
        .args(["--skip", "faults", "--skip", "asan", "--test-threads=2"])
        .env(ASAN, "1")
        .env("LD_PRELOAD", runtime)
        // Rust's runtime keeps a few allocations for ever.
        .env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0")
        .output()
        .expect("this program starts again");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("test result: ok"), "{text}");
}
