//! What every handler shares.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use tokio::sync::Semaphore;

use super::auth::Keys;
use super::config::ServerConfig;
use super::grammar::Grammars;
use super::idle::IdleConnections;
use super::metrics::ServerMetrics;
use crate::cache::slots::BLOCK;
use crate::engine::handle::EngineHandle;
use crate::model::chat::ChatTemplate;
use crate::speculate::budget::MAX_ROWS;

/// One running server.
pub struct App {
    pub config: ServerConfig,
    pub engine: EngineHandle,
    pub chat: Arc<ChatTemplate>,
    pub metrics: Arc<ServerMetrics>,
    pub keys: Keys,
    pub grammars: Grammars,
    /// The gate's certificate, once there is one.
    pub certificate: Arc<std::sync::OnceLock<Value>>,
    /// Seconds since 1970 at the start, for the models' `created`.
    pub created: u64,
    /// One permit for each connection that may be open.
    pub connections: Arc<Semaphore>,
    /// Those of them on which nothing is asked.
    pub idle: Arc<IdleConnections>,
    /// One permit for each grammar that may be compiled at a time.
    pub compiling: Arc<Semaphore>,
    /// Becomes true when the engine thread is gone.
    pub dead: tokio::sync::watch::Sender<bool>,
    ids: Ids,
}

impl App {
    pub fn new(
        config: ServerConfig,
        engine: EngineHandle,
        chat: Arc<ChatTemplate>,
        metrics: Arc<ServerMetrics>,
        keys: Keys,
        certificate: Arc<std::sync::OnceLock<Value>>,
    ) -> Self {
        let connections = Arc::new(Semaphore::new(config.max_connections));
        let compiling = Arc::new(Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from).div_ceil(2)));
        let grammars = Grammars::new(engine.tokenizer().clone(), engine.info());
        Self {
            config,
            engine,
            chat,
            metrics,
            keys,
            grammars,
            certificate,
            created: unix_now(),
            connections,
            idle: Arc::default(),
            compiling,
            dead: tokio::sync::watch::Sender::new(false),
            ids: Ids::new(),
        }
    }

    /// The name answers carry.
    pub fn model_name(&self) -> Arc<str> {
        self.engine.info().name.as_str().into()
    }

    /// Tokens one request can hold at most, given the KV pool: its draft rows need slots too, and slots come in blocks.
    pub fn request_slots(&self) -> usize {
        (self.engine.info().kv_slots / BLOCK * BLOCK).saturating_sub(MAX_ROWS)
    }

    /// A fresh id such as `chatcmpl-6f0d...`.
    pub fn new_id(&self, prefix: &str) -> String {
        format!("{prefix}-{:016x}{:08x}", self.ids.start, self.ids.next.fetch_add(1, Ordering::Relaxed))
    }

    /// A seed for a request that names none.
    pub fn random_seed(&self) -> u64 {
        use std::hash::{BuildHasher, Hasher};
        let mut hasher = self.ids.random.build_hasher();
        hasher.write_u64(self.ids.next.fetch_add(1, Ordering::Relaxed));
        hasher.finish()
    }
}

/// Ids that are unique over restarts too.
struct Ids {
    start: u64,
    next: AtomicU64,
    random: std::hash::RandomState,
}

impl Ids {
    fn new() -> Self {
        let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64);
        Self { start: nanos, next: AtomicU64::new(0), random: std::hash::RandomState::new() }
    }
}

/// Seconds since 1970, for `created`.
pub fn unix_now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
