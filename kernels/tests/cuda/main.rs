//! The CUDA kernels against f64, on the CPU through the emulator, in several orders of threads.
//!
//! With `KVFERRY_TEST_DEVICE=cuda:0` (and `--features cuda`) the same tests run on a GPU. `asan` runs all of them again
//! under AddressSanitizer, `faults` on sources with planted faults, which must be found.

mod asan;
mod attention;
mod blocks;
mod driver;
mod faults;
mod linear;
mod pointwise;
mod qkv;
mod sample;
mod support;
