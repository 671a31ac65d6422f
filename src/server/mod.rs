//! The HTTP server: OpenAI's API, health, metrics and the web page, in front of the engine thread. Called by `kdtree serve`.
//!
//! ```text
//! connection --listen--> routes --openai/*--> generation --EngineHandle--> engine thread
//!                                   ^                |
//!                                   +---- sse <------+
//! ```

pub mod auth;
pub mod chat_output;
pub mod config;
pub mod error;
mod fields;
mod generation;
pub mod grammar;
mod http;
mod idle;
mod listen;
pub mod metrics;
mod openai;
pub mod openapi;
mod page;
mod routes;
mod sse;
mod stall;
mod state;
pub mod systemd;

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use hyper_util::server::graceful::GracefulShutdown;
use serde_json::Value;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time::Instant;

pub use config::ServerConfig;
pub use listen::Bound;
pub use metrics::ServerMetrics;

use crate::engine::handle::{EngineHandle, Health};
use crate::model::chat::ChatTemplate;
use auth::Keys;
use state::App;

/// What a server serves.
pub struct Parts {
    pub engine: EngineHandle,
    pub chat: Arc<ChatTemplate>,
    /// The same object the engine was given as its observer.
    pub metrics: Arc<ServerMetrics>,
    /// Set once the gate has decided; `/gate` and the page show it.
    pub certificate: Arc<OnceLock<Value>>,
}

/// How serving ended without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// SIGTERM or SIGINT, and everything accepted was finished.
    Drained,
    /// The drain deadline passed, or a second signal came: running requests were stopped with an error event.
    Stopped,
}

/// Serves until a signal or the engine's death. The engine may still be loading: until it is ready, `/health` and every request
/// are answered 503.
///
/// # Errors
/// The key file cannot be read, the socket cannot be used, or the engine thread died (after `death_grace_s`, for health checks to
/// see it). The process must then end with a non-zero status.
pub async fn serve(bound: Bound, config: ServerConfig, parts: Parts) -> anyhow::Result<Ended> {
    let keys = Keys::load(config.api_key_file.as_deref())?;
    let address = bound.address;
    if !address.ip().is_loopback() && !keys.required() {
        tracing::warn!(%address, "listening beyond loopback without API keys: everybody who reaches this address can use it (set server.api_key_file)");
    }
    let Parts { engine, chat, metrics, certificate } = parts;
    let app = Arc::new(App::new(config, engine, chat, metrics, keys, certificate));
    let listener = bound.into_tokio()?;
    let mut signals = Signals::new()?;
    tracing::info!(%address, model = %app.engine.info().name, "listening");
    let graceful = GracefulShutdown::new();
    let outcome = tokio::select! {
        () = listen::accept(&listener, &app, &graceful) => unreachable!("accepting never ends by itself"),
        () = signals.end.recv() => Ok(()),
        why = death(&app.engine) => Err(why),
        () = housekeeping(&app, &mut signals.hangup) => unreachable!("housekeeping never ends by itself"),
    };
    match outcome {
        Ok(()) => drain(&listener, &app, graceful, &mut signals.end).await,
        Err(why) => {
            tracing::error!(%why, "the engine has stopped");
            app.dead.send_replace(true);
            // Still answering, so that clients get their errors and health checks see red.
            let grace = Duration::from_secs_f64(app.config.death_grace_s);
            let _ = tokio::time::timeout(grace, listen::accept(&listener, &app, &graceful)).await;
            anyhow::bail!("the engine has stopped: {why}")
        }
    }
}

/// How long the last bytes of answers have where the drain did not end by itself.
const FLUSH: Duration = Duration::from_millis(500);

/// Finishes what runs, refuses what comes, to a deadline or a second signal.
///
/// # Errors
/// The engine thread died meanwhile.
async fn drain(
    listener: &tokio::net::TcpListener,
    app: &Arc<App>,
    graceful: GracefulShutdown,
    end: &mut EndSignals,
) -> anyhow::Result<Ended> {
    systemd::stopping();
    if let Health::Loading(_) = app.engine.health() {
        // Nothing was accepted yet, and nobody may wait for a load of minutes.
        app.engine.stop();
        return Ok(Ended::Stopped);
    }
    app.engine.drain();
    let deadline = Instant::now() + app.config.drain();
    let (running, waiting) = (app.engine.running(), app.engine.waiting());
    tracing::info!(running, waiting, "draining");
    let refusing = GracefulShutdown::new();
    let at_rest = async {
        while app.engine.running() + app.engine.waiting() > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let ended = tokio::select! {
        () = at_rest => Ended::Drained,
        _ = death(&app.engine) => Ended::Stopped,
        () = listen::accept(listener, app, &refusing) => unreachable!("accepting never ends by itself"),
        () = tokio::time::sleep_until(deadline) => Ended::Stopped,
        () = end.recv() => Ended::Stopped,
    };
    app.engine.stop();
    let dead = match app.engine.health() {
        Health::Dead(why) => Some(why),
        _ => None,
    };
    app.dead.send_replace(dead.is_some());
    // What was answered is still on its way to slow readers, error events included.
    let patience = match ended {
        Ended::Drained => deadline.saturating_duration_since(Instant::now()).max(FLUSH),
        Ended::Stopped => FLUSH,
    };
    let late = GracefulShutdown::new();
    let flushed = tokio::select! {
        _ = async { tokio::join!(graceful.shutdown(), refusing.shutdown()) } => true,
        () = listen::accept(listener, app, &late) => unreachable!("accepting never ends by itself"),
        () = tokio::time::sleep(patience) => false,
        () = end.recv() => false,
    };
    if !flushed {
        tracing::warn!("connections were cut");
    }
    if let Some(why) = dead {
        tracing::error!(%why, "the engine has stopped");
        anyhow::bail!("the engine has stopped: {why}");
    }
    tracing::info!(?ended, "stopped");
    Ok(ended)
}

/// Waits for the engine thread's death.
async fn death(engine: &EngineHandle) -> String {
    loop {
        if let Health::Dead(why) = engine.health() {
            return why;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Folds metrics and reloads keys, for as long as the server runs.
async fn housekeeping(app: &App, hangup: &mut Signal) {
    let mut upkeep = tokio::time::interval(Duration::from_secs(5));
    loop {
        tokio::select! {
            _ = upkeep.tick() => app.metrics.upkeep(),
            _ = hangup.recv() => reload(app),
        }
    }
}

/// Reads the keys again.
fn reload(app: &App) {
    // Before the first READY a second one would be false.
    let told = app.engine.health() == Health::Ready;
    if told {
        systemd::reloading();
    }
    match app.keys.reload() {
        Ok(count) => tracing::info!(count, "API keys read again"),
        Err(error) => tracing::error!(error = format!("{error:#}"), "API keys not reloaded; the old ones stay in force"),
    }
    if told {
        systemd::reloaded();
    }
}

struct Signals {
    end: EndSignals,
    hangup: Signal,
}

/// SIGTERM and SIGINT mean the same.
struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    fn new() -> anyhow::Result<Self> {
        let listen = |kind| signal(kind).context("listening for signals");
        let end = EndSignals { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? };
        Ok(Self { end, hangup: listen(SignalKind::hangup())? })
    }
}

impl EndSignals {
    async fn recv(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
