//! Discovery over a real etcd: Debian's `etcd-server`, which `.ci/run` installs.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use server::discovery::etcd::EtcdDiscovery;
use server::discovery::{Change, Discovery, DiscoveryError, WorkerRecord};
use server::router::WorkerId;

use crate::support::{record, until};

struct Etcd {
    process: Child,
    client: u16,
    peer: u16,
    dir: tempfile::TempDir,
}

/// Ports that were free a moment ago: etcd cannot take port 0 and say which it got.
fn free_ports() -> [u16; 2] {
    let listeners = [0, 1].map(|_| TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port())
}

impl Etcd {
    /// `None` where it is not installed, which CI does not put up with.
    async fn start() -> Option<Self> {
        if Command::new("etcd").arg("--version").output().is_err() {
            assert!(std::env::var_os("CI").is_none(), "etcd is not installed: apt-get install etcd-server");
            eprintln!("skipped: etcd is not installed");
            return None;
        }
        let (dir, [client, peer]) = (tempfile::tempdir().unwrap(), free_ports());
        let etcd = Self { process: spawn(dir.path(), client, peer), client, peer, dir };
        etcd.answers().await;
        Some(etcd)
    }

    async fn answers(&self) {
        let (http, url) = (reqwest::Client::new(), format!("{}/health", self.url()));
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        while !http.get(&url).send().await.is_ok_and(|answer| answer.status().is_success()) {
            assert!(tokio::time::Instant::now() < deadline, "etcd does not answer at {url}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.client)
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    async fn restart(&mut self) {
        self.process = spawn(self.dir.path(), self.client, self.peer);
        self.answers().await;
    }

    /// A second endpoint that nobody serves comes first: clients go on to the next.
    fn discovery(&self) -> EtcdDiscovery {
        let endpoints = vec!["http://127.0.0.1:1".to_owned(), self.url()];
        EtcdDiscovery::new(reqwest::Client::new(), endpoints, "test", Duration::from_secs(2))
    }
}

fn spawn(dir: &std::path::Path, client: u16, peer: u16) -> Child {
    let url = |port| format!("http://127.0.0.1:{port}");
    Command::new("etcd")
        .arg("--data-dir")
        .arg(dir)
        .args(["--listen-client-urls", &url(client), "--advertise-client-urls", &url(client)])
        .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
        .args([
            "--initial-cluster",
            &format!("default={}", url(peer)),
            "--logger",
            "zap",
            "--log-level",
            "error",
        ])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

impl Drop for Etcd {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

async fn next(changes: &mut tokio::sync::mpsc::Receiver<Change>) -> Change {
    tokio::time::timeout(Duration::from_secs(30), changes.recv())
        .await
        .expect("no change within 30 s")
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_are_found_over_etcd_until_their_lease_ends() {
    let Some(mut etcd) = Etcd::start().await else { return };
    let (one, two) = (etcd.discovery(), etcd.discovery());
    let early = one.register(record(1, None)).await.unwrap();
    let mut changes = two.watch().await.unwrap();
    assert_eq!(next(&mut changes).await, Change::Joined(record(1, None)));
    let late = two.register(record(2, None)).await.unwrap();
    assert_eq!(next(&mut changes).await, Change::Joined(record(2, None)));

    let draining = WorkerRecord { draining: true, ..record(2, None) };
    late.update(draining.clone()).await.unwrap();
    assert_eq!(next(&mut changes).await, Change::Changed(draining));
    late.withdraw().await;
    assert!(matches!(next(&mut changes).await, Change::Left { worker: WorkerId(2), .. }));

    // ops-06: one id, one worker; the loser takes nothing away.
    let twin = WorkerRecord { worker_id: record(1, None).worker_id, ..record(3, None) };
    let refused = two.register(twin.clone()).await.map(drop).unwrap_err();
    assert!(
        matches!(&refused, DiscoveryError::Taken { owner, .. } if owner.contains("0000000000000001")),
        "{refused}"
    );

    // A record that is none changes nothing for the others, and is counted.
    put(&etcd.url(), "/kvferry/test/workers/bad", "{\"worker_id\": 7").await;
    until("the bad record is counted", || two.invalid_records() == 1).await;

    // Nobody renews it any more, as if its process had died: its id is free when the lease is over.
    drop(early);
    assert!(matches!(next(&mut changes).await, Change::Left { worker: WorkerId(1), .. }));
    let heir = two.register(twin.clone()).await.unwrap();
    assert_eq!(next(&mut changes).await, Change::Joined(twin.clone()));

    // etcd itself is away for a while: workers stay known, and the watch goes on.
    etcd.kill();
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(changes.try_recv().is_err(), "an outage of etcd says nothing about workers");
    etcd.restart().await;
    let last = one.register(record(4, None)).await.unwrap();
    let joined = |change: &Change| *change == Change::Joined(record(4, None));
    while !joined(&next(&mut changes).await) {}
    heir.withdraw().await;
    let left = |change: &Change| matches!(change, Change::Left { worker: WorkerId(3), .. });
    while !left(&next(&mut changes).await) {}
    drop(last);
}

async fn put(url: &str, key: &str, value: &str) {
    use base64::Engine;
    let encode = |text: &str| base64::engine::general_purpose::STANDARD.encode(text);
    let body = serde_json::json!({ "key": encode(key), "value": encode(value) });
    let sent = reqwest::Client::new().post(format!("{url}/v3/kv/put")).json(&body).send().await.unwrap();
    assert!(sent.status().is_success());
}

#[tokio::test]
async fn an_etcd_that_is_not_there_is_said() {
    let nobody = EtcdDiscovery::new(
        reqwest::Client::new(),
        vec!["http://127.0.0.1:1".into()],
        "test",
        Duration::from_secs(2),
    );
    let error = nobody.register(record(1, None)).await.map(drop).unwrap_err().to_string();
    assert!(error.starts_with("etcd discovery: http://127.0.0.1:1/v3/lease/grant: "), "{error}");
}
