//! The markup of tool calls: whether a text begins with a tag, begins like one, or does not.
//!
//! How far a decision looks ahead is bounded, so that little is held back and reading a stream
//! takes linear time however it is cut.

use super::schema::Tools;

/// Longest name of a function or parameter, in bytes.
const MAX_NAME: usize = 256;
/// Most white space between tags that belong together, in bytes.
const MAX_GAP: usize = 64;

/// Whether a text begins with something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Look<T> {
    /// Whatever follows, it does not.
    No,
    /// That depends on what follows.
    Unsure,
    /// It does, and that takes so many bytes.
    Yes(T, usize),
}

impl<T> Look<T> {
    pub fn map<U>(self, f: impl FnOnce(T) -> U) -> Look<U> {
        match self {
            Look::No => Look::No,
            Look::Unsure => Look::Unsure,
            Look::Yes(value, bytes) => Look::Yes(f(value), bytes),
        }
    }

    /// This or, failing that, the other.
    pub fn or(self, other: impl FnOnce() -> Look<T>) -> Look<T> {
        match (self, other) {
            (Look::Yes(value, bytes), _) => Look::Yes(value, bytes),
            (Look::No, other) => other(),
            (Look::Unsure, other) => match other() {
                Look::Yes(value, bytes) => Look::Yes(value, bytes),
                Look::No | Look::Unsure => Look::Unsure,
            },
        }
    }

    /// This and then, in the rest of `text`, the other.
    fn then<U>(self, text: &str, next: impl FnOnce(T, &str) -> Look<U>) -> Look<U> {
        match self {
            Look::No => Look::No,
            Look::Unsure => Look::Unsure,
            Look::Yes(value, bytes) => match next(value, &text[bytes..]) {
                Look::Yes(value, more) => Look::Yes(value, bytes + more),
                other => other,
            },
        }
    }
}

/// The string `word`.
pub(super) fn word(text: &str, word: &str) -> Look<()> {
    if text.starts_with(word) {
        Look::Yes((), word.len())
    } else if word.starts_with(text) {
        Look::Unsure
    } else {
        Look::No
    }
}

/// Any of `words`, none of which begins another.
fn any<T: Copy>(text: &str, words: &[(&str, T)]) -> Look<T> {
    words.iter().fold(Look::No, |look, (w, value)| look.or(|| word(text, w).map(|()| *value)))
}

/// White space, perhaps none. Unsure at the end of the text: more may follow.
fn gap(text: &str) -> Look<()> {
    let bytes = text.len() - text.trim_start().len();
    match bytes {
        _ if bytes > MAX_GAP => Look::No,
        _ if bytes == text.len() => Look::Unsure,
        _ => Look::Yes((), bytes),
    }
}

/// `prefix`, a name, and `>`. The name is on one line and has neither `<` nor `>`.
pub(super) fn named<'a>(text: &'a str, prefix: &str) -> Look<&'a str> {
    match word(text, prefix) {
        Look::No => Look::No,
        Look::Unsure => Look::Unsure,
        Look::Yes((), start) => {
            let after = &text[start..];
            let Some(length) = after.find(['<', '>', '\n']) else {
                return if after.len() > MAX_NAME { Look::No } else { Look::Unsure };
            };
            let name = after[..length].trim();
            if length > MAX_NAME || name.is_empty() || !after[length..].starts_with('>') {
                return Look::No;
            }
            Look::Yes(name, start + length + 1)
        }
    }
}

/// How a tool call begins.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Opening {
    /// A function of this name; its parameters follow.
    Function(String),
    /// What follows is an object that begins as a call does.
    Json,
}

/// The beginning of a tool call. `enveloped` says that a call's `<tool_call>` has not been closed;
/// `end`, that no text follows.
pub(super) fn opening(text: &str, tools: &Tools, enveloped: bool, end: bool) -> Look<Opening> {
    let tagged = word(text, "<tool_call>")
        .then(text, |(), text| gap(text).then(text, |(), text| function(text).or(|| object(text))));
    tagged.or(|| if enveloped { function(text) } else { untagged(text, tools, end) })
}

fn function(text: &str) -> Look<Opening> {
    named(text, "<function=").map(|name| Opening::Function(name.to_owned()))
}

/// A call in JSON; takes no bytes of it.
fn object(text: &str) -> Look<Opening> {
    const KEYS: &[(&str, ())] =
        &[("\"name\"", ()), ("\"arguments\"", ()), ("'name'", ()), ("'arguments'", ())];
    let look = word(text, "{").then(text, |(), t| gap(t).then(t, |(), t| any(t, KEYS)));
    match look.map(|()| Opening::Json) {
        Look::Yes(opening, _) => Look::Yes(opening, 0),
        other => other,
    }
}

/// A function without `<tool_call>`: only one that was offered, and only with what has to follow.
fn untagged(text: &str, tools: &Tools, end: bool) -> Look<Opening> {
    match named(text, "<function=") {
        Look::No => Look::No,
        Look::Unsure => {
            let name = text.strip_prefix("<function=").unwrap_or("").trim();
            if tools.names().any(|n| n.starts_with(name)) { Look::Unsure } else { Look::No }
        }
        Look::Yes(name, _) if !tools.names().any(|n| n == name) => Look::No,
        Look::Yes(name, bytes) => {
            let after = &text[bytes..];
            let next =
                gap(after).then(after, |(), t| any(t, &[("<parameter=", ()), ("</function>", ())]));
            match next {
                Look::No => Look::No,
                Look::Unsure if !end => Look::Unsure,
                Look::Unsure | Look::Yes(..) => {
                    Look::Yes(Opening::Function(name.to_owned()), bytes)
                }
            }
        }
    }
}

/// What ends a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Closing {
    /// `</parameter>`.
    Parameter,
    /// `</function>` and `</tool_call>`.
    Call,
}

/// The end of a value, with a line break before it if there is one.
pub(super) fn closing(text: &str) -> Look<Closing> {
    let line_break = usize::from(text.starts_with('\n'));
    Look::Yes((), line_break).then(text, |(), text| {
        word(text, "</parameter>").map(|()| Closing::Parameter).or(|| {
            word(text, "</function>")
                .then(text, |(), t| gap(t).then(t, |(), t| word(t, "</tool_call>")))
                .map(|()| Closing::Call)
        })
    })
}
