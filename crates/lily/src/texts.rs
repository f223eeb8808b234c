//! What a checkpoint needs beside its weights to talk: tokenizer, chat template, and defaults.

use crate::defaults::Defaults;
use crate::error::Error;
use crate::load::{Files, Source};
use lily_text::Tokenizer;
use lily_text::chat::Template;
use serde::Deserialize;
use std::sync::Arc;

/// Everything between messages and token ids.
pub struct Texts {
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Messages to a prompt.
    pub template: Template,
    /// How tokens are chosen, and which end a reply.
    pub defaults: Defaults,
}

/// The fields of tokenizer_config.json that are read.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    bos_token: Option<Token>,
    eos_token: Option<Token>,
    pad_token: Option<Token>,
}

/// A template, or several of which one is called `default`.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// A token by its text, or as an object that holds it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

impl Texts {
    /// Reads the text files of a checkpoint. Errs, with the file's name, on what is missing or
    /// cannot be used.
    pub fn open(source: &Source) -> Result<Texts, Error> {
        let files = &source.files;
        let tokenizer = files.text("tokenizer.json")?.ok_or_else(|| missing("tokenizer.json"))?;
        let tokenizer = Tokenizer::from_bytes(tokenizer.as_bytes())?;
        let mut template = template(files)?;
        template.guard(tokenizer.openers());
        let generation = files.text("generation_config.json")?;
        let defaults = Defaults::new(generation.as_deref(), source.config())?;
        Ok(Texts { tokenizer: Arc::new(tokenizer), template, defaults })
    }
}

/// The chat template of a checkpoint: chat_template.jinja, else what tokenizer_config.json holds.
pub fn template(files: &Files) -> Result<Template, Error> {
    let config: TokenizerConfig = match files.text("tokenizer_config.json")? {
        None => TokenizerConfig::default(),
        Some(text) => serde_json::from_str(&text)
            .map_err(|e| Error::Failed(format!("tokenizer_config.json: {e}")))?,
    };
    let source = match (files.text("chat_template.jinja")?, config.chat_template) {
        (Some(text), _) | (None, Some(Templates::One(text))) => text,
        (None, Some(Templates::Named(named))) => {
            let default = named.into_iter().find(|t| t.name == "default");
            default.map(|t| t.template).ok_or_else(|| missing("chat_template.jinja"))?
        }
        (None, None) => return Err(missing("chat_template.jinja")),
    };
    let mut template = Template::new(&source)?;
    let tokens = [("bos", config.bos_token), ("eos", config.eos_token), ("pad", config.pad_token)];
    for (name, token) in tokens {
        if let Some(Token::Text(text) | Token::Object { content: text }) = token {
            template.define(&format!("{name}_token"), &text);
        }
    }
    Ok(template)
}

fn missing(name: &str) -> Error {
    Error::Failed(format!(
        "the checkpoint has no {name}, which is needed for text; `lily pull` fetches it \
         (`lily logits` and `lily bench` go without)"
    ))
}
