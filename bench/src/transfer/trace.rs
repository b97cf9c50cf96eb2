//! `bench transfer --trace FILE`: one handoff between two workers as a trace for chrome://tracing or ui.perfetto.dev, with
//! steps and transfers of both workers side by side.
//!
//! The workers log each step and each transfer with its duration when it is over; here that becomes spans.

use std::path::Path;

use serde_json::{Value, json};

use super::Args;
use crate::deployment::{Deployment, Launcher, Shape, Transport};
use crate::error::{BenchError, Result};
use crate::output::write;
use crate::prompts::Prompts;
use crate::serve_log::field;

/// Enough for some decode steps after the handoff.
const OUTPUT: usize = 8;

/// The largest of `--tokens` that still is quick on two cores.
const PROMPT: u32 = 2048;

/// A span as a worker logged it. Microseconds.
#[derive(Clone, Debug, PartialEq)]
struct Span {
    begin: f64,
    length: f64,
    track: &'static str,
    name: String,
    args: Value,
}

/// Starts two workers, hands one prompt over, and writes what they did.
pub async fn run(args: &Args, path: &Path) -> Result<()> {
    let name = &args.transport[0];
    let transport = <Transport as clap::ValueEnum>::from_str(name, true).map_err(|_| {
        BenchError::Usage(format!(
            "--trace starts workers over tcp, shm, cuda_ipc, mmap, socket or auto, not {name}"
        ))
    })?;
    let serve_args =
        [&["--log-level".to_owned(), "info,kv_trace=debug".to_owned()][..], &args.serve_arg].concat();
    let mut launcher = Launcher::new(&args.model, &serve_args)?;
    let mut deployment = launcher.start(Shape::Disaggregated(transport)).await?;
    let outcome = hand_over(args, &deployment).await;
    deployment.blame(outcome).await?;
    let (decode, prefill) = (deployment.log(), deployment.prefill_log().unwrap_or_default());
    deployment.stop().await?;
    let events = events(&[("prefill worker", &prefill), ("decode worker", &decode)]);
    let text = serde_json::to_string(&json!({ "traceEvents": events, "displayTimeUnit": "ms" }))
        .expect("events serialize. This is a bug.");
    write(path, &text)?;
    println!("open it in https://ui.perfetto.dev or chrome://tracing");
    Ok(())
}

/// One request to warm up (connections, pages), then the one that is looked at.
async fn hand_over(args: &Args, deployment: &Deployment) -> Result<()> {
    let tokens = args.tokens.iter().copied().filter(|&tokens| tokens <= PROMPT).max().unwrap_or(PROMPT);
    let mut prompts = Prompts::new(1);
    for request_id in ["warm-up", TRACED] {
        let prompt = prompts.next(&deployment.client, tokens as usize).await?;
        let body = json!({ "prompt": prompt, "max_tokens": OUTPUT, "temperature": 0, "ignore_eos": true });
        deployment.client.stream("/v1/completions", request_id, body, |_| {}).await?;
    }
    Ok(())
}

const TRACED: &str = "traced";

/// Everything after the warm-up's end, as trace events: a process for each worker, a track for steps and one for each
/// transfer that overlaps with others.
fn events(logs: &[(&str, &str)]) -> Vec<Value> {
    // The warm-up's answer is the last thing before the request that is looked at.
    let warm = |log: &&(&str, &str)| log.1.lines().find(|line| line.contains(" finished ")).and_then(time);
    let from = logs.iter().filter_map(|log| warm(&log)).fold(0.0, f64::max);
    let mut events = Vec::new();
    for (pid, (name, log)) in logs.iter().enumerate() {
        events.push(meta("process_name", pid, 0, name));
        let mut spans: Vec<Span> = log.lines().filter_map(span).filter(|span| span.begin >= from).collect();
        spans.sort_by(|a, b| a.begin.total_cmp(&b.begin));
        let mut tracks: Vec<(&str, f64)> = Vec::new();
        for span in spans {
            let free = tracks.iter().position(|&(track, end)| track == span.track && end <= span.begin);
            let tid = free.unwrap_or_else(|| {
                tracks.push((span.track, 0.0));
                events.push(meta("thread_name", pid, tracks.len() - 1, span.track));
                tracks.len() - 1
            });
            tracks[tid].1 = span.begin + span.length;
            events.push(json!({
                "ph": "X", "pid": pid, "tid": tid, "name": span.name, "ts": span.begin - from, "dur": span.length,
                "args": span.args,
            }));
        }
    }
    events
}

fn meta(what: &str, pid: usize, tid: usize, name: &str) -> Value {
    json!({ "ph": "M", "pid": pid, "tid": tid, "name": what, "args": { "name": name } })
}

/// A step or a transfer; it was logged at its end.
fn span(line: &str) -> Option<Span> {
    let end = time(line)?;
    let number = |key| field(line, key)?.parse::<f64>().ok();
    if !line.contains(" kv_trace: ") {
        return None;
    }
    if line.contains(" step ") {
        let (tokens, length) = (number("tokens")?, number("us")?);
        let name = format!("step of {tokens} tokens");
        return Some(Span {
            begin: end - length,
            length,
            track: "engine steps",
            name,
            args: json!({ "tokens": tokens }),
        });
    }
    let (bytes, length) = (number("bytes")?, number("wire_us")?);
    let direction = field(line, "direction")?;
    Some(Span {
        begin: end - length,
        length,
        track: "KV transfers",
        name: format!("{direction} {:.2} MB", bytes / 1e6),
        args: json!({
            "bytes": bytes,
            "descriptors": number("descriptors")?,
            "queue_us": number("queue_us")?,
            "post_us": number("post_us")?,
            "lane": field(line, "lane")?,
            "gb_per_s": bytes / length.max(1e-3) / 1e3,
        }),
    })
}

/// Microseconds since the day's beginning at the head of a log line, such as `2026-11-30T06:24:04.337794Z`.
fn time(line: &str) -> Option<f64> {
    let (_, clock) = line.split_whitespace().next()?.trim_end_matches('Z').split_once('T')?;
    let mut parts = clock.split(':').map(|part| part.parse::<f64>().ok());
    let (hours, minutes, seconds) = (parts.next()??, parts.next()??, parts.next()??);
    Some(((hours * 60.0 + minutes) * 60.0 + seconds) * 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PREFILL: &str = "\
2026-11-30T00:00:00.900000Z DEBUG kv_trace: step tokens=9 us=100
2026-11-30T00:00:01.000000Z  INFO engine::service: finished request_id=\"warm-up\" reason=\"length\"
2026-11-30T00:00:01.010000Z DEBUG kv_trace: step tokens=512 us=8000
2026-11-30T00:00:01.020000Z DEBUG kv_trace: step tokens=512 us=9000
2026-11-30T00:00:01.015000Z DEBUG kv_trace: transfer direction=\"write\" lane=\"cma/memory\" bytes=1000000 descriptors=2 queue_us=1 post_us=2 wire_us=4000
2026-11-30T00:00:01.016000Z DEBUG kv_trace: transfer direction=\"write\" lane=\"cma/memory\" bytes=1000000 descriptors=2 queue_us=1 post_us=2 wire_us=4000
";

    #[test]
    fn spans_end_where_they_were_logged_and_overlapping_ones_have_tracks_of_their_own() {
        let events = events(&[("prefill worker", PREFILL)]);
        let spans: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(spans.len(), 4, "nothing of the warm-up: {events:?}");
        let at = |index: usize| {
            let number = |key: &str| spans[index][key].as_f64().unwrap().round();
            (spans[index]["name"].as_str().unwrap(), number("ts"), number("dur"))
        };
        assert_eq!(at(0), ("step of 512 tokens", 2000.0, 8000.0));
        assert_eq!(at(1), ("write 1.00 MB", 11_000.0, 4000.0));
        let tid = |index: usize| spans[index]["tid"].as_u64();
        // Write, step, write: the two writes overlap.
        let writes: Vec<_> = (0..4).filter(|&i| at(i).0.starts_with("write")).map(tid).collect();
        assert_ne!(writes[0], writes[1]);
    }
}
