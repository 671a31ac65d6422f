//! What the service manager is told: how far loading is, READY, the watchdog's food, drain and reload. Called by `kdtree serve` and
//! the server's own loop; does nothing where no NOTIFY_SOCKET is set.
//!
//! The watchdog is fed from the engine thread's sign of life, not from this task's: a server that still answers HTTP while its engine
//! hangs is not alive.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use sd_notify::NotifyState;

use crate::engine::handle::{EngineHandle, Health};

/// How often the engine is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// Each step of a start moves its deadline this far, ...
const EXTENSION: Duration = Duration::from_secs(60);

/// ... said this often, ...
const EXTEND_EVERY: Duration = Duration::from_secs(5);

/// ... as long as the start has shown a sign of life this recently. A single silent step (copying one layer, say) is shorter.
const LOADING_PATIENCE: Duration = Duration::from_secs(300);

/// Whether anybody listens.
fn listens() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some()
}

fn tell(states: &[NotifyState<'_>]) {
    // A manager that cannot be reached has its own timeouts; nothing here could help.
    if let Err(error) = sd_notify::notify(states) {
        tracing::debug!(%error, "the service manager was not reached");
    }
}

/// A status must be one line.
fn status(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// SIGTERM was taken: the drain begins.
pub(super) fn stopping() {
    tell(&[NotifyState::Stopping, NotifyState::Status("draining")]);
}

/// Around a reload of the keys, so that `systemctl reload` waits for it.
pub(super) fn reloading() {
    if let Ok(now) = NotifyState::monotonic_usec_now() {
        tell(&[NotifyState::Reloading, now]);
    }
}

/// The reload is over, whatever came of it.
pub(super) fn reloaded() {
    tell(&[NotifyState::Ready]);
}

/// Follows the engine from loading to its end. `standing` describes how a ready server stands; `place` is where it listens.
pub async fn follow(engine: EngineHandle, standing: Arc<OnceLock<String>>, place: String) {
    if !listens() {
        return;
    }
    let mut follower = Follower { engine, standing, place, said: String::new(), ready: false, extended: None, fed: None };
    let mut look = tokio::time::interval(LOOK);
    loop {
        look.tick().await;
        if !follower.look() {
            return;
        }
    }
}

struct Follower {
    engine: EngineHandle,
    standing: Arc<OnceLock<String>>,
    place: String,
    said: String,
    ready: bool,
    extended: Option<Instant>,
    fed: Option<Instant>,
}

impl Follower {
    /// One look; false when there is nothing more to say.
    fn look(&mut self) -> bool {
        match self.engine.health() {
            Health::Loading(what) => self.loading(&what),
            Health::Ready => self.serving(),
            // `stopping` has said it.
            Health::Draining => self.said.clear(),
            Health::Dead(why) => {
                self.say(&format!("stopped: {why}"));
                return false;
            }
        }
        self.feed();
        true
    }

    fn say(&mut self, text: &str) {
        let text = status(text);
        if self.said != text {
            tell(&[NotifyState::Status(&text)]);
            self.said = text;
        }
    }

    fn loading(&mut self, what: &str) {
        self.say(what);
        let due = self.extended.is_none_or(|last| last.elapsed() >= EXTEND_EVERY);
        if due && self.engine.since_beat() < LOADING_PATIENCE {
            tell(&[NotifyState::ExtendTimeoutUsec(EXTENSION.as_micros() as u32)]);
            self.extended = Some(Instant::now());
        }
    }

    fn serving(&mut self) {
        let standing = self.standing.get().map_or("", String::as_str);
        let text = status(&format!("serving {} on {}, {standing}", self.engine.info().name, self.place));
        if !self.ready {
            tell(&[NotifyState::Ready, NotifyState::Status(&text)]);
            self.ready = true;
            self.said = text;
        } else {
            self.say(&text);
        }
    }

    /// Feeds the watchdog four times per interval while the engine's last sign of life is younger than the interval.
    fn feed(&mut self) {
        let Some(interval) = sd_notify::watchdog_enabled() else { return };
        let due = self.fed.is_none_or(|last| last.elapsed() >= interval / 4);
        if self.ready && due && self.engine.since_beat() < interval {
            tell(&[NotifyState::Watchdog]);
            self.fed = Some(Instant::now());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_is_one_line() {
        assert_eq!(status("two problems\n  - one\r\n"), "two problems   - one  ");
    }
}
