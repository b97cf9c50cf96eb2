//! Failures of handoffs that users of other servers reported, each by the id it has in our list. Others of them are in
//! `fault_table` (pd-10), `misfits` (pd-08, pd-12), `proxy` (pd-11), `start` (pd-11, pd-15), `pressure` (pd-21),
//! `first_token` (pd-06), `cases` (pd-19) and the transports' own tests (pd-13, pd-14).

use std::time::{Duration, Instant};

use serde_json::json;
use tests::{Ask, Cluster, Deployment, Failure, prompts, wait};
use tokio::net::UdpSocket;

/// Prompts of thousands of tokens: a simulated device, as fast as a step's overhead.
fn simulated() -> Deployment {
    Deployment::split("socket").flags("--device sim --num-kv-blocks 2048 --max-num-batched-tokens 256")
}

/// pd-02: prompts whose clients left are computed no further, and what comes next does not wait for them.
#[tokio::test]
async fn pd_02_prompts_of_clients_that_left_are_given_up_between_chunks() {
    // Slow enough that ten prompts of 32 chunks would take a minute.
    let cluster = simulated().prefill_flags("--max-num-seqs 1 --sim-speed 0.005").start().await;
    let client = cluster.client();
    let short = || Ask::completion(prompts::ids(20, 99)).max_tokens(1);
    let idle = Instant::now();
    client.answer(&short()).await;
    let idle = idle.elapsed();
    let leaving: Vec<_> = (0..10)
        .map(|seed| {
            let (client, ask) = (client.clone(), Ask::completion(prompts::ids(3500, seed)).max_tokens(1).streamed());
            tokio::spawn(async move { client.ask(&ask).await })
        })
        .collect();
    let working = |m: &tests::Metrics| m.prompt_tokens("local_compute") > 256;
    let at = cluster.prefill().client().metrics_when("a long prompt under way", working).await;
    leaving.iter().for_each(tokio::task::JoinHandle::abort);
    let asked = Instant::now();
    client.answer(&short().salted("next")).await;
    assert!(asked.elapsed() < idle * 2 + Duration::from_secs(3), "{:?}, alone {idle:?}", asked.elapsed());
    let after = cluster.prefill().client().settled().await;
    let computed = after.prompt_tokens("local_compute") - at.prompt_tokens("local_compute");
    assert!(computed < 35_000 * 3 / 10, "{computed} tokens were computed for nobody");
    cluster.settled().await;
}

/// pd-10: twenty restarts of the prefill worker under load; the decode worker keeps running, and leaks nothing.
#[tokio::test]
async fn pd_10_twenty_restarts_of_the_prefill_worker_leave_the_decode_worker_whole() {
    let mut cluster = simulated().start().await;
    let client = cluster.client();
    let ask = |round: usize| Ask::completion(prompts::ids(200, 7)).tokens(8).salted(&format!("round {round}"));
    let expected = client.answer(&ask(1000)).await;
    let mut files = Vec::new();
    for round in 0..20 {
        let asks: Vec<_> = (0..4).map(|i| ask(round * 10 + i)).collect();
        let restart = async {
            cluster.prefill_mut().kill();
            cluster.prefill_mut().restart().await;
        };
        let (answers, ()) = tokio::join!(wait::all(asks.iter().map(|ask| client.ask(ask))), restart);
        for answer in answers {
            match answer {
                Ok(answer) => assert_eq!(answer.content(), expected.content(), "round {round}"),
                Err(failure) => assert!(failure.status() >= Some(500), "round {round}: {failure:?}"),
            }
        }
        cluster.prefill().health_is("ready").await;
        cluster.front().health_is("ready").await;
        let before = client.settled().await.transfers();
        assert_eq!(client.answer(&ask(round * 10 + 9)).await.content(), expected.content());
        assert_eq!(client.settled().await.transfers(), before + 1, "round {round}");
        files.push(cluster.front().open_files());
    }
    assert!(files[19] <= files[1] + 3, "{files:?}");
    assert!(cluster.front_mut().is_running());
    cluster.settled().await;
}

/// pd-11: IPv6, host names, and an address that means "all of them" are advertised so that they can be reached.
#[tokio::test]
async fn pd_11_an_address_that_cannot_be_reached_is_never_advertised() {
    for host in ["0.0.0.0", "localhost", "::1"] {
        let dir = tempfile::tempdir().expect("a temporary folder");
        let deployment = Deployment::split("socket").flags(&format!("--host {host}"));
        if host == "::1" && UdpSocket::bind("[::1]:0").await.is_err() {
            eprintln!("NOT TESTED: {host}, which this machine has not");
            continue;
        }
        let base = if host == "::1" { "[::1]" } else { "127.0.0.1" };
        let prefill = tests::Worker::start(dir.path(), deployment.launch("prefill", "--role prefill", &[])).await;
        let flags = format!("--role decode --prefill http://{base}:{}", prefill.port());
        let decode = tests::Worker::start(dir.path(), deployment.launch("decode", &flags, &[])).await;
        let (prefill, decode) = (prefill.client_at(base), decode.client_at(base));
        decode.is_ready().await;
        decode.answer(&Ask::completion(prompts::ids(100, 1))).await;
        assert_eq!(decode.settled().await.transfers(), 1, "{host}");
        let body = json!({
            "model": "demo", "prompt": prompts::ids(50, 2), "kv_transfer_params": { "do_remote_decode": true },
        });
        let (status, answer) = prefill.post("/v1/completions", &body).await.expect("an answer");
        let advertised = answer["kv_transfer_params"]["remote_host"].as_str().unwrap_or_default().to_owned();
        assert_eq!(status, 200, "{answer}");
        assert!(!["0.0.0.0", "::", ""].contains(&advertised.as_str()), "{host}: {answer}");
    }
}

/// pd-15: clients may give many requests the same id; tickets are named by the worker.
#[tokio::test]
async fn pd_15_twenty_requests_of_one_id_are_twenty_requests() {
    let cluster = Deployment::split("socket").start().await;
    let http = reqwest::Client::builder().no_proxy().build().expect("a client");
    let url = format!("{}/v1/completions", cluster.client().url());
    let asks = (0..20).map(|seed| {
        let body = json!({ "model": "demo", "prompt": prompts::ids(100, seed), "max_tokens": 4, "temperature": 0 });
        http.post(&url).header("x-request-id", "the-same").json(&body).send()
    });
    for answer in wait::all(asks).await {
        assert_eq!(answer.expect("an answer").status(), 200);
    }
    cluster.settled().await;
    assert_eq!(cluster.client().metrics().await.transfers(), 20);
}

async fn all_right(cluster: &Cluster, asks: &[Ask]) {
    let expected = simulated_both().start().await.client().answers(asks).await;
    for (answer, expected) in cluster.client().answers(asks).await.iter().zip(&expected) {
        assert_eq!(answer.content(), expected.content());
    }
    cluster.settled().await;
}

fn simulated_both() -> Deployment {
    Deployment::both().flags("--device sim --num-kv-blocks 2048")
}

/// pd-16: many prompts that do not fit into the decode worker together, whole chunks and one more or less: none waits for
/// half of another's blocks.
#[tokio::test]
async fn pd_16_prompts_larger_than_the_decode_workers_pool_together_do_not_deadlock() {
    for direction in ["push", "pull"] {
        let deployment = simulated().prefill_flags("--max-num-batched-tokens 128");
        let flags = format!("--num-kv-blocks 64 --kv-direction {direction}");
        let cluster = deployment.decode_flags(&flags).start().await;
        let long = |count| (0..count).map(|seed| Ask::completion(prompts::ids(700, seed)).max_tokens(16));
        all_right(&cluster, &long(4).collect::<Vec<_>>()).await;
        all_right(&cluster, &long(20).map(|ask| ask.salted("again")).collect::<Vec<_>>()).await;
        let borders = [127, 128, 129, 256, 257].map(|len| Ask::completion(prompts::ids(len, 50 + len as u64)));
        all_right(&cluster, &borders).await;
    }
}

/// pd-18: what was received is not computed again, however short or long, cold or cached.
#[tokio::test]
async fn pd_18_the_decode_worker_computes_nothing_that_it_received() {
    for direction in ["push", "pull"] {
        let cluster = Deployment::split("socket").decode_flags(&format!("--kv-direction {direction}")).start().await;
        let both = Deployment::both().start().await;
        for len in [1, 4, 15, 16, 17, 100, 1000] {
            let ask = Ask::completion(prompts::ids(len, len as u64)).tokens(5);
            let expected = both.client().answer(&ask).await;
            for time in 0..2 {
                let before = cluster.client().metrics().await;
                assert_eq!(cluster.client().answer(&ask).await.content(), expected.content(), "{len} tokens");
                let after = cluster.client().settled().await;
                let grown = |source| after.prompt_tokens(source) - before.prompt_tokens(source);
                let had = grown("external_kv_transfer") + grown("local_cache_hit") + grown("local_compute");
                assert_eq!(had, len as u64, "{len} tokens, time {time}, {direction}");
                // All but the last block cached: one step at home is less than a handoff.
                let computed = if time == 0 || len <= 16 { 0 } else { 16 };
                assert!(grown("local_compute") <= computed, "{len} tokens, time {time}: {}", grown("local_compute"));
            }
        }
        cluster.settled().await;
    }
}

/// A request fails cleanly on both sides when its prefill worker stops in the midst of it and KV failures are errors.
#[tokio::test]
async fn pd_08_a_prefill_worker_that_fails_in_the_midst_of_a_prompt_is_an_error_at_once() {
    for streamed in [false, true] {
        let deployment = simulated().prefill_flags("--sim-speed 0.005 --max-num-batched-tokens 64");
        let flags = "--kv-failure fail --kv-link-timeout-secs 0.5";
        let cluster = deployment.decode_flags(flags).start().await;
        let client = cluster.client();
        let ask = Ask::completion(prompts::ids(1000, 1)).max_tokens(16);
        let ask = if streamed { ask.streamed() } else { ask };
        let stop = async {
            let working = |m: &tests::Metrics| m.prompt_tokens("local_compute") >= 64;
            cluster.prefill().client().metrics_when("the prompt under way", working).await;
            cluster.prefill().pause();
            Instant::now()
        };
        let (outcome, stopped) = tokio::join!(client.ask(&ask), stop);
        assert!(stopped.elapsed() < Duration::from_secs(3), "{:?}", stopped.elapsed());
        let failure = outcome.expect_err("the prefill worker stands still");
        assert!(matches!(failure, Failure::Status { status: 503, .. }), "{failure:?}");
        let failed = client.metrics().await.labelled("kvferry:ticket_faults_total", "reason=\"link_lost\"");
        assert_eq!(failed, 1.0);
        cluster.prefill().resume();
        cluster.front().health_is("ready").await;
        cluster.settled().await;
    }
}
