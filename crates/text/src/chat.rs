//! Messages and tools to the prompt.

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
