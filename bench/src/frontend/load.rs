//! Requests over some connections, one after the other on each, and how long each took.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use super::backend::MODEL;
use super::wire;

/// Digits that make each body another one, at the prompt's beginning: nothing is found in any cache.
const DIGITS: usize = 16;

/// What is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A completion of a few tokens.
    Small,
    /// A chat of a few tokens, streamed.
    ChatStream,
    /// A completion of a few tokens, streamed.
    Stream,
    /// A completion of some 2,300 tokens.
    Long,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Kind::Small => "small",
            Kind::ChatStream => "chat-stream",
            Kind::Stream => "stream",
            Kind::Long => "long",
        }
    }
}

/// Where the requests go.
#[derive(Clone, Debug)]
pub struct Target {
    /// `host:port`
    pub address: String,
    pub model: String,
}

/// How long, or how many.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    Time(Duration),
    Count(u64),
}

/// One run.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Outcome {
    pub requests: u64,
    pub failed: u64,
    /// The first failure.
    pub failure: Option<String>,
    pub seconds: f64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
}

impl Outcome {
    pub fn rate(&self) -> f64 {
        self.requests as f64 / self.seconds.max(1e-9)
    }
}

/// What all connections share.
struct Shared {
    kind: Kind,
    target: Target,
    sent: AtomicU64,
    nonce: u64,
    until: Until,
    started: Instant,
    failure: Mutex<Option<String>>,
    failed: AtomicU64,
}

/// Sends requests of `kind` over `connections` at a time, on a thread of its own.
pub fn run(kind: Kind, target: &Target, connections: usize, until: Until, nonce: u64) -> io::Result<Outcome> {
    let target = target.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let thread = std::thread::spawn(move || {
        let shared = Arc::new(Shared {
            kind,
            target,
            sent: AtomicU64::new(0),
            nonce,
            until,
            started: Instant::now(),
            failure: Mutex::default(),
            failed: AtomicU64::new(0),
        });
        let micros = runtime.block_on(async {
            let tasks: Vec<_> = (0..connections).map(|_| tokio::spawn(connection(shared.clone()))).collect();
            let mut micros = Vec::new();
            for task in tasks {
                micros.extend(task.await.unwrap_or_default());
            }
            micros
        });
        outcome(&shared, micros)
    });
    thread.join().map_err(|_| io::Error::other("the load generator panicked"))
}

fn outcome(shared: &Shared, mut micros: Vec<u32>) -> Outcome {
    micros.sort_unstable();
    let at = |share: f64| match micros.len() {
        0 => 0.0,
        len => f64::from(micros[((len - 1) as f64 * share) as usize]) / 1e3,
    };
    Outcome {
        requests: micros.len() as u64,
        failed: shared.failed.load(Ordering::Relaxed),
        failure: shared.failure.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        seconds: shared.started.elapsed().as_secs_f64(),
        p50_ms: at(0.5),
        p99_ms: at(0.99),
        max_ms: at(1.0),
    }
}

async fn connection(shared: Arc<Shared>) -> Vec<u32> {
    let mut micros = Vec::new();
    let (mut template, digits) = template(&shared.target, shared.kind);
    let mut received = Vec::with_capacity(16 << 10);
    let mut stream: Option<TcpStream> = None;
    while let Some(number) = shared.next() {
        write_digits(&mut template[digits..digits + DIGITS], shared.nonce ^ number);
        let sent = Instant::now();
        match one(&shared.target, &mut stream, &template, &mut received).await {
            Ok(()) => micros.push(sent.elapsed().as_micros().min(u128::from(u32::MAX)) as u32),
            Err(error) => {
                stream = None;
                shared.failed.fetch_add(1, Ordering::Relaxed);
                shared
                    .failure
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error.to_string());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }
    micros
}

impl Shared {
    /// Number of the next request; `None` when there are enough.
    fn next(&self) -> Option<u64> {
        let number = self.sent.fetch_add(1, Ordering::Relaxed);
        let goes_on = match self.until {
            Until::Time(time) => self.started.elapsed() < time,
            Until::Count(count) => number < count,
        };
        goes_on.then_some(number)
    }
}

async fn one(
    target: &Target,
    stream: &mut Option<TcpStream>,
    request: &[u8],
    received: &mut Vec<u8>,
) -> io::Result<()> {
    let stream = match stream {
        Some(stream) => stream,
        None => {
            let connected = TcpStream::connect(&target.address).await?;
            connected.set_nodelay(true)?;
            stream.insert(connected)
        }
    };
    received.clear();
    stream.write_all(request).await?;
    let head = wire::read_head(stream, received).await?;
    let head = head.ok_or_else(|| io::Error::new(io::ErrorKind::UnexpectedEof, "closed before an answer"))?;
    wire::read_body(stream, received, head).await?;
    let streamed = head.chunked && wire::find(received, b"text/event-stream").is_some();
    let whole = !streamed || wire::find(received, b"data: [DONE]").is_some();
    match (head.status, whole) {
        (200, true) => Ok(()),
        (200, false) => Err(io::Error::other("a stream ended without [DONE]")),
        (status, _) => {
            let body = String::from_utf8_lossy(&received[head.end..]).chars().take(200).collect::<String>();
            Err(io::Error::other(format!("status {status}: {body}")))
        }
    }
}

/// A request whose digits are to be filled in, and where they are.
fn template(target: &Target, kind: Kind) -> (Vec<u8>, usize) {
    const HOLE: &str = "@@@@@@@@@@@@@@@@";
    let model = &target.model;
    let prompt = match kind {
        Kind::Long => format!("{HOLE} {}", long_text()),
        _ => format!("{HOLE} Why is the sky blue?"),
    };
    let (path, body) = match kind {
        Kind::ChatStream => (
            "/v1/chat/completions",
            format!(
                r#"{{"model":"{model}","messages":[{{"role":"user","content":"{prompt}"}}],"max_tokens":8,"stream":true}}"#
            ),
        ),
        Kind::Stream => (
            "/v1/completions",
            format!(r#"{{"model":"{model}","prompt":"{prompt}","max_tokens":8,"stream":true}}"#),
        ),
        Kind::Small | Kind::Long => {
            ("/v1/completions", format!(r#"{{"model":"{model}","prompt":"{prompt}","max_tokens":8}}"#))
        }
    };
    let request = format!(
        "POST {path} HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        target.address,
        body.len()
    )
    .into_bytes();
    let at = wire::find(&request, HOLE.as_bytes()).expect("written above. This is a bug.");
    (request, at)
}

/// Some 2,300 tokens of ordinary words.
fn long_text() -> String {
    let words = crate::prompts::WORDS;
    (0..2_280).map(|i| words[(i * i + 7 * i) % words.len()]).collect::<Vec<_>>().join(" ")
}

fn write_digits(hole: &mut [u8], number: u64) {
    // Scrambled, so that the first digits differ already.
    let mut value = number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    for digit in hole {
        *digit = b"0123456789abcdef"[(value >> 60) as usize];
        value <<= 4;
    }
}

/// The model that the trivial worker has.
pub fn default_model() -> String {
    MODEL.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_body_is_another_one_of_the_length_it_says() {
        for kind in [Kind::Small, Kind::ChatStream, Kind::Stream, Kind::Long] {
            let target = Target { address: "a:1".into(), model: "m".into() };
            let (mut request, at) = template(&target, kind);
            write_digits(&mut request[at..at + DIGITS], 1);
            let first = request.clone();
            write_digits(&mut request[at..at + DIGITS], 2);
            assert_ne!(first[at..at + 4], request[at..at + 4]);
            let text = String::from_utf8(request).unwrap();
            let (head, body) = text.split_once("\r\n\r\n").unwrap();
            assert!(head.ends_with(&format!("content-length: {}", body.len())));
            assert!(serde_json::from_str::<serde_json::Value>(body).is_ok(), "{body}");
        }
    }

    #[test]
    fn a_trivial_worker_answers_every_kind() {
        let target = Target {
            address: format!("127.0.0.1:{}", super::super::backend::start(0).unwrap()),
            model: MODEL.into(),
        };
        for kind in [Kind::Small, Kind::ChatStream, Kind::Stream, Kind::Long] {
            let outcome = run(kind, &target, 3, Until::Count(30), 1).unwrap();
            assert_eq!((outcome.requests, outcome.failed), (30, 0), "{kind:?}: {:?}", outcome.failure);
        }
    }
}
