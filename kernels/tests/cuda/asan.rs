//! All of these tests again with kernels compiled for AddressSanitizer: an access beyond any buffer ends the process.

use std::process::Command;

use kernels::cuda::emulator::Mutation;

use crate::pointwise::rms_norm_error;
use crate::support::{ASAN, faulty, runs_on_gpu};

/// This program with AddressSanitizer. Whether it passed, and what it wrote.
fn run(arguments: &[&str]) -> (bool, String) {
    let runtime = Command::new("g++").arg("-print-file-name=libasan.so").output().expect("g++ starts");
    let runtime = String::from_utf8(runtime.stdout).expect("a path").trim().to_owned();
    assert!(runtime.starts_with('/'), "g++ has no AddressSanitizer: {runtime:?}");
    let output = Command::new(std::env::current_exe().expect("this program has a path"))
        .args(arguments)
        .env(ASAN, "1")
        .env("LD_PRELOAD", runtime)
        // Rust's runtime keeps a few allocations for ever.
        .env("ASAN_OPTIONS", "detect_leaks=0:abort_on_error=0")
        .output()
        .expect("this program starts again");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    (output.status.success(), text)
}

#[test]
fn no_kernel_accesses_memory_beyond_its_buffers() {
    if runs_on_gpu() || std::env::var_os(ASAN).is_some() {
        return;
    }
    // Faults have compilers of their own to wait for and nothing to add here.
    let (passed, text) = run(&["--skip", "faults", "--skip", "asan", "--test-threads=2"]);
    assert!(passed && text.contains("test result: ok"), "{text}");
}

#[test]
fn sixteen_bytes_read_beyond_a_weight_are_found() {
    if runs_on_gpu() {
        return;
    }
    if std::env::var_os(ASAN).is_some() {
        let mutation = Mutation { file: "norm.cu", from: "w = weights[i];", to: "w = weights[i + 1];" };
        let _ = rms_norm_error(&faulty(mutation, &["norm.cu"], 0), 2, 1024, None);
        return;
    }
    let (passed, text) = run(&["--exact", "asan::sixteen_bytes_read_beyond_a_weight_are_found"]);
    assert!(!passed && text.contains("AddressSanitizer: heap-buffer-overflow"), "{text}");
}
