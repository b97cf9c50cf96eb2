//! The decode worker's end: keeps a link to each prefill worker.

use std::io::ErrorKind;
use std::time::Duration;

use engine::event::{Event, PeerRole, PrefillLink};
use engine::handoff::PeerMessage;
use futures_util::{SinkExt, StreamExt};
use tokio::net::TcpStream;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::http::StatusCode;
use tokio_tungstenite::tungstenite::{Error as WsError, Message};
use transfer::{PeerId, ProbeReport};

use super::demand::Demand;
use super::frame::{Frame, Greeting};
use super::peers::{Peers, Standing};
use super::{HANDSHAKE, LinkContext, PATH, PINGS, misfit};
use crate::config::PeerUrl;

/// Pause after a link is lost or refused; doubled up to the second.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// Why there is no link.
pub(super) enum Failure {
    /// Nothing listens there: the process is dead.
    Dead(String),
    Lost(String),
    Misfit(String),
}

impl Failure {
    pub(super) fn into_reason(self) -> String {
        match self {
            Self::Dead(reason) | Self::Lost(reason) | Self::Misfit(reason) => reason,
        }
    }
}

/// Keeps a link to `url` until the task is aborted.
pub async fn keep(context: LinkContext, url: PeerUrl, peers: Peers, demand: Demand) {
    let mut retry = RETRY.0;
    // The peer of the last link, as long as it may still write here.
    let mut previous: Option<PeerId> = None;
    loop {
        let failure = match connect(&context, &url, false).await {
            Ok((socket, theirs)) => {
                let peer = context.new_peer();
                match context.add_peer(peer, theirs.hello.metadata.clone()).await {
                    Ok(()) => {
                        // The transport has carried out the removal of the old peer: it takes commands in order.
                        if let Some(previous) = previous.take() {
                            context.engine.send(Event::PeerGone(previous));
                        }
                        retry = RETRY.0;
                        previous = Some(peer);
                        let mut up = None;
                        let on_up = || {
                            up = Some(demand.is_up(theirs.hello.incarnation, peer));
                            peers.link(&url, Some(peer));
                            // Not before: a worker that is ready sends its prompts there.
                            peers.set(&url, Standing::Up { max_prompt: theirs.max_prompt_tokens });
                        };
                        let failure = run(&context, peer, socket, &url, &theirs, false, on_up).await;
                        drop(up);
                        peers.link(&url, None);
                        context.engine.send(Event::PeerDown(peer));
                        // Fences what the old link may still write, before a new one is tried.
                        let _ = context.driver.remove_peer(peer);
                        failure
                    }
                    Err(error) => Failure::Lost(format!("the KV transport cannot reach it: {error}")),
                }
            }
            Err(failure) => failure,
        };
        match failure {
            Failure::Dead(reason) => {
                if let Some(previous) = previous.take() {
                    context.engine.send(Event::PeerGone(previous));
                }
                peers.set(&url, Standing::Down(reason));
            }
            Failure::Lost(reason) => peers.set(&url, Standing::Down(reason)),
            Failure::Misfit(reason) => peers.set(&url, Standing::Refused(reason)),
        }
        sleep(retry).await;
        retry = (retry * 2).min(RETRY.1);
    }
}

pub(super) type Socket = WebSocketStream<TcpStream>;

/// A connection to a prefill worker that fits, and what it says of itself.
pub(super) async fn connect(
    context: &LinkContext,
    url: &PeerUrl,
    on_demand: bool,
) -> Result<(Socket, Greeting), Failure> {
    match timeout(HANDSHAKE, handshake(context, url, on_demand)).await {
        Ok(result) => result,
        Err(_) => Err(Failure::Lost(format!("no answer within {HANDSHAKE:?}"))),
    }
}

async fn handshake(
    context: &LinkContext,
    url: &PeerUrl,
    on_demand: bool,
) -> Result<(Socket, Greeting), Failure> {
    let stream =
        TcpStream::connect((url.host.as_str(), url.port)).await.map_err(|error| match error.kind() {
            ErrorKind::ConnectionRefused => Failure::Dead(error.to_string()),
            _ => Failure::Lost(error.to_string()),
        })?;
    stream.set_nodelay(true).map_err(|error| Failure::Lost(error.to_string()))?;
    let request = format!("ws://{}{PATH}", url.to_string().trim_start_matches("http://"));
    let (mut socket, _) =
        tokio_tungstenite::client_async(request, stream).await.map_err(|error| match error {
            WsError::Http(response) => {
                let body = response.body().as_deref().map(String::from_utf8_lossy).unwrap_or_default();
                let said = format!("HTTP {}: {}", response.status(), body.trim());
                // A worker of ours, of another role.
                let misdirected = response.status() == StatusCode::MISDIRECTED_REQUEST;
                if misdirected { Failure::Misfit(said) } else { Failure::Lost(said) }
            }
            other => Failure::Lost(other.to_string()),
        })?;
    let lost = |error: WsError| Failure::Lost(error.to_string());
    let hello = Frame::Hello(Box::new(Greeting { on_demand, ..(*context.greeting).clone() }));
    socket.send(Message::Binary(hello.encode())).await.map_err(lost)?;
    loop {
        let Some(message) = socket.next().await.transpose().map_err(lost)? else {
            return Err(Failure::Lost("closed during the handshake".into()));
        };
        let Message::Binary(bytes) = message else { continue };
        return match Frame::decode(&bytes) {
            Ok(Frame::Hello(theirs)) => match context.greeting.hello.check(&theirs.hello) {
                Ok(()) if theirs.hello.role.as_deref() == Some("prefill") => Ok((socket, *theirs)),
                Ok(()) => {
                    let role = theirs.hello.role.as_deref().unwrap_or("unknown");
                    Err(Failure::Misfit(format!("its role is {role}, expected prefill")))
                }
                Err(found) => Err(Failure::Misfit(misfit(found.field, &found.theirs, &found.ours))),
            },
            Ok(Frame::Refused { reason, permanent: true }) => Err(Failure::Misfit(reason)),
            Ok(Frame::Refused { reason, permanent: false }) => Err(Failure::Lost(reason)),
            Ok(Frame::Message(_)) => Err(Failure::Lost("a message before the handshake".into())),
            Err(error) => Err(Failure::Misfit(format!("it does not speak this protocol: {error}"))),
        };
    }
}

/// Carries messages until the link ends; says why it did.
#[expect(clippy::too_many_arguments, reason = "a link is all of these")]
pub(super) async fn run(
    context: &LinkContext,
    peer: PeerId,
    mut socket: Socket,
    url: &PeerUrl,
    theirs: &Greeting,
    on_demand: bool,
    on_up: impl FnOnce(),
) -> Failure {
    let (outbox, mut messages) = unbounded_channel();
    let probed = match on_demand {
        true => None,
        false => match probe(context, peer, url, &mut socket).await {
            Ok(probed) => probed,
            Err(failure) => return failure,
        },
    };
    let role = PeerRole::Prefill(PrefillLink {
        direction: context.direction(probed.as_ref()),
        max_prompt: theirs.max_prompt_tokens as usize,
        lease: Duration::from_millis(theirs.lease_ms),
        on_demand,
    });
    if !context.engine.send(Event::PeerUp { peer, role, outbox }) {
        return Failure::Lost("the engine has stopped".into());
    }
    // The engine hears of the peer before anything that names it.
    on_up();
    Failure::Lost(carry(context, peer, socket, &mut messages).await)
}

/// Measures the way to the peer; the link is kept alive meanwhile.
async fn probe(
    context: &LinkContext,
    peer: PeerId,
    url: &PeerUrl,
    socket: &mut Socket,
) -> Result<Option<ProbeReport>, Failure> {
    let mut ping = interval(context.silence / PINGS);
    let mut report = std::pin::pin!(context.probe(peer, url));
    loop {
        tokio::select! {
            report = &mut report => return report.map_err(Failure::Misfit),
            _ = ping.tick() => {
                let sent = socket.send(Message::Ping(Default::default())).await;
                sent.map_err(|error| Failure::Lost(error.to_string()))?;
            }
        }
    }
}

async fn carry(
    context: &LinkContext,
    peer: PeerId,
    mut socket: Socket,
    messages: &mut UnboundedReceiver<PeerMessage>,
) -> String {
    let silence = context.silence;
    let mut ping = interval(silence / PINGS);
    // After a standstill one ping is enough.
    ping.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut heard = Instant::now();
    loop {
        tokio::select! {
            received = socket.next() => {
                heard = Instant::now();
                match received {
                    Some(Ok(Message::Binary(bytes))) => match Frame::decode(&bytes) {
                        Ok(Frame::Message(message)) => drop(context.engine.send(Event::Message { peer, message })),
                        Ok(_) => return "a second handshake".into(),
                        Err(error) => return format!("a message that cannot be read: {error}"),
                    },
                    Some(Ok(_)) => {}
                    Some(Err(error)) => return error.to_string(),
                    None => return "closed by the prefill worker".into(),
                }
            }
            message = messages.recv() => {
                // The engine gave the peer up.
                let Some(message) = message else { return "given up after a fault".into() };
                if let Err(error) = socket.send(Message::Binary(Frame::Message(message).encode())).await {
                    return error.to_string();
                }
            }
            _ = ping.tick() => {
                if heard.elapsed() > silence {
                    return format!("nothing heard for {silence:?}");
                }
                if let Err(error) = socket.send(Message::Ping(Default::default())).await {
                    return error.to_string();
                }
            }
        }
    }
}
