//! `cargo xtask golden [--write]`: computes the golden vectors anew and compares them with those
//! that are committed. What is compared, and how closely, is known to `reference/golden.py`.

use std::{
    path::Path,
    process::{Command, Stdio},
};

/// How a comparison ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The committed vectors are what the reference computes, or have just been written.
    Agree,
    /// They differ; the differences have been printed.
    Differ,
    /// This machine has no `python3` with NumPy.
    NoNumPy,
}

/// Runs `reference/golden.py` of the workspace at `root`; with `write`, replaces what differs.
/// Prints what the script prints.
pub fn run(root: &Path, write: bool) -> Outcome {
    let numpy = Command::new("python3")
        .args(["-c", "import numpy"])
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if !numpy {
        return Outcome::NoNumPy;
    }
    let status = Command::new("python3")
        .arg("-B") // leaves no __pycache__ in the source tree
        .arg(root.join("reference/golden.py"))
        .args(write.then_some("--write"))
        .status();
    if status.is_ok_and(|status| status.success()) { Outcome::Agree } else { Outcome::Differ }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn committed_vectors_are_what_the_reference_computes() {
        match run(&crate::root(), false) {
            Outcome::NoNumPy => eprintln!("skipped: golden vectors: needs python3 with numpy"),
            outcome => assert_eq!(outcome, Outcome::Agree),
        }
    }
}
