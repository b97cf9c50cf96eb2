//! KV events behind a frontend: the index is what workers hold, and a worker without events shows.

use std::time::Duration;

use serde_json::{Value, json};
use tests::fleet::{Fleet, header, states};
use tests::wait::until;
use tests::{Ask, Client, prompts};

const SOON: Duration = Duration::from_secs(20);

const EVENTS: &str = "--num-kv-blocks 600";
const SILENT: &str = "--no-kv-events --num-kv-blocks 600";

fn prompt(kind: u64, turn: u64) -> Vec<u32> {
    [prompts::ids(320, kind), prompts::ids(40, 1000 + turn)].concat()
}

/// Waits until the index of so many workers is fed by events.
async fn followed(front: &Client, count: usize) {
    until(SOON, &format!("{count} workers to be followed"), || async {
        let status = status(front).await;
        let found = status["workers"]
            .as_array()
            .map_or(0, |workers| workers.iter().filter(|worker| worker["index"] == "events").count());
        (found == count).then_some(()).ok_or(status["workers"].to_string())
    })
    .await;
}

async fn status(front: &Client) -> Value {
    let (_, text) = front.get("/status").await.expect("/status answers");
    serde_json::from_str(&text).expect("/status is JSON")
}

/// The overlap of each worker with a prompt, in blocks, in no order.
async fn overlaps(front: &Client, prompt: &[u32]) -> Vec<u64> {
    let (status, answer) =
        front.post("/route/explain", &json!({ "prompt": prompt })).await.expect("an answer");
    assert_eq!(status, 200, "{answer}");
    let workers = answer["cluster"]["workers"].as_array().expect("a list");
    let mut overlaps: Vec<_> =
        workers.iter().map(|worker| worker["overlap_blocks"].as_u64().expect("a number")).collect();
    overlaps.sort_unstable();
    overlaps
}

async fn overlaps_become(front: &Client, prompt: &[u32], expected: &[u64]) {
    until(SOON, &format!("overlaps of {expected:?}"), || async {
        let found = overlaps(front, prompt).await;
        (found == expected).then_some(()).ok_or(format!("{found:?}"))
    })
    .await;
}

/// rt-01: events are expected and some workers publish none. That costs no hits, and it cannot be overlooked.
#[tokio::test]
async fn rt_01_workers_without_events_cost_no_hits_and_are_loud() {
    for (flags, silent) in [([SILENT, SILENT], 2), ([SILENT, EVENTS], 1), ([EVENTS, EVENTS], 0)] {
        let fleet = Fleet::start_unready(&flags, "").await;
        let word = if silent == 0 { "ready" } else { "degraded" };
        fleet.front.health_is(word).await;
        followed(&fleet.client(), 2 - silent).await;
        let mut hits = 0;
        for turn in 0..36 {
            let ask = Ask::completion(prompt(turn % 6, turn)).max_tokens(1);
            let (_, headers, text) = fleet.client().exchange(&ask).await.expect("an answer");
            let answer: Value = serde_json::from_str(&text).expect("JSON");
            let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
            hits += u64::from(cached.is_some_and(|cached| cached >= 320));
            let index = header(&headers, "x-kv-index").expect("every answer says what it rests on");
            let url = header(&headers, "x-kvferry-worker").expect("every answer says who answered");
            let is_silent = fleet.workers[..silent].iter().any(|worker| worker.client().url() == url);
            assert_eq!(index, if is_silent { "approximate" } else { "events" });
        }
        assert_eq!(hits, 30, "{silent} silent workers");
        let metrics = fleet.client().metrics().await;
        let mismatches = metrics.value("dynamo_component_router_kv_event_source_mismatch_workers");
        assert_eq!(mismatches, silent as f64);
        let log = fleet.front.log();
        for worker in &fleet.workers[..silent] {
            let named = |line: &str| {
                line.contains("ERROR")
                    && line.contains("kv_event_publisher_disabled")
                    && line.contains(worker.client().url())
            };
            assert!(log.lines().any(named) && log.contains("--kv-events"), "{log}");
        }
        let (_, _, reason) = fleet.client().health().await.expect("/health answers");
        assert_eq!(reason.matches("kv_event_publisher_disabled").count(), silent, "{reason}");
        fleet.settled().await;
    }
}

/// vLLM's path was 404 on a frontend; and a guess knows nothing of what the worker threw away.
#[tokio::test]
async fn a_reset_through_the_frontend_reaches_every_worker_and_the_guesses() {
    let mut fleet = Fleet::start_unready(&[EVENTS, SILENT], "").await;
    followed(&fleet.client(), 1).await;
    let asked = prompts::ids(321, 3);
    for worker in &fleet.workers {
        worker.client().answer(&Ask::completion(asked.clone()).max_tokens(1)).await;
    }
    // The silent one's cache is guessed from requests: this one goes to it, since it has fewer.
    overlaps_become(&fleet.client(), &asked, &[0, 20]).await;
    let others = [prompts::ids(321, 4), prompts::ids(321, 5)];
    for prompt in &others {
        fleet.client().answer(&Ask::completion(prompt.clone()).max_tokens(1)).await;
    }
    let known = |front: Client| async move {
        let mut sum = 0;
        for prompt in [prompts::ids(321, 3), prompts::ids(321, 4), prompts::ids(321, 5)] {
            sum += overlaps(&front, &prompt).await.iter().sum::<u64>();
        }
        sum
    };
    let known_becomes = async |expected| {
        until(SOON, &format!("an index of {expected} blocks"), || async {
            let known = known(fleet.client()).await;
            (known == expected).then_some(()).ok_or(format!("{known} blocks"))
        })
        .await;
    };
    known_becomes(60).await;
    let (status, said) = fleet.client().post("/reset_prefix_cache", &json!({})).await.expect("an answer");
    assert_eq!((status, said["workers"].as_array().map(Vec::len)), (200, Some(2)), "{said}");
    known_becomes(0).await;
    for worker in &fleet.workers {
        let answer = worker.client().answer(&Ask::completion(asked.clone()).max_tokens(1)).await;
        assert_eq!(answer.usage.cached, 0);
    }
    fleet.workers[0].kill();
    let (status, said) = fleet.client().post("/reset_prefix_cache", &json!({})).await.expect("an answer");
    let failed = said["workers"].as_array().expect("a list").iter().filter(|one| one["reset"] == false);
    assert_eq!((status, failed.count()), (503, 1), "{said}");
    let (status, text) = fleet.client().get("/route/index?fix=banana").await.expect("an answer");
    let error: Value = serde_json::from_str(&text).expect("JSON");
    assert!(status == 400 && error["error"]["message"].as_str().is_some_and(|m| m.contains("fix")), "{text}");
}

#[tokio::test]
async fn required_events_keep_a_silent_worker_out() {
    let fleet = Fleet::start_unready(&[SILENT, EVENTS], "--router-kv-events-required").await;
    followed(&fleet.client(), 1).await;
    for turn in 0..6 {
        fleet.client().answer(&Ask::completion(prompt(turn, turn)).max_tokens(1)).await;
    }
    assert_eq!(fleet.answered().await, [0, 6]);
    let alone = Fleet::start_unready(&[SILENT], "--router-kv-events-required").await;
    until(SOON, "the worker to be met", || async {
        let states = states(&alone.client()).await;
        states.first().is_some_and(|state| state.0 == "ready").then_some(()).ok_or(format!("{states:?}"))
    })
    .await;
    // `/health` said 200 while every request was refused.
    alone
        .front
        .health_says("unavailable", &["kv_event_publisher_disabled", "--router-kv-events-required"])
        .await;
    let failure = alone.client().ask(&Ask::chat("A")).await.unwrap_err();
    assert_eq!(failure.status(), Some(503), "{failure:?}");
}

/// rt-04: a frontend that starts anew knows what workers held before, and what follows it.
#[tokio::test]
async fn rt_04_a_restarted_frontend_reads_what_workers_hold() {
    let mut fleet = Fleet::start(&[EVENTS], "").await;
    followed(&fleet.client(), 1).await;
    let base = prompts::ids(321, 3);
    fleet.client().answer(&Ask::completion(base.clone()).max_tokens(1)).await;
    overlaps_become(&fleet.client(), &base, &[20]).await;
    fleet.front.kill();
    fleet.front.restart().await;
    fleet.front.health_is("ready").await;
    overlaps_become(&fleet.client(), &base, &[20]).await;
    let longer = [&base[..320], &prompts::ids(65, 4)].concat();
    let answer = fleet.client().answer(&Ask::completion(longer.clone()).max_tokens(1)).await;
    assert_eq!(answer.usage.cached, 320);
    overlaps_become(&fleet.client(), &longer, &[24]).await;
    assert_eq!(audit(&fleet.client(), "").await, [(0, 0)]);
}

/// rt-06, the other half: what a worker has thrown away is in no index, and a worker that is gone is in no view.
#[tokio::test]
async fn rt_06_cleared_and_dead_workers_have_no_overlap() {
    let mut fleet = Fleet::start(&[EVENTS], "").await;
    followed(&fleet.client(), 1).await;
    let base = prompts::ids(200, 3);
    fleet.client().answer(&Ask::completion(base.clone()).max_tokens(1)).await;
    overlaps_become(&fleet.client(), &base, &[12]).await;
    fleet.workers[0].client().post("/reset_prefix_cache", &Value::Null).await.expect("an empty cache");
    overlaps_become(&fleet.client(), &base, &[0]).await;
    fleet.client().answer(&Ask::completion(base.clone()).max_tokens(1)).await;
    overlaps_become(&fleet.client(), &base, &[12]).await;
    fleet.workers[0].kill();
    overlaps_become(&fleet.client(), &base, &[]).await;
    fleet.workers[0].restart().await;
    fleet.front.health_is("ready").await;
    overlaps_become(&fleet.client(), &base, &[0]).await;
}

/// Blocks that only the worker has, and that only the index has, for each worker.
async fn audit(front: &Client, query: &str) -> Vec<(u64, u64)> {
    let (_, text) = front.get(&format!("/route/index{query}")).await.expect("an audit");
    let audit: Value = serde_json::from_str(&text).expect("JSON");
    let workers = audit["workers"].as_array().expect("a list");
    let number =
        |worker: &Value, field: &str| worker["audit"][field].as_u64().unwrap_or_else(|| panic!("{text}"));
    workers.iter().map(|worker| (number(worker, "missing"), number(worker, "extra"))).collect()
}

#[tokio::test]
async fn the_index_is_what_workers_hold_after_evictions() {
    // Room for two of the prompts: most of what is stored is evicted again.
    let fleet = Fleet::start(&["--num-kv-blocks 64"; 2], "").await;
    followed(&fleet.client(), 2).await;
    for turn in 0..30 {
        fleet.client().answer(&Ask::completion(prompt(turn % 7, turn)).max_tokens(4)).await;
    }
    until(SOON, "an index as the workers' caches", || async {
        let found = audit(&fleet.client(), "").await;
        (found == [(0, 0), (0, 0)]).then_some(()).ok_or(format!("{found:?}"))
    })
    .await;
    let drift = fleet.client().metrics().await;
    let over = drift.labelled("kvferry_frontend_cached_tokens_drift_sum", "direction=\"over\"");
    assert!(over <= 320.0, "{over} tokens were predicted and not there");
}
