//! The folder as workers and frontends see it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier};
use std::time::{Duration, SystemTime};

use super::file::FileDiscovery;
use super::scan::Scan;
use super::store::Store;
use super::*;
use crate::router::WorkerRole;

const LEASE: Duration = Duration::from_secs(10);

pub(crate) fn record(worker_id: &str, incarnation: u64) -> WorkerRecord {
    WorkerRecord {
        version: record::RECORD_VERSION,
        worker_id: worker_id.into(),
        incarnation: WorkerId(incarnation),
        role: WorkerRole::Both,
        model: "demo".into(),
        url: format!("http://127.0.0.1:{}", 1024 + incarnation % 60_000),
        block_size: Some(16),
        capacity_blocks: Some(100),
        max_model_len: None,
        events: None,
        hash_scheme: None,
        prefill_tokens_per_sec: None,
        kv_bytes_per_token: None,
        kv_transport: None,
        draining: false,
        labels: BTreeMap::new(),
    }
}

struct Folder {
    dir: tempfile::TempDir,
    store: Store,
}

fn folder() -> Folder {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::new(dir.path().join("workers"), LEASE);
    Folder { dir, store }
}

impl Folder {
    fn path(&self, name: &str) -> PathBuf {
        self.store.dir().join(name)
    }

    /// Makes a file look as if nobody had renewed it for so long.
    fn set_age(&self, name: &str, age: Duration) {
        let file = std::fs::File::options().write(true).open(self.path(name)).unwrap();
        file.set_modified(SystemTime::now() - age).unwrap();
    }

    fn names(&self) -> Vec<String> {
        let mut names: Vec<_> = std::fs::read_dir(self.store.dir())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name != ".lock")
            .collect();
        names.sort();
        names
    }
}

fn secs(secs: u64) -> Duration {
    Duration::from_secs(secs)
}

#[test]
fn who_registers_is_found_until_its_lease_is_over() {
    let folder = folder();
    let mut scan = Scan::default();
    assert!(scan.scan(folder.store.dir(), secs(0)).is_empty());
    folder.store.register(&record("a", 1)).unwrap();
    assert_eq!(scan.scan(folder.store.dir(), secs(1)), [Change::Joined(record("a", 1))]);
    let draining = WorkerRecord { draining: true, ..record("a", 1) };
    folder.store.register(&draining).unwrap();
    assert_eq!(scan.scan(folder.store.dir(), secs(2)), [Change::Changed(draining.clone())]);
    folder.set_age("a.json", secs(1));
    assert!(scan.scan(folder.store.dir(), secs(9)).is_empty());
    assert!(folder.store.renew(&draining).unwrap());
    assert!(scan.scan(folder.store.dir(), secs(15)).is_empty());
    assert!(scan.scan(folder.store.dir(), secs(24)).is_empty());
    let left = scan.scan(folder.store.dir(), secs(25));
    assert!(matches!(left[..], [Change::Left { worker: WorkerId(1), .. }]), "{left:?}");
}

/// A crashed worker's file may be there when a frontend starts: it is nobody until it is renewed.
#[test]
fn a_dead_workers_record_is_not_believed() {
    let folder = folder();
    folder.store.register(&record("a", 1)).unwrap();
    folder.set_age("a.json", secs(11));
    let mut scan = Scan::default();
    assert!(scan.scan(folder.store.dir(), secs(0)).is_empty());
    folder.store.renew(&record("a", 1)).unwrap();
    assert_eq!(scan.scan(folder.store.dir(), secs(1)).len(), 1);
}

/// ops-04: each bad file is counted once and changes nothing for the others.
#[test]
fn bad_records_are_skipped_one_by_one() {
    let folder = folder();
    folder.store.register(&record("good", 1)).unwrap();
    let mut scan = Scan::default();
    assert_eq!(scan.scan(folder.store.dir(), secs(0)).len(), 1);
    let write = |name: &str, content: &str| std::fs::write(folder.path(name), content).unwrap();
    let good = std::fs::read_to_string(folder.path("good.json")).unwrap();
    write("a.json", "");
    write("b.json", r#"{"worker_id": 7, "addr": "127.0.0.1:90"#);
    write("c.json", "[]");
    write("d.json", r#"{"worker_id":"x","heartbeat":"soon"}"#);
    write("e.json", &"[".repeat(10 << 20));
    write("f.json", &good);
    std::os::unix::fs::symlink("g.json", folder.path("g.json")).unwrap();
    std::fs::create_dir(folder.path("h.json")).unwrap();
    write("j.json", &good.replace("\"lease_secs\": 10.0", "\"lease_secs\": 1e999"));
    write(".tmp123", "half a rec");
    write("notes.txt", "no record");
    let newer = good.replace("good", "i").replace("0000000000000001", "0000000000000002");
    write("i.json", &newer.replace("\"version\": 1", "\"version\": 9, \"new\": {\"a\": [1]}"));
    let changes = scan.scan(folder.store.dir(), secs(1));
    assert!(matches!(&changes[..], [Change::Joined(joined)] if joined.worker_id == "i"), "{changes:?}");
    assert_eq!(scan.invalid(), 9);
    assert!(scan.scan(folder.store.dir(), secs(2)).is_empty());
    assert_eq!(scan.invalid(), 9, "a bad file is counted once");
}

/// ops-04: a record that is rewritten byte by byte counts as it was, as long as its lease runs.
#[test]
fn half_a_record_keeps_the_whole_one_before_it() {
    let folder = folder();
    folder.store.register(&record("a", 1)).unwrap();
    let mut scan = Scan::default();
    scan.scan(folder.store.dir(), secs(0));
    let whole = std::fs::read(folder.path("a.json")).unwrap();
    for len in [0, 10, whole.len() - 1] {
        std::fs::write(folder.path("a.json"), &whole[..len]).unwrap();
        assert!(scan.scan(folder.store.dir(), secs(5)).is_empty());
    }
    assert_eq!(scan.invalid(), 1);
    assert_eq!(scan.scan(folder.store.dir(), secs(10)).len(), 1, "its lease is over");
    std::fs::write(folder.path("a.json"), &whole).unwrap();
    assert_eq!(scan.scan(folder.store.dir(), secs(11)), [Change::Joined(record("a", 1))]);
}

/// ops-06: of two workers of one id exactly one is registered, and the other removes nothing but its own.
#[test]
fn of_two_workers_with_one_id_one_registers() {
    for round in 0..20 {
        let folder = folder();
        let start = Arc::new(Barrier::new(2));
        let claims: Vec<_> = [1, 2]
            .map(|incarnation| {
                let (store, start) = (folder.store.clone(), start.clone());
                std::thread::spawn(move || {
                    start.wait();
                    (incarnation, store.register(&record("7", incarnation)))
                })
            })
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect();
        let (winners, losers): (Vec<_>, Vec<_>) = claims.into_iter().partition(|(_, result)| result.is_ok());
        assert_eq!((winners.len(), losers.len()), (1, 1), "round {round}");
        let text = losers[0].1.as_ref().unwrap_err().to_string();
        assert!(text.starts_with("worker id \"7\" is taken by worker 000000000000000"), "{text}");
        assert_eq!(super::store::read(&folder.path("7.json")).unwrap().record, record("7", winners[0].0));
        folder.store.remove("7", WorkerId(losers[0].0));
        assert_eq!(folder.names(), ["7.json"]);
        folder.store.remove("7", WorkerId(winners[0].0));
        assert!(folder.names().is_empty());
    }
}

/// ops-06: the id of a crashed worker is free once its lease is over, and what took it is another incarnation.
#[test]
fn a_stale_id_is_taken_over_after_its_lease() {
    let folder = folder();
    folder.store.register(&record("7", 1)).unwrap();
    let error = folder.store.register(&record("7", 2)).unwrap_err();
    assert!(matches!(error, DiscoveryError::Taken { remaining_secs, .. } if remaining_secs > 9.0));
    folder.set_age("7.json", secs(11));
    folder.store.register(&record("7", 2)).unwrap();
    assert_eq!(super::store::read(&folder.path("7.json")).unwrap().record.incarnation, WorkerId(2));
    // The first one, should it wake up, does not renew what is another's.
    assert!(!folder.store.renew(&record("7", 1)).unwrap());
    folder.store.remove("7", WorkerId(1));
    assert_eq!(folder.names(), ["7.json"]);
}

#[test]
fn ids_are_plain_words() {
    for good in ["7", "worker-1.gpu_0", "0000000000000001"] {
        assert!(is_worker_id(good), "{good}");
    }
    for bad in ["", ".", "..", ".lock", "a/b", "a b", "é", &"x".repeat(129)] {
        assert!(!is_worker_id(bad), "{bad}");
    }
}

/// Errors of the file system are told with path, cause and what to do.
#[test]
fn a_folder_that_cannot_be_written_is_said_plainly() {
    let folder = folder();
    std::fs::write(folder.dir.path().join("file"), "").unwrap();
    let store = Store::new(folder.dir.path().join("file/workers"), LEASE);
    let text = store.register(&record("a", 1)).unwrap_err().to_string();
    assert!(text.starts_with("file discovery: make folder ") && text.contains("Not a directory"), "{text}");
    let denied =
        super::store::fault("write /x/a.json", &std::io::ErrorKind::PermissionDenied.into()).to_string();
    assert!(denied.contains("--discovery-dir"), "{denied}");
    let full = super::store::fault("write /x/a.json", &std::io::Error::from_raw_os_error(28)).to_string();
    assert!(full.ends_with("No space left on device (os error 28); the disk is full"), "{full}");
    // /dev/full behaves as a full disk for what is written through it.
    assert!(Path::new("/dev/full").exists());
}

/// ops-04: the folder is deleted and made anew; the worker is back by itself, and leaving takes its record along.
#[tokio::test]
async fn a_lost_record_comes_back() {
    let folder = folder();
    let discovery = FileDiscovery::new(folder.store.dir().to_owned(), Duration::from_millis(1500));
    let registration = discovery.register(record("a", 1)).await.unwrap();
    let mut changes = discovery.watch().await.unwrap();
    assert_eq!(changes.recv().await, Some(Change::Joined(record("a", 1))));
    std::fs::remove_dir_all(folder.store.dir()).unwrap();
    // It may be seen to leave and to join, or come back before anybody looked.
    let deadline = tokio::time::Instant::now() + secs(20);
    while !folder.path("a.json").exists() {
        assert!(tokio::time::Instant::now() < deadline, "the record did not come back");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let draining = WorkerRecord { draining: true, ..record("a", 1) };
    registration.update(draining.clone()).await.unwrap();
    let is_draining = |change: &Change| match change {
        Change::Changed(record) | Change::Joined(record) => record.draining,
        Change::Left { .. } => false,
    };
    while !is_draining(&changes.recv().await.unwrap()) {}
    registration.withdraw().await;
    assert!(matches!(changes.recv().await, Some(Change::Left { worker: WorkerId(1), .. })));
    assert!(folder.names().is_empty());
}
