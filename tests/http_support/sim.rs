//! A simulated engine behind the real server: a thread that owns the engine's inbox and plays a script for each request.

#![allow(dead_code)]

use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use kdtree::engine::contract::{
    Event, Failure, FailureKind, FinishReason, Finished, ModelInfo, Observer, Request, RoundReport, Speculation, Timing, Token,
};
use kdtree::engine::handle::{EngineHandle, Health, Inbox, Submission};
use kdtree::model::chat::ChatTemplate;
use kdtree::model::source::ModelSource;
use kdtree::model::tokenizer::Tokenizer;
use kdtree::server::{Bound, Ended, Parts, ServerConfig, ServerMetrics, serve};

/// One step of a script.
#[derive(Clone, Debug)]
pub enum Step {
    /// One round that emits these; a control token is named by its marker and has no text, other text is one token.
    Say(Vec<&'static str>),
    Sleep(Duration),
    Fail(FailureKind, &'static str),
    /// The engine thread ends without a word.
    Die,
    /// Fills an answer up with this many one-token rounds at this pace.
    Chatter(usize, Duration),
    End(FinishReason),
}

/// Counters of what the engine saw.
#[derive(Default)]
pub struct Seen {
    pub started: AtomicUsize,
    pub cancelled: AtomicUsize,
    pub finished: AtomicUsize,
    pub requests: Mutex<Vec<(Vec<u32>, u32)>>,
}

pub struct Sim {
    pub address: SocketAddr,
    pub seen: Arc<Seen>,
    pub engine: EngineHandle,
    pub ended: Arc<Mutex<Option<Result<Ended, String>>>>,
}

pub fn tokenizer() -> Arc<Tokenizer> {
    static TOKENIZER: OnceLock<Arc<Tokenizer>> = OnceLock::new();
    TOKENIZER.get_or_init(|| Arc::new(Tokenizer::load(&source()).unwrap())).clone()
}

fn source() -> ModelSource {
    ModelSource::directory(concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini"))
}

/// How a simulated server is set up.
pub struct Setup {
    pub config: ServerConfig,
    pub context: usize,
    pub queue: usize,
    pub running: usize,
    pub health: Health,
}

impl Default for Setup {
    fn default() -> Self {
        Self { config: ServerConfig { port: 0, ..ServerConfig::default() }, context: 4096, queue: 64, running: 8, health: Health::Ready }
    }
}

/// Starts a server whose every request follows `script`.
pub fn start(setup: Setup, script: impl Fn(&Request) -> Vec<Step> + Send + Sync + 'static) -> Sim {
    let info = ModelInfo {
        name: "k26-mini".into(),
        vocab_size: 4096,
        max_model_len: setup.context,
        stop_ids: vec![3842, 3841],
        max_rows: 64,
        max_running: setup.running,
        kv_slots: 1 << 20,
    };
    let (engine, inbox) = EngineHandle::new(info, tokenizer(), setup.queue);
    inbox.shared.set_health(setup.health);
    let metrics = Arc::new(ServerMetrics::new("k26-mini"));
    let seen = Arc::new(Seen::default());
    let player = Player { script: Arc::new(script), seen: seen.clone(), observer: metrics.clone(), running: setup.running };
    thread::spawn(move || player.run(inbox));
    let bound = Bound::bind(&setup.config).unwrap();
    let address = bound.address;
    let chat = Arc::new(ChatTemplate::builtin(tokenizer()).unwrap());
    let parts = Parts { engine: engine.clone(), chat, metrics, certificate: Arc::default() };
    let ended = Arc::new(Mutex::new(None));
    let (config, outcome) = (setup.config, ended.clone());
    thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let result = runtime.block_on(serve(bound, config, parts)).map_err(|error| format!("{error:#}"));
        *outcome.lock().unwrap() = Some(result);
    });
    Sim { address, seen, engine, ended }
}

type Script = dyn Fn(&Request) -> Vec<Step> + Send + Sync;

struct Player {
    script: Arc<Script>,
    seen: Arc<Seen>,
    observer: Arc<dyn Observer>,
    running: usize,
}

impl Player {
    /// Takes up to `running` requests at a time, each played on a thread of its own.
    fn run(self, inbox: Inbox) {
        let busy = Arc::new(AtomicUsize::new(0));
        let (dead, died) = crossbeam_channel::unbounded::<()>();
        loop {
            if died.try_recv().is_ok() {
                inbox.shared.set_health(Health::Dead("the simulated engine died".into()));
                return;
            }
            if busy.load(Ordering::SeqCst) >= self.running {
                thread::sleep(Duration::from_millis(1));
                continue;
            }
            let submission = match inbox.queue.recv_timeout(Duration::from_millis(5)) {
                Ok(submission) => submission,
                Err(crossbeam_channel::RecvTimeoutError::Timeout) => continue,
                Err(crossbeam_channel::RecvTimeoutError::Disconnected) => return,
            };
            submission.place.leave_queue();
            inbox.shared.set_running(busy.fetch_add(1, Ordering::SeqCst) + 1);
            self.seen.requests.lock().unwrap().push((submission.request.prompt.clone(), submission.request.max_tokens));
            let steps = (self.script)(&submission.request);
            let (busy, shared, dead) = (busy.clone(), inbox.shared.clone(), dead.clone());
            let (seen, observer) = (self.seen.clone(), self.observer.clone());
            thread::spawn(move || {
                let died = Voice { submission, seen, observer, emitted: 0 }.play(steps);
                if died {
                    let _ = dead.send(());
                } else {
                    shared.set_running(busy.fetch_sub(1, Ordering::SeqCst) - 1);
                }
            });
        }
    }
}

/// One request being played.
struct Voice {
    submission: Submission,
    seen: Arc<Seen>,
    observer: Arc<dyn Observer>,
    emitted: u32,
}

impl Voice {
    /// True when the script says that the engine dies.
    fn play(mut self, steps: Vec<Step>) -> bool {
        self.seen.started.fetch_add(1, Ordering::SeqCst);
        let prompt_tokens = self.submission.request.prompt.len() as u32;
        self.send(Event::Started { prompt_tokens, cached_tokens: 0, queued: Duration::ZERO });
        for step in steps {
            if self.is_cancelled() {
                self.seen.cancelled.fetch_add(1, Ordering::SeqCst);
                self.end(FinishReason::Abort);
                return false;
            }
            match step {
                Step::Say(words) => self.say(&words),
                Step::Sleep(time) => self.sleep(time),
                Step::Fail(kind, message) => {
                    let failure = Failure { kind, message: message.into() };
                    self.observer.failed(&failure);
                    self.send(Event::Failed(failure));
                    return false;
                }
                Step::Die => return true,
                Step::Chatter(count, pace) => {
                    for _ in 0..count {
                        if self.is_cancelled() {
                            break;
                        }
                        self.say(&[" word"]);
                        self.sleep(pace);
                    }
                }
                Step::End(reason) => {
                    self.end(reason);
                    return false;
                }
            }
        }
        if self.is_cancelled() {
            self.seen.cancelled.fetch_add(1, Ordering::SeqCst);
            self.end(FinishReason::Abort);
        } else {
            self.end(FinishReason::Stop);
        }
        false
    }

    fn is_cancelled(&self) -> bool {
        self.submission.place.is_cancelled()
    }

    fn sleep(&self, time: Duration) {
        let until = std::time::Instant::now() + time;
        while !self.is_cancelled() {
            let left = until.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return;
            }
            thread::sleep(left.min(Duration::from_millis(5)));
        }
    }

    fn say(&mut self, words: &[&str]) {
        let tokenizer = tokenizer();
        let token = |word: &&str| match tokenizer.special(word) {
            Some(id) => Token { id, text: String::new(), logprob: None },
            None => Token { id: tokenizer.encode(word)[0], text: (*word).into(), logprob: None },
        };
        let tokens: Vec<_> = words.iter().map(token).collect();
        self.emitted += tokens.len() as u32;
        let accepted = vec![(8, tokens.len() as u16 - 1)];
        self.observer.round(&RoundReport { requests: 1, rows: 8, tokens: tokens.len(), accepted, ..RoundReport::default() });
        self.send(Event::Tokens(tokens));
    }

    fn end(&mut self, reason: FinishReason) {
        let finished = Finished {
            reason,
            stop_match: None,
            prompt_tokens: self.submission.request.prompt.len() as u32,
            cached_tokens: 0,
            completion_tokens: self.emitted,
            speculation: Speculation { rounds: 2, drafted: 14, accepted: 3, histogram: vec![0, 1, 1] },
            timing: Timing::default(),
        };
        self.seen.finished.fetch_add(1, Ordering::SeqCst);
        self.observer.finished(&finished);
        self.send(Event::Finished(finished));
    }

    fn send(&self, event: Event) {
        let _ = self.submission.events.send(event);
    }
}
