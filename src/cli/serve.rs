//! `kdtree serve`: listen first, then load, warm up and gate on the engine thread, then answer.
//!
//! Exit status: 0 after a drain, 78 after a gate that blocks (the same start would fail again: a service manager must not restart
//! it), 1 for everything else, the engine's death included.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use anyhow::Context;
use serde_json::Value;

use super::gate::{chat_template, gate};
use super::logging::start_logging;
use crate::config::{Overrides, ServerOverrides};
use crate::engine::contract::{Failure, Finished, Observer, RoundReport};
use crate::engine::driver::Driver;
use crate::engine::start::{BeforeReady, Prepared};
use crate::gate::rollout::{Refusal, Standing, decide};
use crate::gate::{Gate, OnFailure};
use crate::model::progress;
use crate::server::auth::Keys;
use crate::server::{self, Bound, Ended, Parts, ServerMetrics, systemd};

/// The gate failed and blocks: `EX_CONFIG`, which a unit lists in `RestartPreventExitStatus`.
const EXIT_BLOCKED: u8 = 78;

/// Serves the OpenAI API. Without arguments: the embedded model on 127.0.0.1:8000. Everything else is set in the configuration file
/// (`kdtree config` prints every key).
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    pub overrides: Overrides,
    #[command(flatten)]
    pub server: ServerOverrides,
}

/// Serves until SIGTERM, or until the engine or the gate ends it; see the head of this file for the status.
pub fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = args.server.over(args.overrides.load()?);
    start_logging(&config.log)?;
    // A port that is taken or a key file that cannot be read shows before anything of the model is read.
    Keys::load(config.server.api_key_file.as_deref())?;
    let bound = Bound::bind(&config.server)?;
    let place = bound.address.to_string();
    let prepared = Prepared::read(config.engine.clone())?;
    let chat = chat_template(&config, &prepared)?;
    let gate = config.gate.enable.then(|| gate(&config, &prepared, &chat, false)).transpose()?;
    let metrics = Arc::new(ServerMetrics::new(&prepared.info.name));
    let start = Start::new(metrics.clone());
    let observer = Arc::new(Served { metrics: metrics.clone(), open: start.open.clone() });
    let (engine, thread) = prepared.start(observer, progress::for_this_process(), start.before_ready(gate, config.gate.on_failure));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().context("starting the runtime")?;
    runtime.spawn(systemd::follow(engine.clone(), start.standing.clone(), place));
    let parts = Parts { engine, chat, metrics, certificate: start.certificate.clone() };
    let ended = runtime.block_on(server::serve(bound, config.server, parts));
    runtime.shutdown_timeout(Duration::from_secs(1));
    match (ended, start.blocked.get()) {
        (Err(_), Some(why)) => {
            eprintln!("kdtree: {why}");
            Ok(ExitCode::from(EXIT_BLOCKED))
        }
        (Err(error), None) => Err(error),
        (Ok(Ended::Drained), _) if start.standing.get().is_some() => {
            // Every request has ended and every handle is gone: the engine thread ends by itself.
            let _ = thread.join();
            Ok(ExitCode::SUCCESS)
        }
        // Stopped, or still loading: what the engine thread is at may take minutes, and nobody waits for it.
        (Ok(_), _) => Ok(ExitCode::SUCCESS),
    }
}

/// What the engine thread leaves for the rest of the process before it becomes ready.
struct Start {
    metrics: Arc<ServerMetrics>,
    certificate: Arc<OnceLock<Value>>,
    /// Set when the engine may become ready; how it stands.
    standing: Arc<OnceLock<String>>,
    /// Set when the gate blocks; why.
    blocked: Arc<OnceLock<String>>,
    open: Arc<AtomicBool>,
}

impl Start {
    fn new(metrics: Arc<ServerMetrics>) -> Self {
        Self { metrics, certificate: Arc::default(), standing: Arc::default(), blocked: Arc::default(), open: Arc::default() }
    }

    fn before_ready(&self, gate: Option<Gate>, on_failure: OnFailure) -> BeforeReady {
        let Self { metrics, certificate, standing, blocked, open } = self;
        let (metrics, certificate, standing) = (metrics.clone(), certificate.clone(), standing.clone());
        let (blocked, open) = (blocked.clone(), open.clone());
        Box::new(move |driver: &mut dyn Driver| {
            let decided = decide(driver, gate.as_ref(), on_failure).inspect_err(|refusal| {
                if let Refusal::Blocked(_) = refusal {
                    let _ = blocked.set(refusal.to_string());
                }
            });
            let decided: Standing = decided.map_err(|refusal| refusal.to_string())?;
            metrics.set_verify_mode(&decided.verify.to_string());
            metrics.set_gate_passed(decided.gate.passed());
            if let Some(found) = decided.gate.certificate() {
                let _ = certificate.set(serde_json::to_value(found).map_err(|error| error.to_string())?);
            }
            tracing::info!("ready: {decided}");
            let _ = standing.set(decided.to_string());
            open.store(true, Ordering::Relaxed);
            Ok(())
        })
    }
}

/// Lets through what belongs to served requests: warm-up and gate are no traffic.
struct Served {
    metrics: Arc<ServerMetrics>,
    open: Arc<AtomicBool>,
}

impl Served {
    fn open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }
}

impl Observer for Served {
    fn round(&self, report: &RoundReport) {
        if self.open() {
            self.metrics.round(report);
        }
    }

    fn prefill(&self, tokens: usize, took: Duration) {
        if self.open() {
            self.metrics.prefill(tokens, took);
        }
    }

    fn queue(&self, waiting: usize, running: usize) {
        self.metrics.queue(waiting, running);
    }

    fn finished(&self, finished: &Finished) {
        if self.open() {
            self.metrics.finished(finished);
        }
    }

    fn failed(&self, failure: &Failure) {
        if self.open() {
            self.metrics.failed(failure);
        }
    }

    fn kv(&self, held: usize, cached: usize) {
        self.metrics.kv(held, cached);
    }
}
