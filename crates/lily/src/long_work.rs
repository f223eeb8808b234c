//! What commands that write whole checkpoints share.

use std::path::Path;

use lily_engine::Cancel;

use crate::error::Error;
use crate::interrupt;
use crate::machine::{free_disk, gigabytes};

/// Makes the first Ctrl-C or SIGTERM a wish that the work can see, so that it removes what it has
/// written; a second one ends the process.
pub fn stop_on_interrupt() -> impl Fn() -> bool {
    let cancel = Cancel::default();
    interrupt::guard(&cancel);
    move || cancel.is_cancelled()
}

/// Errs where `need` bytes do not fit beside `path`.
pub fn check_disk(path: &Path, need: u64) -> Result<(), Error> {
    let path = std::path::absolute(path).map_err(|e| Error::io(path, &e))?;
    let free = free_disk(&path).map_err(|e| Error::io(&path, &e))?;
    if need <= free {
        return Ok(());
    }
    let (need, free) = (gigabytes(need), gigabytes(free));
    Err(Error::DoesNotFit(format!(
        "{}: {need} to write, {free} free on that disk; make room or choose another one",
        path.display()
    )))
}

/// What a checkpoint's error is to a command that Ctrl-C may have stopped.
pub fn stopped(error: lily_checkpoint::Error) -> Error {
    match error {
        lily_checkpoint::Error::Stopped => Error::Interrupted,
        other => other.into(),
    }
}
