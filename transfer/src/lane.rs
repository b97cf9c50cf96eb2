//! What really carries the bytes.

use serde::{Deserialize, Serialize};

/// A lane as the library below names it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lane {
    /// Transport and device, such as `cma/memory`, `tcp/lo`, `cuda_ipc/cuda`; several joined by words when the library
    /// splits a transfer.
    pub carrier: String,
    /// How, such as `zero-copy` or `software emulation`.
    pub how: String,
}

impl Lane {
    /// Whether the operation is emulated by messages: it then needs the peer's processor, in small pieces.
    pub fn emulated(&self) -> bool {
        self.how.contains("emulation")
    }

    /// The transports by name, without their devices.
    pub fn transports(&self) -> impl Iterator<Item = &str> {
        self.carrier
            .split_whitespace()
            .filter_map(|word| word.split_once('/'))
            .map(|(transport, _)| transport)
    }
}

impl std::fmt::Display for Lane {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({})", self.carrier, self.how)
    }
}
