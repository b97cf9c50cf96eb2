//! Links that requests ask for: to a prefill worker that keeps KV which a client's `kv_transfer_params` name.
//!
//! A link that stands already, to a `--prefill` worker or from an earlier request, is used; else one is made, and kept
//! until it has not been used for a while. Such links carry no prompts.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::event::Event;
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until};
use transfer::PeerId;

use super::client::{self, Failure};
use super::{LinkContext, engine_id};
use crate::config::PeerUrl;

/// An unused link is closed after this long: far beyond a fetch, which needs its link for a transfer's time only.
const IDLE: Duration = Duration::from_secs(300);

/// Links of this kind at most; clients name the addresses.
const MAX_LINKS: usize = 64;

/// Why there is no link to the worker that was named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// Another worker answers there, or one that does not fit: trying again is of no use.
    Misfit(String),
    /// It cannot be reached now.
    Unreachable(String),
}

type Outcome = Result<(PeerId, u64), Refusal>;

/// One link on demand.
struct Link {
    /// `None` while it is being made.
    outcome: watch::Receiver<Option<Outcome>>,
    used: watch::Sender<Instant>,
}

#[derive(Default)]
struct Table {
    /// Links that stand, of both kinds: peers by incarnation.
    up: HashMap<u64, Vec<PeerId>>,
    on_demand: HashMap<PeerUrl, Link>,
    tasks: JoinSet<()>,
}

/// Makes and finds links. Cheap to clone.
#[derive(Clone)]
pub struct Demand {
    context: LinkContext,
    table: Arc<Mutex<Table>>,
}

/// A link that stands, until dropped.
pub(super) struct Up {
    demand: Demand,
    incarnation: u64,
    peer: PeerId,
}

impl Drop for Up {
    fn drop(&mut self) {
        let mut table = self.demand.table();
        if let Some(peers) = table.up.get_mut(&self.incarnation) {
            peers.retain(|peer| *peer != self.peer);
            if peers.is_empty() {
                table.up.remove(&self.incarnation);
            }
        }
    }
}

impl Demand {
    pub fn new(context: LinkContext) -> Self {
        Self { context, table: Arc::default() }
    }

    /// Enters a link that stands.
    pub(super) fn is_up(&self, incarnation: u64, peer: PeerId) -> Up {
        self.table().up.entry(incarnation).or_default().push(peer);
        Up { demand: self.clone(), incarnation, peer }
    }

    /// The link to the worker `wanted` (its engine id), which should listen at `url`.
    pub async fn link(&self, url: &PeerUrl, wanted: &str) -> Result<PeerId, Refusal> {
        if let Some(peer) = self.standing(wanted) {
            return Ok(peer);
        }
        let mut outcome = self.dial(url)?;
        let outcome = match outcome.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone(),
            Err(_) => None,
        };
        let lost = || Err(Refusal::Unreachable(format!("{url}: the link was lost")));
        let (peer, incarnation) = outcome.unwrap_or_else(lost)?;
        match engine_id(incarnation) {
            found if found == wanted => Ok(peer),
            found => Err(Refusal::Misfit(format!("the engine at {url} is {found:?}, expected {wanted:?}"))),
        }
    }

    fn standing(&self, wanted: &str) -> Option<PeerId> {
        let table = self.table();
        let up = table.up.iter().find(|(incarnation, _)| engine_id(**incarnation) == wanted);
        let peer = *up?.1.last()?;
        for link in table.on_demand.values() {
            if matches!(&*link.outcome.borrow(), Some(Ok((linked, _))) if *linked == peer) {
                link.used.send_replace(Instant::now());
            }
        }
        Some(peer)
    }

    /// The outcome of the link to `url`, which is begun unless it is there.
    fn dial(&self, url: &PeerUrl) -> Result<watch::Receiver<Option<Outcome>>, Refusal> {
        let mut table = self.table();
        while table.tasks.try_join_next().is_some() {}
        if let Some(link) = table.on_demand.get(url) {
            link.used.send_replace(Instant::now());
            return Ok(link.outcome.clone());
        }
        if table.on_demand.len() >= MAX_LINKS {
            let reason = format!("{MAX_LINKS} links to workers that keep KV are open, which is the limit");
            return Err(Refusal::Unreachable(reason));
        }
        let (report, outcome) = watch::channel(None);
        let (used, uses) = watch::channel(Instant::now());
        table.tasks.spawn(self.clone().keep(url.clone(), report, uses));
        table.on_demand.insert(url.clone(), Link { outcome: outcome.clone(), used });
        Ok(outcome)
    }

    /// One link's life.
    async fn keep(self, url: PeerUrl, report: watch::Sender<Option<Outcome>>, uses: watch::Receiver<Instant>) {
        let failed = self.carry(&url, &report, uses).await;
        // First out of the table, so that the next request tries again.
        self.table().on_demand.remove(&url);
        if let Err(refusal) = failed {
            tracing::warn!(peer = %url, ?refusal, "no link to a worker that keeps KV");
            report.send_replace(Some(Err(refusal)));
        }
    }

    async fn carry(
        &self,
        url: &PeerUrl,
        report: &watch::Sender<Option<Outcome>>,
        uses: watch::Receiver<Instant>,
    ) -> Result<(), Refusal> {
        let (socket, theirs) =
            client::connect(&self.context, url, true).await.map_err(|failure| match failure {
                Failure::Misfit(reason) => Refusal::Misfit(format!("{url}: {reason}")),
                Failure::Dead(reason) | Failure::Lost(reason) => {
                    Refusal::Unreachable(format!("{url}: {reason}"))
                }
            })?;
        let peer = self.context.new_peer();
        let added = self.context.add_peer(peer, theirs.hello.metadata.clone()).await;
        added.map_err(|error| Refusal::Unreachable(format!("{url}: the KV transport cannot reach it: {error}")))?;
        let incarnation = theirs.hello.incarnation;
        tracing::info!(peer = %url, "linked to a worker that keeps KV");
        let mut up = None;
        let run = client::run(&self.context, peer, socket, &theirs, true, || {
            up = Some(self.is_up(incarnation, peer));
            report.send_replace(Some(Ok((peer, incarnation))));
        });
        let reason = tokio::select! {
            reason = run => reason,
            () = idle(uses) => format!("not used for {IDLE:?}"),
        };
        drop(up);
        tracing::info!(peer = %url, reason, "the link to a worker that keeps KV ended");
        self.context.engine.send(Event::PeerDown(peer));
        let _ = self.context.driver.remove_peer(peer);
        Ok(())
    }

    fn table(&self) -> std::sync::MutexGuard<'_, Table> {
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Resolves when the last use is long ago.
async fn idle(uses: watch::Receiver<Instant>) {
    loop {
        let until = *uses.borrow() + IDLE;
        if until <= Instant::now() {
            return;
        }
        sleep_until(until).await;
    }
}
