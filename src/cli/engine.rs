//! An engine that serves nobody: loaded and warm, it does one piece of work on its own thread and ends. For the gate and the benches.

use std::sync::Arc;
use std::sync::mpsc::channel;

use anyhow::anyhow;

use crate::engine::contract::Observer;
use crate::engine::driver::Driver;
use crate::engine::start::Prepared;
use crate::model::progress;

/// Wants to know nothing of what an engine does.
pub struct Quiet;
impl Observer for Quiet {}

/// Loads and warms an engine, does `work` on its thread, and lets it go.
///
/// # Errors
/// The engine did not start, or `work` failed.
pub fn on_engine<T: Send + 'static>(
    prepared: Prepared,
    observer: Arc<dyn Observer>,
    work: impl FnOnce(&mut dyn Driver) -> anyhow::Result<T> + Send + 'static,
) -> anyhow::Result<T> {
    let (send, receive) = channel();
    let before_ready = Box::new(move |driver: &mut dyn Driver| {
        // The receiver lives until the thread has ended.
        let _ = send.send(work(driver));
        Err("nothing is served here".to_string())
    });
    let (_engine, thread) = prepared.start(observer, progress::for_this_process(), before_ready);
    let ended = thread.join().map_err(|_| anyhow!("the engine thread panicked"))?;
    match receive.try_recv() {
        Ok(result) => result,
        Err(_) => Err(ended.err().map_or_else(|| anyhow!("the engine ended without a result"), Into::into)),
    }
}
