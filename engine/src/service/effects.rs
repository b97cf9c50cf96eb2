//! Carrying out what the core asks for.

use std::sync::atomic::Ordering;
use std::time::Instant;

use tokio::sync::oneshot;

use super::Service;
use crate::api::Output;
use crate::core::Effect;
use crate::handle::RequestId;
use crate::handoff::{PeerMessage, ToDecode};
use crate::kv_events::KvSnapshot;

impl Service {
    pub(super) fn carry_out(&mut self) {
        for effect in self.core.take_effects() {
            self.carry_out_one(effect);
        }
        self.publish_kv_events();
        let core = &self.core;
        for (_, reply) in self.idle_waiters.extract_if(.., |(peer, _)| core.is_idle_for(*peer)) {
            // Whoever asked may have given up.
            let _ = reply.send(());
        }
        let expected = self.core.expects_traffic();
        if std::mem::take(&mut self.nudge)
            && let Some(driver) = &self.driver
        {
            // A thread that is gone is reported below.
            let _ = driver.expect_traffic(usize::from(expected));
        }
        if expected != self.expected_traffic
            && let Some(driver) = &self.driver
        {
            self.expected_traffic = expected;
            if let Err(error) = driver.expect_traffic(usize::from(expected)) {
                tracing::error!(%error, "the KV transfer thread is gone");
            }
        }
    }

    fn publish_kv_events(&mut self) {
        if let Some(sink) = &mut self.kv_events {
            sink.publish(self.core.take_kv_events());
        }
    }

    pub(super) fn snapshot(&mut self, reply: oneshot::Sender<KvSnapshot>) {
        self.publish_kv_events();
        match &mut self.kv_events {
            Some(sink) => sink.snapshot(self.core.kv_chains(), reply),
            // Nothing is published that the snapshot could be compared with.
            None => drop(reply.send(KvSnapshot { next_seq: 0, chains: self.core.kv_chains() })),
        }
    }

    fn carry_out_one(&mut self, effect: Effect) {
        match effect {
            Effect::Output(id, output) => self.output(id, output),
            Effect::Dequeued(_) => drop(self.waiting.fetch_sub(1, Ordering::Relaxed)),
            Effect::Send(peer, message) => {
                if let Some(outbox) = self.outboxes.get(&peer)
                    && outbox.send(message).is_err()
                {
                    // The link's end is on its way as an event.
                    self.outboxes.remove(&peer);
                }
            }
            Effect::Post { id, peer, spans, note, checksum } => {
                self.post_write(id, peer, spans, note, checksum)
            }
            Effect::Read { range, peer, spans, checksums } => self.post_read(range, peer, spans, checksums),
            Effect::Offer { peer, ticket, first_block, blocks, last, checksum } => {
                let checksums = if checksum { self.sums_of_blocks(&blocks) } else { Vec::new() };
                let offer = ToDecode::Offer { ticket, first_block, blocks, checksums, last };
                self.carry_out_one(Effect::Send(peer, PeerMessage::ToDecode(offer)));
            }
            Effect::TicketFailed { request_id, fault, reason, recompute } => {
                tracing::warn!(
                    request_id,
                    fault = fault.label(),
                    reason,
                    recompute,
                    "no KV from the prefill worker"
                );
                self.metrics.ticket_failed(fault);
            }
            Effect::DropPeer(peer) => drop(self.outboxes.remove(&peer)),
            Effect::Pushed(totals, timing) => {
                self.metrics.computed_for_another(&timing);
                self.metrics.transferred(&totals, &timing);
            }
            Effect::Received { request_id, totals, timing } => {
                tracing::info!(
                    request_id,
                    bytes = totals.bytes,
                    descriptors = totals.descriptors,
                    writes = totals.writes,
                    compute_us = timing.compute_us,
                    wire_us = timing.wire_us,
                    exposed_us = timing.exposed_us,
                    "KV received"
                );
                self.metrics.transferred(&totals, &timing);
            }
        }
    }

    fn output(&mut self, id: RequestId, output: Output) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        match &output {
            Output::Token { .. } => {
                let now = Instant::now();
                match stream.last_token.replace(now) {
                    None => self.metrics.first_token(now - stream.arrival),
                    Some(before) => self.metrics.next_token(now - before),
                }
            }
            Output::Finished { reason, usage, timeline, .. } => {
                self.metrics.finished(*reason, usage, timeline);
                tracing::info!(
                    request_id = stream.request_id,
                    reason = reason.as_str(),
                    prompt_tokens = usage.prompt_tokens,
                    cached_tokens = usage.cached_tokens,
                    transferred_tokens = usage.transferred_tokens,
                    completion_tokens = usage.completion_tokens,
                    ?timeline,
                    "finished"
                );
            }
            Output::Failed(error) => {
                self.metrics.refused(error);
                tracing::warn!(request_id = stream.request_id, %error, "failed");
            }
        }
        let last = !matches!(output, Output::Token { .. });
        // A client that has left is aborted by its own event.
        let _ = stream.outputs.send(output);
        if last {
            self.streams.remove(&id);
        }
    }
}
