//! What passes in a stream of server-sent events, without taking it apart: whether it ended as it should, whether it
//! said an error, and what it says was cached.

use std::sync::LazyLock;

use memchr::memmem::Finder;

/// As many bytes at the end of what has passed as are needed to recognise the end, or a field cut in two.
const TAIL: usize = 64;

/// Looks at pieces of a stream as they pass.
#[derive(Debug, Default)]
pub struct StreamWatch {
    tail: Vec<u8>,
    bytes: u64,
    failed: bool,
    usage: SeenUsage,
}

/// What an answer says of its tokens, as far as it does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SeenUsage {
    pub prompt_tokens: Option<u64>,
    pub completion_tokens: Option<u64>,
    pub cached_tokens: Option<u64>,
}

impl StreamWatch {
    /// `bytes` pass.
    pub fn see(&mut self, bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        // An event with an error begins a piece: servers write it as one.
        self.failed |= is_error(bytes);
        self.usage.see(bytes);
        if bytes.len() >= TAIL {
            self.tail.clear();
            self.tail.extend_from_slice(&bytes[bytes.len() - TAIL..]);
        } else {
            let excess = (self.tail.len() + bytes.len()).saturating_sub(TAIL);
            self.tail.drain(..excess);
            self.tail.extend_from_slice(bytes);
        }
    }

    /// Whether the stream is whole: it ends with `[DONE]`.
    pub fn is_done(&self) -> bool {
        self.tail.trim_ascii_end().ends_with(b"data: [DONE]")
    }

    /// Whether the stream has said an error, after which no `[DONE]` is owed.
    pub fn failed(&self) -> bool {
        self.failed
    }

    /// The last usage that has passed.
    pub fn usage(&self) -> SeenUsage {
        self.usage
    }

    /// Whether what comes next begins an event.
    pub fn at_event_start(&self) -> bool {
        self.tail.is_empty() || self.tail.ends_with(b"\n\n")
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl SeenUsage {
    /// Takes what `bytes` say, in a stream or in a whole answer.
    pub fn see(&mut self, bytes: &[u8]) {
        static USAGE: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b"\"usage\":{"));
        // One search in the ordinary case, where there is none.
        let Some(at) = USAGE.find_iter(bytes).last() else { return };
        let usage = &bytes[at..];
        self.prompt_tokens = number(usage, b"\"prompt_tokens\":").or(self.prompt_tokens);
        self.completion_tokens = number(usage, b"\"completion_tokens\":").or(self.completion_tokens);
        self.cached_tokens = number(usage, b"\"cached_tokens\":").or(self.cached_tokens);
    }
}

fn is_error(bytes: &[u8]) -> bool {
    const STARTS: [&[u8]; 2] = [b"data: {\"error\"", b"data: {\"object\":\"error\""];
    STARTS.iter().any(|start| bytes.starts_with(start) || finds(bytes, start, b"\n\n"))
}

/// Whether an event in the middle of `bytes` begins with `start`.
fn finds(bytes: &[u8], start: &[u8], before: &[u8]) -> bool {
    memchr::memmem::find_iter(bytes, before).any(|at| bytes[at + before.len()..].starts_with(start))
}

/// The number after the first `name`.
fn number(bytes: &[u8], name: &[u8]) -> Option<u64> {
    let at = memchr::memmem::find(bytes, name)?;
    let rest = bytes[at + name.len()..].trim_ascii_start();
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    std::str::from_utf8(&rest[..digits]).ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watch(pieces: &[&str]) -> StreamWatch {
        let mut watch = StreamWatch::default();
        pieces.iter().for_each(|piece| watch.see(piece.as_bytes()));
        watch
    }

    #[test]
    fn only_done_is_the_end() {
        assert!(watch(&["data: {}\n\n", "data: [DONE]\n\n"]).is_done());
        assert!(watch(&["data: {}\n\ndata: [DO", "NE]\n", "\n"]).is_done());
        assert!(watch(&[&"x".repeat(500), "data: [DONE]\n\n"]).is_done());
        assert!(!watch(&["data: {\"text\":\"data: [DONE]\"}\n\n"]).is_done());
        assert!(!watch(&["data: {}\n\n"]).is_done());
        assert!(!watch(&[]).is_done());
    }

    #[test]
    fn errors_are_events_and_no_text() {
        assert!(watch(&["data: {\"error\":{\"message\":\"boom\"}}\n\n"]).failed());
        assert!(watch(&["data: {\"a\":1}\n\ndata: {\"error\":{}}\n\n"]).failed());
        assert!(!watch(&["data: {\"text\":\"data: {\\\"error\\\"\"}\n\n"]).failed());
    }

    #[test]
    fn the_last_usage_counts() {
        let usage = |completion, cached| {
            format!(
                "data: {{\"choices\":[],\"usage\":{{\"prompt_tokens\":9,\"completion_tokens\":{completion},\
                 \"prompt_tokens_details\":{{\"cached_tokens\": {cached} }}}}}}\n\n"
            )
        };
        let seen = watch(&[&usage(0, 16), &usage(3, 32), "data: [DONE]\n\n"]).usage();
        let expected =
            SeenUsage { prompt_tokens: Some(9), completion_tokens: Some(3), cached_tokens: Some(32) };
        assert_eq!(seen, expected);
        assert_eq!(watch(&["data: {\"usage\":null}\n\n"]).usage(), SeenUsage::default());
        assert_eq!(number(b"\"cached_tokens\":null", b"\"cached_tokens\":"), None);
    }
}
