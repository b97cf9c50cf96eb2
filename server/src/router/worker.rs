//! What a worker is to the router.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// One life of a worker process: its incarnation, drawn at random when it starts. A worker that restarts is another one,
/// so nothing known of the old process is believed of the new one.
///
/// Written as 16 hexadecimal digits: JSON's numbers do not hold 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerId(pub u64);

impl fmt::Display for WorkerId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// The text is not 16 hexadecimal digits.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is no worker, expected 16 hexadecimal digits")]
pub struct BadWorkerId(String);

impl FromStr for WorkerId {
    type Err = BadWorkerId;

    fn from_str(text: &str) -> Result<Self, BadWorkerId> {
        let digits = text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = u64::from_str_radix(text, 16).ok().filter(|_| digits);
        value.map(Self).ok_or_else(|| BadWorkerId(text.chars().take(32).collect()))
    }
}

impl Serialize for WorkerId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for WorkerId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// Which legs of a request a worker takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum WorkerRole {
    /// Prompts and answers.
    Both,
    /// Prompts only, for decode workers.
    Prefill,
    /// Answers; prompts may come from a prefill worker.
    Decode,
}

impl WorkerRole {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Both => "both",
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }

    /// True if clients' requests may be sent to it.
    pub fn serves(self) -> bool {
        self != Self::Prefill
    }
}

/// Whether a worker takes new requests now.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    #[default]
    Ready,
    /// Above its limit; takes requests again when it has caught up.
    Overloaded,
    /// It failed lately: connection errors, or an open circuit breaker.
    Quarantined,
    /// Its owner stops it.
    Draining,
    /// It does not fit the cluster (block size, model); the reason is with its record.
    Refused,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_id_is_sixteen_digits() {
        let id = WorkerId(0x0000_00ff_0000_0001);
        assert_eq!(id.to_string(), "000000ff00000001");
        assert_eq!(id.to_string().parse::<WorkerId>().unwrap(), id);
        for bad in ["", "1", "+00000ff00000001", "00000ff000000001z", "0x0000ff00000001", "é00000ff0000001"]
        {
            assert!(bad.parse::<WorkerId>().is_err(), "{bad:?}");
        }
    }
}
