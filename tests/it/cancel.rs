//! Clients that leave at any moment: nothing of theirs stays behind.

use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tests::cluster::can_test;
use tests::{Answer, Ask, Client, Deployment, prompts};

const REQUESTS: usize = 200;
const SEED: u64 = 20;

/// When a client leaves.
#[derive(Clone, Copy, Debug)]
enum Leaves {
    Never,
    /// Before the server has answered anything, unless it is faster than this.
    After(Duration),
    /// After so many pieces of text.
    MidStream(usize),
}

fn plans() -> Vec<(Ask, Leaves)> {
    let mut rng = StdRng::seed_from_u64(SEED);
    let leaves = |(index, ask): (usize, Ask)| match index % 9 {
        0 => (ask, Leaves::After(Duration::ZERO)),
        3 => (ask, Leaves::After(Duration::from_millis(rng.random_range(1..2000)))),
        // Long enough to be in the middle of it.
        6 => (ask.tokens(64).streamed(), Leaves::MidStream(rng.random_range(1..8))),
        _ => (ask, Leaves::Never),
    };
    prompts::random(REQUESTS, 150, 24, SEED).into_iter().enumerate().map(leaves).collect()
}

/// The answer of a client that stays.
async fn act(client: &Client, (ask, leaves): &(Ask, Leaves)) -> Option<Answer> {
    match leaves {
        Leaves::Never => Some(client.answer(ask).await),
        Leaves::After(time) => {
            // Which of the two comes first is chance, and both are right.
            let _ = tokio::time::timeout(*time, client.ask(ask)).await;
            None
        }
        Leaves::MidStream(pieces) => {
            let mut stream = client.open(ask).await.expect("the request is served");
            for _ in 0..*pieces {
                // Text may come in fewer pieces than tokens: then the client leaves at the end.
                if stream.more_text().await.is_err() {
                    break;
                }
            }
            None
        }
    }
}

/// 200 requests at once to `deployment`, a third of them cancelled; the answers of the others.
async fn storm(deployment: Deployment) -> Vec<Option<Answer>> {
    let cluster = deployment.start().await;
    let client = cluster.client();
    let plans = plans();
    let answers = tests::wait::all(plans.iter().map(|plan| act(&client, plan))).await;
    cluster.settled().await;
    let ask = Ask::chat("What is kvferry?");
    let later = client.answer(&ask).await;
    let fresh = client.answer(&ask.salted("fresh")).await;
    assert_eq!(later.content(), fresh.content(), "what the cache kept of the storm is right");
    cluster.settled().await;
    answers
}

async fn storms_alike(transport: &str) {
    if !can_test(transport) {
        return;
    }
    let pool = "--num-kv-blocks 300";
    let split = storm(Deployment::split(transport).flags(pool)).await;
    let both = storm(Deployment::both().flags(pool)).await;
    assert!(split.iter().flatten().count() >= REQUESTS / 2);
    for (index, (split, both)) in split.iter().zip(&both).enumerate() {
        let content =
            |answer: &'_ Option<Answer>| answer.as_ref().map(|answer| answer.content().0.to_owned());
        assert_eq!(content(split), content(both), "request {index}, which stayed, over {transport}");
    }
}

#[tokio::test]
async fn a_third_of_200_requests_leave_and_all_blocks_come_back_socket() {
    storms_alike("socket").await;
}

#[tokio::test]
async fn a_third_of_200_requests_leave_and_all_blocks_come_back_mmap() {
    storms_alike("mmap").await;
}

#[tokio::test]
async fn a_third_of_200_requests_leave_and_all_blocks_come_back_nixl_tcp() {
    storms_alike("tcp").await;
}

#[tokio::test]
async fn a_third_of_200_requests_leave_and_all_blocks_come_back_nixl_shm() {
    storms_alike("shm").await;
}

#[tokio::test]
async fn a_client_leaves_while_its_ticket_waits_in_the_prefill_workers_queue() {
    let cluster = Deployment::split("socket")
        .prefill_flags("--max-num-seqs 1 --max-num-batched-tokens 16")
        .start()
        .await;
    let (client, prefill) = (cluster.client(), cluster.prefill().client());
    let long = Ask::completion(prompts::ids(2000, 1)).max_tokens(1);
    let queued = Ask::completion(prompts::ids(100, 2));
    let leave = async {
        prefill.metrics_when("the long prompt runs", |m| m.in_progress()[0] == 1).await;
        let waiting = client.ask(&queued);
        let seen = prefill.metrics_when("the ticket waits", |m| m.in_progress()[1] == 1);
        tokio::select! {
            answer = waiting => panic!("answered behind a long prompt: {answer:?}"),
            _ = seen => {}
        }
        // The queued request is dropped here; the long prompt still runs when its ticket goes.
        let metrics = prefill.metrics_when("the ticket is gone", |m| m.in_progress()[1] == 0).await;
        assert_eq!(metrics.in_progress()[0], 1, "gone before the long prompt's end");
    };
    let (answer, ()) = tokio::join!(client.answer(&long), leave);
    assert_eq!(answer.usage.completion, 1);
    cluster.settled().await;
    let computed = prefill.metrics().await.prompt_tokens("local_compute");
    assert_eq!(computed, 2000, "nothing of the cancelled prompt was computed");
}

#[tokio::test]
async fn a_client_leaves_while_its_prompt_is_computed_and_the_prefill_worker_stops() {
    let cluster = Deployment::split("socket").flags("--max-num-batched-tokens 16").start().await;
    let (client, prefill) = (cluster.client(), cluster.prefill().client());
    let long = Ask::completion(prompts::ids(3000, 1)).streamed();
    tokio::select! {
        opened = client.open(&long) => panic!("a first token within one step: {:?}", opened.err()),
        _ = prefill.metrics_when("computing", |m| m.prompt_tokens("local_compute") >= 16) => {}
    }
    cluster.settled().await;
    let computed = prefill.metrics().await.prompt_tokens("local_compute");
    assert!(computed < 3000, "the prefill worker computed the whole prompt for nobody");
    assert_eq!(client.metrics().await.prompt_tokens("local_compute"), 0);
}
