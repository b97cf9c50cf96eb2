//! What a worker's own counters say of a stretch of time.

use std::time::{Duration, Instant};

use crate::client::Client;
use crate::error::Result;
use crate::prometheus::Scrape;

/// A worker counts a step just after it has sent the step's answers.
const COUNTED_WITHIN: Duration = Duration::from_secs(2);
const POLL: Duration = Duration::from_millis(5);

/// Tokens that were looked up and found, and requests that were preempted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counted {
    pub queries: usize,
    pub hits: usize,
    pub preemptions: u64,
}

impl Counted {
    /// Since `before`, in which `sent` prompt tokens were answered.
    pub async fn since(client: &Client, before: &Scrape, sent: usize) -> Result<Self> {
        let started = Instant::now();
        loop {
            let counted = Self::between(before, &client.metrics().await?);
            if counted.queries >= sent || started.elapsed() > COUNTED_WITHIN {
                return Ok(counted);
            }
            tokio::time::sleep(POLL).await;
        }
    }

    /// What differs from `sent` prompt tokens of which `cached` were found. A preempted request is looked up again, so
    /// then nothing can be said.
    pub fn unlike(&self, sent: usize, cached: usize) -> Option<String> {
        let same = (self.queries, self.hits) == (sent, cached) || self.preemptions > 0;
        (!same).then(|| {
            format!(
                "vllm:prefix_cache_queries and hits grew by {} and {}, but the answers say {sent} prompt and {cached} \
                 cached tokens",
                self.queries, self.hits
            )
        })
    }

    fn between(before: &Scrape, after: &Scrape) -> Self {
        let grown = |name: &str| after.sum(name, &[]) - before.sum(name, &[]);
        Self {
            queries: grown("vllm:prefix_cache_queries_total") as usize,
            hits: grown("vllm:prefix_cache_hits_total") as usize,
            preemptions: grown("vllm:num_preemptions_total") as u64,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scrape(queries: usize, hits: usize, preemptions: usize) -> Scrape {
        Scrape::parse(&format!(
            "vllm:prefix_cache_queries_total{{model_name=\"m\"}} {queries}\n\
             vllm:prefix_cache_hits_total {hits}\nvllm:num_preemptions_total {preemptions}\n"
        ))
        .unwrap()
    }

    #[test]
    fn counters_must_say_what_the_answers_say() {
        let counted = Counted::between(&scrape(100, 20, 1), &scrape(400, 120, 1));
        assert_eq!(counted, Counted { queries: 300, hits: 100, preemptions: 0 });
        assert_eq!(counted.unlike(300, 100), None);
        assert!(counted.unlike(300, 99).unwrap().contains("grew by 300 and 100"));
        assert!(counted.unlike(299, 100).is_some());
        assert_eq!(Counted { preemptions: 1, ..counted }.unlike(300, 99), None);
    }
}
