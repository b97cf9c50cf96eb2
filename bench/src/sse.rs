//! Reads server-sent events out of a byte stream that may be cut anywhere, within a character too.

/// Collects bytes until events are complete.
#[derive(Debug, Default)]
pub struct SseReader {
    /// The bytes of the line that has not ended.
    line: Vec<u8>,
    /// A `\r` ended the last line: a `\n` that follows belongs to it.
    after_cr: bool,
    /// The `data` lines of the event that has not ended.
    data: Option<String>,
}

impl SseReader {
    /// The `data` of every event that `bytes` completes, in order. Other fields and comments are left out.
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        let mut events = Vec::new();
        for &byte in bytes {
            let crlf = std::mem::replace(&mut self.after_cr, byte == b'\r') && byte == b'\n';
            match byte {
                _ if crlf => {}
                b'\n' | b'\r' => events.extend(self.end_line()),
                _ => self.line.push(byte),
            }
        }
        events
    }

    /// An empty line ends the event.
    fn end_line(&mut self) -> Option<String> {
        let line = String::from_utf8_lossy(&self.line).into_owned();
        self.line.clear();
        if line.is_empty() {
            return self.data.take();
        }
        let value = line.strip_prefix("data:")?;
        let value = value.strip_prefix(' ').unwrap_or(value);
        match &mut self.data {
            Some(data) => {
                data.push('\n');
                data.push_str(value);
            }
            None => self.data = Some(value.to_owned()),
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STREAM: &str = ": hello\nid: 7\ndata: {\"text\":\"né 😀\"}\n\ndata:a\r\ndata: b\r\n\r\nevent: x\n\ndata:  c\r\rdata: [DONE]\n\n";
    const EVENTS: [&str; 4] = ["{\"text\":\"né 😀\"}", "a\nb", " c", "[DONE]"];

    #[test]
    fn events_do_not_depend_on_where_the_stream_is_cut() {
        let bytes = STREAM.as_bytes();
        for first in 0..bytes.len() {
            for second in first..bytes.len() {
                let mut reader = SseReader::default();
                let parts = [&bytes[..first], &bytes[first..second], &bytes[second..]];
                let events: Vec<_> = parts.iter().flat_map(|part| reader.feed(part)).collect();
                assert_eq!(events, EVENTS, "cut at {first} and {second}");
            }
        }
    }

    #[test]
    fn bytes_one_by_one_give_the_same_events() {
        let mut reader = SseReader::default();
        let events: Vec<_> = STREAM.bytes().flat_map(|byte| reader.feed(&[byte])).collect();
        assert_eq!(events, EVENTS);
    }

    #[test]
    fn an_event_that_has_not_ended_is_not_given() {
        assert!(SseReader::default().feed(b"data: a\n").is_empty());
    }
}
