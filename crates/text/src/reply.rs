//! What the model says to what a client is told: reasoning, content and tool calls, as the text
//! arrives.
//!
//! The model writes
//!
//! ```text
//! reasoning
//! </think>
//!
//! content
//!
//! <tool_call>
//! <function=NAME>
//! <parameter=P>
//! value
//! </parameter>
//! </function>
//! </tool_call>
//! ```
//!
//! and sometimes `{"name": .., "arguments": {..}}` inside `<tool_call>`. The parser never fails:
//! text that is none of this is text. A marker is acted upon only when it cannot be anything else,
//! and text is held back only while it may still become a marker, or white space that a marker
//! would swallow.
//!
//! # Rules
//!
//! - A tool call begins with `<tool_call>` and `<function=NAME>`, or an object with a `name`; not
//!   with the bare tag, which may be talked about. It ends reasoning that was not closed. The tag
//!   may be missing before `<function=NAME>` if a tool of that name was offered and a parameter or
//!   the function's end follows. A name that no tool has is a call all the same: the client knows
//!   what to answer. Without tools, nothing is a call.
//! - `<think>` begins reasoning, and a superfluous `</think>` is dropped, only where content (or
//!   what follows a call) begins. Elsewhere in content they are text.
//! - Empty lines before reasoning and content are dropped, and so are line breaks before a marker:
//!   the template puts them back when it renders the reply again. Pieces of one kind with something
//!   else between them are joined by an empty line.
//! - A value is what lies between `<parameter=P>` and `</parameter>`, less one line break at each
//!   end. `</function>` and `</tool_call>` together end it too; alone they are part of it.
//! - Types come from the tool's JSON schema ([`Parser::new`]). Strings are delivered as they
//!   arrive, other values when they are complete. The first of two parameters of one name counts.
//! - A call that the end of the reply cuts off is reported incomplete, with the parameters that are
//!   complete. Markup that was cut off is dropped, not shown.

use serde_json::Value;

mod channel;
mod json;
mod parser;
mod schema;
mod tags;

pub use parser::Parser;

/// Something new in a reply. Those of one kind in a row are pieces of one text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Delta {
    /// More reasoning.
    Reasoning(String),
    /// More content.
    Content(String),
    /// A tool call begins.
    ToolCall {
        /// Its number in this reply, from 0.
        index: usize,
        /// The tool's name as the model wrote it.
        name: String,
    },
    /// More of a call's arguments. All fragments of a complete call together are one JSON object.
    Arguments {
        /// The call's number.
        index: usize,
        /// JSON, cut anywhere but within a character or an escape sequence.
        fragment: String,
    },
    /// A call has ended; each one does, at the latest with [`Parser::finish`].
    ToolCallEnd {
        /// The call's number.
        index: usize,
        /// Whether the model wrote all of it. The arguments of an incomplete call are not closed,
        /// lest somebody take them for complete: less their last `unfinished` bytes, and with
        /// `}` (`{}` if there were none), they are the object of its complete parameters.
        complete: bool,
        /// How many bytes of the arguments belong to a parameter that was cut off.
        unfinished: usize,
    },
}

/// A whole reply.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reply {
    /// What the model thought, empty if nothing.
    pub reasoning: String,
    /// What it said, empty if nothing.
    pub content: String,
    /// What it wants to have called, in order.
    pub tool_calls: Vec<ToolCall>,
}

/// A tool call of a [`Reply`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolCall {
    /// The tool's name as the model wrote it.
    pub name: String,
    /// A JSON object, once the call has ended; of an incomplete call, its complete parameters.
    pub arguments: String,
    /// Whether the model wrote all of the call. False until it has ended.
    pub complete: bool,
}

impl Reply {
    /// Takes in the next delta of a reply. Those that belong to no call of it are ignored.
    pub fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.push_str(&text),
            Delta::Content(text) => self.content.push_str(&text),
            Delta::ToolCall { name, .. } => {
                self.tool_calls.push(ToolCall { name, arguments: String::new(), complete: false });
            }
            Delta::Arguments { index, fragment } => {
                if let Some(call) = self.tool_calls.get_mut(index) {
                    call.arguments.push_str(&fragment);
                }
            }
            Delta::ToolCallEnd { index, complete, unfinished } => {
                let Some(call) = self.tool_calls.get_mut(index) else { return };
                call.complete = complete;
                if !complete {
                    call.arguments.truncate(call.arguments.len().saturating_sub(unfinished));
                    call.arguments.push_str(if call.arguments.is_empty() { "{}" } else { "}" });
                }
            }
        }
    }
}

impl Extend<Delta> for Reply {
    fn extend<I: IntoIterator<Item = Delta>>(&mut self, deltas: I) {
        deltas.into_iter().for_each(|delta| self.add(delta));
    }
}

/// Parses a whole reply, exactly as the stream of its pieces is. Arguments as [`Parser::new`].
pub fn whole(text: &str, tools: &[Value], in_reasoning: bool) -> Reply {
    let mut parser = Parser::new(tools, in_reasoning);
    let mut reply = Reply::default();
    reply.extend(parser.push(text));
    reply.extend(parser.finish());
    reply
}

#[cfg(test)]
mod tests;
