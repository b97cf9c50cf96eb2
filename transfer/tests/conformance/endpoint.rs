//! One endpoint: a transport driven by lines of text.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use transfer::{Direction, Event, Lane, PeerId, Region, Span, Transport, TransportConfig, open};

use crate::pool;

/// How long an endpoint waits for an event that the test expects.
const PATIENCE: Duration = Duration::from_secs(10);

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    Metadata,
    Add {
        peer: u64,
        metadata: String,
    },
    Post {
        direction: Direction,
        peer: u64,
        notification: String,
        spans: Vec<(u64, u64, u64)>,
        then_remove: bool,
    },
    Remove {
        peer: u64,
    },
    Fill {
        seed: u64,
    },
    Checksum,
    Lane {
        direction: Direction,
    },
    /// Answers with the next event.
    Event,
    /// Stands still until the next `Resume`: what SIGSTOP is to a process.
    Pause,
    Resume,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Answer {
    Ok,
    Error(String),
    Metadata(String),
    Checksum(u64),
    Lane(Option<Lane>),
    Posted {
        xfer: u64,
    },
    /// A write.
    Settled {
        xfer: u64,
        bytes: u64,
        descriptors: u32,
    },
    /// A read, with the checksum of the reader's pool at that moment.
    Read {
        xfer: u64,
        bytes: u64,
        descriptors: u32,
        checksum: u64,
    },
    Failed {
        xfer: u64,
        label: String,
    },
    Notified {
        payload: String,
        checksum: u64,
    },
    Lost {
        peer: u64,
    },
    NoEvent,
}

impl Answer {
    #[track_caller]
    pub fn xfer(&self) -> u64 {
        let Self::Posted { xfer } = self else { panic!("{self:?} is no posted transfer") };
        *xfer
    }

    #[track_caller]
    pub fn settled(&self) -> u64 {
        match self {
            Self::Settled { xfer, .. } | Self::Read { xfer, .. } => *xfer,
            other => panic!("{other:?} is no settled transfer"),
        }
    }

    #[track_caller]
    pub fn payload(self) -> String {
        let Self::Notified { payload, .. } = self else { panic!("{self:?} is no notification") };
        payload
    }
}

struct Endpoint {
    transport: Box<dyn Transport>,
    pool: Region,
    events: VecDeque<Answer>,
}

/// Before a backend's name: with a pool that the processor cannot reach.
const ON_DEVICE: &str = "device:";

/// Serves commands until their sender is gone. Polls all the while, as a driver does.
pub fn serve(name: &str, seed: u64, commands: &Receiver<String>, answer: impl Fn(String)) {
    let (name, pool) = match name.strip_prefix(ON_DEVICE) {
        Some(name) => (name, pool::device_region()),
        None if name == "mmap" => (name, pool::shared_region()),
        None => (name, pool::region()),
    };
    pool::fill(&pool, seed);
    let config = TransportConfig { name: name.into(), incarnation: seed, ..Default::default() };
    let transport = open(&config, pool.clone()).unwrap_or_else(|e| panic!("{name} does not open: {e}"));
    let mut endpoint = Endpoint { transport, pool, events: VecDeque::new() };
    loop {
        match commands.recv_timeout(Duration::from_micros(50)) {
            Ok(line) => {
                let command = serde_json::from_str(&line).expect("the test sends commands");
                if matches!(command, Command::Pause) {
                    // Returns when a Resume or the end comes.
                    let _ = commands.recv();
                    continue;
                }
                let reply = endpoint.obey(command);
                answer(serde_json::to_string(&reply).expect("answers serialize"));
            }
            Err(RecvTimeoutError::Timeout) => endpoint.poll(),
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

impl Endpoint {
    fn obey(&mut self, command: Command) -> Answer {
        match command {
            Command::Metadata => Answer::Metadata(to_hex(&self.transport.metadata())),
            Command::Add { peer, metadata } => self.add(peer, &metadata),
            Command::Post { direction, peer, notification, spans, then_remove } => {
                let posted = self.post(direction, peer, &notification, &spans);
                if then_remove {
                    self.transport.remove_peer(PeerId(peer));
                }
                posted
            }
            Command::Remove { peer } => {
                self.transport.remove_peer(PeerId(peer));
                Answer::Ok
            }
            Command::Fill { seed } => {
                pool::fill(&self.pool, seed);
                Answer::Ok
            }
            Command::Checksum => Answer::Checksum(pool::checksum(&self.pool)),
            Command::Lane { direction } => Answer::Lane(self.transport.lane(direction)),
            Command::Event => self.event(),
            Command::Pause | Command::Resume => Answer::Ok,
        }
    }

    fn add(&mut self, peer: u64, metadata: &str) -> Answer {
        match self.transport.add_peer(PeerId(peer), &from_hex(metadata)) {
            Ok(()) => Answer::Ok,
            Err(error) => Answer::Error(error.label().into()),
        }
    }

    fn post(
        &mut self,
        direction: Direction,
        peer: u64,
        notification: &str,
        spans: &[(u64, u64, u64)],
    ) -> Answer {
        let spans: Vec<_> = spans.iter().map(|&(local, remote, len)| Span { local, remote, len }).collect();
        match self.transport.post(direction, PeerId(peer), &spans, notification.as_bytes()) {
            Ok(xfer) => Answer::Posted { xfer: xfer.0 },
            Err(error) => Answer::Error(error.label().into()),
        }
    }

    fn event(&mut self) -> Answer {
        let deadline = Instant::now() + PATIENCE;
        while self.events.is_empty() && Instant::now() < deadline {
            self.poll();
            std::thread::sleep(Duration::from_micros(30));
        }
        self.events.pop_front().unwrap_or(Answer::NoEvent)
    }

    fn poll(&mut self) {
        let mut events = Vec::new();
        self.transport.poll(&mut events).expect("polling works");
        for event in events {
            self.events.push_back(match event {
                Event::Settled { xfer, result: Ok(stats), .. } => {
                    assert!(stats.wire >= stats.post);
                    let (xfer, bytes, descriptors) = (xfer.0, stats.bytes, stats.descriptors);
                    match stats.direction {
                        Direction::Write => Answer::Settled { xfer, bytes, descriptors },
                        Direction::Read => {
                            Answer::Read { xfer, bytes, descriptors, checksum: pool::checksum(&self.pool) }
                        }
                    }
                }
                Event::Settled { xfer, result: Err(error), .. } => {
                    Answer::Failed { xfer: xfer.0, label: error.label().into() }
                }
                // The checksum is of this moment: all bytes must be there by now.
                Event::Notified { payload } => Answer::Notified {
                    payload: String::from_utf8(payload).expect("the tests send text"),
                    checksum: pool::checksum(&self.pool),
                },
                Event::PeerLost { peer, .. } => Answer::Lost { peer: peer.0 },
            });
        }
    }
}

fn to_hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).expect("hex")).collect()
}
