//! Text to tokens and back. Pure functions: nothing here knows a model, a device or a socket.
#![forbid(unsafe_code)]

pub mod stream;
