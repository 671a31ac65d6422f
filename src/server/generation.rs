//! The requests of one HTTP call while they run: submitted together, their events merged, cancelled together when dropped.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Instant;

use super::error::ApiError;
use super::metrics::ServerMetrics;
use super::state::App;
use crate::engine::contract::{Event, EventStream, FailureKind, FinishReason, Request};

struct Choice {
    /// `None` once its terminal event has been passed on.
    events: Option<EventStream>,
    last_tokens: Option<Instant>,
}

/// Running choices, numbered in the order of their requests.
pub struct Generation {
    choices: Vec<Choice>,
    arrival: Instant,
    metrics: Arc<ServerMetrics>,
    /// Where the next look starts, so that a busy choice cannot starve the others.
    turn: usize,
    /// Ends when the engine thread is gone: requests it had not taken yet would wait for ever.
    death: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl Generation {
    /// Queues all requests or none: when one is refused, those queued before it are cancelled.
    pub fn submit(app: &App, requests: Vec<Request>, arrival: Instant) -> Result<Self, ApiError> {
        let mut choices = Vec::with_capacity(requests.len());
        for request in requests {
            let events = app.engine.submit(request).map_err(|refused| ApiError::refused(refused, app.config.retry_after_s))?;
            choices.push(Choice { events: Some(events), last_tokens: None });
        }
        let mut dead = app.dead.subscribe();
        let death = Box::pin(async move {
            // An error means that the server itself is gone, which ends this too.
            let _ = dead.wait_for(|dead| *dead).await;
        });
        Ok(Self { choices, arrival, metrics: app.metrics.clone(), turn: 0, death })
    }

    /// The next event of any choice; `None` after the last terminal event. An error ends everything.
    pub fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<(usize, Event), ApiError>>> {
        let count = self.choices.len();
        let mut open = false;
        for step in 0..count {
            let index = (self.turn + step) % count;
            let Some(events) = &mut self.choices[index].events else { continue };
            open = true;
            let Poll::Ready(event) = events.events.poll_recv(cx) else { continue };
            self.turn = index + 1;
            return Poll::Ready(Some(self.pass(index, event)));
        }
        if !open {
            return Poll::Ready(None);
        }
        self.death.as_mut().poll(cx).map(|()| {
            self.cancel();
            Some(Err(Self::lost()))
        })
    }

    /// The same for async code.
    pub async fn next(&mut self) -> Option<Result<(usize, Event), ApiError>> {
        std::future::poll_fn(|cx| self.poll_next(cx)).await
    }

    fn pass(&mut self, index: usize, event: Option<Event>) -> Result<(usize, Event), ApiError> {
        match event {
            Some(Event::Failed(failure)) => {
                self.cancel();
                match failure.kind {
                    FailureKind::Request => tracing::info!(message = %failure.message, "a request cannot be met"),
                    kind => tracing::error!(?kind, message = %failure.message, "a request failed"),
                }
                Err(ApiError::failure(failure))
            }
            Some(Event::Finished(finished)) if finished.reason == FinishReason::Abort => {
                self.cancel();
                Err(ApiError::unavailable("The server is shutting down; this request was stopped.", 1))
            }
            Some(event) => {
                self.observe(index, &event);
                Ok((index, event))
            }
            // The sender is gone without a terminal event: so is the engine thread.
            None => {
                self.cancel();
                Err(Self::lost())
            }
        }
    }

    fn lost() -> ApiError {
        ApiError { code: Some("engine_dead"), ..ApiError::unavailable("The engine has stopped; this request was lost.", 1) }
    }

    fn observe(&mut self, index: usize, event: &Event) {
        let choice = &mut self.choices[index];
        match event {
            Event::Started { prompt_tokens, cached_tokens, .. } => self.metrics.prefix_lookup(*prompt_tokens, *cached_tokens),
            Event::Tokens(_) => {
                let now = Instant::now();
                match choice.last_tokens.replace(now) {
                    None => self.metrics.first_token(now - self.arrival),
                    Some(last) => self.metrics.next_tokens(now - last),
                }
            }
            Event::Finished(finished) => {
                choice.events = None;
                self.metrics.ended(finished, self.arrival.elapsed());
            }
            _ => {}
        }
    }

    fn cancel(&mut self) {
        self.choices.iter_mut().for_each(|choice| choice.events = None);
    }
}
