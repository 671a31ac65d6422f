//! HTTP/1.1 by hand over a socket: the tests look at bytes, times and what happens when a client leaves, which a client library hides.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A request as it goes over the wire.
#[derive(Clone, Debug, Default)]
pub struct Request {
    pub method: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Request {
    pub fn get(path: &str) -> Self {
        Self { method: "GET".into(), path: path.into(), ..Self::default() }
    }

    pub fn post(path: &str, body: &Value) -> Self {
        let headers = vec![("Content-Type".into(), "application/json".into())];
        Self { method: "POST".into(), path: path.into(), headers, body: body.to_string().into_bytes() }
    }

    pub fn header(mut self, name: &str, value: &str) -> Self {
        self.headers.push((name.into(), value.into()));
        self
    }

    pub fn bytes(&self, address: SocketAddr) -> Vec<u8> {
        let mut head = format!("{} {} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n", self.method, self.path);
        for (name, value) in &self.headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        if !self.body.is_empty() || self.method == "POST" {
            head.push_str(&format!("Content-Length: {}\r\n", self.body.len()));
        }
        head.push_str("\r\n");
        let mut bytes = head.into_bytes();
        bytes.extend_from_slice(&self.body);
        bytes
    }
}

/// When a client leaves before the end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Leave {
    Never,
    /// After so many events of a stream.
    AfterEvents(usize),
    /// So long after sending.
    After(Duration),
}

/// An answer, and when its parts came (counted from the moment the request was sent).
#[derive(Clone, Debug, Default)]
pub struct Answer {
    /// 0: none came.
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    pub head_after: Duration,
    pub arrivals: Vec<Duration>,
    /// The arrivals that brought an event and not only a comment that keeps the connection alive.
    pub event_arrivals: Vec<Duration>,
    pub total: Duration,
}

/// Sends a request on a fresh connection and reads the answer to its end, or leaves before.
pub fn exchange(address: SocketAddr, request: &Request, leave: Leave) -> io::Result<Answer> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(Duration::from_millis(match leave {
        Leave::After(_) => 5,
        _ => 1_800_000,
    })))?;
    let sent = Instant::now();
    // A server may answer and close before a large request is written; what counts is whether its answer can be read.
    let _ = stream.write_all(&request.bytes(address));
    let mut reader = Reader { stream, sent, buffer: Vec::new(), answer: Answer::default(), leave };
    reader.read()?;
    reader.answer.total = sent.elapsed();
    Ok(reader.answer)
}

struct Reader {
    stream: TcpStream,
    sent: Instant,
    buffer: Vec<u8>,
    answer: Answer,
    leave: Leave,
}

impl Reader {
    fn read(&mut self) -> io::Result<()> {
        let Some(head) = self.head()? else { return Ok(()) };
        let mut lines = head.split("\r\n");
        let status = lines.next().and_then(|line| line.split(' ').nth(1)).and_then(|code| code.parse().ok());
        self.answer.status = status.ok_or_else(|| io::Error::other(format!("no status in {head:?}")))?;
        self.answer.headers =
            lines.filter_map(|line| line.split_once(": ")).map(|(name, value)| (name.to_ascii_lowercase(), value.into())).collect();
        self.answer.head_after = self.sent.elapsed();
        let chunked = self.answer.header("transfer-encoding") == Some("chunked");
        let length = self.answer.header("content-length").and_then(|length| length.parse().ok());
        if chunked { self.chunked() } else { self.fixed(length) }
    }

    /// More bytes; false at the end of the connection or when it is time to leave.
    fn more(&mut self) -> io::Result<bool> {
        loop {
            if let Leave::After(limit) = self.leave
                && self.sent.elapsed() >= limit
            {
                return Ok(false);
            }
            let mut part = [0; 16 << 10];
            match self.stream.read(&mut part) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.buffer.extend_from_slice(&part[..count]);
                    return Ok(true);
                }
                Err(error) if matches!(self.leave, Leave::After(_)) && error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !self.buffer.is_empty() => return Ok(false),
                Err(error) => return Err(error),
            }
        }
    }

    fn head(&mut self) -> io::Result<Option<String>> {
        loop {
            if let Some(end) = find(&self.buffer, b"\r\n\r\n") {
                let head: Vec<u8> = self.buffer.drain(..end + 4).collect();
                return Ok(Some(String::from_utf8_lossy(&head[..end]).into_owned()));
            }
            if !self.more()? {
                return Ok(None);
            }
        }
    }

    fn fixed(&mut self, length: Option<usize>) -> io::Result<()> {
        while length.is_none_or(|length| self.buffer.len() < length) && self.more()? {}
        self.answer.body = std::mem::take(&mut self.buffer);
        Ok(())
    }

    fn chunked(&mut self) -> io::Result<()> {
        loop {
            while let Some(end) = find(&self.buffer, b"\r\n") {
                let size = std::str::from_utf8(&self.buffer[..end]).ok().and_then(|text| usize::from_str_radix(text.trim(), 16).ok());
                let size = size.ok_or_else(|| io::Error::other("a chunk without a size"))?;
                if self.buffer.len() < end + 2 + size + 2 {
                    break;
                }
                let chunk = &self.buffer[end + 2..end + 2 + size];
                self.answer.body.extend_from_slice(chunk);
                let now = self.sent.elapsed();
                self.answer.arrivals.push(now);
                if find(chunk, b"data: ").is_some() {
                    self.answer.event_arrivals.push(now);
                }
                self.buffer.drain(..end + 2 + size + 2);
                if size == 0 {
                    return Ok(());
                }
                if let Leave::AfterEvents(count) = self.leave
                    && self.answer.events().len() >= count
                {
                    return Ok(());
                }
            }
            if !self.more()? {
                return Ok(());
            }
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The longest time between two moments, the one before the first included.
fn longest_gap<'a>(moments: impl IntoIterator<Item = &'a Duration>) -> Duration {
    let (mut last, mut longest) = (Duration::ZERO, Duration::ZERO);
    for moment in moments {
        longest = longest.max(moment.saturating_sub(last));
        last = *moment;
    }
    longest
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub fn is_stream(&self) -> bool {
        self.header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"))
    }

    /// The body as strict JSON; `Null` when it is none.
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or(Value::Null)
    }

    /// The data of all events, in order, `[DONE]` included.
    pub fn events(&self) -> Vec<String> {
        let text = self.text();
        text.split("\n\n").filter_map(|block| block.strip_prefix("data: ")).map(str::to_owned).collect()
    }

    /// The events that are JSON.
    pub fn chunks(&self) -> Vec<Value> {
        self.events().iter().filter_map(|data| serde_json::from_str(data).ok()).collect()
    }

    /// The longest time without a byte, the one before the first byte included.
    pub fn longest_silence(&self) -> Duration {
        longest_gap(std::iter::once(&self.head_after).chain(&self.arrivals))
    }

    /// The longest time without an event; comments that keep the connection alive are none.
    pub fn longest_wait_for_an_event(&self) -> Duration {
        longest_gap(&self.event_arrivals)
    }

    /// The choices' texts: content of a chat, text of a completion; joined over a stream.
    pub fn texts(&self) -> Vec<String> {
        let mut texts: Vec<String> = Vec::new();
        let mut add = |choice: &Value| {
            let index = choice["index"].as_u64().unwrap_or(0) as usize;
            if texts.len() <= index {
                texts.resize(index + 1, String::new());
            }
            for place in ["/message/content", "/delta/content", "/text"] {
                texts[index].push_str(choice.pointer(place).and_then(Value::as_str).unwrap_or(""));
            }
        };
        if self.is_stream() {
            self.chunks().iter().flat_map(|chunk| chunk["choices"].as_array().cloned().unwrap_or_default()).for_each(|choice| add(&choice));
        } else {
            self.json()["choices"].as_array().into_iter().flatten().for_each(&mut add);
        }
        texts
    }

    /// The first choice's text.
    pub fn content(&self) -> String {
        self.texts().into_iter().next().unwrap_or_default()
    }

    /// The first choice's reasoning.
    pub fn reasoning(&self) -> String {
        if !self.is_stream() {
            return self.json().pointer("/choices/0/message/reasoning_content").and_then(Value::as_str).unwrap_or("").into();
        }
        let chunks = self.chunks();
        chunks.iter().filter_map(|chunk| chunk.pointer("/choices/0/delta/reasoning_content").and_then(Value::as_str)).collect()
    }

    /// All finish reasons told, in order.
    pub fn finishes(&self) -> Vec<String> {
        let choices: Vec<Value> = if self.is_stream() {
            self.chunks().iter().flat_map(|chunk| chunk["choices"].as_array().cloned().unwrap_or_default()).collect()
        } else {
            self.json()["choices"].as_array().cloned().unwrap_or_default()
        };
        choices.iter().filter_map(|choice| choice["finish_reason"].as_str().map(str::to_owned)).collect()
    }

    /// Usage, wherever it was told.
    pub fn usage(&self) -> Value {
        if self.is_stream() {
            return self.chunks().iter().rev().map(|chunk| chunk["usage"].clone()).find(|usage| !usage.is_null()).unwrap_or_default();
        }
        self.json()["usage"].clone()
    }

    pub fn error_message(&self) -> String {
        self.json().pointer("/error/message").and_then(Value::as_str).unwrap_or("").into()
    }

    pub fn error_code(&self) -> String {
        self.json().pointer("/error/code").and_then(Value::as_str).unwrap_or("").into()
    }
}
