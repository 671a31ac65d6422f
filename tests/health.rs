//! `kdtree health` against servers that behave in one known way each: what counts as healthy, as busy, as refused and as dead.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// What the fake server answers to a completion.
#[derive(Clone, Copy)]
enum Completion {
    Status(u16, &'static str),
    /// Takes the request and says nothing.
    Silence,
}

struct Fake {
    completion: Completion,
    health: &'static str,
    /// Added to the token counter at each look at `/metrics`.
    pace: u64,
    tokens: AtomicU64,
}

impl Fake {
    fn start(completion: Completion, health: &'static str, pace: u64) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let fake = Arc::new(Self { completion, health, pace, tokens: AtomicU64::new(7) });
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let fake = fake.clone();
                std::thread::spawn(move || fake.answer(stream));
            }
        });
        url
    }

    fn answer(&self, mut stream: TcpStream) {
        let mut head = [0u8; 4096];
        let Ok(read) = stream.read(&mut head) else { return };
        let head = String::from_utf8_lossy(&head[..read]).into_owned();
        let (status, body) = match head.split_whitespace().nth(1) {
            Some("/metrics") => {
                let tokens = self.tokens.fetch_add(self.pace, Ordering::Relaxed);
                (200, format!("vllm:generation_tokens_total{{engine=\"0\"}} {tokens}\nvllm:prompt_tokens_total{{engine=\"0\"}} 3\n"))
            }
            Some("/health") => (503, format!("{{\"status\": \"{}\"}}", self.health)),
            _ => match self.completion {
                Completion::Status(status, body) => (status, body.to_string()),
                Completion::Silence => {
                    std::thread::sleep(Duration::from_secs(30));
                    return;
                }
            },
        };
        let _ = write!(stream, "HTTP/1.1 {status} X\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    }
}

fn health(url: &str, more: &[&str]) -> Output {
    let arguments = ["health", "--url", url, "--timeout", "0.5", "--attempts", "2", "--pause", "0.1"];
    Command::new(env!("CARGO_BIN_EXE_kdtree")).args(arguments).args(more).output().unwrap()
}

fn ends(completion: Completion, state: &'static str, pace: u64, status: i32, says: &str) {
    let output = health(&Fake::start(completion, state, pace), &[]);
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{said}");
    assert!(said.contains(says), "{said:?} does not say {says:?}");
}

const TOKENS: &str = r#"{"choices": [{"text": " 4, 5"}], "usage": {"completion_tokens": 3}}"#;

#[test]
fn a_server_that_completes_is_healthy() {
    ends(Completion::Status(200, TOKENS), "ok", 0, 0, "healthy: 3 tokens");
}

#[test]
fn a_busy_server_is_healthy() {
    ends(Completion::Silence, "ok", 5, 0, "5 tokens went through");
    ends(Completion::Status(429, "{}"), "ok", 0, 0, "429");
    ends(Completion::Status(503, "{}"), "loading", 0, 0, "it is loading");
    ends(Completion::Status(503, "{}"), "draining", 0, 0, "it is draining");
    ends(Completion::Status(503, r#"{"error": {"code": "too_many_connections"}}"#), "dead", 0, 0, "connections are taken");
}

#[test]
fn a_mute_or_dead_server_is_unhealthy_after_every_attempt() {
    ends(Completion::Silence, "ok", 0, 1, "unhealthy: 2 attempts");
    ends(Completion::Status(503, "{}"), "dead", 0, 1, "attempt 2 of 2");
    ends(Completion::Status(500, r#"{"error": {"message": "nan"}}"#), "ok", 0, 1, "status 500: nan");
    ends(Completion::Status(200, r#"{"usage": {"completion_tokens": 0}}"#), "ok", 0, 1, "without tokens");
    let output = health("http://127.0.0.1:1", &[]);
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn a_refused_probe_says_nothing_about_the_engine() {
    ends(Completion::Status(401, r#"{"error": {"message": "wrong key"}}"#), "ok", 0, 3, "wrong key");
}

#[test]
fn wrong_arguments_are_named() {
    for (more, named) in [(["--timeout", "0"], "--timeout 0"), (["--api-key-file", "/no/such"], "/no/such")] {
        let output = Command::new(env!("CARGO_BIN_EXE_kdtree")).arg("health").args(more).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        assert!(String::from_utf8_lossy(&output.stderr).contains(named));
    }
}
