//! Messages and tools to the prompt, by the checkpoint's own Jinja template.
//!
//! Templates are written for Python's Jinja as Hugging Face sets it up; minijinja runs them, and
//! `python.rs` gives it Python's words where the two differ. Clients send more shapes of messages
//! than templates take, so `message.rs` brings them into one first. What a message spells stays
//! data: `guard.rs` marks it before rendering and finds it afterwards. Not known here: tokens.

mod guard;
mod message;
mod python;

pub use message::{Message, Role, ToolCall};

use crate::error::line;
use crate::{Error, Result};
use guard::Guard;
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Serde;
use minijinja::{Environment, ErrorKind};
use serde_json::{Map, Value, json};

/// A template longer than this is not one (the real one has 8 KB).
pub(crate) const MAX_SOURCE: usize = 1 << 20;
/// What a rendering may cost in minijinja's fuel, which is about one instruction or 64 bytes: for
/// any prompt, and for each byte of its messages and tools, a string counting 64 more. The real
/// template needs less than one a byte.
const FUEL: u64 = 1 << 20;
const FUEL_PER_BYTE: u64 = 8;

/// A compiled chat template.
pub struct Template {
    env: Environment<'static>,
    source: String,
    openers: Vec<char>,
}

/// What a request may say about its rendering.
#[derive(Debug, Clone, PartialEq)]
pub struct Options {
    /// Whether the reply begins with reasoning (`enable_thinking`).
    pub thinking: bool,
    /// Whether reasoning of turns before the last question stays in the prompt.
    pub preserve_thinking: bool,
    /// Whether the prompt ends with the opening of the assistant's turn.
    pub add_generation_prompt: bool,
    /// Further variables of the template (a request's `chat_template_kwargs`).
    pub variables: Map<String, Value>,
}

impl Default for Options {
    /// Thinks, drops old reasoning, and asks for a reply, as the template does by itself.
    fn default() -> Options {
        Options {
            thinking: true,
            preserve_thinking: false,
            add_generation_prompt: true,
            variables: Map::new(),
        }
    }
}

/// A rendered prompt: text, and which of its characters must not begin an added token because
/// they come from a message or a tool.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Prompt {
    text: String,
    literal: Vec<usize>,
}

impl Prompt {
    /// A prompt from its parts. `literal` holds byte offsets into `text`, ascending; those of
    /// characters that cannot begin an added token are of no effect and may be left out.
    pub fn new(text: String, literal: Vec<usize>) -> Prompt {
        assert!(literal.is_sorted(), "the offsets of literal characters ascend");
        Prompt { text, literal }
    }

    /// The text of the prompt.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Byte offsets of characters of [`Self::text`] at which no added token begins, ascending.
    pub fn literal(&self) -> &[usize] {
        &self.literal
    }
}

impl Template {
    /// Compiles a template. Errs if it is not valid Jinja.
    pub fn new(source: &str) -> Result<Template> {
        if source.len() > MAX_SOURCE {
            return Err(Error::Template(format!(
                "has {} bytes, more than the {MAX_SOURCE} that a template may have",
                source.len()
            )));
        }
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(broken)?);
        python::install(&mut env);
        env.add_template_owned("chat_template", source.to_owned()).map_err(broken)?;
        Ok(Template { env, source: source.to_owned(), openers: vec!['<'] })
    }

    /// Names the characters that added tokens begin with
    /// ([`crate::Tokenizer::openers`]); `<` if this is never called.
    pub fn guard(&mut self, openers: Vec<char>) {
        self.openers = openers;
    }

    /// Gives the template a variable that may spell added tokens, such as `eos_token`.
    pub fn define(&mut self, name: &str, value: &str) {
        self.env.add_global(name.to_owned(), value.to_owned());
    }

    /// The template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// The prompt for a conversation. `tools` are as on the wire:
    /// `{"type": "function", "function": {"name", "description", "parameters"}}`.
    ///
    /// All system messages are joined into one at the beginning. Errs if there is no message, if
    /// a tool's result comes first, if a tool has no name, and if the template refuses.
    pub fn render(
        &self,
        messages: &[Message],
        tools: &[Value],
        options: &Options,
    ) -> Result<Prompt> {
        check_tools(tools)?;
        let messages = message::arrange(messages)?;
        let guard = Guard::new(&self.openers, |see| {
            see(&self.source);
            messages.iter().for_each(|m| m.each_string(see));
            tools.iter().chain(options.variables.values()).for_each(|v| guard::strings(v, see));
            options.variables.keys().for_each(|key| see(key));
        })?;
        let mut context = guard.hide_map(&options.variables);
        context.insert("messages".into(), messages.iter().map(|m| m.to_json(&guard)).collect());
        if !tools.is_empty() {
            context
                .insert("tools".into(), tools.iter().map(|tool| guard.hide_json(tool)).collect());
        }
        context.insert("enable_thinking".into(), json!(options.thinking));
        context.insert("preserve_thinking".into(), json!(options.preserve_thinking));
        context.insert("add_generation_prompt".into(), json!(options.add_generation_prompt));
        let mut env = self.env.clone();
        env.set_fuel(Some(FUEL.saturating_add(guard.weight().saturating_mul(FUEL_PER_BYTE))));
        let template = env.get_template("chat_template").map_err(broken)?;
        let text = template.render(Serde(&context)).map_err(refused)?;
        Ok(guard.reveal(&text))
    }
}

impl std::fmt::Debug for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Template({} bytes)", self.source.len())
    }
}

/// Each tool is a function with a name; the rest is between the client and the model.
fn check_tools(tools: &[Value]) -> Result<()> {
    for (i, tool) in tools.iter().enumerate() {
        let error = |field: &str, problem: &str| Error::Request {
            param: format!("tools[{i}]{field}"),
            problem: problem.into(),
        };
        match tool.get("type").map(Value::as_str) {
            None | Some(Some("function")) => {}
            _ => return Err(error(".type", "expected \"function\": other tools cannot be used")),
        }
        let Some(function) = tool.get("function") else {
            return Err(error("", "expected {\"type\": \"function\", \"function\": {...}}"));
        };
        if function.get("name").and_then(Value::as_str).is_none_or(str::is_empty) {
            return Err(error(".function.name", "expected the name of the function"));
        }
    }
    Ok(())
}

/// The template itself is at fault.
fn broken(error: minijinja::Error) -> Error {
    Error::Template(line(&python::chain(&error)))
}

/// The template raised an exception for these messages, or failed with them.
fn refused(error: minijinja::Error) -> Error {
    if let Some(message) = python::raised(&error) {
        return Error::Request { param: "messages".into(), problem: line(message) };
    }
    if error.kind() == ErrorKind::OutOfFuel {
        return Error::Template("takes too long with these messages: it was stopped".into());
    }
    broken(error)
}

#[cfg(test)]
mod tests;
