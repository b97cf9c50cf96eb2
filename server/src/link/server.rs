//! The prefill worker's end: takes links from decode workers.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use engine::event::{Event, PeerRole};
use engine::handoff::{PeerMessage, TicketId, ToDecode, ToPrefill};
use tokio::sync::mpsc::unbounded_channel;
use tokio::sync::oneshot;
use tokio::time::{Instant, timeout, timeout_at};
use transfer::{Hello, PeerId};

use super::frame::{Frame, Greeting};
use super::{HANDSHAKE, LinkContext, misfit};
use crate::args::Role;
use crate::error::ApiError;
use crate::readiness::State as ReadyState;
use crate::shutdown::Running;
use crate::state::AppState;

/// Takes links on the prefill worker's port.
pub struct LinkServer {
    context: LinkContext,
    /// Every peer that a decode worker (by incarnation) was known as here and that may not have ended yet.
    earlier: Mutex<HashMap<u64, Vec<PeerId>>>,
}

impl LinkServer {
    pub fn new(context: LinkContext) -> Self {
        Self { context, earlier: Mutex::default() }
    }

    /// Waits until nothing is left of the earlier links of this decode worker, then numbers the new one.
    async fn succeed(&self, incarnation: u64) -> Result<PeerId, String> {
        let engine = &self.context.engine;
        let earlier = self.earlier().remove(&incarnation).unwrap_or_default();
        let peer = self.context.new_peer();
        self.earlier().entry(incarnation).or_default().push(peer);
        for old in earlier {
            engine.send(Event::PeerDown(old));
            let (reply, idle) = oneshot::channel();
            engine.send(Event::AwaitIdle { peer: old, reply });
            if timeout(HANDSHAKE, idle).await.is_err() {
                self.earlier().entry(incarnation).or_default().push(old);
                return Err("writes of an earlier link have not settled yet".into());
            }
        }
        Ok(peer)
    }

    fn earlier(&self) -> std::sync::MutexGuard<'_, HashMap<u64, Vec<PeerId>>> {
        self.earlier.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The route of links, beside OpenAI's.
pub fn routes(state: &Arc<AppState>) -> Router {
    Router::new().route(super::PATH, get(upgrade)).with_state(state.clone())
}

async fn upgrade(State(state): State<Arc<AppState>>, upgrade: WebSocketUpgrade) -> Response {
    if state.role != Role::Prefill {
        let message = format!("this worker's role is {}: only prefill workers take links", state.role.as_str());
        return ApiError::new(StatusCode::MISDIRECTED_REQUEST, message).into_response();
    }
    let Some(server) = state.link.get().cloned() else {
        return ApiError::unavailable("the model is being loaded").into_response();
    };
    upgrade.on_upgrade(move |socket| async move { serve(&server, &state, socket).await })
}

async fn serve(server: &LinkServer, state: &AppState, mut socket: WebSocket) {
    let context = &server.context;
    let Greeting { hello, on_demand, .. } = match timeout(HANDSHAKE, first_frame(&mut socket)).await {
        Ok(Some(Frame::Hello(greeting))) => *greeting,
        _ => return tracing::warn!("a link that did not begin with a handshake was closed"),
    };
    let peer = match accept(server, state, &hello, on_demand).await {
        Ok(peer) => peer,
        Err((reason, permanent)) => {
            tracing::warn!(reason, incarnation = hello.incarnation, "refused a decode worker");
            // If it has left it does not need to know.
            let _ = socket.send(Message::Binary(Frame::Refused { reason, permanent }.encode())).await;
            return;
        }
    };
    let ours = Frame::Hello(Box::new((*context.greeting).clone()));
    if socket.send(Message::Binary(ours.encode())).await.is_ok() {
        tracing::info!(?peer, incarnation = hello.incarnation, on_demand, "linked to a decode worker");
        let reason = Carrier { context, state, peer, open: HashMap::new() }.carry(socket).await;
        tracing::info!(?peer, reason, "the link to a decode worker ended");
    }
    context.engine.send(Event::PeerDown(peer));
}

/// Checks that the two fit and makes the peer known; else why not, and whether trying again is of no use.
async fn accept(
    server: &LinkServer,
    state: &AppState,
    hello: &Hello,
    on_demand: bool,
) -> Result<PeerId, (String, bool)> {
    if state.readiness.get() == ReadyState::Draining {
        return Err(("the prefill worker is shutting down".into(), false));
    }
    server
        .context
        .greeting
        .hello
        .check(hello)
        .map_err(|found| (misfit(found.field, &found.ours, &found.theirs), true))?;
    let peer = match on_demand {
        // Nothing is written over it, so nothing of an earlier one needs to settle.
        true => server.context.new_peer(),
        false => server.succeed(hello.incarnation).await.map_err(|reason| (reason, false))?,
    };
    let added = server.context.add_peer(peer, hello.metadata.clone()).await;
    added.map_err(|error| (format!("the KV transport cannot reach the decode worker: {error}"), false))?;
    Ok(peer)
}

async fn first_frame(socket: &mut WebSocket) -> Option<Frame> {
    loop {
        match socket.recv().await?.ok()? {
            Message::Binary(bytes) => return Frame::decode(&bytes).ok(),
            Message::Ping(_) | Message::Pong(_) => {}
            Message::Text(_) | Message::Close(_) => return None,
        }
    }
}

/// One link's messages.
struct Carrier<'a> {
    context: &'a LinkContext,
    state: &'a AppState,
    peer: PeerId,
    /// Tickets under way hold up a shutdown, like requests.
    open: HashMap<TicketId, Running>,
}

impl Carrier<'_> {
    /// Carries messages until the link ends; says why it did.
    async fn carry(mut self, mut socket: WebSocket) -> String {
        let (outbox, mut messages) = unbounded_channel();
        if !self.context.engine.send(Event::PeerUp { peer: self.peer, role: PeerRole::Decode, outbox }) {
            return "the engine has stopped".into();
        }
        let silence = self.context.silence;
        let mut heard = Instant::now();
        loop {
            tokio::select! {
                // Counted from what was heard last, not from what was said.
                received = timeout_at(heard + silence, socket.recv()) => match received.inspect(|_| heard = Instant::now()) {
                    Err(_) => return format!("nothing heard for {silence:?}"),
                    Ok(None) => return "closed by the decode worker".into(),
                    Ok(Some(Err(error))) => return error.to_string(),
                    Ok(Some(Ok(Message::Binary(bytes)))) => match Frame::decode(&bytes) {
                        Ok(Frame::Message(message)) => {
                            if let Some(answer) = self.received(message)
                                && socket.send(Message::Binary(Frame::Message(answer).encode())).await.is_err()
                            {
                                return "closed by the decode worker".into();
                            }
                        }
                        Ok(_) => return "a second handshake".into(),
                        Err(error) => return format!("a message that cannot be read: {error}"),
                    },
                    Ok(Some(Ok(_))) => {}
                },
                message = messages.recv() => {
                    // The engine gave the peer up.
                    let Some(message) = message else { return "given up after a fault".into() };
                    self.ended(&message);
                    if let Err(error) = socket.send(Message::Binary(Frame::Message(message).encode())).await {
                        return error.to_string();
                    }
                }
            }
        }
    }

    /// Hands a message to the engine; a shutdown refuses new tickets at once.
    fn received(&mut self, message: PeerMessage) -> Option<PeerMessage> {
        if let PeerMessage::ToPrefill(ToPrefill::Open { ticket, .. } | ToPrefill::Claim { ticket, .. }) = &message {
            if self.state.readiness.get() == ReadyState::Draining {
                let reason = "the prefill worker is shutting down".to_owned();
                return Some(PeerMessage::ToDecode(ToDecode::Failed {
                    ticket: *ticket,
                    reason,
                    clean: true,
                }));
            }
            self.open.insert(*ticket, self.state.drain.enter());
        }
        self.context.engine.send(Event::Message { peer: self.peer, message });
        None
    }

    fn ended(&mut self, message: &PeerMessage) {
        if let PeerMessage::ToDecode(
            ToDecode::Complete { ticket, .. } | ToDecode::Failed { ticket, .. } | ToDecode::Ended { ticket },
        ) = message
        {
            self.open.remove(ticket);
        }
    }
}
