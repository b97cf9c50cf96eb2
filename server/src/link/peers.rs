//! What a decode worker knows of its prefill workers, and what that means for its readiness.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};
use tokio::sync::watch;
use transfer::PeerId;

use crate::config::PeerUrl;
use crate::readiness::{Readiness, State};

/// How the link to one prefill worker stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No attempt has ended yet.
    Trying,
    /// Linked; prompts of up to `max_prompt` tokens are computed there.
    Up {
        max_prompt: u64,
    },
    Down(String),
    /// The two do not fit: with this pair no request may be served, or its text could be wrong.
    Refused(String),
}

/// The links of a decode worker; every change is reflected in its readiness.
#[derive(Clone, Debug)]
pub struct Peers {
    standings: Arc<Mutex<BTreeMap<String, Standing>>>,
    /// The engine's names of those that are linked.
    peers: Arc<Mutex<HashMap<PeerUrl, PeerId>>>,
    /// Counts changes.
    changes: Arc<watch::Sender<u64>>,
    readiness: Readiness,
}

impl Peers {
    pub fn new(urls: &[PeerUrl], readiness: Readiness) -> Self {
        let standings = urls.iter().map(|url| (url.to_string(), Standing::Trying)).collect();
        let (peers, changes) = (Arc::default(), Arc::new(watch::Sender::new(0)));
        Self { standings: Arc::new(Mutex::new(standings)), peers, changes, readiness }
    }

    pub fn set(&self, url: &PeerUrl, standing: Standing) {
        let mut standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        let before = standings.insert(url.to_string(), standing.clone());
        if before.as_ref() != Some(&standing) {
            match &standing {
                Standing::Up { max_prompt } => {
                    tracing::info!(peer = %url, max_prompt, "linked to the prefill worker")
                }
                Standing::Down(reason) => {
                    tracing::warn!(peer = %url, reason, "no link to the prefill worker")
                }
                Standing::Refused(reason) => {
                    tracing::error!(peer = %url, reason, "the prefill worker does not fit")
                }
                Standing::Trying => {}
            }
        }
        if let Some(state) = readiness(&standings) {
            self.readiness.set(state);
        }
        drop(standings);
        self.changes.send_modify(|count| *count += 1);
    }

    /// The engine knows the worker at `url` as `peer`, or has lost it.
    pub fn link(&self, url: &PeerUrl, peer: Option<PeerId>) {
        let mut peers = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        match peer {
            Some(peer) => peers.insert(url.clone(), peer),
            None => peers.remove(url),
        };
        drop(peers);
        self.changes.send_modify(|count| *count += 1);
    }

    /// Whether there is a link to `url` now.
    pub fn linked(&self, url: &PeerUrl) -> Linked {
        let peer = self.peers.lock().unwrap_or_else(PoisonError::into_inner).get(url).copied();
        let standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        match (peer, standings.get(&url.to_string())) {
            (Some(peer), _) => Linked::Up(peer),
            (None, Some(Standing::Down(_) | Standing::Refused(_))) => Linked::Failed,
            (None, _) => Linked::Trying,
        }
    }

    /// Resolves when the attempt to link `url` that is under way has ended.
    pub async fn settled(&self, url: &PeerUrl) -> Linked {
        let mut changes = self.changes.subscribe();
        let ended = changes.wait_for(|_| self.linked(url) != Linked::Trying).await;
        // An error would mean that nobody changes anything any more; `self` does.
        drop(ended);
        self.linked(url)
    }

    /// Whether this is one of the workers of these links.
    pub fn knows(&self, url: &PeerUrl) -> bool {
        self.standings.lock().unwrap_or_else(PoisonError::into_inner).contains_key(&url.to_string())
    }

    /// A link to `url` is about to be made.
    pub fn expect(&self, url: &PeerUrl) {
        let mut standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        standings.insert(url.to_string(), Standing::Trying);
    }

    /// Nobody keeps a link to `url` any more.
    pub fn forget(&self, url: &PeerUrl) {
        self.standings.lock().unwrap_or_else(PoisonError::into_inner).remove(&url.to_string());
        self.link(url, None);
    }
}

/// How a link is, for a request that wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Linked {
    Up(PeerId),
    Trying,
    Failed,
}

impl Peers {
    /// For `/health`: each prefill worker, how its link stands, why, and the longest prompt it takes.
    pub fn details(&self) -> Vec<Value> {
        let standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        let detail = |(url, standing): (&String, &Standing)| match standing {
            Standing::Trying => json!({ "url": url, "link": "trying" }),
            Standing::Up { max_prompt } => {
                json!({ "url": url, "link": "up", "max_prompt_tokens": max_prompt })
            }
            Standing::Down(reason) => json!({ "url": url, "link": "down", "reason": reason }),
            Standing::Refused(reason) => json!({ "url": url, "link": "refused", "reason": reason }),
        };
        standings.iter().map(detail).collect()
    }
}

/// `None` while the first attempts are under way.
fn readiness(standings: &BTreeMap<String, Standing>) -> Option<State> {
    let refused = standings.iter().find_map(|(url, standing)| match standing {
        Standing::Refused(reason) => Some(format!("prefill worker {url}: {reason}")),
        _ => None,
    });
    if let Some(reason) = refused {
        return Some(State::Unavailable(reason));
    }
    if standings.values().any(|standing| matches!(standing, Standing::Up { .. })) {
        return Some(State::Ready);
    }
    if standings.values().any(|standing| *standing == Standing::Trying) {
        return None;
    }
    let reasons: Vec<_> = standings
        .iter()
        .filter_map(|(url, standing)| match standing {
            Standing::Down(reason) => Some(format!("{url}: {reason}")),
            _ => None,
        })
        .collect();
    let reasons = reasons.join("; ");
    Some(State::Degraded(format!("no prefill worker is linked, prompts are computed here ({reasons})")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(standings: &[Standing]) -> Option<State> {
        readiness(&standings.iter().cloned().enumerate().map(|(i, s)| (format!("http://p:{i}"), s)).collect())
    }

    #[test]
    fn one_link_serves_a_misfit_never_does() {
        let up = Standing::Up { max_prompt: 9 };
        let (down, refused) =
            (Standing::Down("refused".into()), Standing::Refused("block size differs".into()));
        assert_eq!(of(&[Standing::Trying, down.clone()]), None);
        assert_eq!(of(&[up.clone(), down.clone()]), Some(State::Ready));
        let Some(State::Degraded(reason)) = of(&[down.clone(), down.clone()]) else { panic!() };
        assert!(reason.contains("http://p:1: refused"), "{reason}");
        let Some(State::Unavailable(reason)) = of(&[up, refused]) else { panic!() };
        assert!(reason.contains("http://p:1: block size differs"), "{reason}");
    }
}
