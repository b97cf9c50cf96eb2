//! One of the two processes: a pool and a driver, doing what it is told on its standard input.

use std::io::BufRead;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, channel};
use std::time::Instant;

use transfer::driver::Driver;
use transfer::{
    Direction, DriverEvent, DriverHandle, Identity, Lane, PeerId, TransferError, TransportConfig,
};

use super::baseline;
use super::case::{Geometry, Shape};
use super::pool::Pool;
use super::protocol::{Answer, Command};
use crate::error::{BenchError, Result};
use crate::gpu::Device;

/// Not for users: a process that `bench transfer` starts.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The transport to open.
    #[arg(long)]
    pub transport: String,
    /// Decides the pool's content.
    #[arg(long)]
    pub seed: u64,
    /// Blocks of the pool.
    #[arg(long)]
    pub blocks: u32,
    /// The model's sizes, as JSON.
    #[arg(long)]
    pub geometry: String,
    /// Folder with NIXL.
    #[arg(long)]
    pub nixl_dir: Option<PathBuf>,
    /// Where the pool lies.
    #[arg(long, default_value = "cpu")]
    pub device: Device,
    /// What stands in for a GPU.
    #[arg(long)]
    pub cuda_emulator: Option<PathBuf>,
}

struct Endpoint {
    seed: u64,
    geometry: Geometry,
    pool: Pool,
    driver: DriverHandle,
    events: Receiver<DriverEvent>,
}

/// Serves until its input ends. Blocks: the process does nothing else.
pub fn run(args: &Args) -> Result<()> {
    let mut endpoint = Endpoint::new(args)?;
    for line in std::io::stdin().lock().lines() {
        let line = line.map_err(BenchError::io("reading a command"))?;
        let answer = match serde_json::from_str(&line) {
            // The port must be known before anyone connects to it.
            Ok(Command::TcpListen { bytes, repeats }) => endpoint.receive(bytes, repeats),
            Ok(command) => endpoint.obey(command),
            Err(error) => Err(error.to_string()),
        };
        say(&answer.unwrap_or_else(|reason| Answer::Failed { reason }));
    }
    endpoint.driver.stop();
    Ok(())
}

fn say(answer: &Answer) {
    println!("{}", serde_json::to_string(answer).expect("answers serialize. This is a bug."));
}

impl Endpoint {
    fn new(args: &Args) -> Result<Self> {
        let geometry: Geometry = serde_json::from_str(&args.geometry)
            .map_err(|error| BenchError::Usage(format!("--geometry: {error}")))?;
        let gpu = args.device.open(args.cuda_emulator.as_deref())?;
        let incarnation = rand::random();
        let config = TransportConfig {
            name: args.transport.clone(),
            nixl_dir: args.nixl_dir.clone(),
            incarnation,
            ..Default::default()
        };
        let is_shared = transfer::registry::maps_pools(&config);
        let pool = Pool::new(&geometry, args.blocks, args.seed, gpu.as_ref(), is_shared)?;
        let transport = transfer::open(&config, pool.region().clone())
            .map_err(|error| BenchError::Usage(error.to_string()))?;
        let (sender, events) = channel();
        let identity = Identity { incarnation, scratch: Some(pool.scratch) };
        let on_event = move |event| drop(sender.send(event));
        let driver = Driver::spawn(transport, identity, Box::new(on_event));
        // A worker with open tickets polls all the time, too.
        driver.expect_traffic(1).map_err(|error| BenchError::Usage(error.to_string()))?;
        Ok(Self { seed: args.seed, geometry, pool, driver, events })
    }

    fn obey(&mut self, command: Command) -> std::result::Result<Answer, String> {
        let text = |error: TransferError| error.to_string();
        match command {
            Command::Metadata => Ok(Answer::Metadata { metadata: self.driver.metadata().to_vec() }),
            Command::Add { peer, metadata } => {
                self.driver.add_peer(PeerId(peer), metadata).map_err(text)?;
                Ok(Answer::Added)
            }
            Command::Move { direction, shape, blocks, repeats } => {
                self.transfer(direction, shape, blocks, repeats)
            }
            Command::Verify { shape, blocks, source, swapped } => {
                Ok(Answer::Verified { wrong: self.verify(shape, blocks, source, swapped) })
            }
            Command::Memcpy { bytes, repeats } => {
                let seconds = self.pool.copies(bytes, repeats);
                Ok(Answer::Copied { seconds: seconds.map_err(|error| error.to_string())? })
            }
            Command::TcpSend { port, bytes, repeats, variant } => {
                let seconds = baseline::send(port, bytes, repeats, variant);
                Ok(Answer::Copied { seconds: seconds.map_err(|error| error.to_string())? })
            }
            Command::Probe { peer } => {
                Ok(Answer::Probed { report: self.driver.probe(PeerId(peer)).map_err(text)? })
            }
            Command::TcpListen { .. } => unreachable!("handled by run. This is a bug."),
        }
    }

    fn transfer(
        &self,
        direction: Direction,
        shape: Shape,
        blocks: u32,
        repeats: u32,
    ) -> std::result::Result<Answer, String> {
        let spans = self.geometry.spans(shape, blocks);
        let (mut seconds, mut post_seconds, mut carrier) = (Vec::new(), Vec::new(), None);
        for repeat in 0..=u64::from(repeats) {
            let ours = spans.clone();
            let start = Instant::now();
            self.driver
                .post(direction, PeerId(1), ours, b"bench".to_vec(), repeat)
                .map_err(|error| error.to_string())?;
            let (stats, lane) = self.settled()?;
            if repeat > 0 {
                seconds.push(start.elapsed().as_secs_f64());
                post_seconds.push(stats.post.as_secs_f64());
            }
            carrier = lane;
        }
        Ok(Answer::Moved { seconds, post_seconds, descriptors: spans.len() as u32, lane: carrier })
    }

    fn settled(&self) -> std::result::Result<(transfer::XferStats, Option<Lane>), String> {
        loop {
            match self.events.recv().map_err(|_| "the driver ended".to_owned())? {
                DriverEvent::Settled { result, lane, .. } => {
                    let lane = lane.map(|lane| (*lane).clone());
                    return result.map(|stats| (stats, lane)).map_err(|error| error.to_string());
                }
                DriverEvent::Notified { .. } => {}
                DriverEvent::PeerLost { error, .. } => return Err(error.to_string()),
            }
        }
    }

    fn verify(&self, shape: Shape, blocks: u32, source: u64, swapped: bool) -> u64 {
        let spans = self.geometry.spans(shape, blocks);
        let wrong = spans.iter().filter(|span| {
            let (here, there) = if swapped { (span.local, span.remote) } else { (span.remote, span.local) };
            ![0, span.len - 8].iter().all(|end| self.pool.holds(here + end, source, there + end))
        });
        let wrong = wrong.count() as u64;
        self.pool.fill(self.seed, 0, u64::from(blocks) * self.geometry.block_bytes());
        wrong
    }

    /// Says where it listens, then receives in this thread: the next command comes after the sender is done.
    fn receive(&self, bytes: u64, repeats: u32) -> std::result::Result<Answer, String> {
        let (listener, port) = baseline::listen().map_err(|error| error.to_string())?;
        say(&Answer::Listening { port });
        baseline::receive(&listener, bytes, repeats).map_err(|error| error.to_string())?;
        Ok(Answer::Added)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use kernels::cuda::emulator::Build;

    use super::*;

    /// The emulated GPU, where the other tests keep theirs.
    fn emulator() -> PathBuf {
        let test = std::env::current_exe().expect("this program has a path");
        let target = test.ancestors().nth(3).expect("tests are in target/PROFILE/deps");
        let sources = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../kernels/cu"));
        let cache = &target.join("tmp");
        let build = Build { sources, cache, address_sanitizer: false, mutation: None, files: &[] };
        build.library().expect("g++ compiles the kernels")
    }

    fn endpoint(seed: u64, device: Device) -> Endpoint {
        let geometry = Geometry { layers: 2, kv_heads: 2, head_dim: 32, block_size: 16 };
        let args = Args {
            transport: "socket".into(),
            seed,
            blocks: 9,
            geometry: serde_json::to_string(&geometry).unwrap(),
            nixl_dir: None,
            device,
            cuda_emulator: Some(emulator()),
        };
        Endpoint::new(&args).unwrap()
    }

    fn metadata(endpoint: &mut Endpoint) -> Vec<u8> {
        let Ok(Answer::Metadata { metadata }) = endpoint.obey(Command::Metadata) else { panic!() };
        metadata
    }

    #[test]
    fn pools_on_gpus_are_written_read_and_compared() {
        let (mut caller, mut peer) = (endpoint(1, Device::Cuda(0)), endpoint(2, Device::Cuda(1)));
        caller.obey(Command::Add { peer: 1, metadata: metadata(&mut peer) }).unwrap();
        for shape in [Shape::Span, Shape::Block, Shape::Layer] {
            for direction in [Direction::Write, Direction::Read] {
                let moved = caller.obey(Command::Move { direction, shape, blocks: 8, repeats: 2 });
                let Ok(Answer::Moved { seconds, descriptors, .. }) = moved else { panic!("{moved:?}") };
                let expected = caller.geometry.spans(shape, 8).len() as u32;
                assert_eq!((seconds.len(), descriptors), (2, expected));
                let (reader, source, swapped) = match direction {
                    Direction::Write => (&mut peer, 1, false),
                    Direction::Read => (&mut caller, 2, true),
                };
                let mut wrong = |source| {
                    let verified = reader.obey(Command::Verify { shape, blocks: 8, source, swapped });
                    let Ok(Answer::Verified { wrong }) = verified else { panic!("{verified:?}") };
                    wrong
                };
                assert_eq!(wrong(source), 0, "{shape:?} {direction:?}");
                // The first look restored what was there: a second one finds none of it.
                assert_eq!(wrong(source), u64::from(expected), "{shape:?} {direction:?}");
            }
        }
        let copied = caller.obey(Command::Memcpy { bytes: 8 * caller.geometry.block_bytes(), repeats: 3 });
        assert!(matches!(copied, Ok(Answer::Copied { seconds }) if seconds.len() == 3));
    }

    #[test]
    fn a_device_that_is_not_there_is_named() {
        let error = Device::Cuda(7).open(Some(&emulator())).unwrap_err().to_string();
        assert!(error.contains("cuda:7 does not exist"), "{error}");
    }
}
