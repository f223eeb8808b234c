//! `lily chat`: a conversation, line by line.

use crate::args::{DeviceArgs, MemoryArgs, ModelArgs, SamplingArgs};
use crate::error::Error;
use crate::input;
use crate::talk::{ReplyArgs, Talk};
use clap::Args;
use lily_text::chat::{Message, Role};
use std::io::{BufRead, IsTerminal, Read};

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
    let mut stdin = std::io::stdin().lock();
    let prompt = std::io::stdin().is_terminal();
    if prompt {
        say!("{HELP}");
    }
    loop {
        if prompt {
            say_on!("> ");
        }
        let mut line = Vec::new();
        let read = (&mut stdin).take(input::MOST_BYTES).read_until(b'\n', &mut line);
        if read.map_err(|e| Error::Failed(format!("stdin: cannot be read: {e}")))? == 0 {
            return Ok(());
        }
        if line.len() as u64 == input::MOST_BYTES {
            return Err(Error::Usage("stdin: a line without end; give shorter ones".into()));
        }
        let Ok(line) = std::str::from_utf8(&line) else {
            say!("not UTF-8 text, and not understood; the conversation is as it was");
            continue;
        };
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        match command {
            "" => {}
            "/exit" | "/quit" => return Ok(()),
            "/help" => say!("{HELP}"),
            "/reset" => {
                history.clear();
                say!("forgotten");
            }
            "/system" => {
                history.clear();
                talk.system = Some(rest.trim().to_owned()).filter(|text| !text.is_empty());
                say!("begun anew");
            }
            _ if command.starts_with('/') => say!("no command {command}\n{HELP}"),
            _ => {
                history.push(Message::new(Role::User, line));
                match talk.reply(&history) {
                    Ok(said) => history.push(said.message),
                    // The conversation is as it was before; the next line may do better.
                    Err(error @ (Error::Engine(_) | Error::Failed(_))) => {
                        history.pop();
                        say!("error: {error}");
                    }
                    Err(error) => return Err(error),
                }
            }
        }
    }
}
