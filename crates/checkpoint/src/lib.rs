//! The model on disk: its sizes, every tensor it must have, and how to read and check them.
//!
//! Start at [`Checkpoint::open`]. It reads [`Config`] from `config.json`, opens the files through
//! [`shards`] and [`safetensors`], and holds all of it against [`tensors::table`] by way of
//! [`verify`].
#![deny(unsafe_code)]

pub mod checkpoint;
pub mod config;
pub mod error;
#[doc(hidden)]
pub mod fuzzing;
mod grouped;
pub mod mmap;
pub mod quantize;
mod recognise;
pub mod safetensors;
pub mod shards;
pub mod synthesize;
pub mod tensors;
pub mod testing;
pub mod verify;
pub mod writer;

pub use checkpoint::{Checkpoint, OpenOptions};
pub use config::Config;
pub use error::{Error, Result};
pub use shards::Source;
pub use tensors::{Dtype, Tensor};
