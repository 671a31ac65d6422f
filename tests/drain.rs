//! How a server ends after SIGTERM: what was accepted reaches its clients, and a death on the way is told. Signals reach every server of
//! a process, so the tests take turns.

#[path = "http_support/mod.rs"]
mod http_support;
#[path = "http_support/sim.rs"]
mod sim;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use http_support::wire::{Leave, Request, exchange};
use kdtree::server::{Ended, ServerConfig};
use serde_json::json;
use sim::{Setup, Sim, Step, start};

static TURN: Mutex<()> = Mutex::new(());

const DRAIN: f64 = 20.0;

fn serving(steps: Vec<Step>) -> Sim {
    let config = ServerConfig { port: 0, drain_s: DRAIN, ..ServerConfig::default() };
    start(Setup { config, ..Setup::default() }, move |_| steps.clone())
}

fn request() -> Request {
    Request::post("/v1/completions", &json!({"prompt": "x", "stream": true}))
}

fn terminate() {
    // SAFETY: the servers of this process have taken the signal over.
    assert_eq!(unsafe { libc::raise(libc::SIGTERM) }, 0);
}

fn until(what: &str, mut good: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !good() {
        assert!(begun.elapsed() < Duration::from_secs(15), "{what} not within 15 s");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn ended(sim: &Sim) -> Result<Ended, String> {
    until("the server ends", || sim.ended.lock().unwrap().is_some());
    sim.ended.lock().unwrap().clone().unwrap()
}

#[test]
fn a_slow_reader_gets_the_whole_answer() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    // More than the buffers of two sockets hold.
    let sim = serving(vec![Step::Chatter(80_000, Duration::ZERO)]);
    let mut stream = TcpStream::connect(sim.address).unwrap();
    stream.write_all(&request().bytes(sim.address)).unwrap();
    until("the engine is done", || sim.seen.finished.load(Ordering::SeqCst) == 1 && sim.engine.running() == 0);
    terminate();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(sim.ended.lock().unwrap().is_none(), "an answer is still on its way");
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    assert!(answer.windows(12).any(|part| part == b"data: [DONE]"), "cut after {} bytes", answer.len());
    assert_eq!(ended(&sim), Ok(Ended::Drained));
}

#[test]
fn the_engines_death_ends_a_drain_at_once_and_as_an_error() {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    let sim = serving(vec![Step::Sleep(Duration::from_millis(400)), Step::Die]);
    let address = sim.address;
    let asked = std::thread::spawn(move || exchange(address, &request(), Leave::Never).unwrap());
    until("running", || sim.engine.running() == 1);
    let begun = Instant::now();
    terminate();
    let why = ended(&sim).unwrap_err();
    assert!(why.contains("the simulated engine died"), "{why}");
    assert!(begun.elapsed().as_secs_f64() < DRAIN / 2.0, "{:?}", begun.elapsed());
    let answer = asked.join().unwrap();
    assert!(answer.text().contains("engine_dead") && !answer.text().contains("[DONE]"), "{}", answer.text());
}
