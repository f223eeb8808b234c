//! `cargo xtask`: the chores of the project, one file each. `cargo xtask --help` lists them.
#![forbid(unsafe_code)]

mod ci;
mod file_map;
mod golden;
mod mutate;
mod tidy;
mod tree;

use clap::Parser;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The chores of the project.
#[derive(Parser)]
#[command(name = "cargo xtask")]
enum Chore {
    /// Runs every check that needs nothing but Rust: format, clippy, tests, docs, tidy.
    Ci,
    /// Checks the rules of the house that no compiler knows.
    Tidy {
        /// First puts right what a program can: the file map of ARCHITECTURE.md.
        #[arg(long)]
        write: bool,
    },
    /// Compares the golden vectors with what the reference computes. Needs python3 with NumPy.
    Golden {
        /// Says what differs, and replaces it.
        #[arg(long)]
        write: bool,
    },
    /// Makes known mistakes on purpose; a test must notice each of them.
    Mutate {
        /// Only mutations whose name contains this, or those of the pitfall with this number.
        #[arg(default_value = "")]
        only: String,
    },
}

/// Where the workspace lies.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("xtask lies in the workspace").into()
}

fn main() -> ExitCode {
    let done = match Chore::parse() {
        Chore::Ci => ci::run(&root()),
        Chore::Tidy { write } => tidy::run(&root(), write),
        Chore::Golden { write } => golden::run(&root(), write),
        Chore::Mutate { only } => mutate::run(&root(), &only),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::FAILURE
        }
    }
}
