//! `lily quantize`: an unquantised checkpoint to the layout that Lily runs.

use std::path::PathBuf;

use lily_checkpoint::quantize::{ConvertOptions, convert, converted_bytes};

use crate::error::Error;
use crate::machine::gigabytes;
use crate::{long_work, progress};

/// From where to where.
#[derive(clap::Args, Debug)]
pub struct Quantize {
    /// Folder of a bf16 checkpoint as Qwen publishes it (Qwen3.6-35B-A3B or a fine-tune)
    src: PathBuf,
    /// Folder to create; nothing is ever written over
    dst: PathBuf,
    /// Accept a checkpoint of this architecture with other sizes than Qwen3.6-35B-A3B
    #[arg(long)]
    any_size: bool,
    /// Threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Converts to MLX affine 4-bit, group 64, as MLX's CPU backend would.
pub fn run(args: Quantize) -> Result<(), Error> {
    let mut options = ConvertOptions { any_size: args.any_size, ..Default::default() };
    if let Some(threads) = args.threads {
        options.threads = threads.into();
    }
    if std::fs::symlink_metadata(&args.src).is_err() {
        return Err(Error::Failed(format!("{}: no such folder", args.src.display())));
    }
    let need = converted_bytes(&args.src, options)?;
    long_work::check_disk(&args.dst, need)?;
    let (stopped, bar) = (long_work::stop_on_interrupt(), progress::bytes("quantising", 0));
    convert(&args.src, &args.dst, options, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
        !stopped()
    })
    .map_err(long_work::stopped)?;
    bar.finish_and_clear();
    say!("{}: {} of weights, 4-bit; check with `lily verify`", args.dst.display(), gigabytes(need));
    Ok(())
}
