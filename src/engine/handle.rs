//! The door to the engine thread: a bounded queue of requests in, one event stream per request out, and what is known of its health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, TrySendError};
use tokio::sync::mpsc::UnboundedSender;

use super::contract::{Event, EventStream, ModelInfo, Refused, Request};
use super::options::slots_of_request;
use crate::model::tokenizer::Tokenizer;

/// What `/health` answers from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Health {
    Loading(String),
    Ready,
    /// Finishes what runs, accepts nothing.
    Draining,
    /// The engine thread is gone; the process is about to exit with an error.
    Dead(String),
}

/// A request as the engine thread receives it.
pub struct Submission {
    pub request: Request,
    pub events: UnboundedSender<Event>,
    pub place: Arc<Place>,
    pub submitted: Instant,
}

/// Whether a request is still wanted, and its place in the queue; its client and the engine hold it together. Whoever has enough of
/// the queue first gives the place back: the engine by taking the request, the client by leaving.
pub struct Place {
    shared: Arc<Shared>,
    cancelled: AtomicBool,
    waiting: AtomicBool,
}

impl Place {
    /// A place among those that wait, beyond any limit.
    pub fn new(shared: Arc<Shared>) -> Self {
        shared.waiting.fetch_add(1, Ordering::Relaxed);
        Self::counted(shared)
    }

    /// The same, `None` where `limit` wait already.
    fn within(shared: &Arc<Shared>, limit: usize) -> Option<Self> {
        let next = |waiting: usize| (waiting < limit).then_some(waiting + 1);
        shared.waiting.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(Self::counted(shared.clone()))
    }

    fn counted(shared: Arc<Shared>) -> Self {
        Self { shared, cancelled: AtomicBool::new(false), waiting: AtomicBool::new(true) }
    }

    /// The client has left.
    pub fn cancel(&self) {
        self.cancelled.store(true, Ordering::Relaxed);
        self.leave_queue();
    }

    pub fn is_cancelled(&self) -> bool {
        self.cancelled.load(Ordering::Relaxed)
    }

    /// It waits no longer.
    pub fn leave_queue(&self) {
        if self.waiting.swap(false, Ordering::Relaxed) {
            self.shared.waiting.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.leave_queue();
    }
}

/// Shared by every clone of the handle and the engine thread.
pub struct Shared {
    health: Mutex<Health>,
    waiting: AtomicUsize,
    running: AtomicUsize,
    stop: AtomicBool,
    /// Milliseconds since `born` at the engine's last sign of life.
    beat: AtomicU64,
    born: Instant,
}

impl Shared {
    pub fn set_health(&self, health: Health) {
        if health == Health::Ready {
            crate::faults::arm();
        }
        let mut now = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        // Death is final: nothing that ends later may paint over it.
        if !matches!(*now, Health::Dead(_)) {
            *now = health;
        }
    }

    /// How far a start has come. Says nothing once loading is over, or a drain has begun.
    pub fn loading(&self, what: String) {
        let mut now = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        if matches!(*now, Health::Loading(_)) {
            *now = Health::Loading(what);
        }
    }

    pub fn health(&self) -> Health {
        self.health.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub fn set_running(&self, running: usize) {
        self.running.store(running, Ordering::Relaxed);
    }

    /// A sign of life of the engine thread, once per step.
    pub fn beat(&self) {
        self.beat.store(self.born.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    /// How long ago the engine thread last gave one.
    pub fn since_beat(&self) -> Duration {
        self.born.elapsed().saturating_sub(Duration::from_millis(self.beat.load(Ordering::Relaxed)))
    }

    /// Requests that the engine has not taken yet and that somebody still wants.
    pub fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Relaxed)
    }

    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    /// Set when every running request is to be aborted at the next round boundary.
    pub fn stop_requested(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Cheap to clone; the HTTP server, `generate`, the gate and the benches all hold one.
#[derive(Clone)]
pub struct EngineHandle {
    queue: Sender<Submission>,
    /// Most requests that may wait.
    limit: usize,
    shared: Arc<Shared>,
    info: Arc<ModelInfo>,
    tokenizer: Arc<Tokenizer>,
}

/// The engine thread's side.
pub struct Inbox {
    pub queue: Receiver<Submission>,
    pub shared: Arc<Shared>,
}

impl EngineHandle {
    /// A handle and the engine's side of it. `queue_limit` requests may wait beside those that run or could; one more is refused.
    pub fn new(info: ModelInfo, tokenizer: Arc<Tokenizer>, queue_limit: usize) -> (Self, Inbox) {
        // Requests whose clients have left lie in it until the engine looks; that they are many must not take memory without end.
        let (queue, inbox) = crossbeam_channel::bounded(4 * (queue_limit.max(1) + info.max_running));
        let shared = Arc::new(Shared {
            health: Mutex::new(Health::Loading("starting".into())),
            waiting: AtomicUsize::new(0),
            running: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            beat: AtomicU64::new(0),
            born: Instant::now(),
        });
        let handle = Self { queue, limit: queue_limit.max(1), shared: shared.clone(), info: Arc::new(info), tokenizer };
        (handle, Inbox { queue: inbox, shared })
    }

    /// Queues a request. Never blocks.
    pub fn submit(&self, request: Request) -> Result<EventStream, Refused> {
        match self.shared.health() {
            Health::Ready => {}
            Health::Draining => return Err(Refused::Draining),
            Health::Loading(what) => return Err(Refused::Dead(what)),
            Health::Dead(why) => return Err(Refused::Dead(why)),
        }
        self.check(&request)?;
        let full = || Refused::QueueFull { waiting: self.shared.waiting(), retry_after: Duration::from_secs(1) };
        let free = self.info.max_running.saturating_sub(self.shared.running());
        let place = Arc::new(Place::within(&self.shared, self.limit + free).ok_or_else(full)?);
        let (events, stream) = tokio::sync::mpsc::unbounded_channel();
        let submission = Submission { request, events, place: place.clone(), submitted: Instant::now() };
        match self.queue.try_send(submission) {
            Ok(()) => Ok(EventStream { events: stream, place }),
            Err(TrySendError::Full(_)) => Err(full()),
            Err(TrySendError::Disconnected(_)) => Err(Refused::Dead("the engine thread has ended".into())),
        }
    }

    /// The request must fit: the prompt and one generated token at least.
    fn check(&self, request: &Request) -> Result<(), Refused> {
        let limit = self.info.max_model_len;
        if request.prompt.is_empty() {
            return Err(Refused::Invalid("the prompt is empty".into()));
        }
        if let Some(id) = request.prompt.iter().find(|&&id| id as usize >= self.info.vocab_size) {
            return Err(Refused::Invalid(format!("token id {id} is outside the vocabulary of {}", self.info.vocab_size)));
        }
        if request.max_tokens == 0 {
            return Err(Refused::Invalid("max_tokens must be at least 1".into()));
        }
        let tokens = request.prompt.len().saturating_add(request.max_tokens as usize);
        if tokens > limit {
            return Err(Refused::ContextLength { prompt: request.prompt.len(), max_tokens: request.max_tokens, limit });
        }
        let needed = slots_of_request(tokens);
        if needed > self.info.kv_slots {
            return Err(Refused::KvCapacity { needed, slots: self.info.kv_slots });
        }
        Ok(())
    }

    pub fn info(&self) -> &ModelInfo {
        &self.info
    }

    pub fn tokenizer(&self) -> &Arc<Tokenizer> {
        &self.tokenizer
    }

    pub fn health(&self) -> Health {
        self.shared.health()
    }

    pub fn waiting(&self) -> usize {
        self.shared.waiting()
    }

    pub fn running(&self) -> usize {
        self.shared.running()
    }

    /// How long ago the engine thread last gave a sign of life (one per step, ten a second when idle).
    pub fn since_beat(&self) -> Duration {
        self.shared.since_beat()
    }

    /// From now on nothing is accepted; what was accepted runs to its end.
    pub fn drain(&self) {
        self.shared.set_health(Health::Draining);
    }

    /// Aborts everything at the next round boundary.
    pub fn stop(&self) {
        self.drain();
        self.shared.stop.store(true, Ordering::Relaxed);
    }
}
