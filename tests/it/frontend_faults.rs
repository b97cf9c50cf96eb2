//! Workers that fail behind a frontend: no client loses an answer that another worker could give, and none takes half
//! an answer for a whole one.

use std::time::Duration;

use serde_json::json;
use tests::fake::{Behaviour, FakeWorker};
use tests::fleet::{Fleet, header, idle, start_front, start_worker};
use tests::process::Worker;
use tests::wait::until;
use tests::{Ask, Failure, prompts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::frontend::front_of;

const SOON: Duration = Duration::from_secs(20);

fn ask(seed: u64) -> Ask {
    Ask::completion(prompts::ids(64, seed)).max_tokens(4)
}

#[tokio::test]
async fn a_stream_that_breaks_ends_with_an_error_and_never_as_if_it_were_whole() {
    let fake = FakeWorker::start(Behaviour::Answer).await;
    let (front, _dir) = front_of(&[&fake], "--worker-url {0} --router-mode round-robin").await;
    for (behaviour, words) in [(Behaviour::Break(2), "broke"), (Behaviour::Stop(2), "[DONE]")] {
        fake.behave(behaviour);
        front.health_is("ready").await;
        match front.client().ask(&ask(1).streamed()).await {
            Err(Failure::InStream { text, message }) => {
                assert_eq!(text, "0 1 ");
                assert!(message.contains(words) && message.contains(&fake.url()), "{message}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(fake.received().len(), 2, "no other try once a byte was sent");
    idle(&front.client()).await;
    assert_eq!(front.client().metrics().await.value("kvferry_frontend_broken_streams_total"), 2.0);
}

/// Sends a request; what is there of the answer when its head is.
async fn exchange(connection: &mut TcpStream, request: &str) -> String {
    connection.write_all(request.as_bytes()).await.unwrap();
    let mut answer = vec![0; 16 << 10];
    let read =
        tokio::time::timeout(SOON, connection.read(&mut answer)).await.expect("an answer in time").unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

/// Each failed connection counted against a worker that was well, until its breaker kept it out for a minute.
#[tokio::test]
async fn our_own_lack_of_file_descriptors_was_blamed_on_workers() {
    let fake = FakeWorker::start(Behaviour::Answer).await;
    let (front, _dir) = front_of(&[&fake], "--worker-url {0} --router-mode round-robin").await;
    lacks_file_descriptors(&front).await;
}

/// The decode worker was then asked for what the prefill worker could not be.
#[tokio::test]
async fn our_own_lack_of_file_descriptors_was_blamed_on_prefill_workers() {
    let prefill = FakeWorker::start(Behaviour::Prefill(Some(json!({"do_remote_prefill": true})))).await;
    let decode = FakeWorker::start(Behaviour::Answer).await;
    let flags = "--prefill {0} --decode {1} --disagg-policy always --no-router-kv-events";
    let (front, _dir) = front_of(&[&prefill, &decode], flags).await;
    lacks_file_descriptors(&front).await;
}

async fn lacks_file_descriptors(front: &Worker) {
    front.health_is("ready").await;
    // This connection is open before nothing more can be; on this thread of the frontend none to the worker is.
    let mut connection = TcpStream::connect(("127.0.0.1", front.port())).await.unwrap();
    let body = r#"{"model":"demo","prompt":"x","max_tokens":3}"#;
    let post = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    exchange(&mut connection, "GET /live HTTP/1.1\r\nhost: x\r\n\r\n").await;
    let before = front.limit_open_files(3);
    for _ in 0..12 {
        let answer = exchange(&mut connection, &post).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.contains("ulimit -n"), "{answer}");
    }
    front.limit_open_files(before);
    let client = front.client();
    client.is_ready().await;
    client.answer(&ask(20)).await;
    let metrics = client.metrics().await;
    assert_eq!(metrics.value("kvferry_frontend_worker_failures_total"), 12.0);
    assert_eq!(front.log().matches("quarantined").count(), 0);
}

#[tokio::test]
async fn before_the_first_byte_another_worker_answers() {
    let (bad, good) =
        (FakeWorker::start(Behaviour::Answer).await, FakeWorker::start(Behaviour::Answer).await);
    let (front, _dir) = front_of(&[&bad, &good], "--worker-url {0},{1} --router-mode round-robin").await;
    for behaviour in [Behaviour::Refuse(503), Behaviour::Refuse(429), Behaviour::Break(0), Behaviour::Stop(0)]
    {
        bad.behave(behaviour.clone());
        front.health_is("ready").await;
        let before = good.received().len();
        for seed in 0..2 {
            let answer = front.client().answer(&ask(seed).streamed()).await;
            assert_eq!(answer.text, "0 1 2 ", "{behaviour:?}");
        }
        assert!(good.received().len() > before, "{behaviour:?}");
    }
    idle(&front.client()).await;
}

#[tokio::test]
async fn a_request_that_is_at_fault_is_not_tried_again() {
    let (one, two) =
        (FakeWorker::start(Behaviour::Refuse(400)).await, FakeWorker::start(Behaviour::Refuse(400)).await);
    let (front, _dir) = front_of(&[&one, &two], "--worker-url {0},{1} --router-mode round-robin").await;
    let failure = front.client().ask(&ask(1)).await.unwrap_err();
    assert_eq!((failure.status(), failure.message()), (Some(400), "no room"));
    assert_eq!(one.received().len() + two.received().len(), 1);
}

/// A prompt that its worker refused was taken for cached there until the guess ran out, and drew what came next elsewhere.
#[tokio::test]
async fn a_refused_prompt_is_not_taken_for_cached() {
    let fake = FakeWorker::start(Behaviour::Answer).await;
    let (front, _dir) = front_of(&[&fake], "--worker-url {0}").await;
    for (behaviour, seed, known) in [(Behaviour::Answer, 1, true), (Behaviour::Refuse(400), 2, false)] {
        fake.behave(behaviour);
        let prompt = prompts::ids(500, seed);
        let _ = front.client().ask(&Ask::completion(prompt.clone()).max_tokens(1)).await;
        idle(&front.client()).await;
        let ask = json!({ "model": "demo", "prompt": prompt });
        let (_, answer) = front.client().post("/route/explain", &ask).await.expect("an answer");
        let overlap = answer["cluster"]["workers"][0]["overlap_blocks"].as_u64().expect("a number");
        assert_eq!(overlap > 0, known, "{answer}");
    }
}

/// Its own address as a worker's made a frontend repeat what it said of itself, longer each time.
#[tokio::test]
async fn a_frontend_is_no_worker() {
    let fake = FakeWorker::start(Behaviour::Answer).await;
    let (front, dir) = front_of(&[&fake], "--worker-url {0}").await;
    let second = start_front(dir.path(), &format!("--worker-url {}", front.client().url())).await;
    second.health_says("unavailable", &["it is a frontend, expected a worker"]).await;
}

/// rt-09: full workers are left out, and when all are clients hear it at once.
#[tokio::test]
async fn rt_09_full_workers_are_left_out_and_clients_are_told_when_all_are() {
    let (one, two) =
        (FakeWorker::start(Behaviour::Refuse(503)).await, FakeWorker::start(Behaviour::Answer).await);
    let (front, _dir) = front_of(&[&one, &two], "--worker-url {0},{1} --router-mode round-robin").await;
    for seed in 0..10 {
        front.client().answer(&ask(seed)).await;
    }
    assert!(one.received().len() < 10, "it said that it is full");
    two.behave(Behaviour::Refuse(503));
    let (status, headers, body) = front.client().exchange(&ask(99)).await.expect("an answer");
    assert_eq!(status, 503, "{body}");
    assert!(header(&headers, "retry-after").is_some(), "{headers:?}");
    two.behave(Behaviour::Answer);
    until(SOON, "an answer", || async {
        front.client().ask(&ask(100)).await.map_err(|failure| format!("{failure:?}"))
    })
    .await;
    idle(&front.client()).await;
}

/// rt-09, by the router's own books: long streams fill a worker, further requests go elsewhere, and 503 when all are full.
#[tokio::test]
async fn rt_09_a_worker_whose_cache_is_booked_gets_no_further_requests() {
    let flags = "--router-mode kv --no-router-kv-events --active-decode-blocks-threshold 0.2";
    let fleet = Fleet::start(&["--num-kv-blocks 100 --sim-speed 1"; 2], flags).await;
    let long = |seed| Ask::completion(prompts::ids(400, seed)).tokens(900).streamed();
    let (first, second) =
        (fleet.client().open(&long(1)).await.unwrap(), fleet.client().open(&long(2)).await.unwrap());
    for seed in 10..13 {
        let failure = fleet.client().ask(&ask(seed)).await.unwrap_err();
        assert_eq!(failure.status(), Some(503), "{failure:?}");
        assert!(failure.message().contains("overloaded"), "{failure:?}");
    }
    let rejected =
        fleet.client().metrics().await.labelled("kvferry_frontend_rejected_total", "reason=\"overloaded\"");
    assert_eq!(rejected, 3.0);
    drop((first, second));
    until(SOON, "room", || async {
        fleet.client().ask(&ask(20)).await.map_err(|failure| format!("{failure:?}"))
    })
    .await;
    fleet.settled().await;
}

/// rt-06: a worker that is killed takes nobody's answer with it, and gets requests again when it is back.
#[tokio::test]
async fn rt_06_a_killed_worker_loses_no_request_and_comes_back() {
    let mut fleet = Fleet::start(&["", ""], "--no-router-kv-events").await;
    let warm = Ask::completion(prompts::ids(320, 5)).max_tokens(2);
    let (_, headers, _) = fleet.client().exchange(&warm).await.expect("an answer");
    let favourite = header(&headers, "x-kvferry-worker").expect("it says who answered");
    let index =
        fleet.workers.iter().position(|worker| worker.client().url() == favourite).expect("one of ours");
    assert_eq!(fleet.client().answer(&warm).await.usage.cached, prompts::reusable(320));
    fleet.workers[index].kill();
    for _ in 0..20 {
        fleet.client().answer(&warm).await;
    }
    fleet.front.health_says("degraded", &[&favourite]).await;
    let (_, explained) =
        fleet.client().post("/route/explain", &json!({"prompt": prompts::ids(320, 5)})).await.unwrap();
    assert_eq!(explained["cluster"]["workers"].as_array().map(Vec::len), Some(1), "{explained}");
    fleet.workers[index].restart().await;
    fleet.front.health_is("ready").await;
    for seed in 100..110 {
        fleet.client().answer(&ask(seed)).await;
    }
    assert!(fleet.answered().await.iter().all(|count| *count > 0));
    fleet.settled().await;
}

#[tokio::test]
async fn a_worker_that_hangs_is_found_out_and_its_requests_are_answered_elsewhere() {
    let flags = "--no-router-kv-events --router-mode round-robin --health-check-interval-secs 0.2 --health-check-timeout-secs 0.5";
    let fleet = Fleet::start(&["", ""], flags).await;
    fleet.workers[0].pause();
    let asks: Vec<_> = (0..6).map(ask).collect();
    assert_eq!(fleet.client().answers(&asks).await.len(), 6);
    let url = fleet.workers[0].client().url().to_owned();
    fleet.front.health_says("degraded", &[&url, "no answer within"]).await;
    fleet.workers[0].resume();
    fleet.front.health_is("ready").await;
    fleet.settled().await;
}

#[tokio::test]
async fn a_worker_that_never_answers_ends_in_a_timeout_and_nothing_stays_booked() {
    let fake = FakeWorker::start(Behaviour::Hang).await;
    let (front, _dir) = front_of(&[&fake], "--worker-url {0} --request-timeout-secs 0.5").await;
    for ask in [ask(1), ask(2).streamed()] {
        let failure = front.client().ask(&ask).await.unwrap_err();
        assert_eq!(failure.status(), Some(504), "{failure:?}");
    }
    until(SOON, "the worker's requests to end", || async {
        (fake.running() == 0).then_some(()).ok_or(format!("{} run", fake.running()))
    })
    .await;
    idle(&front.client()).await;
}

#[tokio::test]
async fn a_client_that_leaves_ends_its_request_at_the_worker() {
    let fleet = Fleet::start(&["--sim-speed 1"], "--no-router-kv-events").await;
    let mut stream =
        fleet.client().open(&Ask::completion(prompts::ids(64, 1)).tokens(3000).streamed()).await.unwrap();
    stream.more_text().await.expect("it runs");
    drop(stream);
    fleet.settled().await;
    let hanging = FakeWorker::start(Behaviour::Hang).await;
    let (front, _dir) = front_of(&[&hanging], "--worker-url {0}").await;
    let client = front.client();
    let request = ask(1).streamed();
    let waiting = client.open(&request);
    tokio::select! {
        _ = waiting => panic!("the worker hangs"),
        () = until(SOON, "the request to arrive", || async { (hanging.running() == 1).then_some(()).ok_or("not yet".into()) }) => {}
    }
    until(SOON, "the request to end", || async {
        (hanging.running() == 0).then_some(()).ok_or("not yet".into())
    })
    .await;
    idle(&client).await;
}

/// rt-11: however requests end, nothing stays booked.
#[tokio::test]
async fn rt_11_bookings_end_with_their_requests_whatever_happens() {
    let mut fleet = Fleet::start(&["", "", ""], "--no-router-kv-events --request-timeout-secs 20").await;
    for round in 0..4u64 {
        let asks: Vec<_> = (0..24)
            .map(|i| Ask::completion(prompts::ids(60, round * 100 + i)).tokens(30).streamed())
            .collect();
        let client = fleet.client();
        let run = |index: usize| {
            let (client, ask) = (client.clone(), asks[index].clone());
            async move {
                let Ok(mut stream) = client.open(&ask).await else { return };
                if index.is_multiple_of(3) {
                    let _ = stream.more_text().await;
                } else {
                    match stream.finish().await {
                        Ok(_) | Err(Failure::InStream { .. }) => {}
                        Err(other) => panic!("{other:?}"),
                    }
                }
            }
        };
        let victim = round as usize % 3;
        let (_, ()) = tokio::join!(tests::wait::all((0..asks.len()).map(run)), async {
            fleet.workers[victim].kill();
        });
        fleet.workers[victim].restart().await;
        fleet.front.health_is("ready").await;
    }
    fleet.settled().await;
}

/// ops-01: a worker that is told to stop finishes what it has, and nobody notices.
#[tokio::test]
async fn ops_01_a_worker_that_drains_gets_no_new_request_and_finishes_its_streams() {
    let mut fleet = Fleet::start(
        &["--sim-speed 2"; 2],
        "--no-router-kv-events --router-mode round-robin --health-check-interval-secs 0.2",
    )
    .await;
    let story = |seed| Ask::completion(prompts::ids(32, seed)).tokens(200).streamed();
    let mut streams = Vec::new();
    for seed in 0..4 {
        streams.push(fleet.client().open(&story(seed)).await.expect("it begins"));
    }
    fleet.workers[0].terminate();
    for seed in 10..16 {
        fleet.client().answer(&ask(seed)).await;
    }
    for stream in streams {
        stream.finish().await.expect("running streams finish");
    }
    assert!(fleet.workers[0].exited().await.success());
    fleet.client().answer(&ask(50)).await;
    idle(&fleet.client()).await;
}

/// ops-01, at the frontend: running streams finish within the grace period, or end with an error after it.
#[tokio::test]
async fn ops_01_a_frontend_that_drains_finishes_its_streams_or_says_that_it_does_not() {
    for (grace, finishes) in [("30", true), ("0.2", false)] {
        let mut fleet =
            Fleet::start(&["--sim-speed 1"], &format!("--no-router-kv-events --shutdown-grace-secs {grace}"))
                .await;
        let tokens = if finishes { 100 } else { 3000 };
        let mut stream = fleet
            .client()
            .open(&Ask::completion(prompts::ids(32, 1)).tokens(tokens).streamed())
            .await
            .unwrap();
        stream.more_text().await.expect("it runs");
        fleet.front.terminate();
        match (stream.finish().await, finishes) {
            (Ok(_), true) => {}
            (Err(Failure::InStream { message, .. }), false) => {
                assert!(message.contains("shutting down"), "{message}")
            }
            other => panic!("{other:?}"),
        }
        assert!(fleet.front.exited().await.success());
        fleet.workers[0].client().settled().await;
    }
}

/// Prefill and decode servers of vLLM, by the protocol of its proxies.
#[tokio::test]
async fn a_pair_of_foreign_workers_is_driven_by_kv_transfer_params() {
    let params = json!({"do_remote_prefill": true, "remote_engine_id": "e", "remote_block_ids": [1, 2], "remote_host": "h", "remote_port": 5600, "remote_request_id": "r"});
    let prefill = FakeWorker::start(Behaviour::Prefill(Some(params.clone()))).await;
    let decode = FakeWorker::start(Behaviour::Answer).await;
    let (front, _dir) = front_of(
        &[&prefill, &decode],
        "--prefill {0} --decode {1} --disagg-policy always --no-router-kv-events",
    )
    .await;
    let ask = ask(1).with("max_completion_tokens", 50).with("min_tokens", 2).streamed();
    let (status, headers, text) = front.client().exchange(&ask).await.expect("an answer");
    assert!(status == 200 && text.ends_with("data: [DONE]\n\n"), "{text}");
    assert_eq!(header(&headers, "x-kvferry-worker"), Some(decode.url()));
    assert_eq!(header(&headers, "x-kvferry-prefill-worker"), Some(prefill.url()));
    let (p, d) = (&prefill.received()[0], &decode.received()[0]);
    assert_eq!(
        (&p.body["max_tokens"], &p.body["max_completion_tokens"], &p.body["stream"]),
        (&json!(1), &json!(1), &json!(false))
    );
    assert_eq!((p.body.get("min_tokens"), p.body.get("stream_options")), (None, None));
    assert_eq!(p.body["kv_transfer_params"]["do_remote_decode"], true);
    assert_eq!(
        (&d.body["max_completion_tokens"], &d.body["min_tokens"], &d.body["stream"]),
        (&json!(50), &json!(2), &json!(true))
    );
    assert_eq!(d.body["kv_transfer_params"], params);
    assert_eq!(p.headers.get("x-request-id"), d.headers.get("x-request-id"));
    // A prefill worker without a connector is no prefill worker: its answer must not be taken for one.
    prefill.behave(Behaviour::Prefill(None));
    front.client().answer(&ask).await;
    assert_eq!(decode.received().last().map(|d| d.body.get("kv_transfer_params").is_none()), Some(true));
    let failures = front.client().metrics().await;
    assert!(failures.labelled("kvferry_frontend_retries_total", "no_kv_transfer_params") >= 1.0);
    idle(&front.client()).await;
}

#[tokio::test]
async fn a_frontend_with_nobody_left_says_so_and_recovers() {
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let mut worker = start_worker(dir.path(), "worker", "").await;
    worker.health_is("ready").await;
    let flags = format!("--worker-url {} --no-router-kv-events", worker.client().url());
    let front = tests::fleet::start_front(dir.path(), &flags).await;
    front.health_is("ready").await;
    worker.kill();
    let failure = front.client().ask(&ask(1)).await.unwrap_err();
    assert_eq!(failure.status(), Some(503), "{failure:?}");
    worker.restart().await;
    front.health_is("ready").await;
    front.client().answer(&ask(1)).await;
}
