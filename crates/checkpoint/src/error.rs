//! The one error type of this crate. Each message says where, what was expected, what was found,
//! and the next step if there is one.

/// Why a checkpoint, or a part of it, cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// `config.json` is not JSON, or describes something else than this crate reads. Every
    /// deviation is listed, not only the first.
    #[error("{}", list("config.json", .0))]
    Config(Vec<String>),
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
