//! Pools that are too small for what is asked of them at once, or at all.

use tests::{Answer, Ask, Client, Deployment, Failure, prompts};

/// 32 blocks of 16 tokens.
const SMALL: &str = "--num-kv-blocks 32";

async fn right(asks: &[Ask]) -> Vec<Answer> {
    Deployment::both().flags("--num-kv-blocks 1024").start().await.client().answers(asks).await
}

fn same(got: &[Answer], expected: &[Answer]) {
    for (index, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.content(), expected.content(), "request {index}");
    }
}

/// Prompts that fit in 32 blocks, exactly or nearly, with how many tokens of an answer fit beside them; each with a
/// small request right behind it.
async fn near_the_limit(client: &Client) {
    let lens = [(480, 32), (496, 16), (511, 1), (512, 1)];
    for (len, room) in lens {
        // The last token needs no place: it is sampled and not computed.
        let asks =
            [Ask::completion(prompts::ids(len, len as u64)).tokens(40), Ask::completion(prompts::ids(10, 2))];
        let (big, small) = tokio::join!(client.answer(&asks[0]), client.answer(&asks[1]));
        assert_eq!((big.finish.as_str(), small.usage.prompt), ("length", 10));
        assert!((room..=room + 1).contains(&big.usage.completion), "{len} tokens: {big:?}");
        let expected = right(&[asks[0].clone().tokens(big.usage.completion), asks[1].clone()]).await;
        same(&[big, small], &expected);
    }
}

/// One token more than fits, and many more.
async fn never_fits(client: &Client, expected: &[&str]) {
    for len in [513, 528, 2000] {
        for ask in [Ask::completion(prompts::ids(len, 1)), Ask::completion(prompts::ids(len, 1)).streamed()] {
            match client.ask(&ask).await {
                Err(Failure::Status { status: 400, message }) => {
                    let (needed, len) = (len.div_ceil(16).to_string(), len.to_string());
                    for number in [len.as_str(), &needed].iter().chain(expected) {
                        assert!(message.contains(number), "{number} is not in {message:?}");
                    }
                }
                other => panic!("{len} tokens: expected 400, got {other:?}"),
            }
        }
    }
    client.answer(&Ask::completion(prompts::ids(10, 3))).await;
}

#[tokio::test]
async fn one_process_takes_what_fits_and_refuses_what_never_can_with_both_numbers() {
    let cluster = Deployment::both().flags(SMALL).start().await;
    near_the_limit(&cluster.client()).await;
    never_fits(&cluster.client(), &["32 blocks"]).await;
    cluster.settled().await;
}

#[tokio::test]
async fn a_small_decode_pool_takes_what_fits_and_refuses_what_never_can_with_both_numbers() {
    let cluster = Deployment::split("socket").decode_flags(SMALL).start().await;
    near_the_limit(&cluster.client()).await;
    never_fits(&cluster.client(), &["32 blocks"]).await;
    cluster.settled().await;
}

#[tokio::test]
async fn a_prompt_that_only_the_prefill_workers_pool_cannot_hold_is_computed_by_the_decode_worker() {
    let asks = [512, 513, 700].map(|len| Ask::completion(prompts::ids(len, len as u64)));
    let expected = right(&asks).await;
    for small in [SMALL, "--max-model-len 513"] {
        let cluster = Deployment::split("socket").prefill_flags(small).start().await;
        let client = cluster.client();
        for (ask, expected) in asks.iter().zip(&expected) {
            assert_eq!(
                client.answer(&ask.clone().salted(small)).await.content(),
                expected.content(),
                "{small}"
            );
        }
        let metrics = client.settled().await;
        assert_eq!(metrics.value("kvferry:prompts_too_long_for_prefill_total"), 2.0, "{small}");
        assert_eq!(metrics.value("kvferry:prompts_recomputed_total"), 0.0, "{small}: nothing failed");
        assert_eq!(metrics.transfers(), 1, "{small}: what fits is sent");
        cluster.settled().await;
    }
}

#[tokio::test]
async fn many_requests_larger_together_than_both_pools_all_finish_right() {
    let lens = (0..24).map(|index| 40 + index * 17 % 300);
    let mut asks: Vec<_> =
        lens.zip(0..).map(|(len, seed)| Ask::completion(prompts::ids(len, seed)).tokens(40)).collect();
    asks.extend((0..4).map(|seed| Ask::completion(prompts::ids(700, 100 + seed)).tokens(16)));
    let expected = right(&asks).await;
    let pools = [("--num-kv-blocks 64", "--num-kv-blocks 64"), ("--num-kv-blocks 48", "--num-kv-blocks 256")];
    for (prefill, decode) in pools {
        let deployment = Deployment::split("socket").flags("--max-num-batched-tokens 128");
        let cluster = deployment.prefill_flags(prefill).decode_flags(decode).start().await;
        same(&cluster.client().answers(&asks).await, &expected);
        cluster.settled().await;
    }
    let cluster = Deployment::both().flags("--max-num-batched-tokens 128 --num-kv-blocks 64").start().await;
    same(&cluster.client().answers(&asks).await, &expected);
    cluster.settled().await;
}

#[tokio::test]
async fn requests_preempted_after_their_kv_arrived_still_get_the_right_text() {
    // Answers long enough that several decode at once however slowly their prompts come in, and grow out of the pool.
    let asks: Vec<_> =
        (0..10).map(|i| Ask::completion(prompts::ids(200 + i as usize * 10, i)).tokens(400)).collect();
    let expected = right(&asks).await;
    let cluster =
        Deployment::split("socket").decode_flags("--num-kv-blocks 48 --max-num-seqs 8").start().await;
    same(&cluster.client().answers(&asks).await, &expected);
    let metrics = cluster.client().settled().await;
    assert!(
        metrics.value("vllm:num_preemptions_total") > 0.0,
        "the pool was not small enough to show anything"
    );
    cluster.settled().await;
}

#[tokio::test]
async fn sixty_four_streams_at_once() {
    let asks: Vec<_> =
        (0..64).map(|i| Ask::completion(prompts::ids(20 + i as usize, i)).tokens(32).streamed()).collect();
    let expected = right(&asks).await;
    let cluster = Deployment::split("socket").flags("--num-kv-blocks 512").start().await;
    same(&cluster.client().answers(&asks).await, &expected);
    cluster.settled().await;
}
