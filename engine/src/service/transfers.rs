//! Posting transfers and taking their ends.

use transfer::{DriverEvent, PeerId, Span, TransferError};

use super::Service;
use crate::core::{Input, ReadFault, ReadRange, Written};
use crate::event::Event;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, WriteNote};

/// A transfer under way.
#[derive(Debug)]
pub(super) enum Posted {
    Write(RequestId),
    Read { range: ReadRange, spans: Vec<Span>, checksums: Vec<u64> },
}

impl Service {
    pub(super) fn post_write(
        &mut self,
        id: RequestId,
        peer: PeerId,
        spans: Vec<Span>,
        mut note: WriteNote,
        checksum: bool,
    ) {
        if checksum {
            let part = spans.iter().map(|span| span.len).sum::<u64>() / u64::from(note.blocks.max(1));
            note.checksums = self.sums_of_spans(&spans, part);
        }
        let tag = self.tag(Posted::Write(id));
        let posted = self.driver.as_ref().map(|driver| driver.post_write(peer, spans, note.encode(), tag));
        self.failed_at_once(tag, posted);
    }

    pub(super) fn post_read(
        &mut self,
        range: ReadRange,
        peer: PeerId,
        spans: Vec<Span>,
        checksums: Vec<u64>,
    ) {
        let tag = self.tag(Posted::Read { range, spans: spans.clone(), checksums });
        let posted = self.driver.as_ref().map(|driver| driver.post_read(peer, spans, Vec::new(), tag));
        self.failed_at_once(tag, posted);
    }

    fn tag(&mut self, posted: Posted) -> u64 {
        let tag = self.next_tag;
        self.next_tag += 1;
        self.posted.insert(tag, posted);
        tag
    }

    /// A transfer that could not even be handed to the driver is over.
    fn failed_at_once(&mut self, tag: u64, posted: Option<Result<(), TransferError>>) {
        let reason = match posted {
            Some(Ok(())) => return,
            Some(Err(error)) => error.to_string(),
            None => "this worker has no KV transport".to_owned(),
        };
        if let Some(input) = self.settled(tag, Err(reason)) {
            self.core.apply(input, self.started.elapsed());
        }
    }

    fn settled(&mut self, tag: u64, result: Result<Written, String>) -> Option<Input> {
        Some(match self.posted.remove(&tag)? {
            Posted::Write(id) => Input::Settled { id, result },
            Posted::Read { range, spans, checksums } => {
                let result = result.map_err(ReadFault::Failed).and_then(|read| {
                    let intact =
                        checksums.is_empty() || self.sums_of_spans(&spans, self.block_bytes) == checksums;
                    if intact { Ok(read) } else { Err(ReadFault::Corrupt) }
                });
                Input::ReadSettled { range, result }
            }
        })
    }

    pub(super) fn transfer_input(&mut self, event: DriverEvent) -> Option<Input> {
        match event {
            DriverEvent::Settled { tag, result, .. } => {
                let result =
                    result.map(|stats| Written { post: stats.post, wire: stats.wire }).map_err(|error| {
                        self.metrics.transfer_failed();
                        error.to_string()
                    });
                self.settled(tag, result)
            }
            DriverEvent::Notified { payload } => {
                let intact = self.is_intact(&payload);
                Some(Input::Notified { bytes: payload, intact })
            }
            DriverEvent::PeerLost { peer, error } => {
                tracing::warn!(?peer, %error, "the KV transport lost a peer");
                // Closing the link makes both sides start over with a new handshake.
                self.outboxes.remove(&peer);
                None
            }
        }
    }

    /// Whether an event may be handled while a step computes.
    pub(super) fn may_handle_in_step(&self, event: &Event) -> bool {
        match event {
            Event::Submit(_) | Event::AwaitIdle { .. } => true,
            Event::Abort(id) | Event::Finish(id) => !self.core.is_running(*id),
            Event::Message { message: PeerMessage::ToDecode(_), .. } => true,
            Event::Message { peer, message: PeerMessage::ToPrefill(message) } => {
                self.core.may_say_in_step(*peer, message)
            }
            Event::Transfer(DriverEvent::Settled { tag, result, .. }) => match self.posted.get(tag) {
                Some(Posted::Write(id)) => result.is_ok() || !self.core.is_running(*id),
                Some(Posted::Read { .. }) | None => true,
            },
            Event::Transfer(DriverEvent::Notified { .. }) => true,
            _ => false,
        }
    }
}
