//! `cargo xtask ci`: the checks that need nothing but Rust, in one command, for a laptop.
//! `.ci/run` runs the same and, with what it installs, those that need Python or data.

use anyhow::{Context, bail};
use std::path::Path;
use std::process::Command;
use std::time::Instant;

const STEPS: [(&str, &[&str]); 4] = [
    ("format", &["fmt", "--all", "--check"]),
    ("clippy", &["clippy", "--workspace", "--all-targets", "--quiet", "--", "-D", "warnings"]),
    ("tests", &["test", "--workspace", "--quiet"]),
    ("docs", &["doc", "--workspace", "--no-deps", "--quiet"]),
];

/// Runs all steps in `root` and stops at the first that fails.
pub fn run(root: &Path) -> anyhow::Result<()> {
    let start = Instant::now();
    let heading = |name| eprintln!("== {name} ({:.0} s)", start.elapsed().as_secs_f64());
    heading("tidy");
    crate::tidy::run(root, false)?;
    for (name, args) in STEPS {
        heading(name);
        let status = Command::new("cargo")
            .args(args)
            .current_dir(root)
            .env("RUSTDOCFLAGS", "-D warnings")
            .status()
            .with_context(|| format!("cannot start cargo {}", args.join(" ")))?;
        if !status.success() {
            bail!("{name} failed: cargo {}", args.join(" "));
        }
    }
    heading("all checks passed");
    Ok(())
}
