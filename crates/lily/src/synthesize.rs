//! `lily synthesize`: a random checkpoint in the published layout.

use std::path::PathBuf;

use lily_checkpoint::Config;
use lily_checkpoint::synthesize::{Options, synthesize, synthesized_bytes};

use crate::error::Error;
use crate::machine::gigabytes;
use crate::{demo, long_work, progress};

/// What to write, and where.
#[derive(clap::Args, Debug)]
pub struct Synthesize {
    /// Folder to create; nothing is ever written over
    #[arg(long, value_name = "DIR")]
    out: PathBuf,
    /// Layers; the full model has 40 (19.5 GB), and fewer need --any-size to run
    #[arg(long, value_name = "N", default_value_t = 40, value_parser = clap::value_parser!(u16).range(1..=256))]
    layers: u16,
    /// Same seed, same files
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
    /// Write the vision tower's tensors too, which Lily passes over (0.9 GB)
    #[arg(long)]
    vision: bool,
    /// Threads [default: one for each core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
}

/// Writes random weights of Qwen3.6-35B-A3B's sizes, with a made-up tokenizer.
pub fn run(args: Synthesize) -> Result<(), Error> {
    let config = Config { layers: args.layers.into(), ..Config::full() };
    let mut options = Options { seed: args.seed, vision: args.vision, ..Default::default() };
    if let Some(threads) = args.threads {
        options.threads = threads.into();
    }
    let need = synthesized_bytes(&config, options);
    long_work::check_disk(&args.out, need)?;
    let template = "chat_template.jinja";
    let text = demo::file(template).expect("the demo has a template");
    let (stopped, bar) = (long_work::stop_on_interrupt(), progress::bytes("writing", need));
    synthesize(&args.out, &config, options, &[(template, text)], &mut |done, _| {
        bar.set_position(done);
        !stopped()
    })
    .map_err(long_work::stopped)?;
    bar.finish_and_clear();
    say!("{}: {} of random weights; it answers noise", args.out.display(), gigabytes(need));
    Ok(())
}
