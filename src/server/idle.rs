//! Which connections wait for a request, and since when: where no further connection may be open, the one that has waited longest makes
//! room. So whoever opens connections and says nothing on them keeps nobody out.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

use hyper::body::{Body as HttpBody, Bytes, Frame, SizeHint};
use tokio::sync::Notify;

use super::http::Body;

/// All connections that wait for a request.
#[derive(Default)]
pub struct IdleConnections(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    next: u64,
    /// By when their wait began.
    since: BTreeMap<u64, Arc<Notify>>,
}

impl IdleConnections {
    /// Tells the connection that has waited longest to close; false where none waits.
    pub fn make_room(&self) -> bool {
        let oldest = locked(&self.0).since.pop_first();
        oldest.map(|(_, closing)| closing.notify_one()).is_some()
    }
}

/// One connection's part. It waits from the start, is busy from a request's head on, and waits again once the whole answer has been handed
/// to the system.
pub struct Line {
    all: Arc<IdleConnections>,
    closing: Arc<Notify>,
    state: Mutex<State>,
}

enum State {
    Waiting(u64),
    Answering,
    /// The answer is complete, but bytes of it may still be here.
    Answered,
}

impl Line {
    pub fn new(all: Arc<IdleConnections>) -> Self {
        let closing = Arc::new(Notify::new());
        let place = enter(&all, &closing);
        Self { all, closing, state: Mutex::new(State::Waiting(place)) }
    }

    /// Returns when this connection is to make room for another.
    pub async fn told_to_close(&self) {
        self.closing.notified().await;
    }

    /// A request has come.
    pub fn request(&self) {
        self.leave(State::Answering);
    }

    /// Everything written so far has left.
    pub fn flushed(&self) {
        let mut state = locked(&self.state);
        if matches!(*state, State::Answered) {
            *state = State::Waiting(enter(&self.all, &self.closing));
        }
    }

    fn leave(&self, next: State) {
        if let State::Waiting(place) = std::mem::replace(&mut *locked(&self.state), next) {
            locked(&self.all.0).since.remove(&place);
        }
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        self.leave(State::Answered);
    }
}

fn enter(all: &IdleConnections, closing: &Arc<Notify>) -> u64 {
    let mut waiting = locked(&all.0);
    waiting.next += 1;
    let place = waiting.next;
    waiting.since.insert(place, closing.clone());
    place
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An answer's body, which tells its connection when it is over.
pub struct Answer {
    pub body: Body,
    pub line: Arc<Line>,
}

impl HttpBody for Answer {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.line.leave(State::Answered);
    }
}
