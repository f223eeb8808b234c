//! Read-only maps of files, and the one unsafe block of this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use crate::error::{Error, Result};

/// A file's bytes, mapped read-only: pages come from the disk when they are touched, and the
/// system may drop them again. The address is a multiple of the system's page size.
///
/// The file must not be written while it is mapped, by anyone; it may be replaced (written under
/// another name and renamed), which leaves the map as it was. Touching bytes that somebody cut off
/// ends the process with a bus error.
#[derive(Debug)]
pub struct Mapping(memmap2::Mmap);

impl Mapping {
    /// Maps all of the file at `path`.
    ///
    /// # Errors
    /// [`Error::File`] where it cannot be opened, is no regular file, or is empty;
    /// [`Error::NoMemory`] where the system has no room for it.
    pub fn open(path: &Path) -> Result<Mapping> {
        let failed = |what: String| Error::File { path: path.into(), what };
        let file = File::open(path).map_err(|error| failed(error.to_string()))?;
        let metadata = file.metadata().map_err(|error| failed(error.to_string()))?;
        if !metadata.is_file() {
            return Err(failed("expected a regular file".into()));
        }
        if metadata.len() == 0 {
            return Err(failed("the file is empty".into()));
        }
        // SAFETY: The bytes are only ever read, and as plain u8. That nobody changes the file
        // while it is mapped is this type's contract: Lily maps only files that it wrote itself
        // under another name and renamed when they were complete, and never writes them again.
        let mapping = unsafe { memmap2::Mmap::map(&file) };
        Ok(Mapping(mapping.map_err(|error| match error.kind() {
            ErrorKind::OutOfMemory => Error::NoMemory { path: path.into(), bytes: metadata.len() },
            _ => failed(error.to_string()),
        })?))
    }
}

impl AsRef<[u8]> for Mapping {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_map_is_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        std::fs::write(&path, b"hello").unwrap();
        assert_eq!(Mapping::open(&path).unwrap().as_ref(), b"hello");
    }

    #[test]
    fn what_cannot_be_mapped_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let empty = dir.path().join("empty");
        std::fs::write(&empty, b"").unwrap();
        let error = Mapping::open(&empty).unwrap_err().to_string();
        assert!(error.ends_with("empty: the file is empty"), "{error}");
        assert!(Mapping::open(&dir.path().join("none")).is_err());
        assert!(Mapping::open(dir.path()).unwrap_err().to_string().contains("regular file"));
    }
}
