//! A frontend that knows its workers' caches by their events, and says so when it does not.

use std::time::Duration;

use serde_json::{Value, json};
use tests::fleet::{Fleet, header, start_front, start_worker};
use tests::wait::until;
use tests::{Ask, Client, Worker, prompts};

const SOON: Duration = Duration::from_secs(30);

/// What the frontend knows of each worker for this request: its incarnation, and its overlap in blocks.
async fn overlaps(front: &Client, ask: &Ask) -> Vec<(String, u64)> {
    let (status, body) = front.post("/route/explain", &ask.json()).await.expect("an answer");
    assert_eq!(status, 200, "{body}");
    let workers = body["cluster"]["workers"].as_array().expect("the workers as the router sees them");
    let overlap = |worker: &Value| {
        let blocks = worker["overlap_blocks"].as_u64().expect("a number");
        (worker["id"].as_str().expect("an incarnation").to_owned(), blocks)
    };
    workers.iter().map(overlap).collect()
}

async fn incarnation(worker: &Worker) -> String {
    let (_, text) = worker.client().get("/kv/v1/worker").await.expect("an answer");
    let record: Value = serde_json::from_str(&text).expect("JSON");
    record["incarnation"].as_str().expect("an incarnation").to_owned()
}

async fn best_overlap(front: &Client, ask: &Ask) -> u64 {
    overlaps(front, ask).await.into_iter().map(|(_, blocks)| blocks).max().unwrap_or_default()
}

/// Waits until the best worker has this many blocks of the prompt, as far as the frontend knows.
async fn overlap_is(front: &Client, ask: &Ask, blocks: u64) {
    until(SOON, &format!("an overlap of {blocks} blocks"), || async {
        let found = best_overlap(front, ask).await;
        (found == blocks).then_some(()).ok_or(format!("{found} blocks"))
    })
    .await;
}

async fn index_of(client: &Client, ask: &Ask) -> String {
    let (status, headers, body) = client.exchange(ask).await.expect("an answer");
    assert_eq!(status, 200, "{body}");
    header(&headers, "x-kv-index").expect("every answer says where its overlap came from")
}

fn mismatches(metrics: &tests::Metrics) -> f64 {
    metrics.value("dynamo_component_router_kv_event_source_mismatch_workers")
}

/// rt-01: in event mode, workers without events are counted, named in the log with the option, and shown in `/health`
/// and in each answer.
#[tokio::test]
async fn rt_01_workers_without_events_are_loud() {
    for (flags, silent) in
        [(["--no-kv-events", "--no-kv-events"], 2.0), (["--kv-events", "--no-kv-events"], 1.0)]
    {
        let fleet = Fleet::start_unready(&flags, "").await;
        fleet.front.health_says("degraded", &["kv_event_publisher_disabled"]).await;
        fleet
            .client()
            .metrics_when("silent workers are counted", |metrics| mismatches(metrics) == silent)
            .await;
        let log = fleet.front.log();
        let line =
            log.lines().find(|line| line.contains("kv_event_publisher_disabled")).expect("a line in the log");
        assert!(
            line.contains("ERROR") && line.contains("http://127.0.0.1:") && line.contains("--kv-events"),
            "{line}"
        );
        let ask = Ask::completion(prompts::ids(100, 1)).max_tokens(1);
        let index = index_of(&fleet.client(), &ask).await;
        assert!(silent < 2.0 || index == "approximate", "{index}");
        // Guessing works, too: the same prompt is found again, as soon as an event that is on its way is here.
        until(SOON, "the prompt to be found", || async {
            let cached = fleet.client().answer(&ask).await.usage.cached;
            if cached == 96 { Ok(()) } else { Err(format!("{cached} tokens are cached")) }
        })
        .await;
    }
}

/// rt-01 C, the published experiment: 12 prefixes, six times each, on two workers that cannot hold them all.
#[tokio::test]
async fn rt_01_with_events_every_repeat_is_a_hit() {
    let fleet = Fleet::start(&["--num-kv-blocks 925"; 2], "").await;
    let metrics =
        fleet.client().metrics_when("both are followed", |metrics| mismatches(metrics) == 0.0).await;
    assert_eq!(mismatches(&metrics), 0.0);
    let mut hits = 0;
    for round in 0..6_u64 {
        for at in 0..12_u64 {
            let prefix = (at * 5 + round * 7) % 12;
            let prompt = [prompts::ids(1440, prefix), prompts::ids(60, 100 + round * 12 + at)].concat();
            hits += u64::from(
                fleet.client().answer(&Ask::completion(prompt).max_tokens(2)).await.usage.cached >= 1440,
            );
        }
    }
    assert_eq!(hits, 60, "all but the first of each prefix");
    assert_eq!(
        index_of(&fleet.client(), &Ask::completion(prompts::ids(1440, 3)).max_tokens(1)).await,
        "events"
    );
    fleet.settled().await;
}

/// rt-04: a frontend that starts anew knows what is cached, and goes on from there.
#[tokio::test]
async fn rt_04_a_restarted_frontend_knows_what_is_cached() {
    let mut fleet = Fleet::start(&[""], "").await;
    let prompt = |blocks: usize| Ask::completion(prompts::ids(blocks * 16 + 1, 7)).max_tokens(1);
    fleet.client().answer(&prompt(20)).await;
    fleet.front.kill();
    fleet.front.restart().await;
    fleet.front.health_is("ready").await;
    overlap_is(&fleet.client(), &prompt(20), 20).await;
    fleet.client().answer(&prompt(22)).await;
    overlap_is(&fleet.client(), &prompt(22), 22).await;
    let answer = fleet.client().answer(&prompt(24)).await;
    assert!(answer.usage.cached >= 20 * 16, "{answer:?}");
}

/// rt-06: what a worker no longer has is no overlap: after a reset, and after its death; when it is back it gets requests.
#[tokio::test]
async fn rt_06_a_cleared_or_dead_worker_is_no_favourite() {
    let mut fleet = Fleet::start(&["", ""], "--health-check-interval-secs 0.2").await;
    let ask = Ask::completion(prompts::ids(321, 5)).max_tokens(1);
    fleet.client().answer(&ask).await;
    overlap_is(&fleet.client(), &ask, 20).await;
    let answered = fleet.answered().await;
    let favourite = answered.iter().position(|count| *count > 0).expect("one has answered");
    let (status, _) =
        fleet.workers[favourite].client().post("/reset_prefix_cache", &json!({})).await.expect("an answer");
    assert_eq!(status, 200);
    overlap_is(&fleet.client(), &ask, 0).await;
    fleet.client().answer(&ask).await;
    overlap_is(&fleet.client(), &ask, 20).await;
    let before = fleet.answered().await;
    let favourite = usize::from(before[1] > answered[1]);
    fleet.workers[favourite].kill();
    for _ in 0..20 {
        fleet.client().answer(&ask).await;
    }
    overlap_is(&fleet.client(), &ask, 20).await;
    // Its events end before the next look at it does: until then it is there, with nothing.
    let left = [(incarnation(&fleet.workers[1 - favourite]).await, 20)];
    until(SOON, "only the other worker to be there", || async {
        let seen = overlaps(&fleet.client(), &ask).await;
        (seen == left).then_some(()).ok_or(format!("{seen:?}, expected {left:?}"))
    })
    .await;
    fleet.workers[favourite].restart().await;
    fleet.front.health_is("ready").await;
    for seed in 0..20 {
        fleet.client().answer(&Ask::completion(prompts::ids(100, 50 + seed)).max_tokens(1)).await;
    }
    let counts = fleet.answered().await;
    assert!(counts[favourite] > 0, "it gets requests again: {counts:?}");
}

/// kv-04: a salt separates caches, events, and what the router believes.
#[tokio::test]
async fn kv_04_salts_are_kept_apart_in_cache_events_and_index() {
    let fleet = Fleet::start(&[""], "").await;
    let plain = Ask::completion(prompts::ids(65, 9)).max_tokens(2);
    let client = fleet.client();
    let cached = async |ask: &Ask| client.answer(ask).await.usage.cached;
    assert_eq!(cached(&plain.clone().salted("t1")).await, 0);
    assert_eq!(cached(&plain.clone().salted("t1")).await, 64);
    overlap_is(&client, &plain.clone().salted("t1"), 4).await;
    assert_eq!(best_overlap(&client, &plain.clone().salted("t2")).await, 0);
    assert_eq!(best_overlap(&client, &plain).await, 0);
    assert_eq!(cached(&plain.clone().salted("t2")).await, 0);
    assert_eq!(cached(&plain).await, 0);
    overlap_is(&client, &plain, 4).await;
    assert_eq!(
        snapshot(&fleet.workers[0]).await.len(),
        12,
        "three domains of four blocks, all of other names"
    );
    let failure = client.ask(&plain.with("cache_salt", 123)).await.unwrap_err();
    assert_eq!(failure.status(), Some(400), "{failure:?}");
}

/// Names of the blocks that a worker holds, sorted.
async fn snapshot(worker: &Worker) -> Vec<u64> {
    let (status, text) = worker.client().get("/kv_events/snapshot").await.expect("an answer");
    assert_eq!(status, 200, "{text}");
    let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let mut names: Vec<u64> = lines
        .flat_map(|line| line["hashes"].as_array().cloned().unwrap_or_default())
        .map(|name| name.as_u64().expect("a number"))
        .collect();
    names.sort_unstable();
    names
}

/// rt-10: two processes, and one of them again, name the same blocks alike: as the vector that is kept says.
#[tokio::test]
async fn rt_10_names_are_the_same_in_every_process() {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let mut expected = vec![0xb389_87e6_5a67_5473_u64, 0xa4d0_af37_218f_0603];
    expected.sort_unstable();
    let ask = Ask::completion((0..33).collect::<Vec<u32>>()).max_tokens(1);
    let mut first = start_worker(dir.path(), "first", "").await;
    let second = start_worker(dir.path(), "second", "").await;
    for worker in [&first, &second] {
        worker.health_is("ready").await;
        worker.client().answer(&ask).await;
        assert_eq!(snapshot(worker).await, expected);
    }
    first.kill();
    first.restart().await;
    first.health_is("ready").await;
    assert!(snapshot(&first).await.is_empty());
    first.client().answer(&ask).await;
    assert_eq!(snapshot(&first).await, expected);
}

/// What vLLM's users ask a worker.
#[tokio::test]
async fn event_sources_are_listed_as_by_vllm() {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let worker = start_worker(dir.path(), "worker", "").await;
    worker.health_is("ready").await;
    let (status, text) = worker.client().get("/kv_event_sources").await.expect("an answer");
    let sources: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!((status, sources.as_array().map(Vec::len)), (200, Some(1)), "{text}");
    let source = &sources[0];
    assert_eq!((source["data_parallel_rank"].as_u64(), source["block_size"].as_u64()), (Some(0), Some(16)));
    for endpoint in ["endpoint", "replay_endpoint"] {
        assert!(source[endpoint].as_str().is_some_and(|at| at.starts_with("tcp://127.0.0.1:")), "{text}");
    }
    let silent = start_worker(dir.path(), "silent", "--no-kv-events").await;
    silent.health_is("ready").await;
    assert_eq!(silent.client().get("/kv_event_sources").await, Ok((200, "[]".to_owned())));
}

/// Workers that nobody named are found, drained ones are left, dead ones forgotten, and one id is one worker's.
#[tokio::test]
async fn a_frontend_finds_its_workers() {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let front = start_front(dir.path(), "").await;
    front.health_says("unavailable", &["no worker"]).await;
    let lease = "--discovery-lease-secs 2";
    let mut first = start_worker(dir.path(), "first", &format!("--worker-id one {lease}")).await;
    front.health_is("ready").await;
    let ask = Ask::completion(prompts::ids(321, 5)).max_tokens(1);
    front.client().answer(&ask).await;
    overlap_is(&front.client(), &ask, 20).await;

    let flags = format!("--role both --device sim --worker-id one {lease}");
    let launch = tests::Deployment::both().launch("twin", &flags, &[]);
    let (status, log) = Worker::run_to_end(dir.path(), launch).await;
    assert!(!status.success() && log.contains("worker id \"one\" is taken by worker"), "{status}: {log}");

    let mut second = start_worker(dir.path(), "second", lease).await;
    let workers = async |count: usize| {
        until(SOON, &format!("{count} workers"), || async {
            let (_, text) = front.client().get("/health").await.map_err(|error| format!("{error:?}"))?;
            let health: Value = serde_json::from_str(&text).map_err(|error| error.to_string())?;
            let found = health["workers"].as_array().map_or(0, Vec::len);
            (found == count).then_some(()).ok_or(text)
        })
        .await;
    };
    workers(2).await;
    second.terminate();
    workers(1).await;
    assert!(second.exited().await.success());
    first.kill();
    workers(0).await;
    front.health_says("unavailable", &["no worker"]).await;
    first.restart().await;
    front.health_is("ready").await;
    front.client().answer(&ask).await;
}
