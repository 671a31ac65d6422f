//! What several test files share: a loaded engine on the CPU, and requests for it.
#![allow(dead_code)]

use std::sync::Arc;
use std::sync::mpsc::channel;

use kdtree::engine::contract::{Observer, Request, Sampling};
use kdtree::engine::driver::{Driver, Generated, greedy};
use kdtree::engine::options::{DeviceKind, EngineOptions};
use kdtree::engine::start::Prepared;
use kdtree::model::progress::Silent;
use kdtree::speculate::budget::Budget;

pub struct NoObserver;
impl Observer for NoObserver {}

/// Options for the model in the repository.
pub fn options() -> EngineOptions {
    EngineOptions {
        model: concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini").into(),
        drafter: concat!(env!("CARGO_MANIFEST_DIR"), "/models/k26-mini-dflash").into(),
        device: DeviceKind::Cpu,
        ..EngineOptions::default()
    }
}

/// Runs `work` on an engine's own thread, loaded and warm, without serving.
pub fn with_engine<T: Send + 'static>(options: EngineOptions, work: impl FnOnce(&mut dyn Driver) -> T + Send + 'static) -> T {
    with_observed_engine(options, Arc::new(NoObserver), work)
}

pub fn with_observed_engine<T: Send + 'static>(
    options: EngineOptions,
    observer: Arc<dyn Observer>,
    work: impl FnOnce(&mut dyn Driver) -> T + Send + 'static,
) -> T {
    let (send, receive) = channel();
    let before_ready = Box::new(move |driver: &mut dyn Driver| {
        let _ = send.send(work(driver));
        Err("the test is over".to_string())
    });
    let prepared = Prepared::read(options).unwrap();
    let (_handle, thread) = prepared.start(observer, Box::new(Silent), before_ready);
    let result = receive.recv();
    let ended = thread.join();
    result.unwrap_or_else(|_| panic!("the engine ended before the test: {:?}", ended.map(|end| end.map_err(|e| e.to_string()))))
}

/// Sixty prompts of several kinds.
pub fn sixty_prompts(driver: &dyn Driver) -> Vec<Vec<u32>> {
    let starts = [
        "The capital of France is",
        "Once upon a time there was a king who had three sons.",
        "def factorial(n):\n    result = 1\n",
        "1, 2, 3, 4, 5,",
        "The history of the old town",
        "List three primes:",
        "A triangle is a shape that",
        "import sys\nimport os\n\nclass",
        "In the year 1850 a ship left",
        "Tom has 5 apples and buys 7 more.",
    ];
    let ends = ["", " And then", "\n\n", " 12 + 30 =", " It was", " the"];
    let texts = ends.iter().flat_map(|end| starts.iter().map(move |start| format!("{start}{end}")));
    texts.map(|text| driver.tokenizer().encode_prompt(&text)).collect()
}

pub fn sampled(prompt: Vec<u32>, tokens: u32, budget: Budget, seed: u64) -> Request {
    let mut request = greedy(prompt, tokens, Some(budget));
    request.sampling = Sampling { temperature: 1.0, seed, ..Sampling::greedy() };
    request
}

/// Tokens of each result; a failed one shows its message.
pub fn tokens(generated: &[Generated]) -> Vec<Vec<u32>> {
    generated.iter().map(|g| g.end.as_ref().map(|_| g.tokens.clone()).unwrap_or_else(|error| panic!("{error}"))).collect()
}
