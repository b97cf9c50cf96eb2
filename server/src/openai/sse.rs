//! Answers as server-sent events. A stream that ends with `[DONE]` is whole; one that does not is not, and says
//! so in an event with `error`.

use std::convert::Infallible;
use std::pin::Pin;

use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use engine::api::RequestError;
use futures_util::stream::{self, BoxStream, SelectAll, StreamExt};
use futures_util::{FutureExt, Stream};

use super::choice::{Choice, Piece, Share};
use super::generate::usage;
use super::kv_transfer::Extras;
use super::options::StreamOptions;
use super::response::Envelope;
use crate::error::ApiError;
use crate::frontend::headers::CACHED_TOKENS;
use crate::shutdown::{Drain, Running};
use crate::state::AppState;

const EVENT_STREAM: HeaderValue = HeaderValue::from_static("text/event-stream; charset=utf-8");
const NO_CACHE: HeaderValue = HeaderValue::from_static("no-cache");

/// Streams `choices`. Waits for the first token before it answers, so that a request which fails before that
/// gets the status of its error.
pub async fn respond(
    envelope: Envelope,
    options: StreamOptions,
    extras: Extras,
    choices: Vec<Choice>,
    drain: Drain,
) -> Result<Response, ApiError> {
    let (opened, shares) = (vec![false; choices.len()], choices.iter().map(|choice| choice.share).collect());
    let mut updates = stream::select_all(choices.into_iter().map(|choice| updates(choice).boxed()));
    let first = match updates.next().await {
        Some(Update { piece: Err(error), .. }) => return Err(error.into()),
        first => first,
    };
    let cached = first.as_ref().map_or(0, |update| update.share.cached_tokens);
    let cut = Box::pin(drain.cut());
    let running = drain.enter();
    let events = Events { envelope, options, extras, updates, first, opened, shares, cut, running };
    let body = stream::unfold(Some(events), |events| async move {
        let mut events = events?;
        let (bytes, more) = events.next().await;
        Some((Ok::<_, Infallible>(bytes), more.then_some(events)))
    });
    // A frontend compares it with what it expected, without reading the events.
    let cached = (CACHED_TOKENS, HeaderValue::from(cached));
    let headers = [(header::CONTENT_TYPE, EVENT_STREAM), (header::CACHE_CONTROL, NO_CACHE), cached];
    Ok((headers, Body::from_stream(body)).into_response())
}

/// News of one choice.
struct Update {
    index: usize,
    share: Share,
    piece: Result<Piece, RequestError>,
}

/// Ends after the last piece or the first error.
fn updates(choice: Choice) -> impl Stream<Item = Update> + Send + 'static {
    stream::unfold(Some(choice), |choice| async move {
        let mut choice = choice?;
        let piece = choice.next().await;
        let update = Update { index: choice.index, share: choice.share, piece };
        let goes_on = matches!(&update.piece, Ok(Piece { finish: None, .. }));
        Some((update, goes_on.then_some(choice)))
    })
}

/// The state of a stream. Dropping it aborts what still runs.
struct Events {
    envelope: Envelope,
    options: StreamOptions,
    extras: Extras,
    updates: SelectAll<BoxStream<'static, Update>>,
    /// Was awaited before the answer began.
    first: Option<Update>,
    /// Whether the opening chunk of each choice went out.
    opened: Vec<bool>,
    /// One per choice.
    shares: Vec<Share>,
    cut: Pin<Box<dyn Future<Output = ()> + Send>>,
    /// Keeps a shutdown waiting for this stream.
    #[expect(dead_code, reason = "held for its Drop")]
    running: Running,
}

impl Events {
    /// Everything that is ready, at least one event; false after the last.
    async fn next(&mut self) -> (Bytes, bool) {
        let mut out = String::new();
        let mut update = match self.first.take() {
            Some(update) => Some(update),
            None => tokio::select! {
                update = self.updates.next() => update,
                () = &mut self.cut => return self.fail(out, AppState::cut_error()),
            },
        };
        loop {
            match update {
                None => return self.done(out),
                Some(Update { piece: Err(error), .. }) => return self.fail(out, error.into()),
                Some(Update { index, share, piece: Ok(piece) }) => self.write(&mut out, index, share, piece),
            }
            update = match self.updates.next().now_or_never() {
                Some(ready) => ready,
                // Nothing to send: what came was held back. An empty write would only wake the client's socket.
                None if out.is_empty() => tokio::select! {
                    update = self.updates.next() => update,
                    () = &mut self.cut => return self.fail(out, AppState::cut_error()),
                },
                None => return (out.into(), true),
            };
        }
    }

    fn write(&mut self, out: &mut String, index: usize, share: Share, piece: Piece) {
        self.shares[index] = share;
        let stats = |share: Share| self.options.continuous_usage_stats.then(|| share.usage());
        if !std::mem::replace(&mut self.opened[index], true) {
            let before = Share { completion_tokens: 0, ..share };
            if let Some(opening) = self.envelope.opening(index, stats(before)) {
                event(out, &opening);
            }
        }
        if !piece.text.is_empty() || piece.finish.is_some() {
            event(out, &self.envelope.piece(index, &piece, stats(share)));
        }
    }

    fn done(&self, mut out: String) -> (Bytes, bool) {
        let usage = self.options.include_usage.then(|| usage(&self.shares));
        let extras = self.extras.fields(&self.shares);
        // A client that asked for none of this gets no chunk without choices; that its KV was not had is worth one.
        let news = self.extras.return_timeline || extras.values().any(|value| !value.is_null());
        if usage.is_some() || news {
            event(&mut out, &self.envelope.last(usage, extras));
        }
        event(&mut out, "[DONE]");
        (out.into(), false)
    }

    /// No `[DONE]` follows.
    fn fail(&self, mut out: String, error: ApiError) -> (Bytes, bool) {
        event(&mut out, &error.body().to_string());
        (out.into(), false)
    }
}

fn event(out: &mut String, data: &str) {
    out.push_str("data: ");
    out.push_str(data);
    out.push_str("\n\n");
}
