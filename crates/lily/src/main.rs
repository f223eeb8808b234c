//! The `lily` command: one file for each subcommand, flags in `args.rs`, loading in `load.rs`.
//!
//! Text goes to stdout, everything said about it to stderr. This is the only crate that reads the
//! environment, and `pull` the only command that opens a connection to the outside.
#![forbid(unsafe_code)]

#[macro_use]
mod say;

mod args;
mod bench;
mod chat;
mod completions;
mod defaults;
mod demo;
mod doctor;
mod error;
mod input;
mod interrupt;
mod load;
mod logits;
mod long_work;
mod machine;
mod packed_files;
mod progress;
mod pull;
mod quantize;
mod render;
mod run;
mod serve;
mod synthesize;
mod talk;
mod texts;
mod tokenize;
mod verify;

use clap::{Parser, Subcommand};
use std::process::ExitCode;

/// Runs Qwen3.6-35B-A3B (MLX affine 4-bit) on the machine in front of you.
#[derive(Parser, Debug)]
#[command(name = "lily", version, after_help = EXIT_CODES)]
struct Lily {
    #[command(subcommand)]
    command: Command,
}

const EXIT_CODES: &str = "\
Exit codes: 0 done; 1 failed, or what was compared differs; 2 wrong flags or input;
3 does not fit into memory or disk; 130 interrupted; 141 the reader of the output went away.";

#[derive(Subcommand, Debug)]
enum Command {
    /// Ask one question
    Run(run::Run),
    /// Have a conversation
    Chat(chat::Chat),
    /// Serve the OpenAI-compatible API
    Serve(serve::Serve),
    /// Fetch the checkpoint from the Hugging Face Hub
    Pull(pull::Pull),
    /// Compare a checkpoint with everything that is known of it
    Verify(verify::Verify),
    /// Show what this machine has, what fits, and packed weights that can be removed
    Doctor(doctor::Doctor),
    /// Measure tokens per second of prefill and decode
    Bench(bench::Bench),
    /// Turn text into token ids
    Tokenize(tokenize::Tokenize),
    /// Turn messages into the text of the prompt
    Render(render::Render),
    /// Compute the logits after every token of a prompt; needs no tokenizer
    Logits(logits::Logits),
    /// Convert a bf16 checkpoint to the 4-bit layout that Lily runs
    Quantize(quantize::Quantize),
    /// Write a random checkpoint in the published layout, for tests and measurements
    Synthesize(synthesize::Synthesize),
    /// Print a completion script for a shell
    Completions(completions::Completions),
}

fn main() -> ExitCode {
    let done = match Lily::parse().command {
        Command::Run(args) => run::run(args),
        Command::Chat(args) => chat::run(args),
        Command::Serve(args) => serve::run(args),
        Command::Pull(args) => pull::run(args),
        Command::Verify(args) => verify::run(args),
        Command::Doctor(args) => doctor::run(args),
        Command::Bench(args) => bench::run(args),
        Command::Tokenize(args) => tokenize::run(args),
        Command::Render(args) => render::run(args),
        Command::Logits(args) => logits::run(args),
        Command::Quantize(args) => quantize::run(args),
        Command::Synthesize(args) => synthesize::run(args),
        Command::Completions(args) => completions::run(args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = error.to_string();
            if !message.is_empty() {
                say!("error: {message}");
            }
            error.exit_code()
        }
    }
}
