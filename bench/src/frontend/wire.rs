//! As much of HTTP/1.1 as a load generator needs: any client of a library would be slower than what is measured.

use std::io;

use tokio::io::AsyncReadExt;
use tokio::net::TcpStream;

/// A message's head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Head {
    /// Where the body begins.
    pub end: usize,
    /// Bytes of the body, unless it is chunked.
    pub length: usize,
    pub chunked: bool,
    /// Of an answer; 0 of a request.
    pub status: u16,
}

/// Reads until `received` begins with a whole head; `None` when the peer closes before one.
pub async fn read_head(stream: &mut TcpStream, received: &mut Vec<u8>) -> io::Result<Option<Head>> {
    loop {
        if let Some(at) = find(received, b"\r\n\r\n") {
            return Ok(Some(parse(&received[..at + 4])));
        }
        if stream.read_buf(received).await? == 0 {
            return Ok(None);
        }
    }
}

/// Reads the rest of an answer; returns it without its head. Chunks are not joined: only their end is looked for.
pub async fn read_body(stream: &mut TcpStream, received: &mut Vec<u8>, head: Head) -> io::Result<()> {
    let mut seen = head.end;
    loop {
        let whole = match head.chunked {
            // The last chunk is empty; nothing follows it, for one request is under way at a time.
            true => received.len() >= head.end + 5 && received.ends_with(b"0\r\n\r\n"),
            false => received.len() >= head.end + head.length,
        };
        if whole {
            return Ok(());
        }
        if stream.read_buf(received).await? == 0 {
            let what =
                format!("closed within an answer, after {} bytes", received.len() - seen.min(received.len()));
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, what));
        }
        seen = seen.max(head.end);
    }
}

fn parse(head: &[u8]) -> Head {
    let status = head.get(9..12).and_then(|text| std::str::from_utf8(text).ok()?.parse().ok()).unwrap_or(0);
    let text = String::from_utf8_lossy(head);
    let mut lines = text.split("\r\n").filter_map(|line| line.split_once(':'));
    let (mut length, mut chunked) = (0, false);
    for (name, value) in lines.by_ref() {
        if name.eq_ignore_ascii_case("content-length") {
            length = value.trim().parse().unwrap_or(0);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            chunked = value.trim().eq_ignore_ascii_case("chunked");
        }
    }
    Head { end: head.len(), length, chunked, status }
}

/// Where `needle` is in `hay`.
pub fn find(hay: &[u8], needle: &[u8]) -> Option<usize> {
    let first = needle[0];
    let mut from = 0;
    while let Some(at) = hay[from..].iter().position(|&byte| byte == first) {
        let at = from + at;
        if hay[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read() {
        let head = b"HTTP/1.1 503 Nope\r\nContent-Length: 12\r\nx: y\r\n\r\n";
        assert_eq!(parse(head), Head { end: head.len(), length: 12, chunked: false, status: 503 });
        let head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n";
        assert_eq!(parse(head), Head { end: head.len(), length: 0, chunked: true, status: 200 });
        assert_eq!((find(b"abcabd", b"abd"), find(b"abc", b"x")), (Some(3), None));
    }
}
