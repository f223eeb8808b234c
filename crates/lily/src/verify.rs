//! `lily verify`: is this checkpoint what Lily runs, and are its files whole?

use crate::args::{self, ModelArgs};
use crate::defaults::Defaults;
use crate::error::Error;
use crate::load::Source;
use crate::texts::Texts;
use crate::{load, packed_files, progress};
use clap::Args;
use indicatif::ProgressBar;
use lily_checkpoint::{Checkpoint, OpenOptions, verify};
use lily_model::pack;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What to compare.
#[derive(Args, Debug)]
pub struct Verify {
    /// Folder of the checkpoint
    #[arg(env = "LILY_MODEL", hide_env_values = true, value_parser = args::path_parser())]
    dir: PathBuf,
    /// Read every byte and compare the files with the published SHA-256
    #[arg(long)]
    checksums: bool,
    /// Read every byte of the packed weights and compare them with their checksums
    #[arg(long)]
    packed: bool,
    /// Accept other sizes than Qwen3.6-35B-A3B's
    #[arg(long)]
    any_size: bool,
}

/// Prints every difference to stdout; [`Error::Differs`] if there is one.
pub fn run(args: Verify) -> Result<(), Error> {
    if args.dir.as_os_str().is_empty() {
        return Err(Error::Usage("give the folder of the checkpoint: lily verify DIR".into()));
    }
    let options = verify::Options {
        any_size: args.any_size,
        checksums: args.checksums,
        ..verify::Options::default()
    };
    let bar = progress::bytes("reading", 0);
    let mut part = String::new();
    let report = verify::verify(&args.dir, options, &mut |p| {
        if part != p.part {
            p.part.clone_into(&mut part);
            bar.set_message(part.clone());
            bar.set_length(p.total);
        }
        bar.set_position(p.done);
    });
    bar.finish_and_clear();
    let mut stdout = std::io::stdout();
    writeln!(stdout, "{report}")?;
    if !report.ok() {
        return Err(Error::Differs);
    }
    let model = ModelArgs { model: Some(args.dir.clone()), any_size: args.any_size };
    text_files(&Source::open(&model)?, args.any_size, &mut stdout)?;
    if args.packed {
        let checkpoint = Checkpoint::open(&args.dir, OpenOptions { any_size: args.any_size })?;
        return packed(&args.dir, &checkpoint, &mut stdout);
    }
    Ok(())
}

/// The files that turn text into tokens. A checkpoint of other sizes, as tests have, may lack
/// them all and still be computed.
fn text_files(source: &Source, any_size: bool, stdout: &mut impl Write) -> Result<(), Error> {
    let none = ["tokenizer.json", "chat_template.jinja", "tokenizer_config.json"]
        .into_iter()
        .all(|name| matches!(source.files.text(name), Ok(None)));
    let problem = match (Defaults::open(source), Texts::open(source)) {
        (Err(error), _) => error,
        (Ok(_), _) if none && any_size => {
            writeln!(stdout, "  No tokenizer.json: only logits and bench run without one.")?;
            return Ok(());
        }
        (Ok(_), Err(error)) => error,
        (Ok(_), Ok(texts)) => {
            writeln!(
                stdout,
                "  Tokenizer of {} ids and chat template: good.",
                texts.tokenizer.len()
            )?;
            return Ok(());
        }
    };
    writeln!(stdout, "text files:\n  {problem}")?;
    Err(Error::Differs)
}

fn packed(dir: &Path, checkpoint: &Checkpoint, stdout: &mut impl Write) -> Result<(), Error> {
    if load::packs_in_memory(checkpoint.config()) {
        writeln!(stdout, "packed weights: this model is small and packed at every start")?;
        return Ok(());
    }
    let path = packed_files::path(dir)?;
    if !path.exists() {
        let path = path.display();
        return Err(Error::Failed(format!(
            "{path}: no packed weights yet; the first run makes them"
        )));
    }
    let bar: ProgressBar = progress::bytes("packed weights", 0);
    let damaged = pack::verify(&path, checkpoint, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    let path = path.display();
    match damaged {
        Ok(damaged) if damaged.is_empty() => {
            writeln!(stdout, "{path}: every byte is as it was packed")?;
            Ok(())
        }
        Ok(damaged) => {
            let names = damaged.join(", ");
            writeln!(stdout, "{path}: damaged: {names}\n  Remove it: the next run makes it anew.")?;
            Err(Error::Differs)
        }
        Err(pack::Error::Stale { reason, .. }) => {
            writeln!(stdout, "{path}: {reason}\n  The next run makes it anew.")?;
            Err(Error::Differs)
        }
        Err(error) => Err(error.into()),
    }
}
