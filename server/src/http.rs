//! The listening socket: taking a port, publishing it, serving until told to stop.

use std::fmt::Debug;
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use axum::Router;
use axum::serve::{Listener, ListenerExt};
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::shutdown::CLOSE_TIME;

/// The listening socket could not be had.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("cannot listen on {address} (--host, --port): {source}; --port 0 takes any free port")]
    Bind { address: SocketAddr, source: io::Error },
    #[error("cannot write --port-file {path}: {source}")]
    PortFile { path: String, source: io::Error },
}

/// Takes `address`, whose port may be 0, then logs the real one and writes it to `port_file`.
pub async fn bind(address: SocketAddr, port_file: Option<&Path>) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError::Bind { address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let local = listener.local_addr().map_err(failed)?;
    if let Some(path) = port_file {
        publish(path, local.port())
            .map_err(|source| ListenError::PortFile { path: path.display().to_string(), source })?;
    }
    tracing::info!(port = local.port(), "listening on http://{local}");
    Ok(listener)
}

/// Written beside and renamed, so that a reader finds a whole number or no file.
fn publish(path: &Path, port: u16) -> io::Result<()> {
    let temporary = path.with_extension(format!("{}.tmp", std::process::id()));
    std::fs::write(&temporary, format!("{port}\n"))?;
    std::fs::rename(&temporary, path).inspect_err(|_| {
        let _ = std::fs::remove_file(&temporary);
    })
}

/// Serves until `shutdown` resolves, then closes the socket and gives answers that are on their way
/// a moment to leave.
pub async fn run(
    listener: TcpListener,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()> {
    // Without it each small event of a stream waits for the acknowledgement of the one before: 40 ms stalls.
    let listener = listener.tap_io(|stream| {
        let _ = stream.set_nodelay(true);
    });
    serve(listener, router, shutdown).await
}

/// As [`run`], of connections that come from wherever, with Nagle's delay switched off.
pub async fn serve<L>(
    listener: L,
    router: Router,
    shutdown: impl Future<Output = ()> + Send + 'static,
) -> io::Result<()>
where
    L: Listener<Addr: Debug>,
{
    let (closing, closed) = oneshot::channel();
    let serve = axum::serve(listener, router).with_graceful_shutdown(async move {
        shutdown.await;
        let _ = closing.send(());
    });
    tokio::select! {
        served = async { serve.await } => served,
        () = after(closed, CLOSE_TIME) => {
            tracing::warn!("some connections did not close in time");
            Ok(())
        }
    }
}

async fn after(event: oneshot::Receiver<()>, time: Duration) {
    let _ = event.await;
    tokio::time::sleep(time).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_taken_port_is_named() {
        let taken = bind("127.0.0.1:0".parse().unwrap(), None).await.unwrap();
        let address = taken.local_addr().unwrap();
        let message = bind(address, None).await.unwrap_err().to_string();
        assert!(message.starts_with(&format!("cannot listen on {address} (--host, --port): ")), "{message}");
    }

    #[tokio::test]
    async fn the_real_port_is_published() {
        let path = std::env::temp_dir().join(format!("kvferry-port-{}", std::process::id()));
        let listener = bind("127.0.0.1:0".parse().unwrap(), Some(&path)).await.unwrap();
        let published: u16 = std::fs::read_to_string(&path).unwrap().trim().parse().unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!(published, listener.local_addr().unwrap().port());
    }

    #[tokio::test]
    async fn a_port_file_that_cannot_be_written_is_named() {
        let error =
            bind("127.0.0.1:0".parse().unwrap(), Some(Path::new("/no/such/dir/port"))).await.unwrap_err();
        assert!(error.to_string().contains("--port-file /no/such/dir/port"), "{error}");
    }
}
