//! A worker's stream on its way to the client: bytes unchanged, and an error event where the stream breaks.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, HttpBody};
use bytes::Bytes;
use futures_util::FutureExt;
use hyper::body::{Frame, Incoming};
use tokio::time::Sleep;

use super::flight::{Ending, Flight};
use super::stream_watch::StreamWatch;
use crate::error::ApiError;

/// What may end a stream from our side.
pub struct Limits {
    pub deadline: Pin<Box<Sleep>>,
    pub timeout: Duration,
    /// The end of a shutdown's grace period.
    pub cut: Pin<Box<dyn Future<Output = ()> + Send>>,
}

/// A body that passes frames on. Dropping it before its end is a client that left: the worker's connection closes.
pub struct RelayBody {
    inner: Option<Incoming>,
    /// Was awaited before the answer began.
    first: Option<Bytes>,
    watch: StreamWatch,
    limits: Limits,
    /// The request's booking, counts and metrics; told how it ended.
    flight: Option<Flight>,
}

impl RelayBody {
    pub fn body(first: Option<Bytes>, inner: Incoming, limits: Limits, flight: Flight) -> Body {
        Body::new(Self {
            inner: Some(inner),
            first,
            watch: StreamWatch::default(),
            limits,
            flight: Some(flight),
        })
    }

    fn pass(&mut self, bytes: Bytes) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.watch.see(&bytes);
        if let Some(flight) = &mut self.flight {
            flight.passed();
        }
        Poll::Ready(Some(Ok(Frame::data(bytes))))
    }

    /// The worker's body is over.
    fn end(&mut self, broken: Option<String>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.watch.is_done() {
            self.finish(Ending::Done);
            return Poll::Ready(None);
        }
        if self.watch.failed() {
            self.finish(Ending::WorkerError);
            return Poll::Ready(None);
        }
        let reason = broken.unwrap_or_else(|| "it closed the stream before [DONE]".to_owned());
        let worker = self.flight.as_ref().map(|flight| flight.worker_name().to_owned()).unwrap_or_default();
        let message = format!("the stream from worker {worker} broke: {reason}");
        self.fail(ApiError::new(axum::http::StatusCode::BAD_GATEWAY, message), Ending::Broken(reason))
    }

    /// The stream's last event says what went wrong; no `[DONE]` follows.
    fn fail(&mut self, error: ApiError, ending: Ending) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.finish(ending);
        // An event that was cut in two must not swallow this one.
        let event = format!("\n\ndata: {}\n\n", error.body());
        let event = if self.watch.at_event_start() { event[2..].to_owned() } else { event };
        Poll::Ready(Some(Ok(Frame::data(event.into()))))
    }

    fn finish(&mut self, ending: Ending) {
        self.inner = None;
        if let Some(flight) = self.flight.take() {
            flight.end(ending, self.watch.usage());
        }
    }
}

impl HttpBody for RelayBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        if let Some(first) = this.first.take() {
            return this.pass(first);
        }
        loop {
            let Some(inner) = &mut this.inner else { return Poll::Ready(None) };
            match Pin::new(inner).poll_frame(context) {
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(bytes) => return this.pass(bytes),
                    Err(_trailers) => {}
                },
                Poll::Ready(Some(Err(error))) => return this.end(Some(error.to_string())),
                Poll::Ready(None) => return this.end(None),
                Poll::Pending => break,
            }
        }
        if this.limits.cut.poll_unpin(context).is_ready() {
            return this.fail(crate::state::AppState::cut_error(), Ending::Cut);
        }
        if this.limits.deadline.poll_unpin(context).is_ready() {
            let message = format!("the request did not finish within {:?}", this.limits.timeout);
            return this
                .fail(ApiError::new(axum::http::StatusCode::GATEWAY_TIMEOUT, message), Ending::Deadline);
        }
        Poll::Pending
    }
}

impl Drop for RelayBody {
    fn drop(&mut self) {
        // Clients that know the last event do not wait for what follows it.
        let ending = if self.watch.is_done() { Ending::Done } else { Ending::ClientLeft };
        self.finish(ending);
    }
}
