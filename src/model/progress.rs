//! How far a long step of loading has come: a bar on a terminal, log lines under a service manager, nothing in tests.

use std::io::IsTerminal;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Told by the loader, from any thread. One step at a time: `begin`, many `advance`, `end`.
pub trait Progress: Send + Sync {
    fn begin(&self, what: &str, total_bytes: u64);
    fn advance(&self, bytes: u64);
    fn end(&self);
}

/// A bar when standard error is a terminal, log lines otherwise.
pub fn for_this_process() -> Box<dyn Progress> {
    if std::io::stderr().is_terminal() { Box::new(Bar::default()) } else { Box::new(Lines::default()) }
}

/// Says nothing.
pub struct Silent;

impl Progress for Silent {
    fn begin(&self, _what: &str, _total_bytes: u64) {}
    fn advance(&self, _bytes: u64) {}
    fn end(&self) {}
}

/// A bar on standard error.
#[derive(Default)]
pub struct Bar(Mutex<Option<ProgressBar>>);

impl Progress for Bar {
    fn begin(&self, what: &str, total_bytes: u64) {
        let style = ProgressStyle::with_template("{msg:24} {bar:32} {bytes:>11}/{total_bytes} {bytes_per_sec:>13} {eta:>4}")
            .expect("the template is a constant");
        *lock(&self.0) = Some(ProgressBar::new(total_bytes).with_style(style).with_message(what.to_string()));
    }

    fn advance(&self, bytes: u64) {
        if let Some(bar) = lock(&self.0).as_ref() {
            bar.inc(bytes);
        }
    }

    fn end(&self) {
        if let Some(bar) = lock(&self.0).take() {
            bar.finish();
        }
    }
}

/// One log line at the start, one at the end, and one every ten seconds between.
#[derive(Default)]
pub struct Lines(Mutex<Option<Step>>);

struct Step {
    what: String,
    total: u64,
    done: u64,
    started: Instant,
    logged: Instant,
}

const LOG_EVERY: Duration = Duration::from_secs(10);

impl Progress for Lines {
    fn begin(&self, what: &str, total_bytes: u64) {
        let now = Instant::now();
        tracing::info!(step = what, total_mib = total_bytes >> 20, "loading step started");
        *lock(&self.0) = Some(Step { what: what.to_string(), total: total_bytes, done: 0, started: now, logged: now });
    }

    fn advance(&self, bytes: u64) {
        let mut step = lock(&self.0);
        let Some(step) = step.as_mut() else { return };
        step.done += bytes;
        if step.logged.elapsed() >= LOG_EVERY {
            step.logged = Instant::now();
            tracing::info!(step = step.what, done_mib = step.done >> 20, total_mib = step.total >> 20, "loading");
        }
    }

    fn end(&self) {
        if let Some(step) = lock(&self.0).take() {
            tracing::info!(
                step = step.what,
                done_mib = step.done >> 20,
                seconds = step.started.elapsed().as_secs_f64(),
                "loading step done"
            );
        }
    }
}

/// A poisoned lock only means that another thread died while it reported progress.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_may_be_told_from_many_threads() {
        let lines = Lines::default();
        lines.begin("weights", 4000);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..10).for_each(|_| lines.advance(100)));
            }
        });
        assert_eq!(lines.0.lock().unwrap().as_ref().unwrap().done, 4000);
        lines.end();
        lines.advance(1);
        assert!(lines.0.lock().unwrap().is_none());
    }
}
