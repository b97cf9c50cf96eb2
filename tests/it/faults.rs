//! Workers that die or stop at the worst moments. The client gets the right text or a clean error, always in time.

use std::time::Duration;

use rand::Rng;
use tests::cluster::can_test;
use tests::{Answer, Ask, Cluster, Deployment, Failure, prompts};

/// Steps so small that a long prompt is long under way.
const SLOW: &str = "--max-num-batched-tokens 16";

fn long() -> Ask {
    Ask::completion(prompts::ids(2000, 1))
}

fn short(seed: u64) -> Ask {
    Ask::completion(prompts::ids(90, seed))
}

/// What one process answers.
async fn right(asks: &[Ask]) -> Vec<Answer> {
    Deployment::both().start().await.client().answers(asks).await
}

fn same(got: &Answer, expected: &Answer) {
    assert_eq!(got.content(), expected.content());
}

/// Waits until the prefill worker is in the middle of a prompt.
async fn computing(cluster: &Cluster) {
    let client = cluster.prefill().client();
    client.metrics_when("a prompt is being computed", |m| m.prompt_tokens("local_compute") >= 64).await;
}

async fn killed_in_the_middle_of_a_prefill(transport: &str) {
    if !can_test(transport) {
        return;
    }
    let expected = right(&[long(), short(2), short(3)]).await;
    let mut cluster = Deployment::split(transport).prefill_flags(SLOW).start().await;
    let client = cluster.client();
    let ask = long();
    let kill = async {
        computing(&cluster).await;
        cluster.prefill_mut().kill();
    };
    let (answer, ()) = tokio::join!(client.answer(&ask), kill);
    same(&answer, &expected[0]);

    cluster.front().health_says("degraded", &["no prefill worker is linked"]).await;
    same(&client.answer(&short(2)).await, &expected[1]);
    client.settled().await;
    assert_eq!(client.metrics().await.value("kvferry:prompts_recomputed_total"), 1.0);

    cluster.prefill_mut().restart().await;
    cluster.front().health_is("ready").await;
    let before = client.metrics().await.transfers();
    same(&client.answer(&short(3)).await, &expected[2]);
    assert_eq!(client.metrics().await.transfers(), before + 1, "the new prefill worker is used");
    cluster.settled().await;
}

#[tokio::test]
async fn prefill_worker_killed_in_the_middle_of_a_prefill_and_restarted_socket() {
    killed_in_the_middle_of_a_prefill("socket").await;
}

#[tokio::test]
async fn prefill_worker_killed_in_the_middle_of_a_prefill_and_restarted_mmap() {
    killed_in_the_middle_of_a_prefill("mmap").await;
}

#[tokio::test]
async fn prefill_worker_killed_in_the_middle_of_a_prefill_and_restarted_nixl_tcp() {
    killed_in_the_middle_of_a_prefill("tcp").await;
}

#[tokio::test]
async fn prefill_worker_killed_in_the_middle_of_a_prefill_and_restarted_nixl_shm() {
    killed_in_the_middle_of_a_prefill("shm").await;
}

#[tokio::test]
async fn prefill_worker_killed_ten_times_at_random_moments_under_load() {
    if !can_test("tcp") {
        return;
    }
    let asks: Vec<_> =
        (0..6).map(|seed| Ask::completion(prompts::ids(60 + 90 * seed as usize, seed))).collect();
    let expected = right(&asks).await;
    let mut cluster = Deployment::split("tcp").prefill_flags("--max-num-batched-tokens 128").start().await;
    let client = cluster.client();
    let mut files = Vec::new();
    for round in 0..10 {
        // No cache, so that each round transfers again.
        let asks: Vec<_> = asks.iter().map(|ask| ask.clone().salted(&format!("round {round}"))).collect();
        let delay = Duration::from_millis(rand::rng().random_range(0..700));
        let kill = async {
            // The moment is what varies here: during a computation, a transfer or after it.
            tokio::time::sleep(delay).await;
            cluster.prefill_mut().kill();
        };
        let (answers, ()) = tokio::join!(client.answers(&asks), kill);
        for (answer, expected) in answers.iter().zip(&expected) {
            assert_eq!(answer.content(), expected.content(), "killed in round {round} after {delay:?}");
        }
        client.settled().await;
        cluster.prefill_mut().restart().await;
        cluster.front().health_is("ready").await;
        files.push(cluster.front().open_files());
    }
    assert!(
        files[9] <= files[1] + 3,
        "the decode worker keeps files of dead prefill workers open: {files:?}"
    );
    let before = client.metrics().await.transfers();
    same(&client.answer(&asks[0].clone().salted("after")).await, &expected[0]);
    assert_eq!(client.metrics().await.transfers(), before + 1);
    assert!(cluster.front_mut().is_running());
    cluster.settled().await;
}

#[tokio::test]
async fn prefill_worker_that_stands_still_is_given_up_and_its_blocks_come_back_when_it_goes_on() {
    let expected = right(&[long(), short(2), short(3)]).await;
    let cluster = Deployment::split("socket").prefill_flags(SLOW).start().await;
    let client = cluster.client();
    let ask = long();
    let pause = async {
        // What may still be written to granted blocks must not be used. A busy machine computes some of the prompt before
        // it grants any.
        computing(&cluster).await;
        client.metrics_when("a grant", |m| m.account().ticketed > 0).await;
        cluster.prefill().pause();
        client.metrics_when("quarantine", |m| m.account().quarantined > 0).await
    };
    let (answer, _) = tokio::join!(client.answer(&ask), pause);
    same(&answer, &expected[0]);
    same(&client.answer(&short(2)).await, &expected[1]);
    let account = client.metrics().await.account();
    assert_eq!(account.quarantined, 125, "all blocks of the paused writer's ticket: {account:?}");

    cluster.prefill().resume();
    cluster.front().health_is("ready").await;
    cluster.settled().await;
    same(&client.answer(&short(3)).await, &expected[2]);
    assert_eq!(client.metrics().await.transfers(), 1);
}

#[tokio::test]
async fn decode_worker_killed_and_the_prefill_worker_releases_everything() {
    // What a decode worker may still read stays for its lease.
    let flags = format!("{SLOW} --kv-lease-secs 2");
    let mut cluster = Deployment::split("socket").prefill_flags(&flags).start().await;
    let asks = [long(), short(2), short(3)];
    let client = cluster.client();
    let kill = async {
        computing(&cluster).await;
        cluster.front_mut().kill();
    };
    let (outcomes, ()) = tokio::join!(tests::wait::all(asks.iter().map(|ask| client.ask(ask))), kill);
    for outcome in outcomes {
        assert!(matches!(outcome, Err(Failure::Broken(_))), "the server was killed: {outcome:?}");
    }
    let metrics = cluster.prefill().client().settled().await;
    assert!(metrics.prompt_tokens("local_compute") < 2000, "it computed on for nobody");

    // A new decode worker at the same address is another one.
    cluster.front_mut().restart().await;
    cluster.front().health_is("ready").await;
    same(&cluster.client().answer(&short(2)).await, &right(&[short(2)]).await[0]);
    assert_eq!(cluster.client().metrics().await.transfers(), 1);
    cluster.settled().await;
}

#[tokio::test]
async fn kv_failure_fail_is_a_503_before_the_first_token() {
    let deployment = Deployment::split("socket").prefill_flags(SLOW).decode_flags("--kv-failure fail");
    for streamed in [false, true] {
        let mut cluster = deployment.start().await;
        let client = cluster.client();
        let ask = if streamed { long().streamed() } else { long() };
        let kill = async {
            computing(&cluster).await;
            cluster.prefill_mut().kill();
        };
        let (outcome, ()) = tokio::join!(client.ask(&ask), kill);
        let failure = outcome.expect_err("the prefill worker was killed");
        assert_eq!(failure.status(), Some(503), "{failure:?}");
        assert!(failure.message().starts_with("remote prefill failed: "), "{failure:?}");
        client.settled().await;
        // Without a prefill worker prompts are computed here: that is no failure of KV.
        cluster.front().health_is("degraded").await;
        client.answer(&short(2)).await;
    }
}
