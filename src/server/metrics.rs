//! Metrics: vLLM's names, so that existing dashboards and load tools read them, and our own under `kdtree:`.
//!
//! The engine reports through [`Observer`] while it works, so counters advance during generation; the server adds what only it
//! sees (time to first token, connections). Gauges of the queue are read from the engine handle when somebody scrapes.
//! Labels hold the served model's name and nothing a client sent.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use metrics::{Counter, Gauge, Histogram, Key, Label, Level, Metadata, Recorder, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use crate::engine::contract::{Failure, FinishReason, Finished, Observer, RoundReport};
use crate::engine::handle::EngineHandle;

const TTFT: &[f64] =
    &[0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0];
const INTER_TOKEN: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0];
const LATENCY: &[f64] = &[
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0,
    7680.0,
];
const TOKENS: &[f64] = &[1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5];
const ITERATION: &[f64] = &[1.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0];
const ROUND: &[f64] = &[0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0];
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0];
const DEPTH: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 12.0, 16.0, 32.0];

/// Positions for which accepted drafts are counted one by one, as vLLM does per speculative token.
const POSITIONS: usize = 32;

/// Why a request ended, as vLLM labels it.
#[derive(Clone, Copy)]
enum Ending {
    Stop,
    Length,
    Abort,
    Error,
}

const ENDINGS: [&str; 4] = ["stop", "length", "abort", "error"];

/// All metrics of one server. Registered once at the start; recording is an atomic addition or a push.
pub struct ServerMetrics {
    handle: PrometheusHandle,
    running: Gauge,
    waiting: Gauge,
    kv_usage: Gauge,
    kv_slots_held: Gauge,
    kv_slots_cached: Gauge,
    kv_slots_total: Gauge,
    connections: Gauge,
    connections_refused: Counter,
    prompt_tokens: Counter,
    generation_tokens: Counter,
    prefix_queries: Counter,
    prefix_hits: Counter,
    success: [Counter; 4],
    ttft: Histogram,
    inter_token: Histogram,
    per_output_token: Histogram,
    e2e: Histogram,
    queue_time: Histogram,
    prefill_time: Histogram,
    decode_time: Histogram,
    inference_time: Histogram,
    request_prompt_tokens: Histogram,
    request_generation_tokens: Histogram,
    iteration_tokens: Histogram,
    drafts: Counter,
    draft_tokens: Counter,
    accepted_tokens: Counter,
    accepted_at: Vec<Counter>,
    rounds: Counter,
    rows: Counter,
    round_seconds: Histogram,
    tokens_per_round: Histogram,
    accepted_depth: Histogram,
    budget_rows: Histogram,
    verify_mode: [Gauge; 3],
    gate_passed: Gauge,
    verify_max_abs: Gauge,
    verify_max_ulp: Gauge,
    verify_min_cosine: Gauge,
    verify_argmax_agreement: Gauge,
    http_requests: [Counter; 6],
    stream_bytes: Counter,
    token_overhead: Histogram,
    /// KV slots held, as last reported.
    held: AtomicUsize,
}

/// Registers metrics under one recorder, with descriptions.
struct Registry<'a> {
    recorder: &'a PrometheusRecorder,
}

const METADATA: Metadata<'static> = Metadata::new("kdtree", Level::INFO, None);

impl Registry<'_> {
    fn key(name: &'static str, label: Option<(&'static str, String)>) -> Key {
        match label {
            Some((key, value)) => Key::from_parts(name, vec![Label::new(key, value)]),
            None => Key::from_static_name(name),
        }
    }

    fn gauge(&self, name: &'static str, what: &'static str) -> Gauge {
        self.recorder.describe_gauge(name.into(), None::<Unit>, what.into());
        self.recorder.register_gauge(&Self::key(name, None), &METADATA)
    }

    fn gauge_of(&self, name: &'static str, what: &'static str, label: (&'static str, String)) -> Gauge {
        self.recorder.describe_gauge(name.into(), None, what.into());
        self.recorder.register_gauge(&Self::key(name, Some(label)), &METADATA)
    }

    fn counter(&self, name: &'static str, what: &'static str) -> Counter {
        self.recorder.describe_counter(name.into(), None, what.into());
        let counter = self.recorder.register_counter(&Self::key(name, None), &METADATA);
        // Seen from the first scrape on, so that a rate over the first minutes is right.
        counter.absolute(0);
        counter
    }

    fn counter_of(&self, name: &'static str, what: &'static str, label: (&'static str, String)) -> Counter {
        self.recorder.describe_counter(name.into(), None, what.into());
        let counter = self.recorder.register_counter(&Self::key(name, Some(label)), &METADATA);
        counter.absolute(0);
        counter
    }

    fn histogram(&self, name: &'static str, what: &'static str) -> Histogram {
        self.recorder.describe_histogram(name.into(), None, what.into());
        self.recorder.register_histogram(&Self::key(name, None), &METADATA)
    }
}

const BUCKETS: &[(&str, &[f64])] = &[
    ("vllm:time_to_first_token_seconds", TTFT),
    ("vllm:inter_token_latency_seconds", INTER_TOKEN),
    ("vllm:request_time_per_output_token_seconds", INTER_TOKEN),
    ("vllm:e2e_request_latency_seconds", LATENCY),
    ("vllm:request_queue_time_seconds", LATENCY),
    ("vllm:request_prefill_time_seconds", LATENCY),
    ("vllm:request_decode_time_seconds", LATENCY),
    ("vllm:request_inference_time_seconds", LATENCY),
    ("vllm:request_prompt_tokens", TOKENS),
    ("vllm:request_generation_tokens", TOKENS),
    ("vllm:iteration_tokens_total", ITERATION),
    ("kdtree:round_seconds", ROUND),
    ("kdtree:tokens_per_round", DEPTH),
    ("kdtree:accepted_depth", DEPTH),
    ("kdtree:budget_rows", ROWS),
    ("kdtree:server_token_overhead_seconds", &[1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 1e-2]),
];

impl ServerMetrics {
    /// `model` is the served name, the only label value besides fixed words.
    pub fn new(model: &str) -> Self {
        let mut builder = PrometheusBuilder::new().add_global_label("model_name", model).add_global_label("engine", "0");
        for (name, buckets) in BUCKETS {
            builder = builder.set_buckets_for_metric(Matcher::Full((*name).into()), buckets).expect("the bucket lists are not empty");
        }
        let recorder = builder.build_recorder();
        let r = Registry { recorder: &recorder };
        let mode = |mode: &str| r.gauge_of("kdtree:verify_mode", "1 for the verify mode in force.", ("mode", mode.into()));
        Self {
            handle: recorder.handle(),
            running: r.gauge("vllm:num_requests_running", "Requests being generated."),
            waiting: r.gauge("vllm:num_requests_waiting", "Requests waiting in the queue."),
            kv_usage: r.gauge("vllm:kv_cache_usage_perc", "Share of KV slots held by running requests; 1 = all."),
            kv_slots_held: r.gauge("kdtree:kv_slots_held", "KV slots held by running requests, in tokens."),
            kv_slots_cached: r.gauge("kdtree:kv_slots_cached", "KV slots only the prefix cache holds, in tokens; free to be taken."),
            kv_slots_total: r.gauge("kdtree:kv_slots_total", "KV slots there are, in tokens."),
            connections: r.gauge("kdtree:connections", "Open HTTP connections."),
            connections_refused: r.counter("kdtree:connections_refused_total", "Connections turned away over the limit."),
            prompt_tokens: r.counter("vllm:prompt_tokens_total", "Prompt tokens computed."),
            generation_tokens: r.counter("vllm:generation_tokens_total", "Tokens generated."),
            prefix_queries: r.counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache."),
            prefix_hits: r.counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache."),
            success: ENDINGS.map(|ending| {
                let what = "Requests ended, by reason.";
                r.counter_of("vllm:request_success_total", what, ("finished_reason", ending.into()))
            }),
            ttft: r.histogram("vllm:time_to_first_token_seconds", "From the request's arrival to its first token."),
            inter_token: r.histogram("vllm:inter_token_latency_seconds", "Between two deliveries of tokens of one request."),
            per_output_token: r
                .histogram("vllm:request_time_per_output_token_seconds", "Decode time of a request per token after the first."),
            e2e: r.histogram("vllm:e2e_request_latency_seconds", "From the request's arrival to its end."),
            queue_time: r.histogram("vllm:request_queue_time_seconds", "Time in the queue."),
            prefill_time: r.histogram("vllm:request_prefill_time_seconds", "Time computing the prompt."),
            decode_time: r.histogram("vllm:request_decode_time_seconds", "Time generating."),
            inference_time: r.histogram("vllm:request_inference_time_seconds", "Prompt and generation together."),
            request_prompt_tokens: r.histogram("vllm:request_prompt_tokens", "Prompt tokens of a request."),
            request_generation_tokens: r.histogram("vllm:request_generation_tokens", "Generated tokens of a request."),
            iteration_tokens: r.histogram("vllm:iteration_tokens_total", "Tokens emitted by one round over all requests."),
            drafts: r.counter("vllm:spec_decode_num_drafts_total", "Drafts made."),
            draft_tokens: r.counter("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens verified."),
            accepted_tokens: r.counter("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens accepted."),
            accepted_at: (0..POSITIONS)
                .map(|position| {
                    let what = "Drafts whose token at this depth was accepted.";
                    r.counter_of("vllm:spec_decode_num_accepted_tokens_per_pos_total", what, ("position", position.to_string()))
                })
                .collect(),
            rounds: r.counter("kdtree:rounds_total", "Rounds run."),
            rows: r.counter("kdtree:rows_verified_total", "Rows verified, roots included."),
            round_seconds: r.histogram("kdtree:round_seconds", "Time of one round."),
            tokens_per_round: r.histogram("kdtree:tokens_per_round", "Tokens one request got from one round, the bonus token included."),
            accepted_depth: r.histogram("kdtree:accepted_depth", "Drafted tokens accepted in one round of one request."),
            budget_rows: r.histogram("kdtree:budget_rows", "Rows chosen for one request in one round."),
            verify_mode: ["off", "validate", "on"].map(mode),
            gate_passed: r.gauge("kdtree:gate_passed", "1 = the rollout gate passed for what is served; 0 = it failed or did not run."),
            verify_max_abs: r.gauge("kdtree:verify_max_abs_diff", "Mode validate: largest difference of the last round, over layers."),
            verify_max_ulp: r.gauge("kdtree:verify_max_ulp", "Mode validate: largest difference in units of bf16's last place."),
            verify_min_cosine: r.gauge("kdtree:verify_min_cosine", "Mode validate: smallest cosine over layers."),
            verify_argmax_agreement: r
                .gauge("kdtree:verify_argmax_agreement", "Mode validate: share of rows with the same largest component."),
            http_requests: ["1xx", "2xx", "3xx", "4xx", "5xx", "left"]
                .map(|class| r.counter_of("kdtree:http_requests_total", "HTTP requests by class of status.", ("status", class.into()))),
            stream_bytes: r.counter("kdtree:stream_bytes_total", "Bytes of event streams handed to connections."),
            token_overhead: r
                .histogram("kdtree:server_token_overhead_seconds", "Server's own time per delivery of tokens: parsing and writing."),
            held: AtomicUsize::new(0),
        }
    }

    /// Which verify mode the engine runs in: `off`, `validate` or `on`.
    pub fn set_verify_mode(&self, mode: &str) {
        for (gauge, name) in self.verify_mode.iter().zip(["off", "validate", "on"]) {
            gauge.set(if name == mode { 1.0 } else { 0.0 });
        }
    }

    /// Whether the gate let the custom kernel serve.
    pub fn set_gate_passed(&self, passed: bool) {
        self.gate_passed.set(if passed { 1.0 } else { 0.0 });
    }

    /// The text of `/metrics`.
    pub fn render(&self, engine: &EngineHandle) -> String {
        self.running.set(engine.running() as f64);
        self.waiting.set(engine.waiting() as f64);
        let slots = engine.info().kv_slots;
        self.kv_slots_total.set(slots as f64);
        self.kv_usage.set(self.held.load(Ordering::Relaxed) as f64 / slots.max(1) as f64);
        self.handle.render()
    }

    /// Folds histogram samples into buckets. To be called every few seconds, or they would pile up between scrapes.
    pub fn upkeep(&self) {
        self.handle.run_upkeep();
    }

    pub(super) fn connections(&self, change: f64) {
        self.connections.increment(change);
    }

    pub(super) fn connection_refused(&self) {
        self.connections_refused.increment(1);
    }

    /// `None` = the client left before an answer.
    pub(super) fn answered(&self, status: Option<u16>) {
        let class = status.map_or(5, |status| usize::from(status / 100).clamp(1, 5) - 1);
        self.http_requests[class].increment(1);
    }

    pub(super) fn streamed(&self, bytes: usize, took: Duration) {
        self.stream_bytes.increment(bytes as u64);
        self.token_overhead.record(took);
    }

    pub(super) fn first_token(&self, after: Duration) {
        self.ttft.record(after);
    }

    pub(super) fn next_tokens(&self, after: Duration) {
        self.inter_token.record(after);
    }

    pub(super) fn prefix_lookup(&self, prompt: u32, cached: u32) {
        self.prefix_queries.increment(u64::from(prompt));
        self.prefix_hits.increment(u64::from(cached));
    }

    /// A request's end as its client sees it.
    pub(super) fn ended(&self, finished: &Finished, since_arrival: Duration) {
        self.e2e.record(since_arrival);
        self.queue_time.record(finished.timing.queued);
        self.prefill_time.record(finished.timing.prefill);
        self.decode_time.record(finished.timing.decode);
        self.inference_time.record(finished.timing.prefill + finished.timing.decode);
        if finished.completion_tokens > 1 {
            self.per_output_token.record(finished.timing.decode.as_secs_f64() / f64::from(finished.completion_tokens - 1));
        }
    }

    fn ending(&self, ending: Ending) {
        self.success[ending as usize].increment(1);
    }
}

impl Observer for ServerMetrics {
    fn round(&self, report: &RoundReport) {
        self.rounds.increment(1);
        self.rows.increment(report.rows as u64);
        self.round_seconds.record(report.took);
        self.generation_tokens.increment(report.tokens as u64);
        self.iteration_tokens.record(report.tokens as f64);
        for &(rows, accepted) in &report.accepted {
            self.budget_rows.record(f64::from(rows));
            self.accepted_depth.record(f64::from(accepted));
            self.tokens_per_round.record(f64::from(accepted) + 1.0);
            if rows > 1 {
                self.drafts.increment(1);
                self.draft_tokens.increment(u64::from(rows - 1));
                self.accepted_tokens.increment(u64::from(accepted));
                self.accepted_at.iter().take(usize::from(accepted)).for_each(|counter| counter.increment(1));
            }
        }
        if !report.validation.is_empty() {
            let layers = &report.validation;
            self.verify_max_abs.set(f64::from(layers.iter().map(|layer| layer.max_abs).fold(0.0, f32::max)));
            self.verify_max_ulp.set(f64::from(layers.iter().map(|layer| layer.max_ulp).max().unwrap_or(0)));
            self.verify_min_cosine.set(layers.iter().map(|layer| layer.cosine).fold(1.0, f64::min));
            let (equal, rows) = layers.iter().fold((0, 0), |(equal, rows), layer| (equal + layer.argmax_equal, rows + layer.rows));
            self.verify_argmax_agreement.set(if rows == 0 { 1.0 } else { equal as f64 / rows as f64 });
        }
    }

    fn prefill(&self, tokens: usize, _took: Duration) {
        self.prompt_tokens.increment(tokens as u64);
    }

    fn finished(&self, finished: &Finished) {
        self.ending(match finished.reason {
            FinishReason::Stop => Ending::Stop,
            FinishReason::Length => Ending::Length,
            FinishReason::Abort => Ending::Abort,
        });
        self.request_prompt_tokens.record(f64::from(finished.prompt_tokens));
        self.request_generation_tokens.record(f64::from(finished.completion_tokens));
    }

    fn failed(&self, _failure: &Failure) {
        self.ending(Ending::Error);
    }

    fn kv(&self, held: usize, cached: usize) {
        self.held.store(held, Ordering::Relaxed);
        self.kv_slots_held.set(held as f64);
        self.kv_slots_cached.set(cached as f64);
    }
}
