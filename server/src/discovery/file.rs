//! `--discovery-backend file`: a folder that all processes of a deployment can reach.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use tokio::sync::mpsc::{Receiver, channel};
use tokio::sync::watch;
use tokio::task::{JoinHandle, spawn_blocking};

use super::scan::Scan;
use super::store::Store;
use super::{Change, Discovery, DiscoveryError, Registration, WorkerRecord};

/// How often the folder is read: a worker that joins is seen within this.
const SCAN_INTERVAL: Duration = Duration::from_millis(250);

/// A record is renewed this often at least, so that one that was lost is back within a second.
const MAX_RENEWAL: Duration = Duration::from_secs(1);

/// Changes that wait for the reader.
const QUEUE: usize = 256;

/// Workers as files in a folder.
#[derive(Debug)]
pub struct FileDiscovery {
    store: Store,
    lease: Duration,
    invalid: Arc<AtomicU64>,
}

impl FileDiscovery {
    /// Records in `dir`, which need not exist yet, that live for `lease` without renewal.
    pub fn new(dir: PathBuf, lease: Duration) -> Self {
        Self { store: Store::new(dir, lease), lease, invalid: Arc::default() }
    }
}

impl Discovery for FileDiscovery {
    fn name(&self) -> &'static str {
        "file"
    }

    fn register(&self, record: WorkerRecord) -> BoxFuture<'_, Result<Box<dyn Registration>, DiscoveryError>> {
        async move {
            let (store, first) = (self.store.clone(), record.clone());
            blocking(move || store.register(&first)).await?;
            let (sender, wanted) = watch::channel(record);
            let renewal = (self.lease / 3).min(MAX_RENEWAL);
            let withdrawn: Arc<AtomicBool> = Arc::default();
            let keeper = tokio::spawn(keep(self.store.clone(), wanted, withdrawn.clone(), renewal));
            let registration =
                FileRegistration { store: self.store.clone(), wanted: sender, withdrawn, keeper };
            Ok(Box::new(registration) as Box<dyn Registration>)
        }
        .boxed()
    }

    fn watch(&self) -> BoxFuture<'_, Result<Receiver<Change>, DiscoveryError>> {
        async move {
            let (sender, changes) = channel(QUEUE);
            let (dir, invalid) = (self.store.dir().to_owned(), self.invalid.clone());
            tokio::spawn(async move {
                let started = Instant::now();
                let mut scan = Scan::default();
                let mut interval = tokio::time::interval(SCAN_INTERVAL);
                while !sender.is_closed() {
                    interval.tick().await;
                    let dir = dir.clone();
                    let (back, found) = blocking(move || {
                        let found = scan.scan(&dir, started.elapsed());
                        (scan, found)
                    })
                    .await;
                    scan = back;
                    invalid.store(scan.invalid(), Ordering::Relaxed);
                    for change in found {
                        if sender.send(change).await.is_err() {
                            return;
                        }
                    }
                }
            });
            Ok(changes)
        }
        .boxed()
    }

    fn invalid_records(&self) -> u64 {
        self.invalid.load(Ordering::Relaxed)
    }
}

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    spawn_blocking(work).await.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()))
}

#[derive(Debug)]
struct FileRegistration {
    store: Store,
    wanted: watch::Sender<WorkerRecord>,
    withdrawn: Arc<AtomicBool>,
    keeper: JoinHandle<()>,
}

impl Registration for FileRegistration {
    fn update(&self, record: WorkerRecord) -> BoxFuture<'_, Result<(), DiscoveryError>> {
        self.wanted.send_replace(record.clone());
        let store = self.store.clone();
        async move { blocking(move || store.register(&record)).await }.boxed()
    }

    fn withdraw(&self) -> BoxFuture<'_, ()> {
        self.withdrawn.store(true, Ordering::SeqCst);
        self.keeper.abort();
        let (store, record) = (self.store.clone(), self.wanted.borrow().clone());
        async move { blocking(move || store.remove(&record.worker_id, record.incarnation)).await }.boxed()
    }
}

impl Drop for FileRegistration {
    fn drop(&mut self) {
        self.keeper.abort();
    }
}

/// Renews the record, and writes it anew when it is lost.
async fn keep(
    store: Store,
    wanted: watch::Receiver<WorkerRecord>,
    withdrawn: Arc<AtomicBool>,
    interval: Duration,
) {
    let mut interval = tokio::time::interval(interval);
    interval.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    let mut trouble: Option<String> = None;
    loop {
        interval.tick().await;
        let (store, record, withdrawn) = (store.clone(), wanted.borrow().clone(), withdrawn.clone());
        let outcome = blocking(move || match store.renew(&record) {
            Ok(true) => Ok(false),
            Ok(false) if withdrawn.load(Ordering::SeqCst) => Ok(false),
            Ok(false) => {
                let written = store.register(&record).map(|()| true).map_err(|error| error.to_string());
                // Aborting this task does not stop what it has begun: a record that was withdrawn meanwhile must go.
                if withdrawn.load(Ordering::SeqCst) {
                    store.remove(&record.worker_id, record.incarnation);
                }
                written
            }
            Err(error) => Err(super::store::fault("renew", &error).to_string()),
        })
        .await;
        match outcome {
            Ok(anew) => {
                if anew {
                    tracing::warn!("this worker's record was lost and is written again");
                }
                if trouble.take().is_some() {
                    tracing::info!("this worker is registered again");
                }
            }
            Err(reason) if trouble.as_ref() != Some(&reason) => {
                tracing::error!(reason, "this worker cannot be found: its record is not kept");
                trouble = Some(reason);
            }
            Err(_) => {}
        }
    }
}
