//! HTTP to workers: pooled connections without Nagle's delay, bodies as they come.

use std::error::Error as StdError;
use std::time::Duration;

use axum::http::{HeaderMap, Method, Request, Response, StatusCode, Uri, header};
use bytes::Bytes;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// A worker on the same network accepts in milliseconds; one that is gone without a reset must not hold a request.
const CONNECT: Duration = Duration::from_secs(2);

/// Below the 5 s after which uvicorn (vLLM, SGLang) closes an idle connection: writing into one that is being closed
/// looks like a dying worker.
const IDLE: Duration = Duration::from_secs(4);

/// Answers of workers to the frontend's own questions; `/metrics` is the largest.
const MAX_ANSWER: usize = 64 << 20;

/// Why a worker gave no answer. None of it says that the request is at fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// No connection: the worker has not seen the request.
    #[error("no connection: {0}")]
    Connect(String),
    /// The connection ended before the answer began.
    #[error("the connection ended before an answer: {0}")]
    Broken(String),
    #[error("no answer within {0:?}")]
    Timeout(Duration),
    /// This process has no file descriptors left: no worker is at fault.
    #[error("this frontend cannot open a connection (ulimit -n): {0}")]
    Local(String),
}

/// The client of all workers. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Upstream {
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Default for Upstream {
    fn default() -> Self {
        Self::new()
    }
}

impl Upstream {
    pub fn new() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_keepalive(Some(Duration::from_secs(15)));
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(1024)
            .build(connector);
        Self { client }
    }

    /// Sends `body` with `headers`; the answer's body is still on its way. Dropping the future or the body tells the
    /// worker that nobody waits any more.
    pub async fn post(
        &self,
        uri: Uri,
        headers: HeaderMap,
        body: Bytes,
    ) -> Result<Response<Incoming>, SendError> {
        let mut request = Request::new(Full::new(body));
        *request.method_mut() = Method::POST;
        *request.uri_mut() = uri;
        *request.headers_mut() = headers;
        self.client.request(request).await.map_err(classify)
    }

    /// Status and whole body of a GET.
    pub async fn get(&self, uri: Uri, within: Duration) -> Result<(StatusCode, Bytes), SendError> {
        self.exchange(Method::GET, uri, Bytes::new(), within).await
    }

    /// Status and whole body of a POST of JSON.
    pub async fn post_json(
        &self,
        uri: Uri,
        body: Bytes,
        within: Duration,
    ) -> Result<(StatusCode, Bytes), SendError> {
        self.exchange(Method::POST, uri, body, within).await
    }

    async fn exchange(
        &self,
        method: Method,
        uri: Uri,
        body: Bytes,
        within: Duration,
    ) -> Result<(StatusCode, Bytes), SendError> {
        let mut request = Request::new(Full::new(body));
        if method == Method::POST {
            let json = header::HeaderValue::from_static("application/json");
            request.headers_mut().insert(header::CONTENT_TYPE, json);
        }
        *request.method_mut() = method;
        *request.uri_mut() = uri;
        let exchange = async {
            let response = self.client.request(request).await.map_err(classify)?;
            let status = response.status();
            let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
            let body = body.map_err(|error| SendError::Broken(error.to_string()))?;
            Ok((status, body.to_bytes()))
        };
        tokio::time::timeout(within, exchange).await.unwrap_or(Err(SendError::Timeout(within)))
    }
}

fn classify(error: hyper_util::client::legacy::Error) -> SendError {
    let cause = innermost(&error);
    let reason = cause.to_string();
    let code = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::raw_os_error);
    match code {
        Some(libc::EMFILE | libc::ENFILE) => SendError::Local(reason),
        _ if error.is_connect() => SendError::Connect(reason),
        _ => SendError::Broken(reason),
    }
}

/// The cause of the cause: what the system said.
fn innermost<'a>(error: &'a (dyn StdError + 'static)) -> &'a (dyn StdError + 'static) {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last
}
