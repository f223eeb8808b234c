//! A checkpoint that Lily can run: its config, and the bytes of every tensor in the table.

use std::path::Path;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::shards::{Shards, Source};
use crate::verify;

/// What is accepted when a checkpoint is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenOptions {
    /// Accept other sizes than Qwen3.6-35B-A3B's, as tests and the demo have.
    pub any_size: bool,
}

/// An open checkpoint. Every tensor of [`crate::tensors::table`] is in it, with the table's dtype
/// and shape; values are not looked at.
#[derive(Debug)]
pub struct Checkpoint {
    config: Config,
    shards: Shards,
}

impl Checkpoint {
    /// Opens the checkpoint in the folder `dir`: reads its config, index and headers, and compares
    /// all of it with the table. No weight is read.
    ///
    /// # Errors
    /// [`Error::Rejected`] with every difference, as `lily verify` shows it.
    pub fn open(dir: &Path, options: OpenOptions) -> Result<Checkpoint> {
        match verify::examine(dir, options.any_size) {
            (report, Some((config, shards))) if report.ok() => Ok(Checkpoint { config, shards }),
            (report, _) => Err(Error::Rejected(Box::new(report))),
        }
    }

    /// The checkpoint inside the program, of any size: a `config.json` and one safetensors file.
    ///
    /// # Errors
    /// As [`Checkpoint::open`].
    pub fn embedded(config_json: &str, safetensors: &'static [u8]) -> Result<Checkpoint> {
        let config = Config::from_json(config_json)?;
        let shards = Shards::embedded(safetensors)?;
        let report = verify::compare(&config, &shards);
        if !report.ok() {
            return Err(Error::Rejected(Box::new(report)));
        }
        Ok(Checkpoint { config, shards })
    }

    /// The model's sizes.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Bytes of tensor `name`.
    ///
    /// # Panics
    /// Where `name` is not in the table.
    pub fn bytes_of(&self, name: &str) -> u64 {
        let (entry, _) = self.shards.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        entry.range.end - entry.range.start
    }

    /// Fills `out` with the bytes of tensor `name` from `offset` on (little-endian, row-major).
    /// Positional reads: nothing is mapped or kept, so that reading 20 GB needs no memory but
    /// `out`. May be called from several threads at once.
    ///
    /// # Errors
    /// [`Error::Read`] where the file cannot be read, or was cut since it was opened.
    ///
    /// # Panics
    /// Where `name` is not in the table, or has no such bytes.
    pub fn read(&self, name: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        self.shards.read(name, offset, out)
    }

    /// What identifies the bytes of this checkpoint, for a packed copy of them.
    pub fn source(&self) -> Source {
        self.shards.source()
    }

    /// The folder; none for the embedded one.
    pub fn dir(&self) -> Option<&Path> {
        self.shards.dir()
    }
}
