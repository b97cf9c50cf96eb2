//! Failures that users of other servers reported, each by the id it has in our list.

use std::time::Duration;

use serde_json::{Value, json};
use tests::{Ask, Client, Deployment, prompts};

/// sch-02: eight requests that outgrow the pool together are preempted, but not over and over.
#[tokio::test]
async fn sch_02_preemption_is_bounded_and_changes_no_text() {
    let greedy = |seed| Ask::completion(prompts::ids(300, seed)).tokens(200);
    let drawn = |seed| greedy(seed).with("temperature", 0.8).with("seed", seed);
    let asks: Vec<_> = (0..4).map(greedy).chain((4..8).map(drawn)).collect();
    let alone = Deployment::both().flags("--num-kv-blocks 1024").start().await;
    let mut expected = Vec::new();
    for ask in &asks {
        expected.push(alone.client().answer(ask).await);
    }
    // In one process three prompts are admitted at once and outgrow the pool; split, that depends on the prefill worker.
    for (deployment, least) in [(Deployment::both(), 1.0), (Deployment::split("socket"), 0.0)] {
        let cluster = deployment.flags("--num-kv-blocks 64 --max-num-batched-tokens 128").start().await;
        let answers = cluster.client().answers(&asks).await;
        for (index, (answer, expected)) in answers.iter().zip(&expected).enumerate() {
            assert_eq!(answer.content(), expected.content(), "request {index}");
        }
        let preemptions = cluster.client().settled().await.value("vllm:num_preemptions_total");
        assert!((least..=40.0).contains(&preemptions), "{preemptions} preemptions of 8 requests");
        cluster.settled().await;
    }
}

/// kv-07: conversations that come, end and are evicted in any order never continue one another.
#[tokio::test]
async fn kv_07_no_conversation_reads_the_kv_of_another() {
    let conversation = |index: usize| {
        let word: String = (0..6).map(|i| char::from(b'a' + ((index * 7919 + i * 31) % 26) as u8)).collect();
        Ask::chat(&format!("Code word: K-{word}. Repeat the code word.")).tokens(24)
    };
    let asks: Vec<_> = (0..48).map(conversation).collect();
    let cold = Deployment::both().flags("--num-kv-blocks 1024").start().await;
    let mut expected = Vec::new();
    for ask in &asks {
        expected.push(cold.client().answer(ask).await.text);
    }
    for deployment in [Deployment::both(), Deployment::split("socket")] {
        let cluster = deployment.flags("--num-kv-blocks 48").start().await;
        for round in 1..=3 {
            // Another order in each round: 5, 7 and 11 have no factor in common with 48.
            let order: Vec<usize> = (0..48).map(|i| i * [5, 7, 11][round - 1] % 48).collect();
            for group in order.chunks(8) {
                let group_asks: Vec<_> = group.iter().map(|&index| asks[index].clone()).collect();
                for (answer, &index) in cluster.client().answers(&group_asks).await.iter().zip(group) {
                    assert_eq!(answer.text, expected[index], "conversation {index} in round {round}");
                }
            }
        }
        cluster.settled().await;
    }
}

/// kv-03: prompts that share tokens but not the beginning share no blocks, and get their own text.
#[tokio::test]
async fn kv_03_blocks_are_named_by_their_whole_prefix() {
    let run = |parts: &[(u32, usize)]| -> Vec<u32> {
        parts.iter().flat_map(|&(id, count)| std::iter::repeat_n(id, count)).collect()
    };
    let pairs = [
        (run(&[(1000, 16), (2000, 16), (3000, 1)]), run(&[(1001, 16), (2000, 16), (3000, 1)]), 0),
        (run(&[(100, 16), (200, 16)]), run(&[(200, 16), (100, 16)]), 0),
        (run(&[(50, 17)]), run(&[(50, 33)]), 16),
        (run(&[(70, 33)]), run(&[(70, 49)]), 32),
    ];
    let (colder, warmer) = (Deployment::both().start().await, Deployment::both().start().await);
    let (cold, warm) = (colder.client(), warmer.client());
    for (first, second, shared) in pairs {
        let ask = Ask::completion(second).tokens(12);
        let expected = cold.answer(&ask).await;
        cold.post("/reset_prefix_cache", &Value::Null).await.expect("an empty cache");
        warm.answer(&Ask::completion(first).tokens(12)).await;
        let answer = warm.answer(&ask).await;
        assert_eq!((answer.text, answer.usage.cached), (expected.text, shared));
    }
}

/// sch-08: what a request leaves behind is given back. A leak grows with every batch; the allocator's arenas and the caches,
/// which grow at first and when threads meet in new ways, do not.
#[tokio::test]
async fn sch_08_memory_does_not_grow_with_requests() {
    let cluster = Deployment::split("socket").flags("--max-num-queued-reqs 64").start().await;
    let mut resident = Vec::new();
    for batch in 0..5u64 {
        for group in 0..8 {
            let asks: Vec<_> = (0..8)
                .map(|index| {
                    Ask::completion(prompts::ids(200, batch * 1000 + group * 8 + index)).max_tokens(1)
                })
                .collect();
            cluster.client().answers(&asks).await;
            // One that is refused and one that leaves.
            assert_eq!(
                cluster.client().ask(&asks[0].clone().with("top_p", 7)).await.unwrap_err().status(),
                Some(400)
            );
            drop(cluster.client().open(&asks[1].clone().tokens(500).streamed()).await.expect("it is taken"));
        }
        cluster.settled().await;
        resident.push([cluster.front().resident(), cluster.prefill().resident()]);
    }
    for (index, worker) in ["front", "prefill"].iter().enumerate() {
        let resident: Vec<_> = resident.iter().map(|both| both[index]).collect();
        let steady = resident.windows(2).any(|pair| pair[1] <= pair[0] + pair[0] / 100);
        assert!(steady, "{worker} grows with every batch: {resident:?} bytes");
    }
}

/// Block sizes other than 16 give the same text, alone and across the handoff.
#[tokio::test]
async fn other_block_sizes_give_the_same_text() {
    let asks = prompts::varied();
    let expected = Deployment::both().start().await.client().answers(&asks).await;
    for size in [8, 32, 64] {
        let blocks = 256 * 16 / size;
        let deployment =
            Deployment::split("socket").flags(&format!("--block-size {size} --num-kv-blocks {blocks}"));
        let cluster = deployment.start().await;
        for (index, (answer, expected)) in
            cluster.client().answers(&asks).await.iter().zip(&expected).enumerate()
        {
            assert_eq!(answer.content(), expected.content(), "blocks of {size}, prompt {index}");
        }
        cluster.settled().await;
    }
}

/// pd-19: the first token's log-probabilities, made on the prefill worker, are those of one process.
#[tokio::test]
async fn pd_19_log_probabilities_cross_the_handoff() {
    let both = Deployment::both().start().await;
    let split = Deployment::split("socket").start().await;
    let body = json!({
        "model": "demo", "prompt": prompts::ids(50, 3), "max_tokens": 6, "temperature": 0, "ignore_eos": true,
        "logprobs": 3, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": {"300": 2.0},
    });
    let logprobs = |client: Client| {
        let body = body.clone();
        async move {
            let (status, answer) = client.post("/v1/completions", &body).await.expect("an answer");
            assert_eq!(status, 200, "{answer}");
            answer["choices"][0]["logprobs"].clone()
        }
    };
    let (one, two) = (logprobs(both.client()).await, logprobs(split.client()).await);
    let entries = |value: &Value| value["token_logprobs"].as_array().expect("a list").clone();
    assert_eq!((entries(&one).len(), one["tokens"].clone()), (6, two["tokens"].clone()));
    for (a, b) in entries(&one).iter().zip(entries(&two)) {
        let difference = a.as_f64().expect("a number") - b.as_f64().expect("a number");
        assert!(difference.abs() < 1e-3, "{one} {two}");
    }
}

/// A request says when it has waited long enough, and a full queue says when to come back.
#[tokio::test]
async fn a_deadline_ends_a_request_on_both_workers() {
    let long = Ask::completion(prompts::ids(3000, 1)).tokens(500);
    for (limit, timeout_secs) in [("0.3", Value::Null), ("0.3", json!(1000)), ("600", json!(0.3))] {
        let deployment = Deployment::split("socket").flags("--max-num-batched-tokens 16");
        let cluster = deployment.decode_flags(&format!("--request-timeout-secs {limit}")).start().await;
        let started = std::time::Instant::now();
        let error = cluster.client().ask(&long.clone().with("timeout_secs", timeout_secs)).await.unwrap_err();
        assert_eq!(error.status(), Some(504), "{error:?}");
        assert!(started.elapsed() < Duration::from_secs(20));
        cluster.settled().await;
    }
}
