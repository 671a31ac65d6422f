//! Small pieces every handler uses: the body type, JSON and error responses, and reading a request body within limits.

use std::convert::Infallible;
use std::time::Duration;

use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::{Body as HttpBody, Bytes, Incoming};
use hyper::header::{self, HeaderValue};
use hyper::{HeaderMap, Response, StatusCode};
use serde::Serialize;

use super::error::ApiError;

/// The body of every response. Dropping it tells the handler's source that the client left.
pub type Body = UnsyncBoxBody<Bytes, Infallible>;

pub fn full(bytes: impl Into<Bytes>) -> Body {
    Full::new(bytes.into()).boxed_unsync()
}

pub fn bytes(status: StatusCode, content_type: &'static str, body: impl Into<Bytes>) -> Response<Body> {
    let mut response = Response::new(full(body));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

/// Written as it is, without a tree of JSON values in between: log-probabilities of a long prompt would take gigabytes as one.
pub fn json(status: StatusCode, value: &impl Serialize) -> Response<Body> {
    match serde_json::to_vec(value) {
        Ok(text) => bytes(status, "application/json", text),
        Err(problem) => error(&ApiError::internal(format!("The answer could not be written: {problem}."))),
    }
}

pub fn error(error: &ApiError) -> Response<Body> {
    let mut response = json(error.status, &error.to_json());
    let headers = response.headers_mut();
    if let Some(seconds) = error.retry_after {
        headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    if let Some(methods) = error.allow {
        headers.insert(header::ALLOW, HeaderValue::from_static(methods));
    }
    if error.close {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if error.status == StatusCode::UNAUTHORIZED {
        headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    }
    response
}

/// Only JSON is accepted: a form or plain text is what a foreign web page can post without asking its user.
pub fn check_content_type(headers: &HeaderMap) -> Result<(), ApiError> {
    let Some(value) = headers.get(header::CONTENT_TYPE) else { return Ok(()) };
    let kind = value.to_str().unwrap_or("").split(';').next().unwrap_or("").trim().to_ascii_lowercase();
    if kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json")) {
        return Ok(());
    }
    let message = format!("Content-Type {kind:?} is not accepted here: send application/json.");
    Err(ApiError {
        code: Some("unsupported_media_type"),
        ..ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message)
    })
}

/// Reads a whole body of at most `limit` bytes within `timeout`.
///
/// A body over the limit is read on and thrown away for a moment before 413 is answered: a client that is still sending when the
/// connection closes would see a reset instead of the answer.
pub async fn read_body(body: Incoming, limit: usize, timeout: Duration) -> Result<Bytes, ApiError> {
    let announced = body.size_hint().lower();
    if announced > limit as u64 {
        discard(body).await;
        return Err(too_large(limit));
    }
    let mut body = body;
    match tokio::time::timeout(timeout, collect(&mut body, limit)).await {
        Ok(Ok(Some(bytes))) => Ok(bytes),
        Ok(Ok(None)) => {
            discard(body).await;
            Err(too_large(limit))
        }
        Ok(Err(_)) => Err(ApiError { close: true, ..ApiError::body("The request body ended early or is malformed.") }),
        Err(_) => {
            let message = format!("The request body was not complete within {} s.", timeout.as_secs_f64());
            Err(ApiError { close: true, ..ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message) })
        }
    }
}

/// `None` = more than `limit` bytes. A body in one piece, the usual case, is passed on without a copy.
async fn collect(body: &mut Incoming, limit: usize) -> Result<Option<Bytes>, hyper::Error> {
    let mut first = Bytes::new();
    let mut rest = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame?.into_data() else { continue };
        if first.len() + rest.len() + data.len() > limit {
            return Ok(None);
        }
        if first.is_empty() { first = data } else { rest.extend_from_slice(&data) }
    }
    Ok(Some(if rest.is_empty() { first } else { [&first[..], &rest].concat().into() }))
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("The request body is larger than {limit} bytes.");
    ApiError { code: Some("body_too_large"), close: true, ..ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message) }
}

/// Reads and drops what still comes, within bounds.
async fn discard(mut body: Incoming) {
    const MOST: usize = 256 << 20;
    let reading = async {
        let mut seen = 0;
        while let Some(Ok(frame)) = body.frame().await {
            seen += frame.data_ref().map_or(0, Bytes::len);
            if seen > MOST {
                break;
            }
        }
    };
    let _ = tokio::time::timeout(Duration::from_secs(10), reading).await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_and_plain_text_are_refused_and_json_is_not() {
        for (kind, right) in [
            ("application/json", true),
            ("Application/JSON; charset=utf-8", true),
            ("application/vnd.api+json", true),
            ("text/plain", false),
            ("application/x-www-form-urlencoded", false),
            ("multipart/form-data; boundary=x", false),
        ] {
            let headers = HeaderMap::from_iter([(header::CONTENT_TYPE, HeaderValue::from_static(kind))]);
            assert_eq!(check_content_type(&headers).is_ok(), right, "{kind}");
        }
        assert!(check_content_type(&HeaderMap::new()).is_ok());
    }
}
