//! `cargo xtask golden [--write]`: computes the golden vectors anew and compares them with those
//! that are committed. What is compared, and how closely, is known to `reference/golden.py`.

use anyhow::bail;
use std::path::Path;
use std::process::{Command, Stdio};

/// Compares the golden vectors of the workspace at `root` with what the reference computes, and
/// fails where they differ; with `write`, says what differs and replaces it.
pub fn run(root: &Path, write: bool) -> anyhow::Result<()> {
    if !numpy() {
        bail!("golden needs python3 with NumPy: python3 -m pip install numpy");
    }
    let status = Command::new("python3")
        .arg("-B") // leaves no __pycache__ in the source tree
        .arg(root.join("reference/golden.py"))
        .args(write.then_some("--write"))
        .status()?;
    if !status.success() {
        bail!("golden: {status}");
    }
    Ok(())
}

/// Whether this machine has `python3` with NumPy.
fn numpy() -> bool {
    Command::new("python3")
        .args(["-c", "import numpy"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_vectors_are_what_the_reference_computes() {
        if numpy() {
            run(&crate::root(), false).unwrap();
        } else {
            eprintln!("skipped: golden vectors: needs python3 with numpy");
        }
    }
}
