//! A build with CUDA on a machine that has none, and streams that are as late as a GPU's may be.

use kernels::cuda::Gpu;

use crate::support::{on_every_device, runs_on_gpu};

/// Libraries of CUDA that this process has loaded.
fn loaded() -> Vec<String> {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("this system has /proc");
    let names = ["libcuda.so", "libcudart", "libcublas", "libnvidia-ml", "libnvrtc"];
    maps.lines().filter(|line| names.iter().any(|name| line.contains(name))).map(str::to_owned).collect()
}

/// Nothing of CUDA is linked, so that one program starts everywhere.
#[test]
fn a_build_with_cuda_starts_without_it_and_says_what_lacks() {
    if runs_on_gpu() {
        return;
    }
    assert_eq!(loaded(), Vec::<String>::new());
    match (Gpu::open(0), cfg!(feature = "cuda")) {
        (Ok(gpu), _) => assert!(gpu.info().capability >= (8, 0)),
        (Err(error), false) => assert!(error.to_string().contains("--features cuda"), "{error}"),
        (Err(error), true) if loaded().is_empty() => {
            assert!(error.to_string().starts_with("libcuda was not found: no NVIDIA driver"), "{error}");
        }
        // A driver without a device: whatever it says.
        (Err(error), true) => assert!(error.to_string().contains("cu"), "{error}"),
    }
}

/// A GPU may be done long before; the emulated one never is, so that whoever does not wait is found.
#[test]
fn an_emulated_stream_does_nothing_until_it_is_waited_for() {
    if runs_on_gpu() {
        return;
    }
    on_every_device(|gpu| {
        let buffer = gpu.buffer_of(&[1u8; 16]).unwrap();
        let mut pinned = gpu.pinned(16).unwrap();
        let mut seen = [0; 16];
        // The other stream does not wait for this one.
        gpu.zero(buffer.view()).unwrap();
        buffer.read(0, &mut seen).unwrap();
        assert_eq!(seen, [1; 16]);
        let mark = gpu.mark().unwrap();
        // What is written to memory that an upload still reads is what arrives.
        pinned.bytes_mut().fill(2);
        // SAFETY: that it is written before the stream is waited for is what is shown.
        unsafe { gpu.upload(buffer.view(), &pinned).unwrap() };
        pinned.bytes_mut().fill(3);
        // A mark ends before what comes after it.
        mark.wait().unwrap();
        buffer.read(0, &mut seen).unwrap();
        assert_eq!(seen, [0; 16]);
        assert_eq!(buffer.to_vec::<u8>().unwrap(), [3; 16]);
    });
}

/// On a GPU it would read and write what has the memory now.
#[test]
fn replaying_a_graph_whose_memory_was_freed_is_an_error() {
    if runs_on_gpu() {
        return;
    }
    on_every_device(|gpu| {
        let (first, second) = (gpu.buffer_of(&[1u8; 64]).unwrap(), gpu.buffer_of(&[1u8; 64]).unwrap());
        let graph = gpu.capture(|| gpu.zero(first.view().part(16, 16))).unwrap();
        drop(second);
        // SAFETY: the graph names the first buffer alone.
        unsafe { graph.replay().unwrap() };
        assert_eq!(first.to_vec::<u8>().unwrap()[15..33], [[1].as_slice(), &[0; 16], &[1]].concat());
        drop(first);
        // Most likely at the same address.
        let again = gpu.buffer_of(&[1u8; 64]).unwrap();
        // SAFETY: that the emulator refuses is what is shown.
        let error = unsafe { graph.replay() }.unwrap_err().to_string();
        assert!(error.contains("memory was freed"), "{error}");
        assert_eq!(again.to_vec::<u8>().unwrap(), [1; 64]);
    });
}

/// A transport's thread copies whenever it wants to; the driver is told to watch only the thread that captures.
#[test]
fn other_threads_copy_and_allocate_while_a_graph_is_captured() {
    on_every_device(|gpu| {
        let buffer = gpu.buffer_of(&[1u8; 16]).unwrap();
        let (mut seen, mut refused, mut kept) = ([0; 16], String::new(), None);
        let graph = gpu.capture(|| {
            std::thread::scope(|scope| {
                let copies = scope.spawn(|| {
                    buffer.write(0, &[2; 16]).unwrap();
                    buffer.read(0, &mut seen).unwrap();
                    // Dropped later: that waits for the stream.
                    kept = Some(gpu.alloc(16).unwrap());
                });
                copies.join().expect("it copies")
            });
            if gpu.is_emulated() {
                refused = gpu.alloc(16).unwrap_err().to_string();
            }
            gpu.zero(buffer.view())
        });
        let graph = graph.unwrap();
        assert!(kept.is_some() && seen == [2; 16]);
        assert!(!gpu.is_emulated() || refused.contains("not allowed while a graph is captured"), "{refused}");
        // SAFETY: the buffer is alive.
        unsafe { graph.replay().unwrap() };
        assert_eq!(buffer.to_vec::<u8>().unwrap(), [0; 16]);
    });
}
