//! `lily completions`: completion scripts for shells.

use crate::error::Error;
use clap::{Args, CommandFactory};
use std::io::Write;

/// Which shell.
#[derive(Args, Debug)]
pub struct Completions {
    /// The shell, e.g. for bash: `source <(lily completions bash)`
    shell: clap_complete::Shell,
}

/// Prints the script to stdout.
pub fn run(args: Completions) -> Result<(), Error> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut crate::Lily::command(), "lily", &mut script);
    Ok(std::io::stdout().write_all(&script)?)
}
