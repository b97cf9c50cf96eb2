//! Headers on their way through: what concerns one connection stays there, what only we may say is not taken from
//! clients.

use axum::http::{HeaderMap, HeaderName, HeaderValue, header};

/// Tells a decode worker of ours who computes the prompt: a prefill worker's address, or `local`.
pub const PREFILL: HeaderName = HeaderName::from_static("x-kvferry-prefill");

/// Under the same name, a decode worker's answer to an address that it has no link to.
pub const UNLINKED: HeaderValue = HeaderValue::from_static("unlinked");

/// A worker of ours says how many prompt tokens it found cached.
pub const CACHED_TOKENS: HeaderName = HeaderName::from_static("x-kvferry-cached-tokens");

/// Tells clients what the choice of worker rested on: `events`, `approximate` or `none`.
pub const KV_INDEX: HeaderName = HeaderName::from_static("x-kv-index");

/// Tells clients the address of the worker that answered.
pub const WORKER: HeaderName = HeaderName::from_static("x-kvferry-worker");

/// Tells clients the address of the worker that computed the prompt.
pub const PREFILL_WORKER: HeaderName = HeaderName::from_static("x-kvferry-prefill-worker");

/// As Dynamo names the two processes.
pub const WORKER_ID: HeaderName = HeaderName::from_static("x-dynamo-worker-instance-id");
pub const PREFILL_ID: HeaderName = HeaderName::from_static("x-dynamo-prefill-instance-id");

pub const X_REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Of one connection (RFC 9110, 7.6.1), or set anew by the HTTP client.
const HOP: [HeaderName; 10] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRAILER,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    header::CONTENT_LENGTH,
];

/// A client's headers as a worker gets them.
pub fn to_worker(client: &HeaderMap, request_id: &str) -> HeaderMap {
    let mut headers = HeaderMap::with_capacity(client.len() + 4);
    for (name, value) in client {
        // The stream is watched as it passes, so it must not be compressed.
        let ours = [PREFILL, header::HOST, header::EXPECT, header::ACCEPT_ENCODING].contains(name);
        if !ours && !HOP.contains(name) {
            headers.append(name, value.clone());
        }
    }
    if let Ok(id) = HeaderValue::from_str(request_id) {
        headers.insert(X_REQUEST_ID, id);
    }
    headers
}

/// A worker's headers as the client gets them.
pub fn to_client(worker: &mut HeaderMap) {
    for name in HOP.iter().chain([&CACHED_TOKENS, &PREFILL, &header::DATE]) {
        worker.remove(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_cannot_choose_the_prefill_worker_and_keep_their_authorization() {
        let mut client = HeaderMap::new();
        for (name, value) in [
            ("authorization", "Bearer a"),
            ("x-kvferry-prefill", "http://evil:1"),
            ("connection", "close"),
            ("host", "front"),
            ("content-length", "5"),
            ("accept-encoding", "gzip"),
            ("traceparent", "00-1-2-3"),
        ] {
            client.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let headers = to_worker(&client, "r1");
        let mut names: Vec<_> = headers.keys().map(HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["authorization", "traceparent", "x-request-id"]);
    }
}
