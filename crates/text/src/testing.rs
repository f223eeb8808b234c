//! What the tests of this crate share: the demo's tokenizer, and where the reference files are.

use crate::Tokenizer;
use std::path::PathBuf;
use std::sync::LazyLock;

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

/// The tokenizer of the embedded demo model.
pub fn demo_tokenizer() -> &'static Tokenizer {
    static DEMO: LazyLock<Tokenizer> = LazyLock::new(|| {
        Tokenizer::from_bytes(include_bytes!("../../../demo/tokenizer.json")).unwrap()
    });
    &DEMO
}
