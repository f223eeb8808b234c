//! Which tokens to compute next. Knows tokens, never text.
//!
//! A [`Request`] goes in, its [`Event`]s come out; start at `request.rs`.
#![forbid(unsafe_code)]

mod error;
mod request;
mod sampler;
mod scheduler;

pub use error::Error;
pub use request::{Cancel, Event, FinishReason, Logprob, Request, Sampling, Usage};
