//! The text side of a checkpoint directory: which files there are, and what each must hold.

use crate::{Error, Result};
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// Reads a whole file of at most `most` bytes.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    let error = |problem: String| Error::File { path: path.to_owned(), problem };
    let file = File::open(path).map_err(|e| error(e.to_string()))?;
    let mut bytes = Vec::new();
    // One byte more than allowed is asked for, so that a pipe or a growing file is seen too.
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| error(e.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(error(format!("is larger than {most} bytes: this is not the expected file")));
    }
    Ok(bytes)
}
