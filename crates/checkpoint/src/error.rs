//! The one error type of this crate. Each message says where, what was expected, what was found,
//! and the next step if there is one.

use std::path::PathBuf;

use crate::verify::Report;

/// Why a checkpoint, or a part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` is not JSON, or describes something else than this crate reads. Every
    /// deviation is listed, not only the first.
    #[error("{}", list("config.json", .0))]
    Config(Vec<String>),

    /// Files that are missing, cannot be read or are not what their names say. Each line begins
    /// with the file's name.
    #[error("{}", list(&dir.display().to_string(), problems))]
    Files {
        /// The folder of the checkpoint.
        dir: PathBuf,
        /// One line a problem.
        problems: Vec<String>,
    },

    /// The checkpoint was read, and is not one that Lily runs. Shown as `lily verify` shows it.
    #[error("{0}")]
    Rejected(Box<Report>),

    /// A file could not be opened, read or mapped.
    #[error("{}: {what}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// What happened to it.
        what: String,
    },

    /// The system has no room left for the map of a file.
    #[error(
        "{}: no memory to map its {bytes} bytes; raise this process's limit (ulimit -v) or close \
         other programs", path.display()
    )]
    NoMemory {
        /// The file.
        path: PathBuf,
        /// Its bytes.
        bytes: u64,
    },

    /// A file that was whole when it was opened could not be read.
    #[error("{file}: reading {name}: {what}")]
    Read {
        /// The file's name.
        file: String,
        /// The tensor that was read.
        name: String,
        /// What happened.
        what: String,
    },

    /// Long work was asked to stop, and did.
    #[error("stopped")]
    Stopped,
}

/// A result with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// `place: problem`, or one problem a line where there are several.
fn list(place: &str, problems: &[String]) -> String {
    match problems {
        [one] => format!("{place}: {one}"),
        many => {
            let mut text = format!("{place}: {} problems", many.len());
            for problem in many {
                text.push_str("\n  ");
                text.push_str(problem);
            }
            text
        }
    }
}

/// A name or value out of a file, fit for a terminal: control characters escaped, and cut where it
/// is long.
pub(crate) fn shown(text: &str) -> String {
    const MOST: usize = 120;
    let mut out = String::new();
    for (i, c) in text.chars().enumerate() {
        if i == MOST {
            out.push_str("...");
            break;
        }
        if c.is_control() { out.extend(c.escape_default()) } else { out.push(c) }
    }
    out
}
