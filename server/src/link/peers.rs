//! What a decode worker knows of its prefill workers, and what that means for its readiness.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::{Value, json};

use crate::config::PeerUrl;
use crate::readiness::{Readiness, State};

/// How the link to one prefill worker stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    /// No attempt has ended yet.
    Trying,
    /// Linked; prompts of up to `max_prompt` tokens are computed there.
    Up { max_prompt: u64 },
    Down(String),
    /// The two do not fit: with this pair no request may be served, or its text could be wrong.
    Refused(String),
}

/// The links of a decode worker; every change is reflected in its readiness.
#[derive(Clone, Debug)]
pub struct Peers {
    standings: Arc<Mutex<BTreeMap<String, Standing>>>,
    readiness: Readiness,
}

impl Peers {
    pub fn new(urls: &[PeerUrl], readiness: Readiness) -> Self {
        let standings = urls.iter().map(|url| (url.to_string(), Standing::Trying)).collect();
        Self { standings: Arc::new(Mutex::new(standings)), readiness }
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
    }
}

impl Peers {
    /// For `/health`: each prefill worker, how its link stands, why, and the longest prompt it takes.
    pub fn details(&self) -> Vec<Value> {
        let standings = self.standings.lock().unwrap_or_else(PoisonError::into_inner);
        let detail = |(url, standing): (&String, &Standing)| match standing {
            Standing::Trying => json!({ "url": url, "link": "trying" }),
            Standing::Up { max_prompt } => json!({ "url": url, "link": "up", "max_prompt_tokens": max_prompt }),
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
