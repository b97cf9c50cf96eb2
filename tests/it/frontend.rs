//! A frontend in front of workers: who gets which request, and what clients and operators see of it.

use serde_json::{Value, json};
use tests::fake::{Behaviour, FakeWorker};
use tests::fleet::{Fleet, header, idle, start_front, states};
use tests::process::Worker;
use tests::{Ask, Deployment, prompts};

/// A front and fakes behind it, which publish no KV events; `flags` has `{0}`, `{1}` ... for their addresses.
pub async fn front_of(fakes: &[&FakeWorker], flags: &str) -> (Worker, tempfile::TempDir) {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let mut flags = flags.to_owned();
    if !flags.contains("router-kv-events") {
        flags += " --no-router-kv-events";
    }
    for (index, fake) in fakes.iter().enumerate() {
        flags = flags.replace(&format!("{{{index}}}"), &fake.url());
    }
    let front = start_front(dir.path(), &flags).await;
    front.health_is("ready").await;
    (front, dir)
}

#[tokio::test]
async fn answers_through_a_frontend_are_those_of_a_worker() {
    let fleet = Fleet::start(&["", ""], "--no-router-kv-events").await;
    for ask in prompts::varied() {
        let direct = fleet.workers[0].client().answer(&ask).await;
        let routed = fleet.client().answer(&ask).await;
        assert_eq!(direct.content(), routed.content());
        assert_eq!(fleet.client().answer(&ask.streamed()).await.content(), direct.content());
    }
    fleet.settled().await;
}

#[tokio::test]
async fn bodies_reach_a_foreign_worker_unchanged_with_the_clients_headers() {
    let fake = FakeWorker::start(Behaviour::Answer).await;
    // No --model: nothing is tokenized, any OpenAI server will do.
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let launch = tests::process::Launch {
        name: "front".into(),
        args: ["--role", "frontend", "--port", "0", "--worker-url", &fake.url()].map(str::to_owned).to_vec(),
        cores: Vec::new(),
        env: Vec::new(),
        away: None,
    };
    let front = Worker::start(dir.path(), launch).await;
    front.health_is("ready").await;
    let ask =
        Ask::chat("é\u{1F600} \"quoted\"").with("a_field_of_its_own", json!({"z": 1, "a": [1.50, null]}));
    let (status, headers, _) = front.client().exchange(&ask).await.expect("an answer");
    assert_eq!(status, 200);
    assert_eq!(header(&headers, "x-kvferry-worker"), Some(fake.url()));
    assert_eq!(header(&headers, "x-kv-index").as_deref(), Some("approximate"));
    let received = fake.received();
    assert_eq!((received.len(), received[0].path), (1, "/v1/chat/completions"));
    assert_eq!(received[0].body["a_field_of_its_own"], json!({"z": 1, "a": [1.50, null]}));
    let id = received[0].headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    assert_eq!(id, header(&headers, "x-request-id"));
    assert_eq!(front.client().answer(&ask.streamed()).await.text, "0 1 2 ");
    idle(&front.client()).await;
}

#[tokio::test]
async fn each_mode_spreads_requests_as_it_should() {
    for (mode, least, most) in
        [("round-robin", 10, 10), ("random", 2, 18), ("least-loaded", 1, 19), ("power-of-two", 1, 19)]
    {
        let fleet = Fleet::start(&["", ""], &format!("--router-mode {mode}")).await;
        for seed in 0..20 {
            let ask = Ask::completion(prompts::ids(40, seed)).max_tokens(2);
            let (status, headers, _) = fleet.client().exchange(&ask).await.expect("an answer");
            assert_eq!((status, header(&headers, "x-kv-index").as_deref()), (200, Some("none")));
        }
        let answered = fleet.answered().await;
        assert!(answered.iter().all(|count| (least..=most).contains(count)), "{mode}: {answered:?}");
        assert_eq!(answered.iter().sum::<u64>(), 20);
        fleet.settled().await;
    }
}

/// Prompts that begin alike go where their beginning is cached, though nobody said that it is.
#[tokio::test]
async fn kv_mode_without_events_sends_a_prefix_where_it_went_before() {
    let fleet = Fleet::start(&["--num-kv-blocks 600", "--num-kv-blocks 600"], "--no-router-kv-events").await;
    let prompt = |kind: u64, turn: u64| [prompts::ids(320, kind), prompts::ids(40, 1000 + turn)].concat();
    let mut hits = 0;
    for turn in 0..24 {
        let ask = Ask::completion(prompt(turn % 6, turn)).max_tokens(2);
        let answer = fleet.client().answer(&ask).await;
        hits += u64::from(answer.usage.cached >= 320);
    }
    assert_eq!(hits, 18, "all but the first of each prefix");
    let answered = fleet.answered().await;
    assert!(answered.iter().all(|count| *count == 12), "six prefixes are spread evenly: {answered:?}");
    let metrics = fleet.client().metrics().await;
    let drift = metrics.labelled("kvferry_frontend_cached_tokens_drift_sum", "direction=\"under\"");
    assert_eq!(drift, 0.0, "what was predicted is what was cached");
    fleet.settled().await;
}

/// rt-02: another block size would make every overlap 0, in silence.
#[tokio::test]
async fn rt_02_a_worker_with_another_block_size_is_refused_with_both_values() {
    let fleet = Fleet::start_unready(&["", "--block-size 32"], "--no-router-kv-events").await;
    fleet.front.health_says("degraded", &["16", "32", "blocks"]).await;
    for seed in 0..4 {
        fleet.client().answer(&Ask::completion(prompts::ids(500, seed % 2)).max_tokens(1)).await;
    }
    let answered = fleet.answered().await;
    assert!(answered.contains(&0) && answered.contains(&4), "{answered:?}");
    let found = fleet.client().answer(&Ask::completion(prompts::ids(500, 0)).max_tokens(1)).await;
    // The worker that was met first sets the size.
    assert!([499 / 16 * 16, 499 / 32 * 32].contains(&found.usage.cached), "{found:?}");
    fleet.settled().await;
}

#[tokio::test]
async fn a_worker_with_another_model_is_refused_with_both_values() {
    let fleet = Fleet::start_unready(&["", "--served-model-name other"], "--no-router-kv-events").await;
    fleet.front.health_says("degraded", &["other", "demo"]).await;
    fleet.client().answer(&Ask::chat("A").max_tokens(1)).await;
    let failure = fleet.client().ask(&Ask::chat("A").with("model", "nobody's")).await.unwrap_err();
    assert!(failure.status() == Some(404) && failure.message().contains("nobody's"), "{failure:?}");
}

/// rt-13: prompts shorter than a block have no overlap, and that is no number that breaks anything.
#[tokio::test]
async fn rt_13_prompts_shorter_than_a_block_are_spread_and_leave_no_nan() {
    for temperature in ["0", "0.5"] {
        let flags = format!("--no-router-kv-events --router-temperature {temperature}");
        let fleet = Fleet::start(&["", ""], &flags).await;
        for seed in 0..40 {
            let length = [1, 5, 15, 16][seed as usize % 4];
            fleet.client().answer(&Ask::completion(prompts::ids(length, seed)).max_tokens(1)).await;
        }
        let answered = fleet.answered().await;
        assert!(answered.iter().all(|count| (12..=28).contains(count)), "{temperature}: {answered:?}");
        let (_, text) = fleet.client().get("/metrics").await.expect("/metrics answers");
        let values =
            text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.rsplit(' ').next());
        assert!(values.clone().count() > 50);
        assert!(values.into_iter().all(|value| value.parse::<f64>().is_ok_and(f64::is_finite)), "{text}");
    }
}

/// rt-08: a prefix that all requests share does not pin them all to one worker.
#[tokio::test]
async fn rt_08_a_shared_prefix_does_not_pin_the_load() {
    let fleet = Fleet::start(&["--num-kv-blocks 2000 --sim-speed 10"; 4], "--no-router-kv-events").await;
    for shared in [64, 0] {
        let before = fleet.answered().await;
        let prompt =
            |seed| [prompts::ids(shared, 7), prompts::ids(500, 10_000 * shared as u64 + seed)].concat();
        let asks: Vec<_> = (0..160).map(|seed| Ask::completion(prompt(seed)).tokens(20)).collect();
        for group in asks.chunks(16) {
            fleet.client().answers(group).await;
        }
        let after = fleet.answered().await;
        let counts: Vec<_> = after.iter().zip(&before).map(|(after, before)| after - before).collect();
        assert!(counts.iter().all(|count| (24..=56).contains(count)), "{shared} shared tokens: {counts:?}");
    }
    fleet.settled().await;
}

#[tokio::test]
async fn explain_says_where_a_request_would_go_and_changes_nothing() {
    let fleet = Fleet::start(&["", ""], "--no-router-kv-events").await;
    let ask = json!({ "model": "demo", "prompt": prompts::ids(100, 1) });
    let explain = || async {
        let (status, answer) = fleet.client().post("/route/explain", &ask).await.expect("an answer");
        assert_eq!(status, 200, "{answer}");
        answer
    };
    let overlaps = |answer: &Value| -> Vec<u64> {
        let workers = answer["cluster"]["workers"].as_array().expect("a list");
        workers.iter().map(|worker| worker["overlap_blocks"].as_u64().expect("a number")).collect()
    };
    for _ in 0..3 {
        assert_eq!(overlaps(&explain().await), [0, 0]);
    }
    let (_, headers, _) =
        fleet.client().exchange(&Ask::completion(prompts::ids(100, 1)).max_tokens(1)).await.unwrap();
    let answer = explain().await;
    assert_eq!(answer["serve_url"].as_str(), header(&headers, "x-kvferry-worker").as_deref());
    assert_eq!((answer["num_tokens"].as_u64(), answer["mode"].as_str()), (Some(100), Some("kv")));
    let mut sorted = overlaps(&answer);
    sorted.sort_unstable();
    assert_eq!(sorted, [0, 6]);
    assert_eq!(answer["choice"]["scores"].as_array().expect("a list").len(), 2);
    assert_eq!(fleet.answered().await.iter().sum::<u64>(), 1);
    let (status, _) = fleet.client().post("/route/explain", &json!([1])).await.expect("an answer");
    assert_eq!(status, 400);
}

#[tokio::test]
async fn the_status_page_and_its_news_are_there() {
    let fleet = Fleet::start(&[""], "--no-router-kv-events").await;
    fleet.client().answer(&Ask::completion(prompts::ids(64, 1)).max_tokens(2)).await;
    let (status, page) = fleet.client().get("/").await.expect("the page");
    assert!(status == 200 && page.contains("<title>kvferry") && page.contains("status/events"));
    let (_, text) = fleet.client().get("/status").await.expect("its content");
    let content: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(
        (content["workers"][0]["state"].as_str(), content["workers"][0]["index"].as_str()),
        (Some("ready"), Some("approximate"))
    );
    assert_eq!(content["minute"]["requests"], 1);
    assert!(content["minute"]["ttft_p50_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{text}");
}

/// ops-03: what clients send never becomes a label.
#[tokio::test]
async fn ops_03_metrics_do_not_grow_with_what_clients_send() {
    let fleet = Fleet::start(&[""], "--no-router-kv-events").await;
    let client = fleet.client();
    let lines = || async { client.get("/metrics").await.expect("/metrics answers").1.lines().count() };
    client.answer(&Ask::chat("A").max_tokens(1)).await;
    let _ = client.ask(&Ask::chat("A").with("model", "unknown")).await;
    let _ = client.get("/nothing").await;
    let before = lines().await;
    for index in 0..200 {
        let name = match index % 4 {
            0 => format!("model-{index}"),
            1 => format!("quo\"te\n{index}"),
            2 => format!("\u{1F600}{index}"),
            _ => "x".repeat(10_000 + index),
        };
        let failure = client.ask(&Ask::chat("A").with("model", name)).await.unwrap_err();
        assert_eq!(failure.status(), Some(404));
        let (status, _) = client.get(&format!("/some/path/{index}")).await.expect("an answer");
        assert_eq!(status, 404);
    }
    let after = lines().await;
    assert!(after < before + 50, "{before} lines, then {after}");
}

/// ops-02: ready, and a model listed, means that a request is answered.
#[tokio::test]
async fn ops_02_ready_means_that_a_request_is_answered() {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    // The frontend is there before its worker: a port that nobody has.
    let port =
        std::net::TcpListener::bind("127.0.0.1:0").expect("free ports").local_addr().expect("bound").port();
    let front =
        start_front(dir.path(), &format!("--worker-url http://127.0.0.1:{port} --no-router-kv-events")).await;
    let client = front.client();
    front.health_says("unavailable", &[&port.to_string()]).await;
    let failure = client.ask(&Ask::chat("A")).await.unwrap_err();
    assert_eq!(failure.status(), Some(503), "{failure:?}");
    let listed = |text: String| text.contains("\"demo\"");
    assert!(!listed(client.get("/v1/models").await.expect("an answer").1));
    let launch = Deployment::both().flags(tests::fleet::SIM).launch(
        "late",
        &format!("--role both --port {port}"),
        &[],
    );
    let worker = Worker::start(dir.path(), launch);
    let poll = async {
        loop {
            let ready = client.health().await.is_ok_and(|(status, _, _)| status == 200);
            let models = client.get("/v1/models").await.is_ok_and(|(_, text)| listed(text));
            let answered = client.ask(&Ask::chat("A").max_tokens(1)).await;
            if ready || models {
                answered.expect("ready before this request was sent");
                return;
            }
        }
    };
    let (mut worker, ()) = tokio::join!(worker, poll);
    worker.kill();
    front.health_says("unavailable", &[&port.to_string()]).await;
    assert!(!listed(client.get("/v1/models").await.expect("an answer").1));
    assert!(states(&client).await.iter().all(|(state, _)| state == "unreachable"));
}
