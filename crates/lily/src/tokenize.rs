//! `lily tokenize`: text to token ids, as one JSON array on one line.

use crate::error::Error;
use crate::{args, demo, input};
use clap::Args;
use lily_text::Tokenizer;
use std::io::Write;
use std::path::{Path, PathBuf};

/// What to encode, and by which tokenizer.
#[derive(Args, Debug)]
pub struct Tokenize {
    /// A tokenizer.json, or the folder it lies in [default: LILY_MODEL's, or that of the toy model
    /// inside this program]
    #[arg(long, value_name = "FILE|DIR", env = "LILY_MODEL", hide_env = true, value_parser = args::path_parser())]
    tokenizer: Option<PathBuf>,
    /// The text; spellings of control tokens become those tokens [default: stdin]
    text: Option<String>,
}

/// Prints the ids.
pub fn run(args: Tokenize) -> Result<(), Error> {
    let from_file = |path: &Path| {
        let named = |e: lily_text::Error| match e {
            lily_text::Error::Tokenizer(problem) => {
                Error::Failed(format!("{}: {problem}", path.display()))
            }
            other => other.into(),
        };
        Tokenizer::from_file(path).map_err(named)
    };
    let tokenizer = match args::given(&args.tokenizer) {
        Some(path) if path.is_dir() => from_file(&path.join("tokenizer.json"))?,
        Some(path) => from_file(path)?,
        None => {
            say!("{}", demo::NOTICE);
            Tokenizer::from_bytes(demo::TOKENIZER.as_bytes())?
        }
    };
    let text = match args.text {
        Some(text) => text,
        None => input::stdin()?,
    };
    let ids = serde_json::Value::from(tokenizer.encode(&text));
    Ok(writeln!(std::io::stdout(), "{ids}")?)
}
