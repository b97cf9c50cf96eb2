//! The text of every prompt is the same from every deployment, however it was asked for.

use std::fmt::Debug;

use tests::cluster::can_test;
use tests::{Answer, Ask, Client, Deployment, prompts};

/// Tokens that go after a prompt that the caches know: its blocks are found, the rest is computed.
const MORE: usize = 40;

/// What every deployment has to answer like.
struct Reference {
    greedy: Vec<Answer>,
    extended: Vec<Answer>,
    seeded: Vec<Answer>,
}

impl Reference {
    /// From one process with one big step for each prompt.
    async fn get() -> Self {
        let cluster = Deployment::both().flags("--max-num-batched-tokens 2048").start().await;
        let client = cluster.client();
        let reference = Self {
            greedy: one_by_one(&client, &prompts::varied()).await,
            extended: one_by_one(&client, &extended()).await,
            seeded: one_by_one(&client, &seeded()).await,
        };
        let texts: std::collections::HashSet<_> =
            reference.greedy.iter().map(|answer| &answer.text).collect();
        assert!(
            texts.len() > reference.greedy.len() / 2,
            "too few different texts to tell a wrong one: {texts:?}"
        );
        reference
    }
}

async fn one_by_one(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let mut answers = Vec::new();
    for ask in asks {
        answers.push(client.answer(ask).await);
    }
    answers
}

/// Prompts of token ids with more behind them.
fn extended() -> Vec<Ask> {
    let longer = |len: usize| [prompts::ids(len, len as u64), prompts::ids(MORE, 1)].concat();
    [16, 33, 257, 700].map(|len| Ask::completion(longer(len))).into()
}

fn seeded() -> Vec<Ask> {
    let sampled = |ask: Ask| ask.with("temperature", 0.8).with("seed", 7);
    let mut asks: Vec<_> = prompts::varied().into_iter().map(sampled).collect();
    asks.truncate(10);
    asks.push(sampled(Ask::chat("What is a ticket?")).with("top_k", 12).with("top_p", 0.9));
    asks
}

fn equal(got: &[Answer], expected: &[Answer], how: impl Debug) {
    assert_eq!(got.len(), expected.len());
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.content(), expected.content(), "prompt {index}, {how:?}");
    }
}

/// Asks one deployment everything, in every way.
async fn check(deployment: Deployment, reference: &Reference, how: &str) {
    let cluster = deployment.start().await;
    let client = cluster.client();
    let salted = |salt: &str, streamed: bool| -> Vec<Ask> {
        let asks = prompts::varied().into_iter().map(|ask| ask.salted(salt));
        asks.map(|ask| if streamed { ask.streamed() } else { ask }).collect()
    };
    for (salt, first_streamed) in [("a", false), ("b", true)] {
        let cold = one_by_one(&client, &salted(salt, first_streamed)).await;
        equal(&cold, &reference.greedy, (how, "cold cache, streamed", first_streamed));
        let warm = one_by_one(&client, &salted(salt, !first_streamed)).await;
        equal(&warm, &reference.greedy, (how, "warm cache, streamed", !first_streamed));
        for answer in warm {
            assert_eq!(answer.usage.cached, prompts::reusable(answer.usage.prompt), "{how}: {answer:?}");
        }
    }
    let longer: Vec<_> = extended().into_iter().map(|ask| ask.salted("a")).collect();
    equal(
        &one_by_one(&client, &longer).await,
        &reference.extended,
        (how, "known prompt with more behind it"),
    );
    equal(&one_by_one(&client, &seeded()).await, &reference.seeded, (how, "sampled with a seed"));
    for (streamed, state) in [(true, "cold"), (false, "warm")] {
        for batch in [0..8, 5..13] {
            let mixed: Vec<_> = salted("batches", streamed)[batch.clone()].to_vec();
            equal(&client.answers(&mixed).await, &reference.greedy[batch.clone()], (how, state, batch));
        }
    }
    cluster.settled().await;
}

/// Over one transport, with steps smaller than, equal to and larger than most prompts.
async fn check_split(transport: &str) {
    if !can_test(transport) {
        return;
    }
    let reference = Reference::get().await;
    for budget in [16, 64, 4096] {
        let how = format!("{transport}, steps of {budget} tokens");
        let deployment = Deployment::split(transport)
            .flags(&format!("--max-num-batched-tokens {budget}"))
            // The default: whichever was faster.
            .decode_flags("--kv-direction auto");
        check(deployment, &reference, &how).await;
    }
}

#[tokio::test]
async fn one_process_answers_the_same_with_any_step_size() {
    let reference = Reference::get().await;
    for budget in [16, 64, 4096] {
        let deployment = Deployment::both().flags(&format!("--max-num-batched-tokens {budget}"));
        check(deployment, &reference, &format!("both, steps of {budget} tokens")).await;
    }
}

#[tokio::test]
async fn prefill_and_decode_over_socket_answer_like_one_process() {
    check_split("socket").await;
}

#[tokio::test]
async fn prefill_and_decode_over_mapped_pools_answer_like_one_process() {
    check_split("mmap").await;
}

#[tokio::test]
async fn prefill_and_decode_over_nixl_tcp_answer_like_one_process() {
    check_split("tcp").await;
}

#[tokio::test]
async fn prefill_and_decode_over_nixl_shm_answer_like_one_process() {
    check_split("shm").await;
}
