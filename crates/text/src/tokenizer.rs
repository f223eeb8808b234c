//! Text to token ids and ids to bytes, exactly as the checkpoint's `tokenizer.json` says.
//!
//! The pipeline is the one of the Qwen3.5 family and no other: added tokens are cut out of the
//! text, what lies between is normalised to NFC, split into words by one regular expression, and
//! each word's bytes are merged by BPE. Merging and NFC are the `tokenizers` crate's; the split
//! is done here, because the published expression needs a look-ahead and its engines then run on
//! a bounded stack, while the same split is linear with one rule on top of `regex`. Tests compare
//! the ids with the complete Hugging Face pipeline.
//!
//! Not known here: chat templates and what a token means to the model.

use crate::chat::Prompt;
use crate::error::line;
use crate::stream::Vocabulary;
use crate::{Error, Result};
use regex::Regex;
use std::borrow::Cow;
use std::collections::HashMap;
use std::path::Path;
use std::sync::LazyLock;
use tokenizers::models::bpe::BPE;
use tokenizers::{Model as _, NormalizedString};

mod file;

/// The expression that splits text into words, as `tokenizer.json` spells it.
pub const SPLIT: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// [`SPLIT`] without its look-ahead; [`words`] does what is missing.
static WORDS: LazyLock<Regex> = LazyLock::new(|| {
    let (before, _) = SPLIT.split_once(r"|\s+(?!\S)").expect("the look-ahead is in SPLIT");
    Regex::new(&format!(r"{before}|\s+")).expect("SPLIT without its look-ahead is a plain regex")
});

/// The largest `tokenizer.json` that is read: several times the real one (20 MB).
pub(crate) const MAX_FILE: u64 = 256 << 20;

/// A loaded `tokenizer.json`. Encoding and decoding need only `&self`.
pub struct Tokenizer {
    model: BPE,
    /// The letter that stands for each byte in the vocabulary's spelling.
    letters: [char; 256],
    nfc: bool,
    /// The bytes of all tokens one after another, and where each ends.
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// The first added token's id: ids of the base vocabulary are smaller.
    first_added: u32,
    added: HashMap<String, u32>,
    /// Added tokens by id - `first_added`: whether decoding for people leaves them out.
    special: Vec<bool>,
    /// The lengths of added tokens in bytes, longest first, and the bytes they can begin with.
    added_lens: Vec<usize>,
    opens: [bool; 256],
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Tokenizer({} ids, {} of them added)", self.len(), self.special.len())
    }
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Errs if the file cannot be read, and as [`Self::from_bytes`].
    pub fn from_file(path: impl AsRef<Path>) -> Result<Tokenizer> {
        let path = path.as_ref();
        Self::from_bytes(&crate::files::read(path, MAX_FILE)?)
    }

    /// Reads the text of a `tokenizer.json`. Errs if it is not JSON, not a byte-level BPE with
    /// the Qwen3.5 family's pipeline, or contradicts itself.
    pub fn from_bytes(json: &[u8]) -> Result<Tokenizer> {
        file::read(json).map_err(|problem| Error::Tokenizer(line(&problem)))
    }

    /// How many ids there are: base vocabulary and added tokens. The model may have more rows
    /// than that; ids from here on are padding and decode to nothing.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Never true: a tokenizer has at least the 256 bytes.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }

    /// Ids of `text` as Hugging Face gives them: wherever the text spells an added token, that
    /// token is meant. For text that a person wrote, see [`Self::encode_plain`].
    pub fn encode(&self, text: &str) -> Vec<u32> {
        self.encode_with(text, &[])
    }

    /// Ids of `text` with no added token among them, whatever the text spells.
    pub fn encode_plain(&self, text: &str) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        self.encode_between(text, &mut ids);
        ids
    }

    /// Ids of a rendered prompt: added tokens where the template put them, and nowhere else.
    pub fn encode_prompt(&self, prompt: &Prompt) -> Vec<u32> {
        self.encode_with(prompt.text(), prompt.literal())
    }

    /// The text of `ids`, added tokens spelled out. Bytes that are not UTF-8 become U+FFFD.
    pub fn decode(&self, ids: &[u32]) -> String {
        let bytes: Vec<u8> = ids.iter().flat_map(|&id| self.token_bytes(id)).copied().collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The bytes a token stands for; none for an id that the tokenizer does not have.
    pub fn token_bytes(&self, id: u32) -> &[u8] {
        let id = id as usize;
        let Some(&end) = self.ends.get(id) else { return &[] };
        let start = if id == 0 { 0 } else { self.ends[id - 1] };
        &self.bytes[start..end]
    }

    /// Bytes of the longest token: no text of n bytes in NFC has fewer than n / longest tokens.
    pub fn longest(&self) -> usize {
        (0..self.len() as u32).map(|id| self.token_bytes(id).len()).max().unwrap_or(1).max(1)
    }

    /// The id of the added token with this spelling, such as `<|im_end|>`.
    pub fn added(&self, spelling: &str) -> Option<u32> {
        self.added.get(spelling).copied()
    }

    /// Whether decoding for people leaves this token out: a control token such as `<|im_end|>`.
    /// Tags that text is parsed by (`<think>`, `<tool_call>`) are added tokens but not special.
    pub fn special(&self, id: u32) -> bool {
        let added = (id as usize).checked_sub(self.first_added as usize);
        added.and_then(|i| self.special.get(i)).is_some_and(|&special| special)
    }

    /// The characters that added tokens begin with, for [`crate::chat::Template::guard`].
    pub fn openers(&self) -> Vec<char> {
        let mut openers: Vec<char> = self.added.keys().filter_map(|s| s.chars().next()).collect();
        openers.sort_unstable();
        openers.dedup();
        openers
    }

    /// Added tokens are recognised at every byte offset of `text` but those in `literal`, which
    /// ascends. Leftmost first, then longest, as Hugging Face does.
    fn encode_with(&self, text: &str, mut literal: &[usize]) -> Vec<u32> {
        let mut ids = Vec::with_capacity(text.len() / 3);
        let (mut from, mut at) = (0, 0);
        let bytes = text.as_bytes();
        while let Some(skip) = bytes[at..].iter().position(|&b| self.opens[b as usize]) {
            at += skip;
            while literal.first().is_some_and(|&l| l < at) {
                literal = &literal[1..];
            }
            let found = if literal.first() == Some(&at) { None } else { self.added_at(text, at) };
            let Some((id, end)) = found else {
                at += 1;
                continue;
            };
            self.encode_between(&text[from..at], &mut ids);
            ids.push(id);
            (from, at) = (end, end);
        }
        self.encode_between(&text[from..], &mut ids);
        ids
    }

    /// The longest added token that begins at byte `at`, and where it ends.
    fn added_at(&self, text: &str, at: usize) -> Option<(u32, usize)> {
        self.added_lens.iter().find_map(|len| {
            let end = at + len;
            Some((*self.added.get(text.get(at..end)?)?, end))
        })
    }

    /// Ids of text that lies between added tokens.
    fn encode_between(&self, text: &str, ids: &mut Vec<u32>) {
        let text = if self.nfc { nfc(text) } else { Cow::Borrowed(text) };
        let mut spelled = String::new();
        for word in words(&text) {
            spelled.clear();
            spelled.extend(word.bytes().map(|b| self.letters[b as usize]));
            let tokens = self.model.tokenize(&spelled).expect("every byte is in the vocabulary");
            ids.extend(tokens.iter().map(|token| token.id));
        }
    }
}

impl Vocabulary for Tokenizer {
    fn bytes(&self, id: u32) -> &[u8] {
        self.token_bytes(id)
    }

    fn special(&self, id: u32) -> bool {
        Tokenizer::special(self, id)
    }
}

/// `text` in Unicode's normal form C.
pub(crate) fn nfc(text: &str) -> Cow<'_, str> {
    // No character below U+0300 composes with another below it, nor is one ever replaced.
    if text.chars().all(|c| c < '\u{300}') {
        return Cow::Borrowed(text);
    }
    let mut normalized = NormalizedString::from(text);
    normalized.nfc();
    Cow::Owned(normalized.get().to_owned())
}

/// The words of `text` by [`SPLIT`]; together they are the whole text.
///
/// `\s+(?!\S)` matches a run of whitespace but for its last character when something follows, so
/// that a word keeps the blank before it. Only a run without line breaks gets that far in the
/// alternation, and [`WORDS`] then matches it to its end.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let found = WORDS.find_at(text, from)?;
        let mut word = &text[from..found.end()];
        let last = word.chars().next_back()?;
        let blank_run = last.is_whitespace() && !matches!(last, '\r' | '\n');
        if blank_run && found.end() < text.len() && word.len() > last.len_utf8() {
            word = &word[..word.len() - last.len_utf8()];
        }
        from += word.len();
        Some(word)
    })
}

#[cfg(test)]
mod tests;
