//! The trivial worker behind a router that is measured: answers at once, whatever it is asked.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use super::wire::{self, find};

/// Events of a stream, each written by itself: a router or a socket that waits to fill a packet shows.
pub const EVENTS: usize = 4;

/// The model that it says it serves.
pub const MODEL: &str = "demo";

/// Serves on a thread of its own until the process ends; its port, which is `port` unless that is 0.
pub fn start(port: u16) -> io::Result<u16> {
    let listener = std::net::TcpListener::bind(("127.0.0.1", port))?;
    let port = listener.local_addr()?.port();
    listener.set_nonblocking(true)?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    std::thread::spawn(move || {
        runtime.block_on(async move {
            let Ok(listener) = TcpListener::from_std(listener) else { return };
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream));
            }
        })
    });
    Ok(port)
}

async fn serve(mut stream: TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let answers = Answers::new();
    let mut received = Vec::with_capacity(16 << 10);
    loop {
        let Some(head) = wire::read_head(&mut stream, &mut received).await? else { return Ok(()) };
        while received.len() < head.end + head.length {
            if stream.read_buf(&mut received).await? == 0 {
                return Ok(());
            }
        }
        let request = &received[..head.end + head.length];
        let post = request.starts_with(b"POST ");
        let chat = request.starts_with(b"POST /v1/chat");
        let streams = post && find(&request[head.end..], b"\"stream\":true").is_some();
        let models = request.starts_with(b"GET /v1/models");
        received.drain(..head.end + head.length);
        match (post, streams) {
            (true, true) => {
                for piece in if chat { &answers.chat_stream } else { &answers.stream } {
                    stream.write_all(piece).await?;
                }
            }
            (true, false) => stream.write_all(if chat { &answers.chat } else { &answers.completion }).await?,
            (false, _) if models => stream.write_all(&answers.models).await?,
            (false, _) => stream.write_all(&answers.health).await?,
        }
    }
}

struct Answers {
    completion: Vec<u8>,
    chat: Vec<u8>,
    stream: Vec<Vec<u8>>,
    chat_stream: Vec<Vec<u8>>,
    models: Vec<u8>,
    health: Vec<u8>,
}

impl Answers {
    fn new() -> Self {
        let usage = r#""usage":{"prompt_tokens":9,"completion_tokens":4,"total_tokens":13}"#;
        let completion = format!(
            r#"{{"id":"cmpl-1","object":"text_completion","created":1,"model":"{MODEL}","choices":[{{"index":0,"text":" yes","finish_reason":"length"}}],{usage}}}"#
        );
        let chat = format!(
            r#"{{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"{MODEL}","choices":[{{"index":0,"message":{{"role":"assistant","content":"yes"}},"finish_reason":"stop"}}],{usage}}}"#
        );
        let models = format!(
            r#"{{"object":"list","data":[{{"id":"{MODEL}","object":"model","created":1,"owned_by":"bench"}}]}}"#
        );
        let event = |choice: &str| {
            format!(
                r#"{{"id":"cmpl-1","object":"text_completion","created":1,"model":"{MODEL}","choices":[{{"index":0,{choice},"finish_reason":null}}]}}"#
            )
        };
        Self {
            completion: whole(&completion),
            chat: whole(&chat),
            stream: pieces(&event(r#""text":" yes""#)),
            chat_stream: pieces(&event(r#""delta":{"content":" yes"}"#)),
            models: whole(&models),
            health: whole("{}"),
        }
    }
}

fn whole(body: &str) -> Vec<u8> {
    format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into_bytes()
}

/// Head, events, end: as many writes.
fn pieces(event: &str) -> Vec<Vec<u8>> {
    let chunk = |data: &str| format!("{:x}\r\n{data}\r\n", data.len());
    let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
    let first = format!("{head}{}", chunk(&format!("data: {event}\n\n")));
    let more = (1..EVENTS).map(|_| chunk(&format!("data: {event}\n\n")));
    let last = format!("{}0\r\n\r\n", chunk("data: [DONE]\n\n"));
    std::iter::once(first).chain(more).chain([last]).map(String::into_bytes).collect()
}
