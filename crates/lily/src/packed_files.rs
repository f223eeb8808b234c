//! Where packed weights lie: beside the checkpoint, or in the user's cache folder where that is
//! read-only. It knows paths and sizes; what is in the files is the model crate's matter.

use crate::error::Error;
use lily_model::pack::LAYOUT;
use sha2::{Digest, Sha256};
use std::path::{Path, PathBuf};

/// What every packed file's name ends in.
const EXTENSION: &str = "packed";
/// The list of packed files made beside checkpoints, so that `doctor` finds them again.
const LIST: &str = "packed.list";

/// The user's folder for files that can be made again: `$XDG_CACHE_HOME/lily`, `~/.cache/lily`,
/// or `~/Library/Caches/lily`. `None` where there is no home.
pub fn folder() -> Option<PathBuf> {
    let absolute = |path: &PathBuf| path.is_absolute();
    let named = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from).filter(absolute);
    let place = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
    let home = || std::env::home_dir().filter(absolute).map(|home| home.join(place));
    named.or_else(home).map(|caches| caches.join("lily"))
}

/// The packed file of the checkpoint in `dir`: one that exists, else where it can be written.
pub fn path(dir: &Path) -> Result<PathBuf, Error> {
    let dir = dir.canonicalize().map_err(|e| Error::io(dir, &e))?;
    let beside = dir.join(format!("lily-{LAYOUT}.{EXTENSION}"));
    let writable = rustix::fs::access(&dir, rustix::fs::Access::WRITE_OK).is_ok();
    if beside.exists() || writable {
        return Ok(beside);
    }
    let Some(folder) = folder() else {
        return Err(Error::Failed(format!(
            "{}: cannot write the packed weights here, and there is no home folder for a cache; \
             set XDG_CACHE_HOME to a folder that can be written",
            dir.display()
        )));
    };
    let name = dir.file_name().unwrap_or_default().to_string_lossy();
    let hash = Sha256::digest(dir.as_os_str().as_encoded_bytes());
    let hash: String = hash.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    Ok(folder.join(format!("{name:.80}-{hash}-{LAYOUT}.{EXTENSION}")))
}

/// Notes that a packed file was made, for [`known`]. A list that cannot be written is no reason
/// to fail: the file itself is there.
pub fn remember(path: &Path) {
    let Some(folder) = folder() else { return };
    let list = folder.join(LIST);
    let mut lines = std::fs::read_to_string(&list).unwrap_or_default();
    let line = path.to_string_lossy();
    if !lines.lines().any(|l| l == line) && std::fs::create_dir_all(&folder).is_ok() {
        lines.push_str(&line);
        lines.push('\n');
        let _ = std::fs::write(&list, lines);
    }
}

/// Every packed file that is known and exists, complete or not, with its bytes: those in the
/// cache folder, those on its list, and those in `dirs`.
pub fn known(dirs: &[PathBuf]) -> Vec<(PathBuf, u64)> {
    let mut paths = Vec::new();
    let mut places = dirs.to_vec();
    if let Some(folder) = folder() {
        let list = std::fs::read_to_string(folder.join(LIST)).unwrap_or_default();
        paths.extend(list.lines().map(PathBuf::from));
        places.push(folder);
    }
    for place in places {
        let entries = std::fs::read_dir(&place).into_iter().flatten().flatten();
        paths.extend(entries.map(|entry| entry.path()));
    }
    let canonical = paths.into_iter().filter_map(|path| path.canonicalize().ok());
    let mut found: Vec<(PathBuf, u64)> = canonical
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.ends_with(".packed") || name.ends_with(".packed.incomplete")
        })
        .filter_map(|path| Some((path.clone(), path.metadata().ok()?.len())))
        .collect();
    found.sort();
    found.dedup();
    found
}
