//! GB/s of each transport between two processes of this machine, through the driver.
//!
//! `cargo run --release -p transfer --example throughput [transport]...` moves the KV of 1,040 tokens of
//! Qwen3-0.6B (65 blocks of 1,835,008 bytes, no two adjacent) again and again.

use std::env;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use transfer::driver::Driver;
use transfer::{DriverEvent, DriverHandle, Identity, PeerId, Region, TransportConfig, coalesce, open};

const BLOCK: u64 = 1_835_008;
const BLOCKS: u32 = 65;
const ROUNDS: u64 = 20;
const ROLE: &str = "KVFERRY_THROUGHPUT_ROLE";

fn main() {
    let names: Vec<String> = env::args().skip(1).collect();
    match env::var(ROLE).as_deref() {
        Ok("receiver") => receive(&names[0]),
        Ok("writer") => write(&names[0], &names[1]),
        _ if names.is_empty() => ["socket", "tcp", "shm"].iter().for_each(|name| measure(name)),
        _ => names.iter().for_each(|name| measure(name)),
    }
}

/// A receiver and a writer, each a process of its own: UCX's settings are a process's.
fn measure(name: &str) {
    let program = env::current_exe().expect("this program has a path");
    let mut receiver = Command::new(&program)
        .arg(name)
        .env(ROLE, "receiver")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("this program starts");
    let mut metadata = String::new();
    BufReader::new(receiver.stdout.take().expect("piped")).read_line(&mut metadata).expect("text");
    let writer = Command::new(&program).args([name, metadata.trim()]).env(ROLE, "writer").status();
    drop(receiver.stdin.take());
    let received = receiver.wait().expect("a child");
    assert!(writer.expect("this program starts").success() && received.success(), "{name} failed");
}

fn start(name: &str) -> (DriverHandle, Receiver<DriverEvent>, Vec<u8>) {
    let bytes = 2 * u64::from(BLOCKS) * BLOCK;
    let mut words: Vec<u64> = Vec::with_capacity(bytes as usize / 8);
    // In huge pages, as the engine's pool. SAFETY: advice on whole pages inside an allocation of ours; it changes
    // no content, and where it fails the pages stay small.
    unsafe {
        let start = words.as_mut_ptr().cast::<libc::c_void>();
        let offset = start.align_offset(4096);
        libc::madvise(start.byte_add(offset), (bytes as usize - offset) & !4095, libc::MADV_HUGEPAGE);
    }
    words.resize(bytes as usize / 8, 1);
    let words = Arc::new(words);
    let base = NonNull::new(words.as_ptr() as *mut u8).expect("a vector has an address");
    // SAFETY: the vector lives as long as the region and nothing else touches it.
    let pool = unsafe { Region::new(base, bytes as usize, words) };
    let config = TransportConfig { name: name.into(), ..Default::default() };
    let transport = open(&config, pool).unwrap_or_else(|e| panic!("{name}: {e}"));
    let (sender, events) = channel();
    let identity = Identity::default();
    let driver = Driver::spawn(transport, identity, Box::new(move |event| drop(sender.send(event))));
    let metadata = driver.metadata().to_vec();
    (driver, events, metadata)
}

fn receive(name: &str) {
    let (driver, _events, metadata) = start(name);
    driver.expect_traffic(1).expect("just started");
    println!("{}", metadata.iter().map(|b| format!("{b:02x}")).collect::<String>());
    // The parent closes our input when the writer is done.
    let _ = std::io::stdin().lines().count();
    driver.stop();
}

fn write(name: &str, metadata: &str) {
    let (driver, events, _) = start(name);
    let metadata =
        (0..metadata.len()).step_by(2).map(|i| u8::from_str_radix(&metadata[i..i + 2], 16).expect("hex"));
    driver.add_peer(PeerId(1), metadata.collect()).expect("the receiver is there");
    let spans = coalesce((0..BLOCKS).map(|i| (2 * i, 2 * i + 1)), BLOCK);
    let mut rates: Vec<f64> = (0..ROUNDS)
        .map(|round| {
            driver.post_write(PeerId(1), spans.clone(), b"done".to_vec(), round).expect("running");
            match events.recv().expect("running") {
                DriverEvent::Settled { result: Ok(stats), .. } => {
                    stats.bytes as f64 / stats.wire.as_secs_f64() / 1e9
                }
                other => panic!("{other:?}"),
            }
        })
        // The first one connects and touches every page.
        .skip(1)
        .collect();
    rates.sort_by(f64::total_cmp);
    let median = rates[rates.len() / 2];
    println!(
        "{name:8} median {median:5.2} GB/s, best {:5.2}, worst {:5.2}",
        rates[rates.len() - 1],
        rates[0]
    );
    driver.stop();
}
