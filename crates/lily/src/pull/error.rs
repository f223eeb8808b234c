//! What can go wrong in a pull, each with what to do about it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::machine::gigabytes;

/// Why a pull stopped. What had arrived by then is kept and the next pull goes on from there,
/// unless the message says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A setting or an argument that cannot be used.
    #[error("{what} is {found:?}; expected {expected}")]
    Setting {
        /// The variable's or option's name.
        what: &'static str,
        /// Its value.
        found: String,
        /// What it may be.
        expected: &'static str,
    },
    /// No folder for the cache.
    #[error("no home folder to put the checkpoint in: set HF_HOME, or give --to DIR")]
    NoHome,
    /// `HF_HUB_OFFLINE` is set and something is missing.
    #[error(
        "HF_HUB_OFFLINE is set and {file} is not in {}: unset it, or pull on a machine with a \
         connection and copy the folder", dir.display()
    )]
    Offline {
        /// The first file missing.
        file: String,
        /// Where it was looked for.
        dir: PathBuf,
    },
    /// Not enough room for what is still to fetch.
    #[error(
        "not enough disk space in {}: {} to fetch, {} free. Make room, or choose another disk \
         with --to DIR (or HF_HOME)", dir.display(), gigabytes(*need), gigabytes(*free)
    )]
    Space {
        /// The folder that would hold the files.
        dir: PathBuf,
        /// Bytes still to fetch.
        need: u64,
        /// Bytes free.
        free: u64,
    },
    /// The file system refused.
    #[error("cannot {what} {}: {source}. {}", path.display(), next_step(source))]
    File {
        /// What was tried.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// 401.
    #[error("{url}: the server asks for a login (401). {}", login_step(*token))]
    Login {
        /// What was asked for.
        url: String,
        /// Whether a token was sent.
        token: bool,
    },
    /// 403.
    #[error(
        "{url}: access refused (403{}). {}", reason.as_deref().map(|r| format!(", {r}")).unwrap_or_default(),
        if *token { "The account behind your token may not read this repository: open its page \
                     in a browser, accept its terms if it has any, and pull again" }
        else { "If the repository has terms to accept, do so on its page, then set HF_TOKEN to a \
                token of that account; otherwise a proxy or firewall may be in the way" }
    )]
    Forbidden {
        /// What was asked for.
        url: String,
        /// What the server said of it.
        reason: Option<String>,
        /// Whether a token was sent.
        token: bool,
    },
    /// 404.
    #[error(
        "{url}: not found (404{}). Check --revision and HF_ENDPOINT; without --revision, Lily \
         pulls the revision it is tested with",
        reason.as_deref().map(|r| format!(", {r}")).unwrap_or_default()
    )]
    NotFound {
        /// What was asked for.
        url: String,
        /// What the server said of it.
        reason: Option<String>,
    },
    /// 429 with a wait longer than anyone would sit through.
    #[error(
        "{url}: too many requests (429); the server asks to wait {} s. Pull again after that; \
         what has arrived is kept", wait.as_secs()
    )]
    Busy {
        /// What was asked for.
        url: String,
        /// How long to wait.
        wait: Duration,
    },
    /// Any other status that trying again will not change.
    #[error("{url}: the server answered {status}. Check HF_ENDPOINT and any proxy in between")]
    Status {
        /// What was asked for.
        url: String,
        /// The HTTP status.
        status: u16,
    },
    /// The same trouble again and again.
    #[error(
        "{file}: gave up after {tries} tries without progress; the last: {last}. What has \
         arrived is kept: run the same command again to go on"
    )]
    GaveUp {
        /// The file.
        file: String,
        /// How many times in a row nothing arrived.
        tries: u32,
        /// The last of the failures.
        last: String,
    },
    /// A redirect that cannot be followed.
    #[error("{url}: {what}. Check HF_ENDPOINT and any proxy in between")]
    Redirect {
        /// What was asked for.
        url: String,
        /// What is wrong with the redirect.
        what: String,
    },
    /// The server's file has another size.
    #[error(
        "{file}: the server offers {found} bytes, expected {expected}. The answer is not the \
         file (a login page of the network, or a mirror of another revision): check HF_ENDPOINT \
         and open {url} in a browser"
    )]
    Length {
        /// The file.
        file: String,
        /// What was asked for.
        url: String,
        /// Size by the server, in bytes; "more than" when the answer had no length.
        found: String,
        /// Size by the table or the Hub's own record.
        expected: u64,
    },
    /// All bytes arrived, and they are wrong.
    #[error(
        "{file}: the bytes received have checksum {found}, expected {expected}; they were \
         thrown away. Pull again; if it happens again, something on the way changes files (a \
         proxy, or the mirror in HF_ENDPOINT)"
    )]
    Checksum {
        /// The file.
        file: String,
        /// What arrived.
        found: String,
        /// What should have.
        expected: String,
    },
    /// The server does not say what the file is.
    #[error(
        "{url}: the server names no {what} for this file, so it could not be checked. \
         HF_ENDPOINT must be the Hub or a mirror that passes its headers on"
    )]
    Nameless {
        /// What was asked for.
        url: String,
        /// The missing header's meaning.
        what: &'static str,
    },
    /// The index of another revision cannot be used.
    #[error(
        "model.safetensors.index.json of this revision: {what}. It is no checkpoint that Lily reads"
    )]
    Index {
        /// What is wrong with it.
        what: String,
    },
}

impl Error {
    /// Wraps a file-system error, naming what was tried where.
    pub fn file(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        move |source| Error::File { what, path: path.to_owned(), source }
    }
}

impl From<Error> for crate::error::Error {
    fn from(error: Error) -> crate::error::Error {
        let message = error.to_string();
        match error {
            Error::Setting { .. } => crate::error::Error::Usage(message),
            Error::Space { .. } => crate::error::Error::DoesNotFit(message),
            _ => crate::error::Error::Failed(message),
        }
    }
}

fn login_step(token: bool) -> &'static str {
    if token {
        "The token sent (HF_TOKEN, or the file that `hf auth login` writes) was not accepted: \
         it may have expired; make a new one at https://huggingface.co/settings/tokens"
    } else {
        "Set HF_TOKEN to a token from https://huggingface.co/settings/tokens; if this \
         repository needs none, check --revision and HF_ENDPOINT"
    }
}

fn next_step(source: &io::Error) -> &'static str {
    match source.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            "The disk is full: make room and run the same command again (what has arrived is \
             kept), or choose another disk with --to DIR"
        }
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "Choose a folder you may write to with --to DIR, or set HF_HOME"
        }
        io::ErrorKind::NotADirectory | io::ErrorKind::AlreadyExists => {
            "Something else has that name: move it away, or choose another folder with --to DIR"
        }
        _ => "Check the disk and the folder, or choose another with --to DIR",
    }
}
