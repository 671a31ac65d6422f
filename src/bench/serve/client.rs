//! One HTTP client of an OpenAI server, over plain HTTP with kept connections. Also used by `kdtree wait`.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_TYPE};
use hyper::{Method, Request, Response, Uri};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Largest answer that is read, in bytes.
const MAX_ANSWER: usize = 64 << 20;

/// An HTTP client of one server, with its key and how long an answer may take.
pub struct Client {
    http: hyper_util::client::legacy::Client<HttpConnector, Full<Bytes>>,
    base: String,
    key: Option<String>,
    timeout: Duration,
}

/// How one request went; all durations count from when it was due.
#[derive(Clone, Debug)]
pub enum Outcome {
    Done {
        first: Duration,
        /// Between one delivery of tokens and the next.
        gaps: Vec<Duration>,
        total: Duration,
        prompt_tokens: u64,
        completion_tokens: u64,
        /// From the server's `metrics.speculative_decoding`, if it sends that: accepted drafted tokens and rounds.
        speculation: Option<(u64, u64)>,
    },
    Failed(String),
}

impl Client {
    /// `url` is `http://HOST[:PORT]`, with or without `/v1`.
    pub fn new(url: &str, key: Option<String>, timeout: Duration) -> anyhow::Result<Self> {
        let parsed: Uri = url.parse().with_context(|| format!("URL {url:?}"))?;
        if parsed.scheme_str() != Some("http") || parsed.host().is_none() {
            bail!("URL {url:?}: wanted http://HOST:PORT (put a proxy in front for TLS)");
        }
        let base = url.trim_end_matches('/').trim_end_matches("/v1").to_owned();
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        connector.set_connect_timeout(Some(timeout));
        let http = hyper_util::client::legacy::Client::builder(TokioExecutor::new()).build(connector);
        Ok(Self { http, base, key, timeout })
    }

    async fn send(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(format!("{}{path}", self.base)).header(CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(AUTHORIZATION, format!("Bearer {key}"));
        }
        let body = body.map_or_else(Bytes::new, |body| body.to_string().into());
        Ok(self.http.request(request.body(Full::new(body))?).await?)
    }

    /// Status and JSON of a short answer, within the client's time.
    pub async fn json(&self, method: Method, path: &str, body: Option<&Value>) -> anyhow::Result<(u16, Value)> {
        let exchange = async {
            let response = self.send(method, path, body).await?;
            let status = response.status().as_u16();
            let bytes = http_body_util::Limited::new(response.into_body(), MAX_ANSWER)
                .collect()
                .await
                .map_err(anyhow::Error::from_boxed)?
                .to_bytes();
            let value = serde_json::from_slice(&bytes).with_context(|| format!("status {status}, and the answer is not JSON"))?;
            Ok((status, value))
        };
        match tokio::time::timeout(self.timeout, exchange).await {
            Ok(result) => result,
            Err(_) => bail!("no answer within {} s", self.timeout.as_secs_f64()),
        }
    }

    /// Body of a successful GET, within the client's time.
    pub async fn text(&self, path: &str) -> anyhow::Result<String> {
        let exchange = async {
            let response = self.send(Method::GET, path, None).await?;
            let status = response.status();
            if !status.is_success() {
                bail!("{path} answered {}", status.as_u16());
            }
            let body = http_body_util::Limited::new(response.into_body(), MAX_ANSWER).collect().await.map_err(anyhow::Error::from_boxed)?;
            Ok(String::from_utf8_lossy(&body.to_bytes()).into_owned())
        };
        match tokio::time::timeout(self.timeout, exchange).await {
            Ok(result) => result,
            Err(_) => bail!("{path}: no answer within {} s", self.timeout.as_secs_f64()),
        }
    }

    /// Name of the first model.
    pub async fn first_model(&self) -> anyhow::Result<String> {
        let (status, models) = self.json(Method::GET, "/v1/models", None).await?;
        let name = models.pointer("/data/0/id").and_then(Value::as_str);
        name.map(str::to_owned).with_context(|| format!("/v1/models answered {status} and names no model: {}", short(&models.to_string())))
    }

    /// One streamed chat, timed from `due`.
    pub async fn chat(&self, body: &Value, due: Instant) -> Outcome {
        let exchange = self.stream(body, due);
        match tokio::time::timeout(self.timeout, exchange).await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => Outcome::Failed(format!("{error:#}")),
            Err(_) => Outcome::Failed(format!("no end within {} s", self.timeout.as_secs_f64())),
        }
    }

    async fn stream(&self, body: &Value, due: Instant) -> anyhow::Result<Outcome> {
        let response = self.send(Method::POST, "/v1/chat/completions", Some(body)).await?;
        let status = response.status();
        let mut incoming = response.into_body();
        if !status.is_success() {
            let bytes = incoming.collect().await?.to_bytes();
            bail!("status {}: {}", status.as_u16(), short(&String::from_utf8_lossy(&bytes)));
        }
        let mut stream = Stream::new(due);
        while let Some(frame) = incoming.frame().await {
            if let Ok(data) = frame?.into_data() {
                stream.take(&data)?;
            }
        }
        stream.end()
    }
}

fn short(text: &str) -> String {
    text.chars().take(200).collect()
}

/// Reads one event stream as it arrives.
struct Stream {
    due: Instant,
    rest: Vec<u8>,
    first: Option<Instant>,
    last: Instant,
    gaps: Vec<Duration>,
    usage: Option<(u64, u64)>,
    speculation: Option<(u64, u64)>,
    finished: bool,
    done: bool,
}

impl Stream {
    fn new(due: Instant) -> Self {
        Self {
            due,
            rest: Vec::new(),
            first: None,
            last: due,
            gaps: Vec::new(),
            usage: None,
            speculation: None,
            finished: false,
            done: false,
        }
    }

    fn take(&mut self, data: &[u8]) -> anyhow::Result<()> {
        let now = Instant::now();
        self.rest.extend_from_slice(data);
        while let Some(end) = self.rest.windows(2).position(|pair| pair == b"\n\n") {
            let block: Vec<u8> = self.rest.drain(..end + 2).collect();
            let Some(payload) = block.strip_prefix(b"data: ") else { continue };
            let payload = payload.trim_ascii_end();
            if payload == b"[DONE]" {
                self.done = true;
                continue;
            }
            let chunk: Value = serde_json::from_slice(payload).context("an event is not JSON")?;
            self.chunk(&chunk, now)?;
        }
        Ok(())
    }

    fn chunk(&mut self, chunk: &Value, now: Instant) -> anyhow::Result<()> {
        if let Some(error) = chunk.get("error") {
            bail!("error event: {}", short(&error.to_string()));
        }
        let count = |name: &str| chunk.pointer(&format!("/usage/{name}")).and_then(Value::as_u64);
        if let (Some(prompt), Some(completion)) = (count("prompt_tokens"), count("completion_tokens")) {
            self.usage = Some((prompt, completion));
        }
        let spec = |name: &str| chunk.pointer(&format!("/metrics/speculative_decoding/{name}")).and_then(Value::as_u64);
        if let (Some(accepted), Some(steps)) = (spec("num_accepted_draft_tokens"), spec("num_spec_steps")) {
            self.speculation = Some((accepted, steps));
        }
        let Some(choice) = chunk.pointer("/choices/0") else { return Ok(()) };
        self.finished |= choice.get("finish_reason").is_some_and(|reason| !reason.is_null());
        let delta = choice.get("delta");
        let says = |name: &str| delta.and_then(|delta| delta.get(name)).is_some_and(|value| value.as_str() != Some("") && !value.is_null());
        if says("content") || says("reasoning_content") || says("reasoning") || says("tool_calls") {
            match self.first {
                None => self.first = Some(now),
                Some(_) => self.gaps.push(now - self.last),
            }
            self.last = now;
        }
        Ok(())
    }

    fn end(self) -> anyhow::Result<Outcome> {
        if !self.finished || !self.done {
            bail!("the stream ended without a finish reason and [DONE]");
        }
        let total = self.due.elapsed();
        let (prompt_tokens, completion_tokens) = self.usage.context("the stream told no usage")?;
        let first = self.first.map_or(total, |first| first - self.due);
        Ok(Outcome::Done { first, gaps: self.gaps, total, prompt_tokens, completion_tokens, speculation: self.speculation })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_cut_anywhere_is_read_and_a_broken_one_is_an_error() {
        let whole =
            b"data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n: keep-alive\n\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"a\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"delta\":{\"content\":\"b\"},\"finish_reason\":null}]}\n\n\
            data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n\
            data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\ndata: [DONE]\n\n";
        for size in [1, 7, 1000] {
            let mut stream = Stream::new(Instant::now());
            whole.chunks(size).for_each(|part| stream.take(part).unwrap());
            let Ok(Outcome::Done { gaps, prompt_tokens, completion_tokens, .. }) = stream.end() else { panic!("not done") };
            assert_eq!((gaps.len(), prompt_tokens, completion_tokens), (1, 3, 2));
        }
        let mut cut = Stream::new(Instant::now());
        cut.take(&whole[..150]).unwrap();
        assert!(cut.end().unwrap_err().to_string().contains("without"));
        let mut failed = Stream::new(Instant::now());
        assert!(failed.take(b"data: {\"error\":{\"message\":\"x\"}}\n\n").unwrap_err().to_string().contains("error event"));
    }

    #[test]
    fn only_plain_http_urls_are_taken() {
        for url in ["https://host", "host:80", "", "http://"] {
            assert!(Client::new(url, None, Duration::from_secs(1)).is_err(), "{url}");
        }
        assert_eq!(Client::new("http://127.0.0.1:8000/v1/", None, Duration::from_secs(1)).unwrap().base, "http://127.0.0.1:8000");
    }
}
