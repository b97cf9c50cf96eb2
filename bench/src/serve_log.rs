//! What the log of a `serve` process says: facts that the API and the metrics do not have.

use serde::Serialize;

/// One handoff, as the decode worker logged it under the request's id. Times as in the ticket protocol: microseconds
/// on the prefill worker; `wire_us` is the time with a write under way, `exposed_us` from the first token to the last write's arrival.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Handoff {
    pub request_id: String,
    pub bytes: u64,
    pub descriptors: u64,
    pub writes: u64,
    pub compute_us: u64,
    pub wire_us: u64,
    pub exposed_us: u64,
}

/// All handoffs in the log of a decode worker, in order. Empty if it logs less than `info`.
pub fn handoffs(log: &str) -> Vec<Handoff> {
    log.lines().filter(|line| line.contains(" KV received ")).filter_map(handoff).collect()
}

/// The transport that the worker really opened, which `auto` does not say.
pub fn transport(log: &str) -> Option<String> {
    let line = log.lines().find(|line| line.contains(" KV transport open "))?;
    field(line, "transport")
}

/// How large a KV block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSize {
    pub tokens: u64,
    pub bytes: u64,
}

/// The size of a KV block, from the whole cache's.
pub fn block_size(log: &str) -> Option<BlockSize> {
    let line = log.lines().find(|line| line.contains(" model loaded "))?;
    let per_block = |key| {
        let number = |key| field(line, key)?.parse::<u64>().ok();
        number(key)?.checked_div(number("kv_blocks")?).filter(|&size| size > 0)
    };
    Some(BlockSize { tokens: per_block("kv_tokens")?, bytes: per_block("kv_bytes")? })
}

fn handoff(line: &str) -> Option<Handoff> {
    let number = |key| field(line, key)?.parse().ok();
    Some(Handoff {
        request_id: field(line, "request_id")?,
        bytes: number("bytes")?,
        descriptors: number("descriptors")?,
        writes: number("writes")?,
        compute_us: number("compute_us")?,
        wire_us: number("wire_us")?,
        exposed_us: number("exposed_us")?,
    })
}

/// The value of `key=value` in a log line, without its quotes. Values here are numbers and ids without blanks.
fn field(line: &str, key: &str) -> Option<String> {
    let word = line.split_whitespace().find_map(|word| word.strip_prefix(key)?.strip_prefix('='))?;
    Some(word.trim_matches('"').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
2026-11-30T06:24:04.337794Z  INFO transfer::registry: KV transport open asked=\"auto\" transport=\"shm\"
2026-11-30T06:24:04.417220Z  INFO server::link::peers: linked to the prefill worker peer=http://127.0.0.1:34715
2026-11-30T06:24:09.792879Z  INFO engine::service: KV received request_id=\"r0-1\" bytes=49152 descriptors=2 writes=1 compute_us=7832 wire_us=2852 exposed_us=3410
2026-11-30T06:24:09.797256Z  INFO engine::service: finished request_id=\"r0-1\" reason=\"length\" prompt_tokens=21
2026-11-30T06:24:09.8Z  INFO engine::service: KV received request_id=\"cut off\" by";

    #[test]
    fn the_handoff_of_a_request_is_found() {
        let handoffs = handoffs(LOG);
        let expected = Handoff {
            request_id: "r0-1".into(),
            bytes: 49152,
            descriptors: 2,
            writes: 1,
            compute_us: 7832,
            wire_us: 2852,
            exposed_us: 3410,
        };
        assert_eq!(handoffs, [expected]);
    }

    #[test]
    fn the_transport_is_the_one_that_was_opened() {
        assert_eq!(transport(LOG).as_deref(), Some("shm"));
        assert_eq!(transport("nothing yet"), None);
    }

    #[test]
    fn the_size_of_a_block_is_that_of_the_pool_shared_out() {
        let log =
            "INFO server::worker: model loaded model=/m kv_blocks=43690 kv_tokens=699040 kv_bytes=1073725440";
        assert_eq!(block_size(log), Some(BlockSize { tokens: 16, bytes: 24_576 }));
        assert_eq!(block_size(""), None);
    }
}
