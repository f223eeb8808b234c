//! `lily tokenize`: text to token ids, as one JSON array on one line.

use crate::error::Error;
use crate::{demo, stdin};
use clap::Args;
use lily_text::Tokenizer;
use std::io::Write;
use std::path::PathBuf;

/// What to encode, and by which tokenizer.
#[derive(Args, Debug)]
pub struct Tokenize {
    /// A tokenizer.json, or the folder it lies in [default: LILY_MODEL's, or that of the toy model
    /// inside this program]
    #[arg(long, value_name = "FILE|DIR", env = "LILY_MODEL", hide_env = true)]
    tokenizer: Option<PathBuf>,
    /// The text; spellings of control tokens become those tokens [default: stdin]
    text: Option<String>,
}

/// Prints the ids.
pub fn run(args: Tokenize) -> Result<(), Error> {
    let tokenizer = match &args.tokenizer {
        Some(path) if path.is_dir() => Tokenizer::from_file(path.join("tokenizer.json"))?,
        Some(path) => Tokenizer::from_file(path)?,
        None => {
            eprintln!("{}", demo::NOTICE);
            Tokenizer::from_bytes(demo::TOKENIZER.as_bytes())?
        }
    };
    let text = match args.text {
        Some(text) => text,
        None => stdin::read()?,
    };
    let ids = serde_json::Value::from(tokenizer.encode(&text));
    Ok(writeln!(std::io::stdout(), "{ids}")?)
}
