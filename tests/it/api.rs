//! What the API says beside the text: usage, cached tokens, stops; and who computed what.

use serde_json::json;
use tests::cluster::can_test;
use tests::{Answer, Ask, Client, Cluster, Deployment, prompts};

async fn deployments() -> [Cluster; 2] {
    [Deployment::both().start().await, Deployment::split("socket").start().await]
}

#[tokio::test]
async fn cached_tokens_are_whole_blocks_and_never_the_whole_prompt() {
    for cluster in deployments().await {
        let client = cluster.client();
        for len in [1, 15, 16, 17, 31, 32, 33, 48, 100] {
            let ask = Ask::completion(prompts::ids(len, 50 + len as u64)).max_tokens(8);
            let cold = client.answer(&ask).await;
            assert_eq!((cold.usage.prompt, cold.usage.cached), (len as u64, 0));
            for ask in [ask.clone(), ask.clone().streamed(), ask.clone()] {
                let warm = client.answer(&ask).await;
                assert_eq!(warm.usage.cached, prompts::reusable(len as u64), "{len} tokens");
                assert_eq!(warm.content(), cold.content(), "{len} tokens");
            }
            let longer = [prompts::ids(len, 50 + len as u64), prompts::ids(16, 9)].concat();
            let longer = client.answer(&Ask::completion(longer).max_tokens(8)).await;
            assert_eq!(longer.usage.cached, (len / 16 * 16) as u64, "{len} tokens with 16 more");
        }
        cluster.settled().await;
    }
}

#[tokio::test]
async fn only_truly_shared_blocks_are_cached() {
    let blocks = |ids: &[u32]| ids.iter().flat_map(|&id| [id; 16]).collect::<Vec<u32>>();
    let tail = |mut ids: Vec<u32>| {
        ids.push(3000);
        ids
    };
    // The first warms, the second is asked; how many tokens they share.
    let pairs = [
        (tail(blocks(&[1000, 2000])), tail(blocks(&[1001, 2000])), 0),
        (tail(blocks(&[1100, 2100])), tail(blocks(&[2100, 1100])), 0),
        (tail(blocks(&[1200, 2200])), tail(blocks(&[1200, 2201])), 16),
        (vec![77; 33], vec![77; 49], 32),
    ];
    let fresh = Deployment::both().start().await;
    for cluster in deployments().await {
        for (first, second, shared) in &pairs {
            let second = Ask::completion(second.clone()).max_tokens(12);
            cluster.client().answer(&Ask::completion(first.clone())).await;
            let answer = cluster.client().answer(&second).await;
            assert_eq!(answer.usage.cached, *shared);
            let salted = second.salted(&format!("{shared}"));
            assert_eq!(answer.content(), fresh.client().answer(&salted).await.content());
        }
    }
}

#[tokio::test]
async fn a_cache_salt_keeps_caches_apart() {
    for cluster in deployments().await {
        let client = cluster.client();
        let ask = Ask::completion(prompts::ids(64, 60)).max_tokens(2);
        let salts =
            [(Some("t1"), 0), (Some("t1"), 48), (Some("t2"), 0), (None, 0), (None, 48), (Some("t1"), 48)];
        for (salt, cached) in salts {
            let ask = salt.map_or(ask.clone(), |salt| ask.clone().salted(salt));
            assert_eq!(client.answer(&ask).await.usage.cached, cached, "{salt:?}");
        }
        let wrong = client.ask(&ask.clone().with("cache_salt", 123)).await.expect_err("a salt is a string");
        assert_eq!(wrong.status(), Some(400));
    }
}

#[tokio::test]
async fn stop_strings_end_the_text_before_them_in_both_deployments() {
    let [both, split] = deployments().await;
    let ask = Ask::completion(prompts::ids(120, 61)).tokens(40);
    let whole = both.client().answer(&ask).await.text;
    let words: Vec<_> = whole.split_whitespace().filter(|word| word.is_ascii()).collect();
    assert!(words.len() > 6, "the answer has words to stop at: {whole:?}");
    for stop in [words[1], words[words.len() / 2], &whole[whole.len() - 1..], "never in it"] {
        let ask = ask.clone().with("stop", json!([stop, "nor this"]));
        let expected = whole.split(stop).next().expect("split yields at least one part");
        for client in [both.client(), split.client()] {
            for ask in [ask.clone(), ask.clone().streamed()] {
                let Answer { text, finish, .. } = client.answer(&ask).await;
                assert_eq!(text, expected, "stop at {stop:?}");
                assert_eq!(finish, if whole.contains(stop) { "stop" } else { "length" });
            }
        }
    }
    both.settled().await;
    split.settled().await;
}

/// Prompt tokens by source, on the decode worker.
async fn sources(client: &Client) -> [u64; 3] {
    let metrics = client.metrics().await;
    ["local_compute", "local_cache_hit", "external_kv_transfer"].map(|source| metrics.prompt_tokens(source))
}

async fn prompts_are_computed_once(transport: &str) {
    if !can_test(transport) {
        return;
    }
    let cluster = Deployment::split(transport).start().await;
    let (client, prefill) = (cluster.client(), cluster.prefill().client());
    for len in [1, 4, 15, 16, 17, 33, 100, 1000] {
        let ask = Ask::completion(prompts::ids(len, 70 + len as u64)).max_tokens(5);
        let (before, there) = (sources(&client).await, sources(&prefill).await);
        client.answer(&ask).await;
        cluster.settled().await;
        let (after, len) = (sources(&client).await, len as u64);
        let [computed, cached, transferred] = [0, 1, 2].map(|source| after[source] - before[source]);
        assert_eq!([computed, cached, transferred], [0, 0, len], "{len} tokens, cold");
        assert_eq!(sources(&prefill).await[0] - there[0], len, "{len} tokens computed on the prefill worker");

        client.answer(&ask).await;
        cluster.settled().await;
        let warm = sources(&client).await;
        let [computed, cached, transferred] = [0, 1, 2].map(|source| warm[source] - after[source]);
        let known = prompts::reusable(len);
        // What is left of a known prompt is at most a block, which is computed here rather than sent for.
        let expected = if known > 0 { [len - known, known, 0] } else { [0, 0, len] };
        assert_eq!([computed, cached, transferred], expected, "{len} tokens, warm");
    }
}

#[tokio::test]
async fn each_prompt_is_computed_once_and_moved_whole_socket() {
    prompts_are_computed_once("socket").await;
}

#[tokio::test]
async fn each_prompt_is_computed_once_and_moved_whole_nixl_tcp() {
    prompts_are_computed_once("tcp").await;
}

#[tokio::test]
async fn each_prompt_is_computed_once_and_moved_whole_nixl_shm() {
    prompts_are_computed_once("shm").await;
}
