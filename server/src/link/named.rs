//! Prefill workers that a frontend names, request by request: linked when they are first named, and kept.
//!
//! Such a link is as one to a `--prefill` worker, but that it says nothing about this worker's readiness: whoever names
//! another one tomorrow is served just as well.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use engine::api::PrefillBy;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use transfer::PeerId;

use super::LinkContext;
use super::client;
use super::demand::Demand;
use super::peers::{Linked, Peers};
use crate::config::{PeerUrl, peer_url};
use crate::error::ApiError;
use crate::frontend::headers::PREFILL;
use crate::readiness::Readiness;

/// A request waits this long for a link that is being made: a handshake and its probe, with NIXL some half a second.
const LINKED_WITHIN: Duration = Duration::from_secs(5);

/// Links of this kind at most; whoever sends requests names the addresses.
const MAX_LINKS: usize = 64;

/// Who computes the prompt of one request, as its header says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum PrefillName {
    /// Nothing was said.
    #[default]
    Unnamed,
    /// This worker.
    Here,
    At(PeerUrl),
}

impl PrefillName {
    /// Reads `x-kvferry-prefill`. Errors: a value that is neither `local` nor a URL.
    pub fn of(headers: &axum::http::HeaderMap) -> Result<Self, ApiError> {
        let Some(value) = headers.get(PREFILL) else { return Ok(Self::Unnamed) };
        let text = value.to_str().unwrap_or_default();
        if text == "local" {
            return Ok(Self::Here);
        }
        let wrong = |_| {
            let message =
                format!("{PREFILL} is {value:?}, expected local or a URL such as http://127.0.0.1:8001");
            ApiError::bad_request(message)
        };
        peer_url("prefill", text).map(Self::At).map_err(wrong)
    }
}

/// Finds links to prefill workers, and makes them. Cheap to clone.
#[derive(Clone)]
pub struct Named {
    context: LinkContext,
    demand: Demand,
    /// Those of `--prefill`.
    configured: Peers,
    others: Peers,
    keepers: Arc<Mutex<HashMap<PeerUrl, JoinHandle<()>>>>,
}

impl Named {
    pub fn new(context: LinkContext, demand: Demand, configured: Peers) -> Self {
        let others = Peers::new(&[], Readiness::default());
        Self { context, demand, configured, others, keepers: Arc::default() }
    }

    /// Who computes the prompt, in the engine's words.
    pub async fn prefill(&self, name: &PrefillName) -> PrefillBy {
        match name {
            PrefillName::Unnamed => PrefillBy::Anyone,
            PrefillName::Here => PrefillBy::Here,
            PrefillName::At(url) => self.peer(url).await.map_or(PrefillBy::Unlinked, PrefillBy::Peer),
        }
    }

    async fn peer(&self, url: &PeerUrl) -> Option<PeerId> {
        let peers = if self.configured.knows(url) { &self.configured } else { &self.others };
        if let Linked::Up(peer) = peers.linked(url) {
            return Some(peer);
        }
        if !self.configured.knows(url) && !self.dial(url) {
            tracing::warn!(peer = %url, "{MAX_LINKS} links to named prefill workers are open, which is the limit");
            return None;
        }
        match timeout(LINKED_WITHIN, peers.settled(url)).await {
            Ok(Linked::Up(peer)) => Some(peer),
            _ => {
                tracing::warn!(peer = %url, "the named prefill worker is not linked");
                None
            }
        }
    }

    /// Sees to it that somebody keeps a link to `url`; false if there are too many already.
    fn dial(&self, url: &PeerUrl) -> bool {
        let mut keepers = self.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        if keepers.contains_key(url) {
            return true;
        }
        if keepers.len() >= MAX_LINKS {
            let lost: Vec<_> = keepers
                .keys()
                .filter(|url| !matches!(self.others.linked(url), Linked::Up(_)))
                .cloned()
                .collect();
            for url in lost {
                if let Some(keeper) = keepers.remove(&url) {
                    keeper.abort();
                    self.others.forget(&url);
                }
            }
        }
        if keepers.len() >= MAX_LINKS {
            return false;
        }
        self.others.expect(url);
        let (context, peers, demand) = (self.context.clone(), self.others.clone(), self.demand.clone());
        keepers.insert(url.clone(), tokio::spawn(client::keep(context, url.clone(), peers, demand)));
        true
    }

    /// Ends all links of this kind.
    pub fn stop(&self) {
        let mut keepers = self.keepers.lock().unwrap_or_else(PoisonError::into_inner);
        keepers.drain().for_each(|(_, keeper)| keeper.abort());
    }
}

#[cfg(test)]
mod tests {
    use axum::http::{HeaderMap, HeaderValue};

    use super::*;

    #[test]
    fn the_header_names_a_worker_or_this_one() {
        let of = |value: &'static str| {
            let headers = HeaderMap::from_iter([(PREFILL, HeaderValue::from_static(value))]);
            PrefillName::of(&headers)
        };
        assert_eq!(PrefillName::of(&HeaderMap::new()).unwrap(), PrefillName::Unnamed);
        assert_eq!(of("local").unwrap(), PrefillName::Here);
        let url = PeerUrl { host: "a".into(), port: 1 };
        assert_eq!(of("http://a:1").unwrap(), PrefillName::At(url));
        let message = of("somewhere").unwrap_err().message;
        assert!(message.contains("somewhere") && message.contains("local"), "{message}");
    }
}
