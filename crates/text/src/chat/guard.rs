//! Keeps what messages and tools spell apart from what the template writes.
//!
//! An added token is recognised by its spelling, so a message that spells `<|im_end|>` could end
//! its own turn. Before rendering, every character of the data that an added token can begin with
//! is replaced by a stand-in: a noncharacter of Unicode that occurs nowhere in data or template.
//! Whatever the template then does with the data, a stand-in in its output is a character of the
//! data, and a character that is not one was written by the template.
//!
//! Stand-ins would hide from the template the one tag it looks for in a user's message: a message
//! that is wrapped in `<tool_response>` does not count as a question. Those two tags stay as they
//! are and are marked on their inner side.

use super::{Error, Map, Prompt, Result, Value, python};

const OPENING: &str = "<tool_response>";
const CLOSING: &str = "</tool_response>";

/// The stand-ins of one rendering.
pub(super) struct Guard {
    /// Each character that is replaced, and by what.
    stand_ins: Vec<(char, char)>,
    /// Stands after an opening tag that is data.
    after: char,
    /// Stands before a closing tag that is data.
    before: char,
    /// Keeps blanks from being trimmed away; vanishes.
    fence: char,
    weight: u64,
}

impl Guard {
    /// Chooses stand-ins for `openers`. `walk` shows every string that must not hold one.
    pub fn new(openers: &[char], walk: impl FnOnce(&mut dyn FnMut(&str))) -> Result<Guard> {
        let mut taken = Vec::new();
        let mut weight = 0;
        walk(&mut |text| {
            weight += 64 + text.len() as u64;
            taken.extend(text.chars().filter(|&c| is_candidate(c)));
        });
        taken.sort_unstable();
        taken.dedup();
        let mut free = candidates().filter(|c| taken.binary_search(c).is_err());
        let mut next = || {
            free.next().ok_or_else(|| Error::Request {
                param: "messages".into(),
                problem: "every private or unassigned character of Unicode occurs in them, which \
                          leaves none to keep them apart from the template"
                    .into(),
            })
        };
        let (after, before, fence) = (next()?, next()?, next()?);
        let stand_ins = openers.iter().map(|&c| Ok((c, next()?))).collect::<Result<_>>()?;
        Ok(Guard { stand_ins, after, before, fence, weight })
    }

    /// How many bytes were shown to [`Self::new`], with 64 more for each string.
    pub fn weight(&self) -> u64 {
        self.weight
    }

    /// `text` with stand-ins.
    pub fn hide(&self, text: &str) -> String {
        text.chars().map(|c| self.stand_in(c).unwrap_or(c)).collect()
    }

    /// A user's message: a tag that wraps it is left to be seen by the template.
    pub fn hide_wrapped(&self, text: &str) -> String {
        let mut hidden = String::with_capacity(text.len() + 16);
        let mut body = python::trim_start(text);
        hidden.push_str(&text[..text.len() - body.len()]);
        if let Some(rest) = body.strip_prefix(OPENING) {
            hidden.push_str(OPENING);
            hidden.push(self.after);
            body = rest;
        }
        let trimmed = python::trim_end(body);
        match trimmed.strip_suffix(CLOSING) {
            Some(inner) => {
                hidden.push_str(&self.hide(inner));
                hidden.push(self.before);
                hidden.push_str(CLOSING);
                hidden.push_str(&body[trimmed.len()..]);
            }
            None => hidden.push_str(&self.hide(body)),
        }
        hidden
    }

    /// `text` with stand-ins, its leading blanks safe from trimming.
    pub fn hide_fenced(&self, text: &str) -> String {
        let hidden = self.hide(text);
        let blank = python::trim_start(text).len() != text.len();
        if blank { format!("{}{hidden}", self.fence) } else { hidden }
    }

    /// JSON with stand-ins in all its strings and keys.
    pub fn hide_json(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.hide(text)),
            Value::Array(items) => items.iter().map(|item| self.hide_json(item)).collect(),
            Value::Object(map) => Value::Object(self.hide_map(map)),
            other => other.clone(),
        }
    }

    /// As [`Self::hide_json`].
    pub fn hide_map(&self, map: &Map<String, Value>) -> Map<String, Value> {
        map.iter().map(|(key, value)| (self.hide(key), self.hide_json(value))).collect()
    }

    /// The prompt: characters in place of their stand-ins, and where those are.
    pub fn reveal(&self, rendered: &str) -> Prompt {
        let mut text = String::with_capacity(rendered.len());
        let mut literal = Vec::new();
        for c in rendered.chars() {
            if let Some((opener, _)) = self.stand_ins.iter().find(|(_, stand_in)| *stand_in == c) {
                literal.push(text.len());
                text.push(*opener);
            } else if c == self.after {
                if text.ends_with(OPENING) {
                    literal.push(text.len() - OPENING.len());
                }
            } else if c == self.before {
                literal.push(text.len());
            } else if c != self.fence {
                text.push(c);
            }
        }
        Prompt::new(text, literal)
    }

    fn stand_in(&self, c: char) -> Option<char> {
        self.stand_ins.iter().find(|(opener, _)| *opener == c).map(|(_, stand_in)| *stand_in)
    }
}

/// Every string in `value`, keys too.
pub(super) fn strings(value: &Value, see: &mut dyn FnMut(&str)) {
    match value {
        Value::String(text) => see(text),
        Value::Array(items) => items.iter().for_each(|item| strings(item, see)),
        Value::Object(map) => map.iter().for_each(|(key, value)| {
            see(key);
            strings(value, see);
        }),
        _ => {}
    }
}

/// Noncharacters first, which no text for interchange holds; then the private use area.
fn candidates() -> impl Iterator<Item = char> {
    ('\u{fdd0}'..='\u{fdef}').chain('\u{e000}'..='\u{f8ff}')
}

fn is_candidate(c: char) -> bool {
    matches!(c, '\u{fdd0}'..='\u{fdef}' | '\u{e000}'..='\u{f8ff}')
}
