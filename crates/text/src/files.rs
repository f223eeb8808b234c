//! The text side of a checkpoint: which files it is in, and what they must hold together.
//!
//! `tokenizer.json` is needed. The chat template is in `chat_template.jinja`, in older copies in
//! `chat_template.json` or `tokenizer_config.json`; the last also names the tokens that templates
//! know as `eos_token` and the like. How tokens are chosen (`generation_config.json`) is not text
//! and not read here.

use crate::chat::{MAX_SOURCE, Message, Options, Template};
use crate::error::line;
use crate::tokenizer::{MAX_FILE, Tokenizer};
use crate::{Error, Result};
use serde_json::Value;
use std::borrow::Cow;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::Path;
use std::sync::Arc;

/// What turns requests into tokens and tokens into text, as one checkpoint does it.
#[derive(Debug)]
pub struct Text {
    /// Text to ids and back.
    pub tokenizer: Arc<Tokenizer>,
    /// Conversations to prompts.
    pub template: Template,
}

impl Text {
    /// Reads the files of a checkpoint's folder. Errs with the name of the file that is missing,
    /// cannot be read, or is not what it should be.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Text> {
        let dir = dir.as_ref();
        Text::gather(dir, |name| {
            let most = if name == "tokenizer.json" { MAX_FILE } else { 2 * MAX_SOURCE as u64 };
            Ok(read_if_there(&dir.join(name), most)?.map(Cow::Owned))
        })
    }

    /// As [`Self::from_dir`], from files inside the program: `file` gives one by its name.
    pub fn embedded(file: impl Fn(&str) -> Option<&'static str>) -> Result<Text> {
        let place = Path::new("(inside this program)");
        Text::gather(place, |name| Ok(file(name).map(|text| Cow::Borrowed(text.as_bytes()))))
    }

    /// The ids of the prompt for a conversation, and whether the reply begins inside reasoning is
    /// `options.thinking`. Errs as [`Template::render`].
    pub fn prompt(
        &self,
        messages: &[Message],
        tools: &[Value],
        options: &Options,
    ) -> Result<Vec<u32>> {
        Ok(self.tokenizer.encode_prompt(&self.template.render(messages, tools, options)?))
    }

    /// Only the template of a checkpoint's folder, which need not have a tokenizer. Errs as
    /// [`Self::from_dir`].
    pub fn template_from_dir(dir: impl AsRef<Path>) -> Result<Template> {
        let dir = dir.as_ref();
        template_of(dir, &|name| {
            Ok(read_if_there(&dir.join(name), 2 * MAX_SOURCE as u64)?.map(Cow::Owned))
        })
    }

    fn gather(dir: &Path, file: impl Fn(&str) -> Result<Option<Bytes>>) -> Result<Text> {
        let Some(bytes) = file("tokenizer.json")? else {
            let problem = "is missing: text cannot be made into tokens without it; `lily pull` \
                           fetches a complete checkpoint";
            return Err(Error::File { path: dir.join("tokenizer.json"), problem: problem.into() });
        };
        let tokenizer = Tokenizer::from_bytes(&bytes)?;
        drop(bytes);
        let mut template = template_of(dir, &file)?;
        template.guard(tokenizer.openers());
        Ok(Text { tokenizer: Arc::new(tokenizer), template })
    }
}

/// What a file holds.
type Bytes = Cow<'static, [u8]>;

/// The template that is in one of the files, with the tokens it may name.
fn template_of(dir: &Path, file: &dyn Fn(&str) -> Result<Option<Bytes>>) -> Result<Template> {
    let error = |name: &str, problem: String| Error::File { path: dir.join(name), problem };
    let text = |name: &str| -> Result<Option<String>> {
        let Some(bytes) = file(name)? else { return Ok(None) };
        let text = String::from_utf8(bytes.into_owned());
        text.map(Some).map_err(|_| error(name, "is not UTF-8 text".into()))
    };
    let json = |name: &str| -> Result<Value> {
        let Some(text) = text(name)? else { return Ok(Value::Null) };
        serde_json::from_str(&text).map_err(|e| error(name, line(&format!("is not JSON: {e}"))))
    };

    let config = json("tokenizer_config.json")?;
    let source = match text("chat_template.jinja")? {
        Some(source) => Some(source),
        None => template_in(&json("chat_template.json")?).or_else(|| template_in(&config)),
    };
    let Some(source) = source else {
        let problem = "is missing, and no chat_template.json or tokenizer_config.json has a \
                           chat_template: messages cannot be made into a prompt without one; \
                           `lily pull` fetches a complete checkpoint";
        return Err(error("chat_template.jinja", problem.into()));
    };
    let mut template = Template::new(&source)?;
    for name in ["bos_token", "eos_token", "pad_token", "unk_token"] {
        let token = &config[name];
        if let Some(spelling) = token.as_str().or_else(|| token["content"].as_str()) {
            template.define(name, spelling);
        }
    }
    Ok(template)
}

/// The template in a JSON file: one, or several by name.
fn template_in(config: &Value) -> Option<String> {
    let template = &config["chat_template"];
    let named = || {
        let default = |entry: &&Value| entry["name"] == "default";
        template.as_array()?.iter().find(default)?["template"].as_str()
    };
    template.as_str().or_else(named).map(str::to_owned)
}

/// The bytes of a file of at most `most`; `None` where there is none.
fn read_if_there(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let error = |problem: String| Error::File { path: path.to_owned(), problem };
    let file = match File::open(path) {
        Ok(file) => file,
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(error(e.to_string())),
    };
    let mut bytes = Vec::new();
    // One byte more than allowed is asked for, so that a pipe or a growing file is seen too.
    file.take(most + 1).read_to_end(&mut bytes).map_err(|e| error(e.to_string()))?;
    if bytes.len() as u64 > most {
        return Err(error(format!("has more than {most} bytes: this is not the expected file")));
    }
    Ok(Some(bytes))
}

/// The bytes of a file of at most `most`.
pub(crate) fn read(path: &Path, most: u64) -> Result<Vec<u8>> {
    read_if_there(path, most)?.ok_or_else(|| Error::File {
        path: path.to_owned(),
        problem: "there is no such file".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::Role;
    use crate::testing::shared;
    use serde_json::json;

    const TOKENIZER: &str = include_str!("../../../demo/tokenizer.json");
    const TEMPLATE: &str = include_str!("../../../demo/chat_template.jinja");

    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
        }
        dir
    }

    #[test]
    fn the_template_is_found_wherever_checkpoints_keep_it() {
        let inside = json!({ "chat_template": TEMPLATE }).to_string();
        let named = json!({ "chat_template": [
            { "name": "tool_use", "template": "x" },
            { "name": "default", "template": TEMPLATE },
        ]});
        for file in [
            ("chat_template.jinja", TEMPLATE),
            ("chat_template.json", &inside),
            ("tokenizer_config.json", &inside),
            ("tokenizer_config.json", &named.to_string()),
        ] {
            let dir = folder(&[("tokenizer.json", TOKENIZER), file]);
            let text = Text::from_dir(dir.path()).unwrap();
            assert_eq!(text.template.source(), TEMPLATE, "{}", file.0);
        }
    }

    #[test]
    fn what_is_missing_or_damaged_is_named() {
        let tokenizer = ("tokenizer.json", TOKENIZER);
        for (files, expected) in [
            (&[][..], "tokenizer.json: is missing"),
            (&[tokenizer], "chat_template.jinja: is missing"),
            (&[tokenizer, ("tokenizer_config.json", "{")], "tokenizer_config.json: is not JSON"),
            (&[tokenizer, ("tokenizer_config.json", "[]")], "chat_template.jinja: is missing"),
            (&[tokenizer, ("chat_template.jinja", "{% if %}")], "chat template: "),
            (&[("tokenizer.json", "")], "tokenizer.json: cannot be read"),
        ] {
            let error = Text::from_dir(folder(files).path()).unwrap_err().to_string();
            assert!(error.contains(expected), "expected {expected:?} in: {error}");
        }
        let dir = folder(&[tokenizer]);
        std::fs::write(dir.path().join("chat_template.jinja"), b"\xff").unwrap();
        let error = Text::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.ends_with("chat_template.jinja: is not UTF-8 text"), "{error}");
        std::fs::write(dir.path().join("chat_template.jinja"), vec![b' '; 3 << 20]).unwrap();
        let error = Text::from_dir(dir.path()).unwrap_err().to_string();
        assert!(error.contains("this is not the expected file"), "{error}");
    }

    #[test]
    fn templates_know_the_names_of_tokens() {
        let config = json!({
            "eos_token": "<|im_end|>",
            "pad_token": { "content": "<|endoftext|>", "lstrip": false },
            "bos_token": null,
        });
        let dir = folder(&[
            ("tokenizer.json", TOKENIZER),
            ("tokenizer_config.json", &config.to_string()),
            ("chat_template.jinja", "{{ bos_token }}{{ eos_token }}{{ pad_token }}"),
        ]);
        let text = Text::from_dir(dir.path()).unwrap();
        let hi = [Message::new(Role::User, "hi")];
        let ids = text.prompt(&hi, &[], &Options::default()).unwrap();
        assert_eq!(text.tokenizer.decode(&ids), "<|im_end|><|endoftext|>");
        assert_eq!(ids.len(), 2);
    }

    #[test]
    fn the_real_files_give_the_published_prompts() {
        let Some(shared) = shared() else { return };
        let dir = tempfile::tempdir().unwrap();
        for file in [
            "tokenizer/tokenizer.json",
            "tokenizer/tokenizer_config.json",
            "spec/chat_template.jinja",
        ] {
            let from = shared.join(file);
            std::fs::copy(&from, dir.path().join(from.file_name().unwrap())).unwrap();
        }
        let text = Text::from_dir(dir.path()).unwrap();
        let prompt = |question: &str, thinking| {
            let messages = [Message::new(Role::User, question)];
            text.prompt(&messages, &[], &Options { thinking, ..Options::default() }).unwrap()
        };
        assert_eq!(
            prompt("Quanto fa 17 * 23?", true),
            [
                248045, 846, 198, 2114, 13168, 2148, 220, 16, 22, 348, 220, 17, 18, 30, 248046,
                198, 248045, 74455, 198, 248068, 198
            ]
        );
        assert_eq!(
            prompt("Rispondi solo: sì", false),
            [
                248045, 846, 198, 49, 158648, 13138, 25, 187179, 248046, 198, 248045, 74455, 198,
                248068, 271, 248069, 271
            ]
        );
    }
}
