//! The listening socket and its connections: bound before anything is loaded, limited in number, ended gracefully.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::Service;
use hyper::{Request, Response};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::OwnedSemaphorePermit;

use super::config::ServerConfig;
use super::http::Body;
use super::idle::{Answer, Line};
use super::metrics::ServerMetrics;
use super::routes;
use super::stall::StallGuard;
use super::state::App;

/// A bound socket. Bound early, so that a taken port is known before a model is loaded for minutes.
pub struct Bound {
    listener: std::net::TcpListener,
    pub address: SocketAddr,
}

impl Bound {
    /// Errors name address and cause in one line.
    pub fn bind(config: &ServerConfig) -> anyhow::Result<Self> {
        config.check().map_err(anyhow::Error::msg)?;
        let host = config.host.trim_start_matches('[').trim_end_matches(']');
        let describe = || format!("cannot listen on {host} port {}", config.port);
        let listener = std::net::TcpListener::bind((host, config.port)).with_context(describe)?;
        listener.set_nonblocking(true).with_context(describe)?;
        let address = listener.local_addr().with_context(describe)?;
        Ok(Self { listener, address })
    }

    pub(super) fn into_tokio(self) -> anyhow::Result<TcpListener> {
        TcpListener::from_std(self.listener).context("handing the socket to the runtime")
    }
}

/// Accepts connections for ever; the caller stops it by dropping the future.
pub(super) async fn accept(listener: &TcpListener, app: &Arc<App>, graceful: &GracefulShutdown) {
    loop {
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of file descriptors, or a connection that is gone already: neither may end the server or spin it.
                tracing::warn!(%error, "accepting a connection failed");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Some(permit) = admit(app).await else {
            app.metrics.connection_refused();
            tokio::spawn(turn_away(stream));
            continue;
        };
        let _ = stream.set_nodelay(true);
        let guard = ConnectionGauge::new(app.metrics.clone());
        let line = Arc::new(Line::new(app.idle.clone()));
        let connection = serve_connection(stream, app.clone(), line.clone());
        let watched = graceful.watch(connection);
        tokio::spawn(async move {
            tokio::select! {
                // Errors here are clients that left or spoke no HTTP; hyper has answered what could be answered.
                ended = watched => if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                },
                () = line.told_to_close() => tracing::debug!("a connection without a request made room"),
            }
            drop((permit, guard));
        });
    }
}

/// Room for one connection more, made by the one that has waited longest for a request where there is none. `None`: all are busy.
async fn admit(app: &App) -> Option<OwnedSemaphorePermit> {
    let permits = app.connections.clone();
    match permits.clone().try_acquire_owned() {
        Ok(permit) => Some(permit),
        Err(_) if app.idle.make_room() => tokio::time::timeout(CLOSING, permits.acquire_owned()).await.ok()?.ok(),
        Err(_) => None,
    }
}

/// A connection told to close does nothing but that.
const CLOSING: Duration = Duration::from_secs(1);

/// What a connection calls for each of its requests.
struct Answering(Arc<App>, Arc<Line>);

impl Service<Request<Incoming>> for Answering {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let Self(app, line) = self;
        let (app, line) = (app.clone(), line.clone());
        line.request();
        Box::pin(async move { Ok(routes::answer(app, request).await.map(|body| Answer { body, line }.boxed_unsync())) })
    }
}

fn serve_connection(stream: TcpStream, app: Arc<App>, line: Arc<Line>) -> http1::Connection<TokioIo<StallGuard>, Answering> {
    let config = app.config.clone();
    let io = TokioIo::new(StallGuard::new(stream, config.write_timeout(), line.clone()));
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(config.header_timeout())
        .max_buf_size(config.max_header_bytes.max(8192))
        .max_headers(100)
        .keep_alive(true);
    builder.serve_connection(io, Answering(app, line))
}

/// Tells one client too many so, without reading from it and without waiting for it.
async fn turn_away(mut stream: TcpStream) {
    const BODY: &str = r#"{"error":{"message":"Too many connections.","type":"server_error","param":null,"code":"too_many_connections"}}"#;
    let answer = format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{BODY}",
        BODY.len()
    );
    let telling = async {
        let _ = stream.write_all(answer.as_bytes()).await;
        let _ = stream.shutdown().await;
        // What the client sent is read away for a moment: closing with unread bytes would reset the answer.
        let mut sink = [0u8; 1024];
        while stream.readable().await.is_ok() && matches!(stream.try_read(&mut sink), Ok(1..)) {}
    };
    let _ = tokio::time::timeout(Duration::from_millis(200), telling).await;
}

/// Counts a connection as open for as long as it lives, however it ends.
struct ConnectionGauge(Arc<ServerMetrics>);

impl ConnectionGauge {
    fn new(metrics: Arc<ServerMetrics>) -> Self {
        metrics.connections(1.0);
        Self(metrics)
    }
}

impl Drop for ConnectionGauge {
    fn drop(&mut self) {
        self.0.connections(-1.0);
    }
}
