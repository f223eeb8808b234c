//! The one error type of this crate. Each message says where, what was expected, what was found,
//! and the next step if there is one.

use std::path::PathBuf;

/// Why text cannot be turned into tokens or back.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file of the checkpoint could not be read.
    #[error("{}: {problem}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it, and what to do.
        problem: String,
    },
    /// `tokenizer.json` is damaged, or describes another kind of tokenizer.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
