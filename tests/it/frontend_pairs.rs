//! Prefill and decode workers of ours behind a frontend: it names the prefill worker, the decode worker links to it.

use serde_json::json;
use tests::fleet::{header, idle, start_front};
use tests::process::Worker;
use tests::wait::until;
use tests::{Ask, Deployment, prompts};

/// A pair that knows nothing of each other, and a frontend that knows both.
struct Pair {
    prefill: Vec<Worker>,
    decode: Worker,
    front: Worker,
    #[expect(dead_code, reason = "held for its Drop")]
    dir: tempfile::TempDir,
}

impl Pair {
    async fn start(prefills: usize, front: &str) -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let deployment = Deployment::split("socket");
        let start = |name: String, role: &'static str| {
            Worker::start(dir.path(), deployment.launch(&name, &format!("--role {role}"), &[]))
        };
        let mut prefill = Vec::new();
        for index in 0..prefills {
            let worker = start(format!("prefill{index}"), "prefill").await;
            worker.health_is("ready").await;
            prefill.push(worker);
        }
        let decode = start("decode".into(), "decode").await;
        decode.health_is("ready").await;
        let urls: Vec<_> = prefill.iter().map(|worker| worker.client().url().to_owned()).collect();
        let flags = format!(
            "--prefill {} --decode {} --no-router-kv-events --health-check-interval-secs 0.3 {front}",
            urls.join(" --prefill "),
            decode.client().url()
        );
        let front = front_with(dir.path(), &flags).await;
        front.health_is("ready").await;
        Self { prefill, decode, front, dir }
    }

    async fn transfers(&self) -> Vec<u64> {
        let mut transfers = Vec::new();
        for worker in &self.prefill {
            transfers.push(worker.client().metrics().await.transfers());
        }
        transfers
    }

    async fn settled(&self) {
        idle(&self.front.client()).await;
        self.decode.client().settled().await;
        for worker in &self.prefill {
            worker.client().settled().await;
        }
    }
}

/// `--prefill` may come twice, which [`start_front`]'s flags cannot.
async fn front_with(dir: &std::path::Path, flags: &str) -> Worker {
    if flags.matches("--prefill ").count() == 1 {
        return start_front(dir, flags).await;
    }
    let mut launch = Deployment::both().launch("front", "--role frontend", &[]);
    launch.args.extend(flags.split_whitespace().map(str::to_owned));
    Worker::start(dir, launch).await
}

#[tokio::test]
async fn a_decode_worker_gets_kv_from_the_prefill_worker_that_the_frontend_names() {
    let pair = Pair::start(1, "--disagg-policy always").await;
    let alone = Deployment::both().start().await;
    for (count, ask) in prompts::varied().into_iter().enumerate() {
        let expected = alone.client().answer(&ask).await;
        assert_eq!(pair.front.client().answer(&ask).await.content(), expected.content(), "prompt {count}");
    }
    let (_, headers, _) =
        pair.front.client().exchange(&Ask::completion(prompts::ids(100, 77))).await.expect("an answer");
    assert_eq!(header(&headers, "x-kvferry-prefill-worker").as_deref(), Some(pair.prefill[0].client().url()));
    assert_eq!(header(&headers, "x-kvferry-worker").as_deref(), Some(pair.decode.client().url()));
    pair.settled().await;
    assert!(pair.transfers().await[0] >= 10, "{:?}", pair.transfers().await);
    assert_eq!(pair.decode.client().metrics().await.value("kvferry:tickets_failed_total"), 0.0);
}

/// A prefill worker's requests end on the decode worker, so its prefill time was not counted, and its speed stayed an
/// assumption however much it computed.
#[tokio::test]
async fn a_prefill_workers_speed_was_never_measured() {
    let pair = Pair::start(1, "--disagg-policy always").await;
    for seed in 0..4 {
        pair.front.client().answer(&Ask::completion(prompts::ids(300, seed))).await;
    }
    pair.settled().await;
    let worker = pair.prefill[0].client();
    let metrics = worker.metrics().await;
    assert_eq!(metrics.value("vllm:request_prefill_time_seconds_count"), 4.0);
    let speed = 1200.0 / metrics.value("vllm:request_prefill_time_seconds_sum");
    let close =
        |found: &serde_json::Value| found.as_f64().is_some_and(|found| (found / speed - 1.0).abs() < 0.01);
    let (_, own) = worker.get("/kv/v1/worker").await.expect("an answer");
    let own: serde_json::Value = serde_json::from_str(&own).expect("a record");
    assert!(close(&own["prefill_tokens_per_sec"]), "{own}, expected {speed}");
    let (front, body) = (pair.front.client(), json!({ "prompt": prompts::ids(150, 9) }));
    until(std::time::Duration::from_secs(30), "the frontend has read it", || async {
        let (_, explained) = front.post("/route/explain", &body).await.expect("an answer");
        match close(&explained["disagg"]["prefill_tokens_per_sec_there"]) {
            true => Ok(()),
            false => Err(format!("{explained}, expected {speed}")),
        }
    })
    .await;
}

#[tokio::test]
async fn never_and_a_threshold_keep_prompts_on_the_decode_worker() {
    let pair = Pair::start(1, "--disagg-policy threshold:200").await;
    for (length, transfers) in [(100, 0), (300, 1)] {
        pair.front.client().answer(&Ask::completion(prompts::ids(length, 1))).await;
        pair.settled().await;
        assert_eq!(pair.transfers().await, [transfers]);
    }
    let body = json!({ "prompt": prompts::ids(150, 2) });
    let (_, explained) = pair.front.client().post("/route/explain", &body).await.expect("an answer");
    let disagg = &explained["disagg"];
    assert_eq!(
        (disagg["remote"].as_bool(), disagg["reason"].as_str()),
        (Some(false), Some("below_threshold"))
    );
    assert_eq!(disagg["uncached_tokens_here"], 150);
    assert!(disagg["local_cost_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{explained}");
}

#[tokio::test]
async fn a_prefill_worker_that_dies_costs_nobody_an_answer() {
    let mut pair = Pair::start(2, "--disagg-policy always").await;
    let ask = |seed| Ask::completion(prompts::ids(200, seed)).max_tokens(4);
    for seed in 0..4 {
        pair.front.client().answer(&ask(seed)).await;
    }
    assert!(pair.transfers().await.iter().all(|count| *count > 0), "{:?}", pair.transfers().await);
    pair.prefill[0].kill();
    for seed in 10..16 {
        pair.front.client().answer(&ask(seed)).await;
    }
    let dead = pair.prefill[0].client().url().to_owned();
    pair.front.health_says("degraded", &[&dead]).await;
    pair.prefill[0].restart().await;
    pair.front.health_is("ready").await;
    let client = pair.front.client();
    let again = pair.prefill[0].client();
    let mut seed = 100;
    until(std::time::Duration::from_secs(30), "a transfer from the new process", || {
        seed += 1;
        let (client, again, ask) = (client.clone(), again.clone(), ask(seed));
        async move {
            client.answer(&ask).await;
            let transfers = again.metrics().await.transfers();
            (transfers > 0).then_some(()).ok_or("none yet".into())
        }
    })
    .await;
    pair.settled().await;
}

/// A prefill worker that cannot be linked, a decode worker with `flags`, and a frontend that names the one to the other.
async fn misfits(decode_flags: &str, policy: &str) -> (tempfile::TempDir, [Worker; 3]) {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let deployment = Deployment::split("socket");
    let start = |name, flags: String| Worker::start(dir.path(), deployment.launch(name, &flags, &[]));
    let prefill = start("prefill", "--role prefill --kv-layout-version 9".into()).await;
    let decode = start("decode", format!("--role decode {decode_flags}")).await;
    prefill.health_is("ready").await;
    decode.health_is("ready").await;
    let (prefill_url, decode_url) = (prefill.client().url().to_owned(), decode.client().url().to_owned());
    let flags = format!(
        "--prefill {prefill_url} --decode {decode_url} --disagg-policy {policy} --no-router-kv-events"
    );
    let front = front_with(dir.path(), &flags).await;
    front.health_is("ready").await;
    (dir, [prefill, decode, front])
}

/// A decode worker that does not fit the prefill worker that its frontend names computed the prompts itself, and only its
/// log said so: nothing was counted anywhere, and the answer named a prefill worker that had done nothing.
#[tokio::test]
async fn a_pair_that_does_not_fit_was_passed_over_in_silence() {
    let (_dir, [_prefill, decode, front]) = misfits("", "always").await;
    for (count, streamed) in [false, true].into_iter().enumerate() {
        let ask = Ask::completion(prompts::ids(100, 3 + count as u64)).with("return_timeline", true);
        let ask = if streamed { ask.streamed() } else { ask };
        let (status, headers, text) = front.client().exchange(&ask).await.expect("an answer");
        assert!(status == 200 && text.contains("\"recomputed\":\"not_linked\""), "{status} {text}");
        assert_eq!(header(&headers, "x-kvferry-prefill-worker"), None);
        assert_eq!(header(&headers, "x-kvferry-prefill"), None);
        assert_eq!(header(&headers, "x-kvferry-worker").as_deref(), Some(decode.client().url()));
    }
    let counted = decode.client().metrics().await;
    assert_eq!(counted.labelled("kvferry:ticket_faults_total", "not_linked"), 2.0);
    let counted = front.client().metrics().await;
    assert_eq!(counted.value("kvferry_frontend_prefill_unlinked_total"), 2.0);
}

/// With `--kv-failure fail` such a pair had the frontend take the decode worker for full, and refuse prompts that need no
/// prefill worker at all.
#[tokio::test]
async fn a_missing_link_was_taken_for_a_full_decode_worker() {
    let (_dir, [_prefill, decode, front]) = misfits("--kv-failure fail", "threshold:80").await;
    for seed in 0..3 {
        let (status, headers, text) =
            front.client().exchange(&Ask::completion(prompts::ids(100, seed))).await.expect("an answer");
        assert!(status == 503 && text.contains("not linked"), "{status} {text}");
        assert_eq!(header(&headers, "x-kvferry-prefill-worker"), None);
        front.client().answer(&Ask::completion(prompts::ids(20, seed))).await;
        front.health_is("ready").await;
    }
    let counted = decode.client().metrics().await;
    assert_eq!(counted.labelled("kvferry:ticket_faults_total", "not_linked"), 3.0);
    let counted = front.client().metrics().await;
    assert_eq!(counted.value("kvferry_frontend_prefill_unlinked_total"), 3.0);
}
