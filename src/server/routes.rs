//! Which path and method does what, who needs a key, and the one place where every request passes through.

use std::sync::Arc;
use std::time::Instant;

use hyper::body::Incoming;
use hyper::header::{self, HeaderValue};
use hyper::{Method, Request, Response, StatusCode};
use serde_json::json;

use super::error::ApiError;
use super::http::{self, Body};
use super::openai::chat_request::ChatRequest;
use super::openai::completions::CompletionRequest;
use super::openai::{chat, completions, models, tokenize};
use super::state::App;
use super::{openapi, page};
use crate::engine::handle::Health;

/// Who may use a route.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Door {
    /// A key, when keys are configured.
    Key,
    /// Everybody: tells no more than whether the server lives, or holds nothing of anybody.
    Open,
    /// `/metrics`: open unless `open_metrics` is false.
    Metrics,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Route {
    Page,
    Health,
    Version,
    Metrics,
    OpenApi,
    Gate,
    Models,
    Model,
    Tokenize,
    Detokenize,
    Completions,
    Chat,
}

struct Entry {
    path: &'static str,
    allow: &'static str,
    door: Door,
    route: Route,
}

const fn entry(path: &'static str, allow: &'static str, door: Door, route: Route) -> Entry {
    Entry { path, allow, door, route }
}

const GET: &str = "GET, HEAD";
const POST: &str = "POST";

/// Every route there is. Deny by default: a route not listed as open needs a key.
const ROUTES: &[Entry] = &[
    entry("/", GET, Door::Open, Route::Page),
    entry("/health", GET, Door::Open, Route::Health),
    entry("/ping", GET, Door::Open, Route::Health),
    entry("/metrics", GET, Door::Metrics, Route::Metrics),
    entry("/version", GET, Door::Key, Route::Version),
    entry("/openapi.json", GET, Door::Key, Route::OpenApi),
    entry("/gate", GET, Door::Key, Route::Gate),
    entry("/v1/models", GET, Door::Key, Route::Models),
    entry("/v1/models/", GET, Door::Key, Route::Model),
    entry("/tokenize", POST, Door::Key, Route::Tokenize),
    entry("/detokenize", POST, Door::Key, Route::Detokenize),
    entry("/v1/completions", POST, Door::Key, Route::Completions),
    entry("/v1/chat/completions", POST, Door::Key, Route::Chat),
];

/// Exact paths only, as they came over the wire: no decoding, no folding of `//`, `..` or case, so that no spelling slips past.
fn find(path: &str) -> Option<&'static Entry> {
    let exact = ROUTES.iter().find(|entry| entry.path == path && entry.route != Route::Model);
    exact.or_else(|| {
        ROUTES.iter().find(|entry| entry.route == Route::Model && path.len() > entry.path.len() && path.starts_with(entry.path))
    })
}

/// Bodies from this size on are prepared beside the runtime's threads.
const LARGE: usize = 16 << 10;

/// Answers one request, whatever it is.
pub async fn answer(app: Arc<App>, request: Request<Incoming>) -> Response<Body> {
    let mut counted = Counted { app: app.clone(), status: None };
    let head = request.method() == Method::HEAD;
    let mut response = match dispatch(app.clone(), request).await {
        Ok(response) => response,
        Err(error) => {
            if error.status.is_server_error() {
                tracing::warn!(status = error.status.as_u16(), message = %error.message, "request failed");
            }
            http::error(&error)
        }
    };
    if head {
        *response.body_mut() = http::full("");
    }
    response.headers_mut().insert(header::SERVER, HeaderValue::from_static(concat!("kdtree/", env!("CARGO_PKG_VERSION"))));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    counted.status = Some(response.status().as_u16());
    response
}

/// Counts a request when it is answered or, with no status, when its client left before.
struct Counted {
    app: Arc<App>,
    status: Option<u16>,
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.app.metrics.answered(self.status);
    }
}

async fn dispatch(app: Arc<App>, request: Request<Incoming>) -> Result<Response<Body>, ApiError> {
    let arrival = Instant::now();
    let path = request.uri().path();
    let entry = find(path);
    let door = entry.map_or(Door::Key, |entry| entry.door);
    let needs_key = match door {
        Door::Open => false,
        Door::Metrics => !app.config.open_metrics,
        Door::Key => true,
    };
    // Before anything else: without a key nobody learns even which routes there are.
    if needs_key && !app.keys.admits(request.headers()) {
        return Err(ApiError { close: request_has_body(&request), ..ApiError::unauthorized() });
    }
    let Some(entry) = entry else {
        let message = format!("There is no {} here. See /openapi.json for what there is.", shorten(path));
        return Err(ApiError { code: Some("not_found"), ..ApiError::new(StatusCode::NOT_FOUND, "invalid_request_error", message) });
    };
    if !entry.allow.split(", ").any(|method| method == request.method().as_str()) {
        let message = format!("{} does not take {}: wanted {}.", entry.path, shorten(request.method().as_str()), entry.allow);
        let error = ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "invalid_request_error", message);
        return Err(ApiError { code: Some("method_not_allowed"), allow: Some(entry.allow), ..error });
    }
    match entry.route {
        Route::Page => Ok(page::response()),
        Route::Health => Ok(health(&app)),
        Route::Version => Ok(http::json(StatusCode::OK, &json!({"version": env!("CARGO_PKG_VERSION")}))),
        Route::Metrics => Ok(http::bytes(StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8", app.metrics.render(&app.engine))),
        Route::OpenApi => Ok(http::json(StatusCode::OK, &openapi::document(app.engine.info()))),
        Route::Gate => Ok(gate(&app)),
        Route::Models => Ok(models::list(&app)),
        Route::Model => models::one(&app, &path[entry.path.len()..]),
        Route::Tokenize | Route::Detokenize | Route::Completions | Route::Chat => post(app, entry.route, request, arrival).await,
    }
}

fn request_has_body(request: &Request<Incoming>) -> bool {
    use hyper::body::Body;
    !request.body().is_end_stream()
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= 100 { text.into() } else { text.chars().take(97).chain("...".chars()).collect() }
}

async fn post(app: Arc<App>, route: Route, request: Request<Incoming>, arrival: Instant) -> Result<Response<Body>, ApiError> {
    http::check_content_type(request.headers())?;
    if matches!(route, Route::Completions | Route::Chat) {
        super::openai::check_ready(&app)?;
    }
    let body = http::read_body(request.into_body(), app.config.max_body_bytes, app.config.body_timeout()).await?;
    let work = app.clone();
    let large = body.len() >= LARGE;
    let prepare = move || prepare(&work, route, &body);
    let prepared = if large {
        tokio::task::spawn_blocking(prepare).await.map_err(|_| ApiError::internal("Preparing the request failed."))??
    } else {
        prepare()?
    };
    match prepared {
        Prepared::Answer(response) => Ok(*response),
        Prepared::Completion(request) => completions::answer(app, *request, arrival).await,
        Prepared::Chat(request) => chat::answer(app, *request, arrival).await,
    }
}

enum Prepared {
    Answer(Box<Response<Body>>),
    Completion(Box<CompletionRequest>),
    Chat(Box<ChatRequest>),
}

/// Everything before the engine: parsing, checking, rendering, tokenizing.
fn prepare(app: &App, route: Route, body: &[u8]) -> Result<Prepared, ApiError> {
    let body = super::openai::parse_object(body)?;
    Ok(match route {
        Route::Tokenize => Prepared::Answer(Box::new(tokenize::tokenize(app, &body)?)),
        Route::Detokenize => Prepared::Answer(Box::new(tokenize::detokenize(app, &body)?)),
        Route::Completions => Prepared::Completion(Box::new(CompletionRequest::parse(app, &body)?)),
        _ => Prepared::Chat(Box::new(ChatRequest::parse(app, &body)?)),
    })
}

/// 200 only while the engine takes requests. Says no more than the state and, while loading, how far it is.
fn health(app: &App) -> Response<Body> {
    let (status, body) = match app.engine.health() {
        Health::Ready => (StatusCode::OK, json!({"status": "ok"})),
        Health::Loading(what) => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "loading", "progress": what})),
        Health::Draining => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "draining"})),
        Health::Dead(_) => (StatusCode::SERVICE_UNAVAILABLE, json!({"status": "dead"})),
    };
    http::json(status, &body)
}

/// The certificate of the gate that let this model serve; `null` while there is none.
fn gate(app: &App) -> Response<Body> {
    http::json(StatusCode::OK, &json!({"certificate": app.certificate.get()}))
}

/// The paths of all routes, for the OpenAPI document's test.
#[cfg(test)]
pub(super) fn paths() -> impl Iterator<Item = (&'static str, &'static str)> {
    ROUTES.iter().map(|entry| (entry.path, entry.allow))
}

/// Whether the document marks a path as open.
#[cfg(test)]
pub(super) fn is_open(path: &str) -> bool {
    ROUTES.iter().any(|entry| entry.path == path && entry.door != Door::Key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_listed_routes_are_open() {
        let open: Vec<_> = ROUTES.iter().filter(|entry| entry.door != Door::Key).map(|entry| entry.path).collect();
        assert_eq!(open, ["/", "/health", "/ping", "/metrics"], "a new open route must be argued for here");
    }

    #[test]
    fn no_spelling_of_a_path_but_its_own_is_found() {
        for path in
            ["//v1/completions", "/v1/../v1/completions", "/V1/completions", "/%761/completions", "/v1/completions/", "/v1/models/", ""]
        {
            assert!(find(path).is_none(), "{path}");
        }
        assert_eq!(find("/v1/models/k26-mini").map(|entry| entry.route), Some(Route::Model));
        assert_eq!(find("/v1/models").map(|entry| entry.route), Some(Route::Models));
    }
}
