//! The model on disk: its sizes, every tensor it must have, and how to read and check them.
#![deny(unsafe_code)]

pub mod config;
pub mod error;
pub mod tensors;
pub mod testing;

pub use config::Config;
pub use error::{Error, Result};
pub use tensors::{Dtype, Tensor};
