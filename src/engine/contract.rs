//! What a client of the engine (HTTP server, `generate`, gate, benches) and the engine thread say to each other.
//! Nothing here knows HTTP or a device. Requests go in through a bounded queue; each request has its own event stream.
//! Every accepted request gets exactly one terminal event (`Finished` or `Failed`), and dropping the stream cancels it.

use std::sync::Arc;
use std::time::Duration;

use super::handle::Place;
use crate::speculate::budget::Budget;
use crate::speculate::tree::Tree;

/// One generation. `n > 1` and lists of prompts are several requests.
pub struct Request {
    /// Token ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    pub sampling: Sampling,
    pub stop: Stop,
    /// Most tokens to generate, at least one. The engine clips it to the context limit.
    pub max_tokens: u32,
    /// Stop ids and stop strings are inactive (end-of-text ids are not even sampled) before this many tokens.
    pub min_tokens: u32,
    /// Rows verified per round; `None` = the server's setting.
    pub budget: Option<Budget>,
    /// `Some(k)`: report the log-probability of every generated token and of the `k` best (at most 20).
    pub logprobs: Option<u32>,
    /// `Some(k)`: the same for the prompt's tokens (the first has none), sent as `Event::Prompt`.
    pub prompt_logprobs: Option<u32>,
    /// Restricts which tokens may follow; asked at every node of the draft tree.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Send `Event::Round` after every round (the web page draws it).
    pub trace: bool,
}

/// How a token is chosen from the target's logits. The uniform of a position comes from (seed, position), so that a seeded
/// request gives the same text under every budget.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampling {
    /// 0 = greedy (ties to the lowest id).
    pub temperature: f32,
    /// Nucleus: smallest set of most probable tokens whose mass reaches this; 1 = off.
    pub top_p: f32,
    /// Keep the k most probable; 0 = off.
    pub top_k: u32,
    /// Keep tokens whose probability is at least this share of the best one's; 0 = off.
    pub min_p: f32,
    pub seed: u64,
    /// OpenAI: logit -= frequency * count + presence * (count > 0), counts over generated tokens.
    pub frequency_penalty: f32,
    pub presence_penalty: f32,
    /// vLLM/HF: positive logits of tokens seen in prompt or output are divided by it, negative ones multiplied; 1 = off.
    pub repetition_penalty: f32,
    /// Added to the logits before anything else.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Sampling {
    pub fn greedy() -> Self {
        Self {
            temperature: 0.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
        }
    }

    /// Whether the logits depend on which tokens came before (then each tree node has its own history).
    pub fn has_penalties(&self) -> bool {
        self.frequency_penalty != 0.0 || self.presence_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

/// When to stop besides `max_tokens`.
#[derive(Clone, Debug, Default)]
pub struct Stop {
    /// Further stop ids. The model's own end-of-text ids are added unless `ignore_eos`.
    pub ids: Vec<u32>,
    pub strings: Vec<String>,
    pub ignore_eos: bool,
    /// Keep the matched stop string (or the text of a stop id) in the text.
    pub include_in_output: bool,
}

/// Which tokens may come next, as a state machine over generated tokens (JSON schema, tool arguments ...).
/// The engine calls it on its own thread; one round = one `mask_tree`, then `commit` for each emitted token.
pub trait Constraint: Send {
    /// For every row of a draft tree the set of tokens allowed **after** that row, given everything committed so far and the
    /// row's own path. Row 0 is the last committed token (already committed, not to be consumed again). `tokens[i]` and
    /// `parents[i]` (`parents[i] < i`) describe the tree. `masks` holds `tokens.len() * words` words, bit t of row i = token t
    /// allowed; arrives zeroed. A row whose own token is not allowed gets an all-ones mask (it can never be reached).
    fn mask_tree(&mut self, tokens: &[u32], parents: &[u8], words: usize, masks: &mut [u32]) -> Result<(), String>;
    /// A token was emitted. Returns true when nothing may follow but the end of the turn.
    fn commit(&mut self, token: u32) -> Result<bool, String>;
}

/// One emitted token.
#[derive(Clone, Debug)]
pub struct Token {
    pub id: u32,
    /// Text that became certain with this token: may be empty (half a character, a possible stop string) and may hold what earlier
    /// tokens held back. Control tokens give no text of their own, only what was held back before them; who wants to show one
    /// appends its name after this text. The concatenation over a request is its text.
    pub text: String,
    pub logprob: Option<TokenLogprob>,
}

/// Natural-log probabilities under the target's own distribution (before temperature, penalties and bias).
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprob {
    pub token: u32,
    pub logprob: f32,
    /// Rank among the vocabulary, 1 = most probable.
    pub rank: u32,
    /// The best tokens, most probable first.
    pub top: Vec<(u32, f32)>,
}

/// The tree of one round, for display.
#[derive(Clone, Debug)]
pub struct RoundTrace {
    /// Rows in verification order; row 0 is the anchor.
    pub tokens: Vec<u32>,
    pub parents: Vec<u8>,
    /// Rows accepted this round, root first.
    pub path: Vec<u8>,
    /// The target's own token after the last accepted row.
    pub bonus: u32,
    pub round_us: u64,
}

#[derive(Debug)]
pub enum Event {
    /// The request left the queue.
    Started {
        prompt_tokens: u32,
        cached_tokens: u32,
        queued: Duration,
    },
    /// One entry per prompt token; only when asked for.
    Prompt(Vec<Option<TokenLogprob>>),
    Tokens(Vec<Token>),
    Round(RoundTrace),
    Finished(Finished),
    Failed(Failure),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// End-of-text id, stop id or stop string.
    Stop,
    /// `max_tokens` or the context limit.
    Length,
    /// Cancelled by the client or by a stop of the server.
    Abort,
}

/// What made a request stop, as vLLM's `stop_reason` reports it; end-of-text = `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StopMatch {
    Id(u32),
    Text(String),
}

#[derive(Clone, Debug)]
pub struct Finished {
    pub reason: FinishReason,
    pub stop_match: Option<StopMatch>,
    pub prompt_tokens: u32,
    pub cached_tokens: u32,
    pub completion_tokens: u32,
    pub speculation: Speculation,
    pub timing: Timing,
}

impl Finished {
    /// Cancelled before anything was computed.
    pub fn aborted(prompt_tokens: usize) -> Self {
        Self {
            reason: FinishReason::Abort,
            stop_match: None,
            prompt_tokens: prompt_tokens as u32,
            cached_tokens: 0,
            completion_tokens: 0,
            speculation: Speculation::default(),
            timing: Timing::default(),
        }
    }
}

/// Counts of one request's rounds. Mean acceptance length = 1 + accepted / rounds (the bonus token counts).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Speculation {
    pub rounds: u64,
    /// Drafted nodes sent to verification (roots not counted).
    pub drafted: u64,
    /// Drafted nodes accepted.
    pub accepted: u64,
    /// `histogram[d]` = rounds that accepted exactly `d` drafted tokens.
    pub histogram: Vec<u64>,
}

#[derive(Clone, Debug, Default)]
pub struct Timing {
    pub queued: Duration,
    pub prefill: Duration,
    pub decode: Duration,
}

/// Why a request ended without a result. `kind` decides the HTTP status.
#[derive(Clone, Debug, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    pub kind: FailureKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The request itself (a constraint that cannot be met, an id outside the vocabulary).
    Request,
    /// NaN logits or another fault of the model or the device; the engine lives on.
    Model,
    /// The engine thread is gone.
    EngineDead,
}

/// Why a request was not accepted. Nothing was queued.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Refused {
    #[error("the queue is full ({waiting} requests waiting)")]
    QueueFull { waiting: usize, retry_after: Duration },
    #[error("prompt of {prompt} tokens and {max_tokens} to generate exceed the context of {limit} tokens")]
    ContextLength { prompt: usize, max_tokens: u32, limit: usize },
    /// It fits the context limit but not the KV cache: it would wait for ever.
    #[error("the request needs {needed} KV slots, the KV capacity is {slots}")]
    KvCapacity { needed: usize, slots: usize },
    #[error("{0}")]
    Invalid(String),
    #[error("the server is shutting down")]
    Draining,
    #[error("the engine is not running: {0}")]
    Dead(String),
}

/// The receiving end of one request. Dropping it cancels the request at the next round boundary, and frees its place in the queue at once.
pub struct EventStream {
    pub(crate) events: tokio::sync::mpsc::UnboundedReceiver<Event>,
    pub(crate) place: Arc<Place>,
}

impl EventStream {
    /// The next event; `None` only after the terminal one (or when the engine died without sending it).
    pub async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// The same for threads without an async runtime.
    pub fn next_blocking(&mut self) -> Option<Event> {
        self.events.blocking_recv()
    }

    /// Asks the engine to stop this request at the next round boundary; the terminal event still arrives.
    pub fn cancel(&self) {
        self.place.cancel();
    }
}

impl Drop for EventStream {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// Facts about the loaded model that clients of the engine need.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Name under which the model is served.
    pub name: String,
    pub vocab_size: usize,
    /// Longest prompt plus output, in tokens.
    pub max_model_len: usize,
    /// Ids that end a turn or text.
    pub stop_ids: Vec<u32>,
    /// Most rows verified per request and round.
    pub max_rows: usize,
    /// Requests that can run at once.
    pub max_running: usize,
    /// KV slots, in tokens.
    pub kv_slots: usize,
}

/// What the engine tells about itself while it works. The server turns it into metrics; tests count with it.
/// Called on the engine thread: implementations must be cheap and must not block.
pub trait Observer: Send + Sync {
    fn round(&self, _report: &RoundReport) {}
    /// What one request verified in a round that is over: its tree with the drafter's path probabilities, and the accepted rows.
    fn draft(&self, _tree: &Tree, _path: &[u8]) {}
    fn prefill(&self, _tokens: usize, _took: Duration) {}
    fn queue(&self, _waiting: usize, _running: usize) {}
    fn finished(&self, _finished: &Finished) {}
    fn failed(&self, _failure: &Failure) {}
    /// KV slots held by running requests, and slots only the prefix cache holds (free to be taken). Called whenever they changed,
    /// the end of the last request included: at rest `held` must read 0.
    fn kv(&self, _held: usize, _cached: usize) {}
}

/// One round over every running request.
#[derive(Clone, Debug, Default)]
pub struct RoundReport {
    pub requests: usize,
    /// Rows verified, roots included.
    pub rows: usize,
    pub tokens: usize,
    pub took: Duration,
    pub kv_slots_used: usize,
    /// Per request: (rows verified = budget chosen, accepted drafted tokens).
    pub accepted: Vec<(u16, u16)>,
    /// Only in mode `validate`: per layer, worst of the round.
    pub validation: Vec<LayerDiff>,
}

/// Baseline against custom verify attention, one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct LayerDiff {
    pub max_abs: f32,
    /// Largest distance in units of the last place of bf16.
    pub max_ulp: u32,
    pub cosine: f64,
    /// Rows whose largest component sits at the same place in both outputs, and rows compared.
    pub argmax_equal: u64,
    pub rows: u64,
}

impl LayerDiff {
    /// Keeps the worst of each layer.
    pub fn keep_worst(worst: &mut Vec<Self>, new: &[Self]) {
        worst.resize(worst.len().max(new.len()), Self { cosine: 1.0, ..Self::default() });
        for (worst, new) in worst.iter_mut().zip(new) {
            worst.max_abs = worst.max_abs.max(new.max_abs);
            worst.max_ulp = worst.max_ulp.max(new.max_ulp);
            worst.cosine = worst.cosine.min(new.cosine);
            worst.argmax_equal += new.argmax_equal;
            worst.rows += new.rows;
        }
    }
}
