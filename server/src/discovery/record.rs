//! What a worker says of itself.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::router::{WorkerId, WorkerRole};

/// Version of the record; a newer one with more fields is read as far as it is known here.
pub const RECORD_VERSION: u32 = 1;

/// Names of blocks as in `engine::hash`: whoever says this sends [`crate::router::policy::BlockKey`]s in its events.
pub const HASH_SCHEME: &str = "kvferry-1";

/// A worker, as it is found by frontends and by other workers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkerRecord {
    pub version: u32,
    /// The name its owner gave it, or its incarnation. At most one living worker has it.
    pub worker_id: String,
    /// This life of the process.
    pub incarnation: WorkerId,
    pub role: WorkerRole,
    /// The model's name in the API.
    pub model: String,
    /// Where its HTTP server is: `http://host:port`.
    pub url: String,
    /// Tokens in a block; `None` if it did not say, as a plain OpenAI server.
    pub block_size: Option<u32>,
    /// Blocks of its KV pool.
    pub capacity_blocks: Option<u64>,
    pub max_model_len: Option<u64>,
    /// Where its KV events are; `None` if it publishes none.
    pub events: Option<EventEndpoints>,
    /// How blocks are named in its events; `None` or another value than [`HASH_SCHEME`]: by token ids only.
    pub hash_scheme: Option<String>,
    /// What it measured of itself: prompt tokens computed in a second of prefill. Not in what is registered, which is
    /// written before anything is computed, but in its answer to who it is.
    pub prefill_tokens_per_sec: Option<f32>,
    /// Bytes of KV of one token; `None` if it did not say.
    pub kv_bytes_per_token: Option<u64>,
    /// Name of its KV transport.
    pub kv_transport: Option<String>,
    /// It takes no new requests.
    #[serde(default)]
    pub draining: bool,
    /// What others may want to know, such as the transport's address.
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
}

/// Where a worker publishes KV events.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct EventEndpoints {
    /// ZMQ PUB, such as `tcp://10.0.0.1:5557`.
    pub endpoint: String,
    /// ZMQ ROUTER that repeats batches.
    pub replay_endpoint: Option<String>,
    #[serde(default)]
    pub topic: String,
    /// URL of what it holds now, as a stream; only our workers have it.
    pub snapshot_url: Option<String>,
}
