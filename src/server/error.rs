//! What a client is told when something is refused or fails: OpenAI's error object and the HTTP status that goes with it.

use hyper::StatusCode;
use serde_json::{Value, json};

use crate::engine::contract::{Failure, FailureKind, Refused};

/// One refusal or failure. Before the answer has begun it is a JSON response, afterwards a `data:` event of the stream.
#[derive(Clone, Debug, PartialEq)]
pub struct ApiError {
    pub status: StatusCode,
    pub kind: &'static str,
    pub message: String,
    pub param: Option<String>,
    pub code: Option<&'static str>,
    /// Seconds for `Retry-After`.
    pub retry_after: Option<u64>,
    /// Methods for `Allow`.
    pub allow: Option<&'static str>,
    /// The connection cannot be used further (its body was not read to the end).
    pub close: bool,
}

const INVALID: &str = "invalid_request_error";

impl ApiError {
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> Self {
        Self { status, kind, message: message.into(), param: None, code: None, retry_after: None, allow: None, close: false }
    }

    /// A field with a value that cannot be served. `param` is the field's path.
    pub fn invalid(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { param: Some(param.into()), code: Some("invalid_value"), ..Self::new(StatusCode::BAD_REQUEST, INVALID, message) }
    }

    /// A known field this server does not do.
    pub fn unsupported(param: impl Into<String>, message: impl Into<String>) -> Self {
        Self { code: Some("unsupported_parameter"), ..Self::invalid(param, message) }
    }

    /// The body as a whole is not what was expected.
    pub fn body(message: impl Into<String>) -> Self {
        Self { code: Some("invalid_json"), ..Self::new(StatusCode::BAD_REQUEST, INVALID, message) }
    }

    pub fn context_length(prompt: usize, asked: u64, limit: usize) -> Self {
        let message = format!(
            "This model's maximum context length is {limit} tokens. The prompt has {prompt} tokens and {asked} were asked to be generated, \
             which does not fit. Shorten the prompt."
        );
        Self { code: Some("context_length_exceeded"), ..Self::invalid("messages", message) }
    }

    pub fn kv_capacity(prompt: usize, asked: u64, slots: usize) -> Self {
        let message = format!(
            "The KV capacity of this server is {slots} tokens. The prompt has {prompt} tokens and {asked} were asked to be generated, \
             which does not fit. Shorten the prompt."
        );
        Self { code: Some("kv_capacity_exceeded"), ..Self::invalid("messages", message) }
    }

    pub fn model_not_found(asked: &str, served: &str) -> Self {
        let message = format!("The model {asked:?} does not exist here. This server has {served:?}.");
        Self { param: Some("model".into()), code: Some("model_not_found"), ..Self::new(StatusCode::NOT_FOUND, INVALID, message) }
    }

    pub fn unauthorized() -> Self {
        let message = "A valid API key is needed: send the header \"Authorization: Bearer KEY\".";
        Self { code: Some("invalid_api_key"), ..Self::new(StatusCode::UNAUTHORIZED, "authentication_error", message) }
    }

    pub fn unavailable(message: impl Into<String>, retry_after: u64) -> Self {
        Self { retry_after: Some(retry_after), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", message) }
    }

    pub fn internal(message: impl Into<String>) -> Self {
        Self { code: Some("internal_error"), ..Self::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message) }
    }

    /// Why the engine did not take a request.
    pub fn refused(refused: Refused, default_retry_after: u64) -> Self {
        match refused {
            Refused::QueueFull { waiting, retry_after } => Self {
                code: Some("queue_full"),
                retry_after: Some(retry_after.as_secs().max(1)),
                ..Self::new(
                    StatusCode::TOO_MANY_REQUESTS,
                    "rate_limit_error",
                    format!("The queue is full: {waiting} requests wait. Try again."),
                )
            },
            Refused::ContextLength { prompt, max_tokens, limit } => Self::context_length(prompt, u64::from(max_tokens), limit),
            Refused::KvCapacity { needed, slots } => {
                let message = format!("The request needs {needed} KV slots, the KV capacity is {slots}. Shorten the prompt or max_tokens.");
                Self { code: Some("kv_capacity_exceeded"), ..Self::new(StatusCode::BAD_REQUEST, INVALID, message) }
            }
            Refused::Invalid(message) => Self::new(StatusCode::BAD_REQUEST, INVALID, message),
            Refused::Draining => Self::unavailable("The server is shutting down.", default_retry_after),
            Refused::Dead(why) => Self::unavailable(format!("The engine is not running: {why}"), default_retry_after),
        }
    }

    /// Why a running request ended without a result.
    pub fn failure(failure: Failure) -> Self {
        match failure.kind {
            FailureKind::Request => Self::new(StatusCode::BAD_REQUEST, INVALID, failure.message),
            FailureKind::Model => Self::internal(failure.message),
            FailureKind::EngineDead => {
                Self { code: Some("engine_dead"), ..Self::new(StatusCode::SERVICE_UNAVAILABLE, "server_error", failure.message) }
            }
        }
    }

    pub fn with_param(mut self, param: &str) -> Self {
        self.param = Some(param.into());
        self
    }

    /// `{"error": {message, type, param, code}}`.
    pub fn to_json(&self) -> Value {
        json!({"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}})
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_overflow_names_prompt_asked_and_limit() {
        let error = ApiError::refused(Refused::ContextLength { prompt: 70, max_tokens: 5, limit: 64 }, 1);
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
        assert_eq!(error.code, Some("context_length_exceeded"));
        for number in ["70", "5", "64"] {
            assert!(error.message.contains(number), "{}", error.message);
        }
    }

    #[test]
    fn a_full_queue_is_429_with_at_least_one_second_to_wait() {
        let error = ApiError::refused(Refused::QueueFull { waiting: 9, retry_after: Duration::from_millis(10) }, 7);
        assert_eq!((error.status, error.retry_after), (StatusCode::TOO_MANY_REQUESTS, Some(1)));
    }

    #[test]
    fn a_fault_of_the_model_is_never_the_clients() {
        let error = ApiError::failure(Failure { kind: FailureKind::Model, message: "NaN".into() });
        assert_eq!(error.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert_eq!(error.to_json()["error"]["type"], "server_error");
    }
}
