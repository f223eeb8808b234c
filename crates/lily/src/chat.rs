//! `lily chat`: a conversation, line by line.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs, SamplingArgs};
use crate::error::Error;
use crate::talk::{ReplyArgs, Talk};
use clap::Args;
use lily_text::chat::{Message, Role};
use std::io::{BufRead, IsTerminal, Write};

/// How to converse.
#[derive(Args, Debug)]
pub struct Chat {
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

const HELP: &str = "\
/reset          forget the conversation
/system TEXT    begin anew with this system message (without TEXT: with none)
/help           this
/exit           end, as does Ctrl-D; Ctrl-C ends a reply that runs";

/// Reads a line, prints a reply, until the input ends.
pub fn run(args: Chat) -> Result<(), Error> {
    let mut talk = Talk::open(&args.model, &args.device, &args.memory, args.reply, &args.sampling)?;
    let mut history: Vec<Message> = Vec::new();
    let mut lines = std::io::stdin().lock().lines();
    let prompt = std::io::stdin().is_terminal();
    if prompt {
        eprintln!("{HELP}");
    }
    loop {
        if prompt {
            eprint!("> ");
            std::io::stderr().flush()?;
        }
        let Some(line) = lines.next() else { return Ok(()) };
        let line = line.map_err(|e| Error::Failed(format!("cannot read stdin: {e}")))?;
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/help" => eprintln!("{HELP}"),
            "/reset" => {
                history.clear();
                eprintln!("forgotten");
            }
            "/system" => {
                history.clear();
                talk.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                eprintln!("begun anew");
            }
            _ if command.starts_with('/') => eprintln!("no command {command}\n{HELP}"),
            _ => {
                history.push(Message::new(Role::User, line));
                match talk.reply(&history) {
                    Ok(said) => history.push(said.message),
                    // The conversation is as it was before; the next line may do better.
                    Err(error @ (Error::Engine(_) | Error::Failed(_))) => {
                        history.pop();
                        eprintln!("error: {error}");
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
}
