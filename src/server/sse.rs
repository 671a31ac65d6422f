//! Server-sent events as a response body: pulled by the connection, so that a slow reader slows only itself, and kept alive by
//! comment lines while nothing is to be said. Dropping the body drops its source, which cancels the generation.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http_body_util::BodyExt;
use hyper::body::{Bytes, Frame};
use hyper::header::{self, HeaderValue};
use hyper::{Response, StatusCode};
use serde::Serialize;
use tokio::time::{Instant, Sleep};

use super::http::Body;
use super::metrics::ServerMetrics;

/// What a stream has to say.
pub trait Source: Send + Unpin + 'static {
    /// Appends the events that are ready to `out`. `Ready(true)`: more may follow. `Ready(false)`: these were the last.
    fn poll_events(&mut self, cx: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<bool>;
}

/// Appends one event whose data is `value` as JSON.
pub fn event(out: &mut Vec<u8>, value: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    let start = out.len();
    if let Err(error) = serde_json::to_writer(&mut *out, value) {
        // Only a map with non-string keys or a failing writer could bring this about; neither is among our types.
        out.truncate(start);
        out.extend_from_slice(b"{}");
        tracing::error!(%error, "an event could not be written");
    }
    out.extend_from_slice(b"\n\n");
}

/// Appends the event that ends every successful stream.
pub fn done(out: &mut Vec<u8>) {
    out.extend_from_slice(b"data: [DONE]\n\n");
}

struct SseBody<S> {
    source: S,
    interval: Duration,
    silence: Pin<Box<Sleep>>,
    ended: bool,
    metrics: Arc<ServerMetrics>,
}

/// A response that streams `source`, with a comment line after every `interval` of silence.
pub fn response(source: impl Source, interval: Duration, metrics: Arc<ServerMetrics>) -> Response<Body> {
    let silence = Box::pin(tokio::time::sleep(interval));
    let body = SseBody { source, interval, silence, ended: false, metrics };
    let mut response = Response::new(body.boxed_unsync());
    *response.status_mut() = StatusCode::OK;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Proxies of the nginx family would collect the events otherwise.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

impl<S: Source> hyper::body::Body for SseBody<S> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let this = &mut *self;
        while !this.ended {
            let begun = std::time::Instant::now();
            let mut out = Vec::new();
            match this.source.poll_events(cx, &mut out) {
                Poll::Ready(more) => this.ended = !more,
                Poll::Pending if out.is_empty() => break,
                Poll::Pending => {}
            }
            if !out.is_empty() {
                this.silence.as_mut().reset(Instant::now() + this.interval);
                this.metrics.streamed(out.len(), begun.elapsed());
                return Poll::Ready(Some(Ok(Frame::data(out.into()))));
            }
        }
        if this.ended {
            return Poll::Ready(None);
        }
        if this.silence.as_mut().poll(cx).is_pending() {
            return Poll::Pending;
        }
        this.silence.as_mut().reset(Instant::now() + this.interval);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b": keep-alive\n\n")))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Script(Vec<Option<&'static str>>);

    impl Source for Script {
        fn poll_events(&mut self, _: &mut Context<'_>, out: &mut Vec<u8>) -> Poll<bool> {
            match self.0.first().copied() {
                Some(Some(text)) => {
                    self.0.remove(0);
                    event(out, &text);
                    Poll::Ready(!self.0.is_empty())
                }
                Some(None) => Poll::Pending,
                None => Poll::Ready(false),
            }
        }
    }

    fn metrics() -> Arc<ServerMetrics> {
        Arc::new(ServerMetrics::new("m"))
    }

    #[tokio::test]
    async fn events_are_framed_and_the_last_one_ends_the_body() {
        let response = response(Script(vec![Some("a\nb"), Some("c")]), Duration::from_secs(60), metrics());
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(&body[..], b"data: \"a\\nb\"\n\ndata: \"c\"\n\n");
    }

    #[tokio::test]
    async fn silence_is_broken_by_comments_only() {
        let interval = Duration::from_millis(40);
        let mut body = response(Script(vec![None]), interval, metrics()).into_body();
        for _ in 0..3 {
            let begun = Instant::now();
            let frame = body.frame().await.unwrap().unwrap().into_data().unwrap();
            assert_eq!(&frame[..], b": keep-alive\n\n");
            assert!(begun.elapsed() >= interval - Duration::from_millis(5));
        }
    }
}
