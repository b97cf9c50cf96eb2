//! Reading `/metrics`.

/// One scrape of Prometheus' text format.
#[derive(Clone, Debug)]
pub struct Metrics {
    /// Name, labels as they are written, value.
    samples: Vec<(String, String, f64)>,
}

/// KV blocks by state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Account {
    pub free: u64,
    pub cached: u64,
    pub running: u64,
    pub ticketed: u64,
    pub quarantined: u64,
}

impl Metrics {
    /// # Panics
    /// On a line that is neither a comment nor a sample.
    pub fn parse(text: &str) -> Self {
        let samples =
            text.lines().filter(|line| !line.starts_with('#') && !line.trim().is_empty()).map(|line| {
                let (series, value) = line.rsplit_once(' ').unwrap_or_else(|| panic!("no sample: {line:?}"));
                let (name, labels) = series.split_once('{').unwrap_or((series, ""));
                let value = value.parse().unwrap_or_else(|error| panic!("{line:?}: {error}"));
                (name.to_owned(), labels.trim_end_matches('}').to_owned(), value)
            });
        Self { samples: samples.collect() }
    }

    /// The value of the one series of this name.
    ///
    /// # Panics
    /// When there is none: a metric that is not exported is not 0.
    pub fn value(&self, name: &str) -> f64 {
        self.labelled(name, "")
    }

    /// The value of the series that has `label`, such as `state="free"`.
    pub fn labelled(&self, name: &str, label: &str) -> f64 {
        let found = self.samples.iter().find(|(n, labels, _)| n == name && labels.contains(label));
        found.unwrap_or_else(|| panic!("/metrics has no {name}{{{label}}}: {:?}", self.samples)).2
    }

    /// Prompt tokens by where their KV came from: `local_compute`, `local_cache_hit` or `external_kv_transfer`.
    pub fn prompt_tokens(&self, source: &str) -> u64 {
        self.labelled("vllm:prompt_tokens_by_source_total", &format!("source=\"{source}\"")) as u64
    }

    /// Handoffs whose KV arrived (decode) or was sent (prefill).
    pub fn transfers(&self) -> u64 {
        self.value("vllm:nixl_bytes_transferred_count") as u64
    }

    /// What a worker does and holds, for messages; a frontend has neither.
    pub fn state(&self) -> String {
        match self.samples.iter().any(|(name, ..)| name == "vllm:num_requests_running") {
            true => format!("{:?}, {:?}", self.in_progress(), self.account()),
            false => "no engine".into(),
        }
    }

    /// Requests that run, wait for a slot or blocks, or wait for remote KV.
    pub fn in_progress(&self) -> [u64; 3] {
        let deferred = self.labelled("vllm:num_requests_waiting_by_reason", "reason=\"deferred\"");
        [self.value("vllm:num_requests_running"), self.value("vllm:num_requests_waiting"), deferred]
            .map(|value| value as u64)
    }

    pub fn account(&self) -> Account {
        let blocks = |state: &str| self.labelled("kvferry:kv_blocks", &format!("state=\"{state}\"")) as u64;
        Account {
            free: blocks("free"),
            cached: blocks("cached"),
            running: blocks("running"),
            ticketed: blocks("ticketed"),
            quarantined: blocks("quarantined"),
        }
    }
}

impl Account {
    /// Blocks that some request, ticket or writer has.
    pub fn held(&self) -> u64 {
        self.running + self.ticketed + self.quarantined
    }

    pub fn capacity(&self) -> u64 {
        self.free + self.cached + self.held()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_are_found_by_name_and_label() {
        let text =
            "# HELP a b\nvllm:x{state=\"free\",engine=\"0\"} 3\nvllm:x{state=\"cached\"} 4\nplain 5e1\n";
        let metrics = Metrics::parse(text);
        assert_eq!(metrics.labelled("vllm:x", "state=\"cached\""), 4.0);
        assert_eq!(metrics.value("plain"), 50.0);
    }
}
