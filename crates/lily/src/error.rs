//! What ends a command early, and the exit code a script sees.

use std::process::ExitCode;

/// Why a command did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags contradict each other or the input: exit code 2, as for flags that do not parse.
    #[error("{0}")]
    Usage(String),
    /// It was tried and failed; the message says what to do next.
    #[error("{0}")]
    Failed(String),
    /// What was compared differs; the command has said how.
    #[error("")]
    Differs,
    /// Memory or disk are too small for what was asked; nothing was allocated.
    #[error("{0}")]
    DoesNotFit(String),
    /// Ctrl-C, or SIGTERM.
    #[error("interrupted")]
    Interrupted,
    /// Whoever read our output has closed it, as `head` does: no message, it is not our matter.
    #[error("")]
    OutputClosed,
    /// The checkpoint cannot be used.
    #[error(transparent)]
    Checkpoint(#[from] lily_checkpoint::Error),
    /// The checkpoint's tokenizer or template, or the messages, cannot be used.
    #[error(transparent)]
    Text(#[from] lily_text::Error),
    /// The machine cannot compute it.
    #[error(transparent)]
    Device(#[from] lily_device::Error),
    /// The weights cannot be packed, or their packed form cannot be used.
    #[error(transparent)]
    Pack(#[from] lily_model::pack::Error),
    /// The engine refused or lost the request.
    #[error(transparent)]
    Engine(#[from] lily_engine::Error),
}

impl Error {
    /// A failure of the file system, with the path.
    pub fn io(path: &std::path::Path, error: &std::io::Error) -> Error {
        Error::Failed(format!("{}: {error}", path.display()))
    }

    /// What the process exits with: the list in `lily --help`.
    pub fn exit_code(&self) -> ExitCode {
        ExitCode::from(match self {
            Error::Usage(_)
            | Error::Text(lily_text::Error::Request { .. })
            | Error::Device(lily_device::Error::Unsupported(_))
            | Error::Engine(
                lily_engine::Error::EmptyPrompt
                | lily_engine::Error::PromptTooLong { .. }
                | lily_engine::Error::TokenId { .. }
                | lily_engine::Error::Sampling { .. },
            ) => 2,
            Error::DoesNotFit(_)
            | Error::Device(lily_device::Error::OutOfMemory { .. })
            | Error::Checkpoint(lily_checkpoint::Error::NoMemory { .. })
            | Error::Pack(lily_model::pack::Error::Checkpoint(
                lily_checkpoint::Error::NoMemory { .. },
            )) => 3,
            Error::Interrupted => 130,
            Error::OutputClosed => 141,
            _ => 1,
        })
    }
}

/// Failing to write to stdout: the only `io::Error` that commands pass on without a path.
impl From<std::io::Error> for Error {
    fn from(error: std::io::Error) -> Error {
        match error.kind() {
            std::io::ErrorKind::BrokenPipe => Error::OutputClosed,
            _ => Error::Failed(format!("cannot write the output: {error}")),
        }
    }
}
