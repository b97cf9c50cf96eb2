//! Starting: what is in the way is named, what is only missing is done without and said.

use std::path::Path;

use rand::RngCore;
use tests::process::{Launch, Worker};
use tests::{Ask, Client, Deployment, prompts};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

fn ask(seed: u64) -> Ask {
    Ask::completion(prompts::ids(100, seed))
}

async fn fails(launch: Launch, words: &[&str]) {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let (status, log) = Worker::run_to_end(dir.path(), launch).await;
    assert!(!status.success(), "{status}: {log}");
    for word in words {
        assert!(log.contains(word), "{word:?} is not in {log}");
    }
}

#[tokio::test]
async fn a_taken_port_ends_the_process_and_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").await.expect("loopback has free ports");
    let address = taken.local_addr().expect("it is bound");
    let flags = format!("--role both --port {}", address.port());
    fails(Deployment::both().launch("both", &flags, &[]), &[&address.to_string(), "--port"]).await;
}

#[tokio::test]
async fn asking_for_nixl_where_it_is_not_installed_ends_the_process_and_says_how_to_get_it() {
    let home = tempfile::tempdir().expect("a temporary folder");
    for transport in ["tcp", "shm"] {
        let deployment = Deployment::split(transport).away(home.path());
        fails(
            deployment.launch("prefill", "--role prefill", &[]),
            &["libnixl_capi.so", "scripts/nixl-setup"],
        )
        .await;
    }
}

#[tokio::test]
async fn asking_for_nixl_where_it_does_not_load_ends_the_process_and_names_the_file() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    std::fs::write(dir.path().join("libnixl_capi.so"), "not a library").expect("it is writable");
    let flags = format!("--role decode --nixl-dir {}", dir.path().display());
    let words = [&dir.path().join("libnixl_capi.so").display().to_string(), "does not load"];
    fails(Deployment::split("tcp").launch("decode", &flags, &[]), &words).await;
}

#[tokio::test]
async fn auto_without_nixl_warns_and_moves_kv_over_sockets() {
    let home = tempfile::tempdir().expect("a temporary folder");
    let cluster = Deployment::split("auto").away(home.path()).start().await;
    cluster.client().answer(&ask(1)).await;
    cluster.settled().await;
    assert_eq!(cluster.client().metrics().await.transfers(), 1);
    for worker in [cluster.front(), cluster.prefill()] {
        let log = worker.log();
        let warned = |line: &str| line.contains("WARN") && line.contains("scripts/nixl-setup");
        assert!(log.lines().any(warned), "{log}");
    }
}

/// A decode worker that is told of its prefill worker in this way gets KV from it.
async fn linked(dir: &Path, prefill: &Worker, url: &str, flags: &str) {
    let flags = format!("--role decode --prefill {url} {flags}");
    let decode = Worker::start(dir, Deployment::split("socket").launch("decode", &flags, &[])).await;
    decode.health_is("ready").await;
    let before = prefill.client().metrics().await.transfers();
    decode.client().answer(&ask(2)).await;
    decode.client().settled().await;
    prefill.client().metrics_when("the transfer is counted", |m| m.transfers() == before + 1).await;
}

#[tokio::test]
async fn workers_find_each_other_by_name_and_when_they_listen_on_every_address() {
    let dir = tempfile::tempdir().expect("a temporary folder");
    let all = Deployment::split("socket").prefill_flags("--host 0.0.0.0");
    let prefill = all.start_prefill(dir.path()).await;
    let (by_name, by_address) = (format!("http://localhost:{}", prefill.port()), prefill.client());
    linked(dir.path(), &prefill, &by_name, "").await;
    linked(dir.path(), &prefill, by_address.url(), "--host 0.0.0.0").await;
}

/// What a port scanner or a confused program may send.
async fn send_noise(client: &Client, first: &[u8]) {
    let mut noise = vec![0; 1 << 20];
    rand::rng().fill_bytes(&mut noise);
    let address = client.url().trim_start_matches("http://");
    let mut stream = TcpStream::connect(address).await.expect("the worker listens");
    stream.write_all(first).await.expect("a first line is taken");
    // The worker may close the connection at any time from here on.
    let _ = stream.write_all(&noise).await;
    let mut answer = Vec::new();
    let closed =
        tokio::time::timeout(std::time::Duration::from_secs(20), stream.read_to_end(&mut answer)).await;
    assert!(closed.is_ok(), "the connection is still open after {first:?} and noise");
}

#[tokio::test]
async fn noise_on_a_port_closes_only_that_connection() {
    let mut cluster = Deployment::split("socket").start().await;
    let expected = cluster.client().answer(&ask(3)).await;
    let upgrade = "GET /kv/v1/link HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n";
    // As a WebSocket message: binary, unmasked length of 2^40 bytes.
    let huge = [upgrade.as_bytes(), &[0x82, 0xff, 0, 0, 1, 0, 0, 0, 0, 0]].concat();
    for client in [cluster.client(), cluster.prefill().client()] {
        for first in [&b""[..], b"POST /v1/completions HTTP/1.1\r\n", upgrade.as_bytes(), &huge] {
            send_noise(&client, first).await;
        }
    }
    assert!(cluster.front_mut().is_running() && cluster.prefill_mut().is_running());
    let answer = cluster.client().answer(&ask(3).salted("again")).await;
    assert_eq!(answer.content(), expected.content());
    cluster.settled().await;
    assert_eq!(cluster.client().metrics().await.transfers(), 2);
}
