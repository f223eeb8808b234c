//! The one place that turns an error into a status code and JSON.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

/// Whatever keeps a request from its answer. Clients retry 408, 409, 429 and everything from 500
/// on by themselves, so what cannot succeed the second time is none of these.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum Error {
    /// A field is wrong; `param` is its path, as in `messages[0].role`.
    #[error("{param}: {message}")]
    Field {
        /// Where in the body.
        param: String,
        /// What was expected, what was found.
        message: String,
    },
    /// The request is wrong as a whole.
    #[error("{0}")]
    Request(String),
    /// Prompt and reply do not fit; the words are those that clients look for.
    #[error(
        "This model's maximum context length is {max_seq} tokens. However, your {param} resulted \
         in {}{prompt} tokens, and the reply needs at least one more. Please shorten the {param}.",
        if *bound { "at least " } else { "" }
    )]
    ContextLength {
        /// `messages` or `prompt`.
        param: &'static str,
        /// Tokens of the prompt.
        prompt: usize,
        /// Whether that is only a lower bound: the prompt was so long that it was not tokenised.
        bound: bool,
        /// Tokens of a whole sequence.
        max_seq: usize,
    },
    /// No key, or not the right one.
    #[error(
        "Incorrect API key: give the server's key as `Authorization: Bearer KEY` or `x-api-key: KEY`"
    )]
    Key,
    /// A browser's page that may not use this server.
    #[error("pages of the origin {0} may not use this server; `--allow-origin` adds an origin")]
    Origin(String),
    /// No such route.
    #[error("unknown route: {0}")]
    Route(String),
    /// A known route, another method.
    #[error("{0} does not allow this method")]
    Method(String),
    /// No such model.
    #[error("The model `{0}` does not exist; `GET /v1/models` lists what is served")]
    Model(String),
    /// The body is larger than allowed.
    #[error("the request body is larger than the allowed {0} bytes")]
    TooLarge(usize),
    /// The body did not arrive in time.
    #[error("the request body did not arrive within {0} s")]
    SlowBody(u64),
    /// Too many requests wait.
    #[error("{0}")]
    Busy(String),
    /// The model is not loaded yet.
    #[error("Loading model")]
    Loading,
    /// There is no model and will be none: loading failed, or the engine has died or stops.
    #[error("{0}")]
    Unavailable(String),
    /// A fault of ours.
    #[error("{0}")]
    Internal(String),
}

impl Error {
    /// A wrong field.
    pub fn field(param: impl Into<String>, message: impl Into<String>) -> Error {
        Error::Field { param: param.into(), message: message.into() }
    }

    /// What the engine says, in the words of the wire; `param` is what the prompt is made of.
    pub fn from_engine(error: lily_engine::Error, param: &'static str) -> Error {
        use lily_engine::Error as Engine;
        match error {
            Engine::EmptyPrompt => Error::field(param, error.to_string()),
            Engine::PromptTooLong { prompt, max_seq } => {
                Error::ContextLength { param, prompt, bound: false, max_seq }
            }
            Engine::TokenId { .. } => Error::field(param, error.to_string()),
            Engine::Sampling { field, value, expected } => {
                Error::field(field, format!("expected {expected}, found {value}"))
            }
            Engine::QueueFull { .. } => Error::Busy(error.to_string()),
            Engine::ShuttingDown | Engine::Dead(_) => Error::Unavailable(error.to_string()),
            Engine::Model(_) | Engine::NoFiniteLogit => Error::Internal(error.to_string()),
        }
    }

    /// The status, OpenAI's type of error, and its code.
    fn kind(&self) -> (StatusCode, &'static str, Value) {
        const BAD: &str = "invalid_request_error";
        match self {
            Error::Field { .. } | Error::Request(_) => (StatusCode::BAD_REQUEST, BAD, Value::Null),
            Error::ContextLength { .. } => {
                (StatusCode::BAD_REQUEST, BAD, "context_length_exceeded".into())
            }
            Error::Key => (StatusCode::UNAUTHORIZED, BAD, "invalid_api_key".into()),
            Error::Origin(_) => (StatusCode::FORBIDDEN, BAD, "origin_not_allowed".into()),
            Error::Route(_) => (StatusCode::NOT_FOUND, BAD, "unknown_url".into()),
            Error::Method(_) => (StatusCode::METHOD_NOT_ALLOWED, BAD, "method_not_allowed".into()),
            Error::Model(_) => (StatusCode::NOT_FOUND, BAD, "model_not_found".into()),
            Error::TooLarge(_) => (StatusCode::PAYLOAD_TOO_LARGE, BAD, "body_too_large".into()),
            Error::SlowBody(_) => (StatusCode::REQUEST_TIMEOUT, BAD, "body_timeout".into()),
            Error::Busy(_) => {
                (StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", "queue_full".into())
            }
            // The number is what clients of llama.cpp look for.
            Error::Loading => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", Value::from(503))
            }
            Error::Unavailable(_) => {
                (StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", "unavailable".into())
            }
            Error::Internal(_) => {
                (StatusCode::INTERNAL_SERVER_ERROR, "server_error", "internal_error".into())
            }
        }
    }

    /// The status that a response with this error has.
    pub fn status(&self) -> StatusCode {
        self.kind().0
    }

    /// `{"error": {"message", "type", "param", "code"}}`
    pub fn json(&self) -> Value {
        let (_, kind, code) = self.kind();
        let param = match self {
            Error::Field { param, .. } => Some(param.as_str()),
            Error::ContextLength { param, .. } => Some(*param),
            Error::Model(_) => Some("model"),
            _ => None,
        };
        json!({"error": {"message": self.to_string(), "type": kind, "param": param, "code": code}})
    }
}

impl From<lily_text::Error> for Error {
    fn from(error: lily_text::Error) -> Error {
        match error {
            lily_text::Error::Request { param, problem } => Error::field(param, problem),
            // It was compiled when the model was loaded: what it fails on now came with the request.
            lily_text::Error::Template(problem) => {
                Error::field("messages", format!("the chat template cannot render them: {problem}"))
            }
            // The checkpoint's files: the client can do nothing about them.
            _ => Error::Internal(error.to_string()),
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let mut response = (self.status(), axum::Json(self.json())).into_response();
        let headers = response.headers_mut();
        match self {
            Error::Busy(_) | Error::Loading => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Error::Unavailable(_) => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("10"));
            }
            Error::Key => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            // What is left of the body is not read: the connection cannot be used again.
            Error::TooLarge(_) | Error::SlowBody(_) => {
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            _ => {}
        }
        response
    }
}
