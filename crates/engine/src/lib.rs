//! Which tokens to compute next. Knows tokens, never text.
//!
//! A [`Request`] goes into the [`Engine`], its [`Event`]s come out. Start at `request.rs`, then
//! `engine.rs`, the loop; `scheduler.rs` decides what runs, `sampler.rs` which token comes.
#![forbid(unsafe_code)]

mod engine;
mod error;
mod forward;
mod request;
mod sampler;
mod scheduler;

pub use engine::{Engine, Limits, Load, Options};
pub use error::Error;
pub use forward::Forward;
pub use lily_model::{Outputs, Span};
pub use request::{Cancel, Event, FinishReason, Logprob, Request, Sampling, Usage};
