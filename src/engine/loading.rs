//! What a start is doing, for `/health` and the service manager: passes the loader's progress on and keeps text and beat fresh.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::handle::Shared;
use crate::model::progress::Progress;

/// The progress that a loader reports to; `inner` shows it on the terminal or in the log.
pub struct Told {
    inner: Box<dyn Progress>,
    shared: Arc<Shared>,
    step: Mutex<String>,
    total: AtomicU64,
    done: AtomicU64,
}

impl Told {
    pub fn new(inner: Box<dyn Progress>, shared: Arc<Shared>) -> Self {
        Self { inner, shared, step: Mutex::default(), total: AtomicU64::new(0), done: AtomicU64::new(0) }
    }

    fn say(&self, percent: u64) {
        let step = self.step.lock().unwrap_or_else(PoisonError::into_inner);
        self.shared.loading(format!("{step}: {percent} %"));
    }
}

impl Progress for Told {
    fn begin(&self, what: &str, total_bytes: u64) {
        *self.step.lock().unwrap_or_else(PoisonError::into_inner) = what.to_string();
        self.total.store(total_bytes, Ordering::Relaxed);
        self.done.store(0, Ordering::Relaxed);
        self.shared.beat();
        self.say(0);
        self.inner.begin(what, total_bytes);
    }

    fn advance(&self, bytes: u64) {
        let before = self.done.fetch_add(bytes, Ordering::Relaxed);
        let total = self.total.load(Ordering::Relaxed).max(1);
        let percent = |done: u64| (u128::from(done) * 100 / u128::from(total)).min(100) as u64;
        self.shared.beat();
        if percent(before + bytes) != percent(before) {
            self.say(percent(before + bytes));
        }
        self.inner.advance(bytes);
    }

    fn end(&self) {
        self.inner.end();
    }
}
