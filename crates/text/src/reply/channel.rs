//! Reasoning or content on its way out, without the white space that the template puts around it.

/// One of the two texts of a reply.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    /// Whether a marker that follows takes line breaks away.
    trims: bool,
    /// Whether anything visible was delivered.
    begun: bool,
    /// Whether nothing visible was delivered since the beginning or the last [`Self::part`].
    fresh: bool,
    /// White space that is not certain: while fresh, the indentation of the first visible line;
    /// then a line break and what follows it.
    held: String,
}

impl Channel {
    pub fn new(trims: bool) -> Channel {
        Channel { trims, begun: false, fresh: true, held: String::new() }
    }

    /// Whether a piece of this text would begin here.
    pub fn fresh(&self) -> bool {
        self.fresh
    }

    /// Takes in `text`, and gives what is certain to be delivered.
    pub fn push(&mut self, mut text: &str) -> String {
        let mut out = String::new();
        if self.fresh {
            let visible = text.find(|c: char| !c.is_whitespace());
            let (blank, after) = text.split_at(visible.unwrap_or(text.len()));
            match blank.rfind('\n') {
                Some(at) => self.held = blank[at + 1..].to_owned(),
                None => self.held.push_str(blank),
            }
            if visible.is_none() {
                return out;
            }
            if self.begun {
                out.push_str("\n\n");
            }
            out.push_str(&std::mem::take(&mut self.held));
            (self.fresh, self.begun) = (false, true);
            text = after;
        }
        if !self.trims {
            out.push_str(text);
            return out;
        }
        let (visible, blank) = text.split_at(text.trim_end().len());
        if !visible.is_empty() {
            out.push_str(&std::mem::take(&mut self.held));
            out.push_str(visible);
        }
        // Blanks before a line break are certain: only what begins with one is dropped.
        let certain = match blank.find(['\n', '\r']) {
            _ if !self.held.is_empty() => 0,
            at => at.unwrap_or(blank.len()),
        };
        out.push_str(&blank[..certain]);
        self.held.push_str(&blank[certain..]);
        out
    }

    /// Something else stands here: white space before it is dropped.
    pub fn part(&mut self) {
        self.fresh = true;
        self.held.clear();
    }

    /// Nothing follows: gives what is held back.
    pub fn finish(&mut self) -> String {
        let held = std::mem::take(&mut self.held);
        if self.fresh { String::new() } else { held }
    }
}
