//! What the engine promises each request: the right end at the right token, one terminal event, slots given back, a bounded queue.

mod common;

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use common::{options, sampled};
use kdtree::engine::contract::{Constraint, Event, FailureKind, FinishReason, Finished, Observer, Refused, Request, StopMatch};
use kdtree::engine::driver::greedy;
use kdtree::engine::handle::{EngineHandle, Health};
use kdtree::engine::options::EngineOptions;
use kdtree::engine::start::{EngineThread, Prepared};
use kdtree::model::progress::Silent;
use kdtree::speculate::budget::Budget;

/// Remembers what the engine last said of its slots, and every end.
#[derive(Default)]
struct Watch {
    held: Mutex<usize>,
    ended: Mutex<usize>,
}

impl Observer for Watch {
    fn finished(&self, _finished: &Finished) {
        *self.ended.lock().unwrap() += 1;
    }
    fn kv(&self, held: usize, _cached: usize) {
        *self.held.lock().unwrap() = held;
    }
}

fn start(options: EngineOptions) -> (EngineHandle, EngineThread, Arc<Watch>) {
    let watch = Arc::new(Watch::default());
    let (handle, thread) = Prepared::read(options).unwrap().start(watch.clone(), Box::new(Silent), Box::new(|_| Ok(())));
    while handle.health() != Health::Ready {
        assert!(!matches!(handle.health(), Health::Dead(_)), "{:?}", handle.health());
        std::thread::sleep(Duration::from_millis(5));
    }
    (handle, thread, watch)
}

/// Everything a request sent: tokens, text, the terminal event.
fn drain(handle: &EngineHandle, request: Request) -> (Vec<u32>, String, Finished) {
    let mut stream = handle.submit(request).unwrap();
    let (mut tokens, mut text, mut end) = (Vec::new(), String::new(), None);
    while let Some(event) = stream.next_blocking() {
        assert!(end.is_none(), "an event after the terminal one: {event:?}");
        match event {
            Event::Tokens(new) => {
                tokens.extend(new.iter().map(|token| token.id));
                new.iter().for_each(|token| text.push_str(&token.text));
            }
            Event::Finished(finished) => end = Some(finished),
            Event::Failed(failure) => panic!("{failure}"),
            Event::Started { .. } | Event::Prompt(_) | Event::Round(_) => {}
        }
    }
    (tokens, text, end.expect("one terminal event"))
}

#[test]
fn a_request_ends_where_it_must_under_every_budget() {
    let (handle, thread, watch) = start(options());
    let prompt = handle.tokenizer().encode_prompt("1, 2, 3, 4, 5,");
    let (all, text, _) = drain(&handle, greedy(prompt.clone(), 40, Some(Budget::Off)));
    assert_eq!(all.len(), 40);
    for budget in [Budget::Off, Budget::Chain, Budget::Tree(32)] {
        // Every count, so that ends fall inside accepted runs too.
        for most in 1..=12 {
            let (tokens, _, end) = drain(&handle, greedy(prompt.clone(), most, Some(budget)));
            assert_eq!((tokens.as_slice(), end.reason), (&all[..most as usize], FinishReason::Length), "{budget}");
            assert_eq!(end.completion_tokens, most);
        }
        // A stop string in the middle: nothing of it in the text, nothing after it.
        let stop = "11,";
        let at = text.find(stop).expect("the model counts");
        let mut request = greedy(prompt.clone(), 40, Some(budget));
        request.stop.strings = vec!["never".into(), stop.into()];
        let (_, cut, end) = drain(&handle, request);
        assert_eq!((cut.as_str(), end.stop_match), (&text[..at], Some(StopMatch::Text(stop.into()))), "{budget}");
        // A stop id.
        let id = all[9];
        let first = all.iter().position(|&token| token == id).unwrap();
        let mut request = greedy(prompt.clone(), 40, Some(budget));
        request.stop.ids = vec![id];
        let (tokens, _, end) = drain(&handle, request);
        assert_eq!((tokens.as_slice(), end.stop_match), (&all[..=first], Some(StopMatch::Id(id))), "{budget}");
        // The same id, asked for, but not before the twentieth token.
        let mut request = greedy(prompt.clone(), 40, Some(budget));
        request.stop.ids = vec![id];
        request.min_tokens = 20;
        let (tokens, _, _) = drain(&handle, request);
        assert!(tokens.len() >= 20 && !tokens[..20].contains(&id), "{budget}: {tokens:?}");
    }
    assert_eq!(*watch.held.lock().unwrap(), 0, "slots held at rest");
    drop(handle);
    thread.join().unwrap().unwrap();
}

#[test]
fn a_context_is_used_to_its_last_token_and_not_beyond() {
    let (handle, _thread, _) = start(EngineOptions { max_model_len: 64, ..options() });
    for (prompt, tokens) in [(40, 24), (57, 7), (62, 2), (63, 1)] {
        for budget in [Budget::Off, Budget::Tree(64)] {
            let mut request = greedy(vec![261; prompt], tokens, Some(budget));
            request.stop.ignore_eos = true;
            let (found, _, end) = drain(&handle, request);
            assert_eq!((found.len(), end.reason), (tokens as usize, FinishReason::Length));
        }
        let refused = handle.submit(greedy(vec![261; prompt], tokens + 1, None)).err().unwrap();
        assert_eq!(refused, Refused::ContextLength { prompt, max_tokens: tokens + 1, limit: 64 });
    }
}

#[test]
fn a_cancelled_request_ends_within_a_round_and_gives_its_slots_back() {
    let (handle, _thread, watch) = start(options());
    let prompt = handle.tokenizer().encode_prompt("Once upon a time");
    let mut streams = Vec::new();
    for seed in 0..4 {
        let mut request = sampled(prompt.clone(), 4000, Budget::Tree(8), seed);
        request.stop.ignore_eos = true;
        streams.push(handle.submit(request).unwrap());
    }
    for stream in &mut streams {
        while !matches!(stream.next_blocking(), Some(Event::Tokens(_))) {}
    }
    // Two are dropped, two are told and must still hear their end.
    drop(streams.split_off(2));
    for stream in &mut streams {
        stream.cancel();
        let mut rest = Vec::new();
        while let Some(event) = stream.next_blocking() {
            rest.push(event);
        }
        assert!(matches!(rest.last(), Some(Event::Finished(end)) if end.reason == FinishReason::Abort), "{rest:?}");
    }
    let began = Instant::now();
    while *watch.held.lock().unwrap() > 0 || *watch.ended.lock().unwrap() < 4 {
        assert!(began.elapsed() < Duration::from_secs(10), "slots are still held");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Allows everything a few times, then cannot say what may follow.
struct GivesUp(usize);

impl Constraint for GivesUp {
    fn mask_tree(&mut self, _tokens: &[u32], _parents: &[u8], _words: usize, masks: &mut [u32]) -> Result<(), String> {
        self.0 = self.0.checked_sub(1).ok_or("the grammar is too large")?;
        masks.fill(u32::MAX);
        Ok(())
    }

    fn commit(&mut self, _token: u32) -> Result<bool, String> {
        Ok(false)
    }
}

#[test]
fn a_constraint_that_cannot_be_met_fails_its_own_request_and_as_the_clients_fault() {
    let (handle, _thread, watch) = start(EngineOptions { budget: Budget::Tree(8), ..options() });
    for masks in [0, 3] {
        let other = handle.submit(greedy(vec![261; 5], 60, None)).unwrap();
        let constraint: Option<Box<dyn Constraint>> = Some(Box::new(GivesUp(masks)));
        let mut stream = handle.submit(Request { constraint, ..greedy(vec![261; 40], 60, None) }).unwrap();
        let events: Vec<Event> = std::iter::from_fn(|| stream.next_blocking()).collect();
        let Some(Event::Failed(failure)) = events.last() else { panic!("{events:?}") };
        assert_eq!((failure.kind, failure.message.as_str()), (FailureKind::Request, "the grammar is too large"));
        let mut other = other;
        let ends = std::iter::from_fn(|| other.next_blocking()).filter(|event| matches!(event, Event::Finished(_))).count();
        assert_eq!(ends, 1, "the other request is not touched");
    }
    assert_eq!(*watch.held.lock().unwrap(), 0);
}

#[test]
fn a_full_queue_refuses_and_a_drain_finishes_what_it_took() {
    let (handle, thread, watch) = start(EngineOptions { max_running: 1, max_waiting: 2, ..options() });
    let prompt = handle.tokenizer().encode_prompt("Once upon a time");
    let mut accepted = Vec::new();
    let mut refused = 0;
    for seed in 0..40 {
        let mut request = sampled(prompt.clone(), 200, Budget::Off, seed);
        request.stop.ignore_eos = true;
        match handle.submit(request) {
            Ok(stream) => accepted.push(stream),
            Err(Refused::QueueFull { retry_after, .. }) => {
                assert!(retry_after >= Duration::from_secs(1));
                refused += 1;
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 20 && accepted.len() >= 2, "{refused} refused, {} accepted", accepted.len());
    handle.drain();
    assert_eq!(handle.submit(greedy(prompt, 1, None)).err(), Some(Refused::Draining));
    for mut stream in accepted {
        let mut ends = 0;
        while let Some(event) = stream.next_blocking() {
            ends +=
                usize::from(matches!(event, Event::Finished(end) if end.reason == FinishReason::Length && end.completion_tokens == 200));
        }
        assert_eq!(ends, 1);
    }
    assert_eq!(*watch.held.lock().unwrap(), 0);
    drop(handle);
    thread.join().unwrap().unwrap();
}

#[test]
fn a_client_that_leaves_the_queue_frees_its_place_at_once() {
    let (handle, _thread, _) = start(EngineOptions { max_running: 1, max_waiting: 2, ..options() });
    let prompt = handle.tokenizer().encode_prompt("Once upon a time");
    let ask = |seed| {
        let mut request = sampled(prompt.clone(), 4000, Budget::Off, seed);
        request.stop.ignore_eos = true;
        handle.submit(request)
    };
    let _running = ask(0).unwrap();
    while (handle.running(), handle.waiting()) != (1, 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut waiting = vec![ask(1).unwrap(), ask(2).unwrap()];
    assert!(matches!(ask(3).err(), Some(Refused::QueueFull { waiting: 2, .. })));
    for seed in 4..8 {
        waiting.remove(0);
        assert_eq!(handle.waiting(), 1);
        waiting.push(ask(seed).unwrap());
        assert!(matches!(ask(3).err(), Some(Refused::QueueFull { waiting: 2, .. })));
    }
    assert_eq!(handle.running(), 1);
}

#[test]
fn what_cannot_be_computed_is_refused_by_name() {
    let (handle, _thread, _) = start(EngineOptions { max_model_len: 1024, kv_tokens: 256, ..options() });
    assert!(matches!(handle.submit(greedy(vec![], 1, None)).err(), Some(Refused::Invalid(why)) if why.contains("empty")));
    assert!(matches!(handle.submit(greedy(vec![4096], 1, None)).err(), Some(Refused::Invalid(why)) if why.contains("4096")));
    assert!(matches!(handle.submit(greedy(vec![261; 400], 4, None)).err(), Some(Refused::KvCapacity { slots: 256, .. })));
    assert_eq!(drain(&handle, greedy(vec![261; 40], 4, None)).0.len(), 4);
}
