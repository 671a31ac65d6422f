//! Error-level log records seen while a gate runs: a kernel that complains has not passed, whatever its text.

use std::fmt::{Debug, Write};
use std::sync::{Mutex, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::filter::{Filtered, LevelFilter};
use tracing_subscriber::layer::Context;

/// Most records kept with their text; more are only counted.
const KEPT: usize = 20;

/// Records since `watch` began; `None` while nobody watches.
static SEEN: Mutex<Option<Records>> = Mutex::new(None);

/// What was logged at level error.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Records {
    pub count: u64,
    /// The first ones, as `target: message field=value`.
    pub texts: Vec<String>,
}

/// Takes part in the process's log; keeps nothing until `watch` is called.
pub struct Watch;

/// To be put beside the log's own layer.
pub fn layer<S: Subscriber + for<'a> tracing_subscriber::registry::LookupSpan<'a>>() -> Filtered<Watch, LevelFilter, S> {
    Watch.with_filter(LevelFilter::ERROR)
}

/// From now on error records are kept.
pub fn watch() {
    *lock() = Some(Records::default());
}

/// What was kept since `watch`; ends it.
pub fn take() -> Records {
    lock().take().unwrap_or_default()
}

fn lock() -> std::sync::MutexGuard<'static, Option<Records>> {
    SEEN.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Subscriber> Layer<S> for Watch {
    fn on_event(&self, event: &Event<'_>, _context: Context<'_, S>) {
        let metadata = event.metadata();
        // The HTTP side runs at the same time and says nothing about the kernels.
        if *metadata.level() != Level::ERROR || metadata.target().starts_with("kdtree::server") {
            return;
        }
        if let Some(records) = lock().as_mut() {
            records.count += 1;
            if records.texts.len() < KEPT {
                let mut line = Line(format!("{}:", metadata.target()));
                event.record(&mut line);
                records.texts.push(line.0);
            }
        }
    }
}

/// A record as one line.
struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        let written = if field.name() == "message" { write!(self.0, " {value:?}") } else { write!(self.0, " {}={value:?}", field.name()) };
        written.expect("writing to a string never fails");
    }
}

#[cfg(test)]
mod tests {
    use tracing_subscriber::layer::SubscriberExt;

    use super::*;

    #[test]
    fn errors_are_kept_while_watched_and_nothing_else_is() {
        let subscriber = tracing_subscriber::registry().with(layer());
        tracing::subscriber::with_default(subscriber, || {
            tracing::error!("before");
            watch();
            tracing::warn!("a warning");
            tracing::error!(target: "kdtree::server::routes", "of a client");
            tracing::error!(layer = 3, "a kernel complains");
            let records = take();
            assert_eq!((records.count, records.texts.len()), (1, 1));
            assert!(records.texts[0].ends_with("a kernel complains layer=3"), "{records:?}");
            tracing::error!("after");
            assert_eq!(take(), Records::default());
        });
    }
}
