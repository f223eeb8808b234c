//! Tool calls written in JSON, and values written in JSON or nearly so.

use super::tags::{self, Look};
use serde::Deserialize;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde_json::Value;
use serde_json::value::RawValue;

/// `text` as a JSON string.
pub(super) fn string(text: &str) -> String {
    Value::from(text).to_string()
}

/// `text` as it stands inside a JSON string.
pub(super) fn escaped(text: &str) -> String {
    let mut quoted = string(text);
    quoted.pop();
    quoted.remove(0);
    quoted
}

/// The value that `text` spells in JSON or Python, and its JSON: `text` itself where that is JSON,
/// so that no digit changes.
pub(super) fn literal(text: &str) -> Option<(Value, String)> {
    if let Ok(value) = serde_json::from_str(text) {
        return Some((value, text.to_owned()));
    }
    let json = lenient(text);
    Some((serde_json::from_str(&json).ok()?, json))
}

/// Makes JSON of what is almost JSON: Python's constants and quotes, line breaks within strings,
/// a comma after the last element. What is not JSON otherwise stays wrong.
fn lenient(text: &str) -> String {
    let mut json = String::with_capacity(text.len() + 16);
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        match c {
            '"' | '\'' => {
                json.push('"');
                while let Some(inner) = chars.next() {
                    match inner {
                        _ if inner == c => break,
                        '\\' if chars.peek() == Some(&'\'') => json.extend(chars.next()),
                        '\\' => {
                            json.push('\\');
                            json.extend(chars.next());
                        }
                        '"' => json.push_str("\\\""),
                        '\0'..='\x1f' => json.push_str(&escaped(inner.encode_utf8(&mut [0; 4]))),
                        _ => json.push(inner),
                    }
                }
                json.push('"');
            }
            ']' | '}' => {
                if let Some(before) = json.trim_end().strip_suffix(',') {
                    json.truncate(before.len());
                }
                json.push(c);
            }
            'a'..='z' | 'A'..='Z' => {
                let mut word = String::from(c);
                while let Some(next) = chars.next_if(|c| c.is_ascii_alphanumeric() || *c == '_') {
                    word.push(next);
                }
                json.push_str(match word.as_str() {
                    "True" => "true",
                    "False" => "false",
                    "None" => "null",
                    other => other,
                });
            }
            _ => json.push(c),
        }
    }
    json
}

/// A tool call as an object.
#[derive(Debug, Deserialize)]
pub(super) struct Object {
    pub name: String,
    #[serde(default)]
    arguments: Option<Box<RawValue>>,
}

impl Object {
    fn parse(json: &str) -> Option<Object> {
        let mut object: Object = serde_json::from_str(json).ok()?;
        object.name = object.name.trim().to_owned();
        (!object.name.is_empty()).then_some(object)
    }

    /// The members of its arguments, which may also be a string that holds the object.
    pub fn arguments(&self) -> Option<Vec<(String, Box<RawValue>)>> {
        let Some(arguments) = &self.arguments else { return Some(Vec::new()) };
        let members = match serde_json::from_str::<String>(arguments.get()) {
            Ok(text) => serde_json::from_str::<Members>(&text),
            Err(_) => serde_json::from_str::<Members>(arguments.get()),
        };
        Some(members.ok()?.0)
    }
}

/// The members of an object in the order of the text.
struct Members(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for Members {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Members, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Members;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Members, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(Members(members))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}

/// Looks for the end of an object, each byte once.
#[derive(Debug, Clone)]
pub(super) struct Scan {
    /// What opened the call and what was taken of the object.
    text: String,
    /// Where the object begins in it.
    start: usize,
    /// What would close the brackets that are open, outermost first.
    open: String,
    /// The quote that would close a string.
    quote: Option<char>,
    /// The character before.
    last: char,
    escaped: bool,
    /// Where the text could be cut so that members of the call and of its arguments stay whole,
    /// and what closes it there: after a bracket or quote, and before a comma.
    after_value: Option<(usize, String)>,
    before_comma: Option<(usize, String)>,
}

impl Scan {
    /// A scan of an object that comes after `opening`.
    pub fn new(opening: &str) -> Scan {
        Scan {
            text: opening.to_owned(),
            start: opening.len(),
            open: String::new(),
            quote: None,
            last: ' ',
            escaped: false,
            after_value: None,
            before_comma: None,
        }
    }

    /// All that was taken, from the call's opening on.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Takes bytes of `text`: how many, and whether the object ends after them. It ends at its
    /// last bracket, and where `</tool_call>` follows that cannot be part of a string.
    pub fn take(&mut self, text: &str, end: bool) -> (usize, bool) {
        for (at, c) in text.char_indices() {
            // JSON has no line breaks within strings, so this one began with a stray quote.
            if c == '<' && (self.quote.is_none() || (self.last == '\n' && !self.escaped)) {
                match tags::word(&text[at..], "</tool_call>") {
                    Look::Yes(..) => return (at, true),
                    Look::Unsure if !end => return (at, false),
                    Look::Unsure | Look::No => {}
                }
            }
            self.step(c);
            if self.open.is_empty() {
                return (at + c.len_utf8(), true);
            }
        }
        (text.len(), false)
    }

    fn step(&mut self, c: char) {
        self.text.push(c);
        self.last = c;
        match (self.quote, c) {
            (Some(_), _) if self.escaped => self.escaped = false,
            (Some(_), '\\') => self.escaped = true,
            (Some(quote), _) => {
                if c == quote {
                    self.quote = None;
                    self.mark_value();
                }
            }
            (None, '"' | '\'') => self.quote = Some(c),
            (None, '{') => self.open.push('}'),
            (None, '[') => self.open.push(']'),
            (None, '}' | ']') => {
                self.open.pop();
                self.mark_value();
            }
            (None, ',') if self.open.len() <= 2 => {
                self.before_comma = Some((self.text.len() - 1, self.open.clone()));
            }
            (None, _) => {}
        }
    }

    fn mark_value(&mut self) {
        if self.open.len() <= 2 {
            self.after_value = Some((self.text.len(), self.open.clone()));
        }
    }

    /// The call that was scanned, with the brackets closed that are open.
    pub fn parse(&self) -> Option<Object> {
        self.parse_to(self.text.len(), &self.open)
    }

    /// What is whole of a call that was cut off.
    pub fn recover(&self) -> Option<Object> {
        let cuts = [&self.after_value, &self.before_comma].into_iter().flatten();
        let mut objects = cuts.filter_map(|(at, open)| self.parse_to(*at, open));
        objects.next()
    }

    /// Whether more text could have made JSON of it.
    pub fn is_cut_off(&self) -> bool {
        let json = serde_json::from_str::<IgnoredAny>(&self.text[self.start..]);
        json.is_err_and(|error| error.is_eof())
    }

    fn parse_to(&self, at: usize, open: &str) -> Option<Object> {
        let mut json = self.text[self.start..at].to_owned();
        json.extend(open.chars().rev());
        Object::parse(&json).or_else(|| Object::parse(&lenient(&json)))
    }
}
