//! Text to tokens and back. Pure functions: nothing here knows a model, a device or a socket.
//!
//! - [`tokenizer`]: text to ids and ids to bytes, exactly as the checkpoint's `tokenizer.json`
//!   says;
//! - [`chat`]: messages and tools to the prompt, by the checkpoint's own template;
//! - [`Text`]: both, read from a checkpoint's folder;
//! - [`stream`]: ids to text as they arrive;
//! - [`reply`]: that text to reasoning, content and tool calls.
#![forbid(unsafe_code)]

pub mod chat;
mod error;
mod files;
#[doc(hidden)]
pub mod fuzzing;
pub mod reply;
pub mod stream;
#[cfg(test)]
mod testing;
pub mod tokenizer;

pub use error::{Error, Result};
pub use files::Text;
pub use tokenizer::Tokenizer;
