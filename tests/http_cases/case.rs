//! A case of `tests/cases/http.jsonl` and the requests it makes.

use serde_json::{Value, json};

use crate::http_support::wire::Request;

pub const MODEL: &str = "k26-mini";
pub const KEY: &str = "test-key-of-the-cases";

#[derive(Clone, Debug, serde::Deserialize)]
pub struct Case {
    pub id: String,
    pub case: String,
    pub method: String,
    pub path: String,
    #[serde(default)]
    pub headers: serde_json::Map<String, Value>,
    pub body: Value,
    pub raw: Option<String>,
    pub raw_b64: Option<String>,
    #[serde(default)]
    pub fill: Vec<Fill>,
    pub times: Option<usize>,
    pub parallel: Option<String>,
    pub client: Option<String>,
    pub setup: Option<String>,
    pub run_on: Option<String>,
    pub expect: Expect,
}

#[derive(Clone, Debug, serde::Deserialize)]
pub struct Fill {
    pub at: String,
    pub text: Option<String>,
    pub id: Option<u32>,
    pub times: usize,
}

#[derive(Clone, Debug, serde::Deserialize)]
pub struct Expect {
    pub status: Value,
    pub checks: Vec<String>,
}

impl Expect {
    pub fn allows(&self, status: u16) -> bool {
        match &self.status {
            Value::Array(list) => list.iter().any(|one| one == &json!(status)),
            one => one == &json!(status),
        }
    }
}

pub fn all() -> Vec<Case> {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/cases/http.jsonl");
    let text = std::fs::read_to_string(file).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error} in {line}"))).collect()
}

impl Case {
    /// The request as written in the file.
    pub fn request(&self) -> Request {
        self.request_with(&json!({}))
    }

    /// The same with further fields of the body.
    pub fn request_with(&self, extra: &Value) -> Request {
        let mut body = self.body.clone();
        let mut raw = self.raw.clone();
        let mut request = Request { method: self.method.clone(), path: self.path.clone(), ..Request::default() };
        for (name, value) in &self.headers {
            request.headers.push((name.clone(), value.as_str().unwrap_or("").replace("$KEY", KEY)));
        }
        for fill in &self.fill {
            let text = || fill.text.clone().unwrap_or_default().repeat(fill.times);
            if let Some(header) = fill.at.strip_prefix("header:") {
                request.headers.push((header.into(), text()));
            } else if fill.at == "raw" {
                raw = Some(raw.unwrap_or_default() + &text());
            } else {
                let place = body.pointer_mut(&fill.at).unwrap_or_else(|| panic!("{}: no {}", self.id, fill.at));
                *place = match fill.id {
                    Some(id) => json!(vec![id; fill.times]),
                    None => json!(text()),
                };
            }
        }
        if let (Some(fields), Some(more)) = (body.as_object_mut(), extra.as_object()) {
            fields.extend(more.clone());
        }
        request.body = match (&raw, &self.raw_b64) {
            (Some(text), _) => text.replace("$MODEL", MODEL).into_bytes(),
            (None, Some(encoded)) => base64(encoded),
            (None, None) if body.is_null() => Vec::new(),
            (None, None) => body.to_string().replace("$MODEL", MODEL).into_bytes(),
        };
        request
    }
}

/// Standard base64 with padding, for the one body that is no UTF-8.
fn base64(text: &str) -> Vec<u8> {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut bytes = Vec::new();
    let (mut bits, mut count) = (0u32, 0);
    for letter in text.bytes().filter(|letter| *letter != b'=') {
        let value = ALPHABET.iter().position(|known| *known == letter).expect("a base64 letter") as u32;
        bits = bits << 6 | value;
        count += 6;
        if count >= 8 {
            count -= 8;
            bytes.push((bits >> count) as u8);
            bits &= (1 << count) - 1;
        }
    }
    bytes
}

/// "What is the capital of France?", the canary after every case.
pub fn france(extra: Value) -> Value {
    chat("What is the capital of France?", 16, extra)
}

pub fn primes(extra: Value) -> Value {
    chat("List the first ten prime numbers.", 48, extra)
}

fn chat(question: &str, max_tokens: u32, extra: Value) -> Value {
    let mut body = json!({"model": MODEL, "messages": [{"role": "user", "content": question}], "temperature": 0,
        "max_tokens": max_tokens, "chat_template_kwargs": {"thinking": false}});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

pub const FRANCE: &str = "The capital of France is Paris.";
pub const PRIMES: &str = "The first ten prime numbers are 2, 3, 5, 7, 11, 13, 17, 19, 23, 29.";
