//! The model on disk: its sizes, every tensor it must have, and how to read and check them.
#![deny(unsafe_code)]

pub mod config;

pub use config::Config;
