//! `lily render`: messages and tools to the text of the prompt, as the model gets it.

use crate::args::ModelArgs;
use crate::error::Error;
use crate::load::Files;
use crate::{input, texts};
use clap::Args;
use lily_text::chat::{Message, Options};
use serde_json::Value;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What to render.
#[derive(Args, Debug)]
pub struct Render {
    #[command(flatten)]
    model: ModelArgs,
    /// JSON list of messages, as in a chat request; `-` is stdin
    #[arg(long, value_name = "FILE")]
    messages: PathBuf,
    /// JSON list of tools, as in a chat request
    #[arg(long, value_name = "FILE")]
    tools: Option<PathBuf>,
    /// The prompt of a reply that begins without reasoning
    #[arg(long)]
    no_thinking: bool,
}

/// Prints the prompt's text to stdout, exactly: no line break is added.
pub fn run(args: Render) -> Result<(), Error> {
    let stdin = Path::new("-");
    if args.messages == stdin && args.tools.as_deref() == Some(stdin) {
        let problem = "--messages and --tools are both `-`: stdin can be only one of them";
        return Err(Error::Usage(problem.into()));
    }
    let messages = Message::list(&json(&args.messages)?)?;
    let tools = match &args.tools {
        None => Vec::new(),
        Some(path) => match json(path)? {
            Value::Array(tools) => tools,
            _ => return Err(Error::Usage(format!("{}: expected a JSON list", input::name(path)))),
        },
    };
    // Only the template is needed: the weights may be elsewhere.
    let template = texts::template(&Files::of(&args.model)?)?;
    let options = Options { thinking: !args.no_thinking, ..Options::default() };
    let prompt = template.render(&messages, &tools, &options)?;
    Ok(std::io::stdout().write_all(prompt.text().as_bytes())?)
}

fn json(path: &Path) -> Result<Value, Error> {
    let text = input::file(path)?;
    let error = |e| Error::Usage(format!("{}: not JSON: {e}", input::name(path)));
    serde_json::from_str(&text).map_err(error)
}
