//! Token ids to text as it arrives: nothing is sent that a later token could still change.
//!
//! Held back are the bytes of a character that is not whole yet, and text that may be the
//! beginning of a stop string; everything else comes out with the token that completes it. The
//! deltas together are the whole text, up to the first stop string. Not known here: what the text
//! means; see [`crate::reply`] for that.

use std::ops::Deref;

/// What a [`Detokenizer`] asks of a tokenizer.
pub trait Vocabulary {
    /// The bytes a token stands for, not always whole characters; none for an unknown id.
    fn bytes(&self, id: u32) -> &[u8];

    /// Whether the token is left out of text for people: a control token such as `<|im_end|>`.
    fn special(&self, id: u32) -> bool;
}

impl<P: Deref<Target: Vocabulary>> Vocabulary for P {
    fn bytes(&self, id: u32) -> &[u8] {
        (**self).bytes(id)
    }

    fn special(&self, id: u32) -> bool {
        (**self).special(id)
    }
}

/// Makes text of one sequence's tokens. `V` may be a reference or an `Arc`.
#[derive(Debug, Clone)]
pub struct Detokenizer<V> {
    vocabulary: V,
    /// The beginning of a character: at most three bytes, and valid so far.
    partial: Vec<u8>,
    /// Text that may be the beginning of a stop string.
    held: String,
    stops: Vec<Stop>,
    /// Which of `stops` was found.
    stopped: Option<usize>,
}

impl<V: Vocabulary> Detokenizer<V> {
    /// A detokenizer that ends the text before the first of `stops` to be completed; where
    /// several are completed by the same character, before the longest. Empty ones are ignored.
    pub fn new<S: Into<String>>(
        vocabulary: V,
        stops: impl IntoIterator<Item = S>,
    ) -> Detokenizer<V> {
        let stops = stops.into_iter().map(|text| text.into());
        let stops = stops.filter(|text: &String| !text.is_empty()).map(Stop::new).collect();
        Detokenizer { vocabulary, partial: Vec::new(), held: String::new(), stops, stopped: None }
    }

    /// The text that this token makes certain; nothing for special tokens, and nothing once a
    /// stop string was found. Bytes that can never become a character are U+FFFD, placed as
    /// [`String::from_utf8_lossy`] places them.
    pub fn push(&mut self, id: u32) -> String {
        if self.stopped.is_some() || self.vocabulary.special(id) {
            return String::new();
        }
        let mut bytes = std::mem::take(&mut self.partial);
        bytes.extend_from_slice(self.vocabulary.bytes(id));
        let mut text = String::with_capacity(bytes.len());
        let mut chunks = bytes.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            match std::str::from_utf8(chunk.invalid()) {
                Ok(_) => {}
                Err(e) if e.error_len().is_none() && chunks.peek().is_none() => {
                    self.partial = chunk.invalid().to_vec();
                }
                Err(_) => text.push(char::REPLACEMENT_CHARACTER),
            }
        }
        self.release(text)
    }

    /// What was still held back, when no more tokens come: half a character as U+FFFD, half a
    /// stop string as the text it is. A second call gives nothing.
    pub fn finish(&mut self) -> String {
        if self.stopped.is_some() {
            return String::new();
        }
        let partial = std::mem::take(&mut self.partial);
        let mut text = self.release(String::from_utf8_lossy(&partial).into_owned());
        text.push_str(&std::mem::take(&mut self.held));
        self.stops.iter_mut().for_each(|stop| stop.matched = 0);
        text
    }

    /// The stop string that ended the text.
    pub fn stopped(&self) -> Option<&str> {
        self.stopped.map(|i| self.stops[i].text.as_str())
    }

    /// Appends `text` to what is held, and takes from it what no stop string can claim any more.
    fn release(&mut self, text: String) -> String {
        if self.stops.is_empty() {
            return text;
        }
        let mut out = std::mem::take(&mut self.held);
        let known = out.len();
        out.push_str(&text);
        for end in known..out.len() {
            let byte = out.as_bytes()[end];
            let mut found: Option<usize> = None;
            for i in 0..self.stops.len() {
                let longer =
                    found.is_none_or(|f| self.stops[f].text.len() < self.stops[i].text.len());
                if self.stops[i].step(byte) && longer {
                    found = Some(i);
                }
            }
            if let Some(i) = found {
                out.truncate(end + 1 - self.stops[i].text.len());
                self.stopped = Some(i);
                self.partial.clear();
                return out;
            }
        }
        let undecided = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        // A stop string's first byte begins a character, so this is a character border.
        self.held = out.split_off(out.len() - undecided);
        out
    }
}

/// One stop string, searched byte by byte (Knuth, Morris, Pratt): no text is read twice.
#[derive(Debug, Clone)]
struct Stop {
    text: String,
    /// `fallback[n]`: the longest proper prefix of the text that ends its first `n + 1` bytes.
    fallback: Vec<usize>,
    /// How many bytes of the text the stream ends with.
    matched: usize,
}

impl Stop {
    fn new(text: String) -> Stop {
        let bytes = text.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        for i in 1..bytes.len() {
            let mut n: usize = fallback[i - 1];
            while n > 0 && bytes[n] != bytes[i] {
                n = fallback[n - 1];
            }
            fallback[i] = n + usize::from(bytes[n] == bytes[i]);
        }
        Stop { text, fallback, matched: 0 }
    }

    /// Takes one more byte of the stream; true when the text is complete.
    fn step(&mut self, byte: u8) -> bool {
        let bytes = self.text.as_bytes();
        if self.matched == bytes.len() {
            self.matched = self.fallback[self.matched - 1];
        }
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

#[cfg(test)]
mod tests;
