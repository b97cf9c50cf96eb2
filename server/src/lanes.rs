//! Connections on threads that share nothing: each lane has a runtime of its own, so that what one connection's tasks tell each
//! other wakes no other thread.
//!
//! A request that is passed on has its client's connection, its worker's connection and itself on one thread. On a runtime of
//! several threads these wake each other through the kernel, which costs a relayed request half as much again.

use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use axum::Router;
use axum::serve::Listener;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};

use crate::http;

/// What is left of a lane's blocking threads is waited for by nobody.
const RUNTIME_STOP: Duration = Duration::from_millis(200);

/// Serves `router` over `count` lanes until `shutdown` resolves, then as [`http::run`] does. A new connection goes to the lane that
/// has fewest. `router` is called once for each lane.
///
/// Errors: threads or runtimes cannot be had.
pub async fn run(
    mut listener: TcpListener,
    count: usize,
    router: impl Fn() -> Router,
    shutdown: impl Future<Output = ()>,
) -> io::Result<()> {
    let address = listener.local_addr()?;
    let (open, closed) = watch::channel(());
    let lanes = (0..count.max(1))
        .map(|number| Lane::start(number, address, router(), closed.clone()))
        .collect::<io::Result<Vec<_>>>()?;
    let accept = async {
        loop {
            let (stream, _) = Listener::accept(&mut listener).await;
            let lane =
                lanes.iter().min_by_key(|lane| lane.connections()).expect("at least one. This is a bug.");
            lane.take(stream);
        }
    };
    tokio::select! {
        () = accept => {}
        () = shutdown => {}
    }
    drop((listener, open));
    // Each to its end, whatever became of the others.
    let ended = tokio::task::spawn_blocking(|| lanes.into_iter().map(Lane::join).collect::<Vec<_>>()).await?;
    ended.into_iter().collect()
}

struct Lane {
    queue: mpsc::UnboundedSender<Counted<std::net::TcpStream>>,
    /// One for each connection that is open or on its way, and this.
    count: Arc<()>,
    thread: thread::JoinHandle<io::Result<()>>,
}

impl Lane {
    fn start(
        number: usize,
        address: SocketAddr,
        router: Router,
        mut closed: watch::Receiver<()>,
    ) -> io::Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let (queue, connections) = mpsc::unbounded_channel();
        let serve = move || {
            let shutdown = async move { while closed.changed().await.is_ok() {} };
            let served = runtime.block_on(http::serve(Queue { connections, address }, router, shutdown));
            runtime.shutdown_timeout(RUNTIME_STOP);
            served
        };
        let thread = thread::Builder::new().name(format!("http-{number}")).spawn(serve)?;
        Ok(Self { queue, count: Arc::default(), thread })
    }

    fn connections(&self) -> usize {
        Arc::strong_count(&self.count)
    }

    fn take(&self, stream: TcpStream) {
        let moved = stream.set_nodelay(true).and_then(|()| stream.into_std());
        // A connection that is closed already, or a lane that stops: the client sees its connection end.
        if let Ok(stream) = moved {
            let _ = self.queue.send(Counted { stream, _count: self.count.clone() });
        }
    }

    fn join(self) -> io::Result<()> {
        self.thread.join().map_err(|_| io::Error::other("a thread that serves HTTP panicked"))?
    }
}

/// Where a lane's connections come from.
struct Queue {
    connections: mpsc::UnboundedReceiver<Counted<std::net::TcpStream>>,
    address: SocketAddr,
}

impl Listener for Queue {
    type Io = Counted<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, Self::Addr) {
        while let Some(Counted { stream, _count }) = self.connections.recv().await {
            match TcpStream::from_std(stream) {
                Ok(stream) => return (Counted { stream, _count }, self.address),
                Err(error) => tracing::warn!(%error, "a connection cannot be served"),
            }
        }
        // Nobody sends any more: the shutdown is under way.
        std::future::pending().await
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Ok(self.address)
    }
}

/// A connection that its lane counts.
struct Counted<S> {
    stream: S,
    _count: Arc<()>,
}

impl Counted<TcpStream> {
    fn inner(self: Pin<&mut Self>) -> Pin<&mut TcpStream> {
        Pin::new(&mut self.get_mut().stream)
    }
}

impl AsyncRead for Counted<TcpStream> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.inner().poll_read(context, buffer)
    }
}

impl AsyncWrite for Counted<TcpStream> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.inner().poll_write(context, bytes)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.inner().poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_flush(context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.inner().poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use axum::routing::get;
    use tokio::sync::oneshot;

    use super::*;

    /// The name of the thread that serves.
    async fn served_by() -> String {
        thread::current().name().unwrap_or_default().to_owned()
    }

    async fn start(
        count: usize,
    ) -> (SocketAddr, oneshot::Sender<()>, tokio::task::JoinHandle<io::Result<()>>) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = oneshot::channel();
        let shutdown = async move { drop(stopped.await) };
        let router = || Router::new().route("/", get(served_by));
        (address, stop, tokio::spawn(run(listener, count, router, shutdown)))
    }

    /// A client with a connection of its own that it keeps.
    async fn ask(client: &reqwest::Client, address: SocketAddr) -> String {
        client.get(format!("http://{address}/")).send().await.unwrap().text().await.unwrap()
    }

    #[tokio::test]
    async fn open_connections_are_spread_over_the_lanes_and_stay_there() {
        let (address, _stop, _serving) = start(3).await;
        let clients: Vec<_> = (0..6).map(|_| reqwest::Client::new()).collect();
        let mut lanes = Vec::new();
        for client in &clients {
            lanes.push(ask(client, address).await);
        }
        let distinct: BTreeSet<_> = lanes.iter().cloned().collect();
        assert_eq!(distinct, BTreeSet::from(["http-0", "http-1", "http-2"].map(str::to_owned)));
        for (client, lane) in clients.iter().zip(&lanes) {
            assert_eq!(&ask(client, address).await, lane);
        }
    }

    /// Connections that all ended in one lane must not leave it empty for ever.
    #[tokio::test]
    async fn a_connection_that_ended_makes_room() {
        let (address, _stop, _serving) = start(2).await;
        let (first, second) = (reqwest::Client::new(), reqwest::Client::new());
        let left = ask(&first, address).await;
        assert_ne!(ask(&second, address).await, left);
        drop(first);
        // Its end has to be noticed first.
        let again = async {
            while ask(&reqwest::Client::builder().pool_max_idle_per_host(0).build().unwrap(), address).await
                != left
            {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), again).await.unwrap();
    }

    #[tokio::test]
    async fn it_stops_when_told_and_the_port_is_free_again() {
        let (address, stop, serving) = start(2).await;
        ask(&reqwest::Client::new(), address).await;
        stop.send(()).unwrap();
        tokio::time::timeout(Duration::from_secs(10), serving).await.unwrap().unwrap().unwrap();
        TcpListener::bind(address).await.unwrap();
    }
}
