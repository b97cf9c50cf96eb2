//! `bench demo`: a question to a prefill and a decode worker, and what the handoff took.

use std::io::Write;
use std::time::Instant;

use serde_json::{Value, json};

use crate::client::{Answer, Client};
use crate::deployment::{Deployment, Launcher, Shape, Transport};
use crate::error::Result;
use crate::serve_log::{self, Handoff};
use crate::table::{grouped, ms};
use crate::transfers::gb_per_s;

/// Start a prefill and a decode worker, ask two questions, and print what the handoff of the KV took.
///
/// The second question goes on in the same conversation: what the decode worker still has in its prefix cache is
/// neither computed nor sent again.
#[derive(Clone, Debug, clap::Args)]
#[command(after_long_help = AFTER_HELP)]
pub struct Args {
    /// What to ask first.
    #[arg(long, value_name = "TEXT", default_value = "What is kvferry?")]
    question: String,
    /// What to ask then, in the same conversation.
    #[arg(long, value_name = "TEXT", default_value = "Why are prefill and decode in separate processes?")]
    follow_up: String,
    /// What to serve: a folder, a Hugging Face id, or `demo`.
    #[arg(long, value_name = "PATH|ID|demo", default_value = "demo")]
    model: String,
    /// How KV moves between the two workers.
    #[arg(long, value_name = "NAME", env = "KV_TRANSPORT", default_value = "auto")]
    transport: Transport,
    /// Longest answer, in tokens.
    #[arg(long, value_name = "N", default_value_t = 128)]
    max_tokens: usize,
    /// A further argument for both workers, such as --serve-arg=--threads=1; repeat it for several.
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    serve_arg: Vec<String>,
    /// Leave the workers running until Ctrl-C, and print a command to try.
    #[arg(long)]
    keep: bool,
}

const AFTER_HELP: &str = "\
Examples:
  bench demo
  bench demo --question \"How does the KV cache move?\" --transport tcp
  bench demo --keep
  bench demo --model Qwen/Qwen3-0.6B --question \"Why is the sky blue?\"";

pub async fn run(args: Args) -> Result<()> {
    eprintln!("starting a prefill and a decode worker with model {} ...", args.model);
    let started = Instant::now();
    let mut launcher = Launcher::new(&args.model, &args.serve_arg)?;
    let mut deployment = launcher.start(Shape::Disaggregated(args.transport)).await?;
    let transport = deployment.transport().unwrap_or_else(|| "an unknown transport".into());
    eprintln!(
        "ready after {:.1} s; KV moves over {}",
        started.elapsed().as_secs_f64(),
        named(args.transport, &transport)
    );
    let talk = talk(&args, &deployment, &transport).await;
    deployment.blame(talk).await?;
    if args.keep {
        keep(&mut deployment).await?;
    }
    eprintln!("\nstopping the workers ...");
    deployment.stop().await
}

/// Both questions with their answers.
async fn talk(args: &Args, deployment: &Deployment, transport: &str) -> Result<()> {
    let mut messages = Vec::new();
    for (number, question) in [&args.question, &args.follow_up].into_iter().enumerate() {
        println!("\n> {question}");
        messages.push(json!({ "role": "user", "content": question }));
        let request_id = format!("demo-{}", number + 1);
        let answer = ask(&deployment.client, &request_id, &messages, args.max_tokens).await?;
        messages.push(json!({ "role": "assistant", "content": answer.text }));
        let moved = Moved::find(&deployment.log(), &request_id);
        println!("\n\n{}", describe(&answer, moved.as_ref(), transport));
    }
    Ok(())
}

async fn ask(client: &Client, request_id: &str, messages: &[Value], max_tokens: usize) -> Result<Answer> {
    let body = json!({ "messages": messages, "max_tokens": max_tokens, "temperature": 0 });
    let show = |text: &str| {
        print!("{text}");
        // An answer that cannot be shown is still measured.
        let _ = std::io::stdout().flush();
    };
    client.stream("/v1/chat/completions", request_id, body, show).await
}

/// Leaves the workers running; Ctrl-C ends this program and with it the workers.
async fn keep(deployment: &mut Deployment) -> Result<()> {
    println!("\nThe workers run until Ctrl-C. To try, in another terminal:\n");
    println!(
        "  curl -N {}/v1/chat/completions -H 'content-type: application/json' \\",
        deployment.client.base()
    );
    println!(
        "    -d '{{\"stream\": true, \"messages\": [{{\"role\": \"user\", \"content\": \"What is kvferry?\"}}]}}'"
    );
    deployment.outlive().await
}

/// The figures of one answer, one to a line.
fn describe(answer: &Answer, moved: Option<&Moved>, transport: &str) -> String {
    let mut lines = Vec::new();
    let mut line = |what: &str, text: String| lines.push(format!("  {what:<16}{text}"));
    let usage = answer.usage;
    let (tokens, cached) = (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens);
    line(
        "prompt",
        format!("{}, {} of them computed now", count(tokens as u64, "token"), tokens - cached.min(tokens)),
    );
    match moved {
        Some(Moved { handoff, blocks }) => {
            let (wire, exposed) = (handoff.wire_us as f64 / 1e3, handoff.exposed_us as f64 / 1e3);
            let rate = gb_per_s(handoff.bytes as f64, wire).map(|rate| format!(" ({rate:.2} GB/s)"));
            if let Some(blocks) = blocks {
                let here = blocks.tokens_here(tokens as u64);
                line(
                    "cached",
                    format!("{} on the decode worker; only the rest is sent", count(here, "token")),
                );
            }
            let (bytes, descriptors) = (grouped(handoff.bytes), count(handoff.descriptors, "descriptor"));
            let blocks = blocks.map(|blocks| format!("{}, ", count(blocks.moved, "block")));
            let (blocks, writes) = (blocks.unwrap_or_default(), count(handoff.writes, "write"));
            line("KV handed off", format!("{bytes} bytes, {blocks}{descriptors}, {writes} over {transport}"));
            line("prefill compute", format!("{} ms", ms(handoff.compute_us as f64 / 1e3)));
            line("wire", format!("{} ms{}", ms(wire), rate.unwrap_or_default()));
            line("exposed", format!("{} ms after the first token, not hidden by compute", ms(exposed)));
        }
        None => line("KV handed off", "none: the decode worker computed the prompt itself".into()),
    }
    let at = |index: usize| answer.arrivals.get(index).map(|arrival| arrival.as_secs_f64() * 1e3);
    if let Some(first) = at(0) {
        line("first token", format!("{} ms after the request (TTFT)", ms(first)));
    }
    if let Some(second) = at(1) {
        line("second token", format!("{} ms after the request", ms(second)));
    }
    let rate = tokens_per_second(answer).map(|rate| format!(", {rate:.0} tokens/s after the first"));
    line("answer", format!("{}{}", count(usage.completion_tokens as u64, "token"), rate.unwrap_or_default()));
    lines.join("\n")
}

/// A handoff, and its blocks where the log says how large one is.
#[derive(Clone, Debug)]
struct Moved {
    handoff: Handoff,
    blocks: Option<Blocks>,
}

/// The blocks that a handoff moved.
#[derive(Clone, Copy, Debug)]
struct Blocks {
    moved: u64,
    /// Tokens in a block.
    tokens: u64,
}

impl Moved {
    fn find(log: &str, request_id: &str) -> Option<Self> {
        let handoff =
            serve_log::handoffs(log).into_iter().find(|handoff| handoff.request_id == request_id)?;
        let blocks = serve_log::block_size(log)
            .map(|size| Blocks { moved: handoff.bytes / size.bytes, tokens: size.tokens });
        Some(Self { handoff, blocks })
    }
}

impl Blocks {
    /// Tokens of a prompt whose blocks were not moved: whole blocks at its beginning.
    fn tokens_here(self, prompt_tokens: u64) -> u64 {
        prompt_tokens.div_ceil(self.tokens).saturating_sub(self.moved) * self.tokens
    }
}

/// Without the first token, whose time is the prompt's.
fn tokens_per_second(answer: &Answer) -> Option<f64> {
    let (first, last) = (answer.arrivals.first()?, answer.arrivals.last()?);
    let seconds = (*last - *first).as_secs_f64();
    (seconds > 0.0).then(|| (answer.arrivals.len() - 1) as f64 / seconds)
}

/// The transport, and what was asked for if that is not its name.
fn named(asked: Transport, transport: &str) -> String {
    match asked.to_string() {
        same if same == transport => same,
        asked => format!("{transport} (asked for: {asked})"),
    }
}

fn count(number: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(number), if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::client::{PromptTokensDetails, Usage};

    fn answer() -> Answer {
        let usage = Usage {
            prompt_tokens: 40,
            completion_tokens: 3,
            prompt_tokens_details: PromptTokensDetails { cached_tokens: 16 },
        };
        let arrivals = [4, 6, 14].map(Duration::from_millis).to_vec();
        Answer { usage, arrivals, ..Answer::default() }
    }

    #[test]
    fn a_handoff_is_described_in_full() {
        let log = "INFO x: model loaded model=/m threads=2 kv_blocks=4 kv_tokens=64 kv_bytes=98304 seconds=1\n\
                   INFO x: KV received request_id=\"a\" bytes=49152 descriptors=1 writes=1 compute_us=3500 wire_us=200 exposed_us=310";
        let text = describe(&answer(), Moved::find(log, "a").as_ref(), "shm");
        for part in [
            "40 tokens, 24 of them computed now",
            "16 tokens on the decode worker; only the rest",
            "49,152 bytes, 2 blocks, 1 descriptor, 1 write over shm",
            "compute 3.50 ms",
            "0.20 ms (0.25 GB/s)",
            "0.31 ms after",
            "4.00 ms after the request (TTFT)",
            "second token    6.00 ms",
            "3 tokens, 200 tokens/s",
        ] {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn an_answer_without_a_handoff_says_so() {
        assert!(describe(&answer(), None, "shm").contains("computed the prompt itself"));
    }
}
