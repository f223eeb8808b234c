//! What tests of this and other crates share: where the reference files are.

use std::path::PathBuf;

/// The folder of reference files that are not part of the repository: `LILY_SHARED`, else
/// `../shared` beside the workspace. Says aloud what is skipped where there is none.
pub fn shared() -> Option<PathBuf> {
    let dir = std::env::var_os("LILY_SHARED")
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared")));
    if dir.is_dir() {
        return Some(dir);
    }
    eprintln!("skipped: needs the reference files in {} (set LILY_SHARED)", dir.display());
    None
}
