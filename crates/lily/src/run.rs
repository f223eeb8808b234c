//! `lily run`: one question, one answer. The answer goes to stdout, everything else to stderr.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs, SamplingArgs};
use crate::error::Error;
use crate::input;
use crate::talk::{ReplyArgs, Talk};
use clap::Args;
use lily_engine::FinishReason;
use lily_text::chat::{Message, Role};
use std::io::IsTerminal;

/// What to ask, and how.
#[derive(Args, Debug)]
pub struct Run {
    /// The question; what is piped into stdin follows it, after an empty line
    prompt: Vec<String>,
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    memory: MemoryArgs,
    #[command(flatten)]
    reply: ReplyArgs,
    #[command(flatten)]
    sampling: SamplingArgs,
}

/// Asks the model and prints its answer as it comes.
pub fn run(args: Run) -> Result<(), Error> {
    let prompt = question(args.prompt)?;
    let mut talk = Talk::open(&args.model, &args.device, &args.memory, args.reply, &args.sampling)?;
    let said = talk.reply(&[Message::new(Role::User, prompt)])?;
    match said.reason {
        FinishReason::Cancelled => Err(Error::Interrupted),
        _ => Ok(()),
    }
}

/// The argument and what is piped in, with an empty line between them.
fn question(words: Vec<String>) -> Result<String, Error> {
    if let [first, second, ..] = words.as_slice() {
        return Err(Error::Usage(format!(
            "one question, please, not {first:?} and {second:?}: quote it, as in `lily run {:?}`",
            words.join(" ")
        )));
    }
    let piped = if std::io::stdin().is_terminal() { String::new() } else { input::stdin()? };
    let parts = [words.into_iter().next().unwrap_or_default(), piped];
    let parts: Vec<&str> = parts.iter().map(|p| p.trim_end()).filter(|p| !p.is_empty()).collect();
    if parts.is_empty() {
        return Err(Error::Usage(
            "no question: give it as an argument, as in `lily run \"Who are you?\"`, or on stdin"
                .into(),
        ));
    }
    Ok(parts.join("\n\n"))
}
