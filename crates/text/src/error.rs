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
    /// The chat template is not valid, or fails whatever it is given.
    #[error("chat template: {0}")]
    Template(String),
    /// The messages, tools or options of a request cannot be made into a prompt.
    #[error("{param}: {problem}")]
    Request {
        /// The field at fault, as a path: `messages[2].content[0]`.
        param: String,
        /// What was expected there, and what was found.
        problem: String,
    },
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What others say of their errors, fit for a line of a message: foreign text in it may be long
/// and hold control characters.
pub(crate) fn line(text: &str) -> String {
    const LONGEST: usize = 600;
    let blank = |c: char| if c.is_control() { ' ' } else { c };
    let mut line: String = text.chars().take(LONGEST).map(blank).collect();
    if text.chars().nth(LONGEST).is_some() {
        line.push('…');
    }
    line
}
