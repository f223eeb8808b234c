//! What a checkpoint needs beside its weights to talk: tokenizer, chat template, and defaults.

use crate::defaults::Defaults;
use crate::demo;
use crate::error::Error;
use crate::load::{Files, Source};
use lily_text::chat::Template;
use lily_text::{Text, Tokenizer};
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

impl Texts {
    /// Reads the text files of a checkpoint. Errs, with the file's name, on what is missing or
    /// cannot be used.
    pub fn open(source: &Source) -> Result<Texts, Error> {
        let defaults = Defaults::open(source)?;
        let Text { tokenizer, template } = match &source.files.dir {
            None => Text::embedded(demo::file)?,
            Some(dir) => Text::from_dir(dir)?,
        };
        let (ids, vocab) = (tokenizer.len(), source.config().vocab);
        if ids > vocab {
            return Err(Error::Failed(format!(
                "tokenizer.json: it has {ids} ids, the model has {vocab}: they do not belong \
                 together; `lily pull` fetches a complete checkpoint"
            )));
        }
        Ok(Texts { tokenizer, template, defaults })
    }
}

/// The chat template of a checkpoint, which need not have anything else.
pub fn template(files: &Files) -> Result<Template, Error> {
    Ok(match &files.dir {
        None => Text::embedded(demo::file)?.template,
        Some(dir) => Text::template_from_dir(dir)?,
    })
}
