//! The shapes of messages that clients send, brought into the one that templates take.
//!
//! Accepted and changed: content as text, `null` or text parts; `developer` for `system`; system
//! messages anywhere and several of them; `reasoning` for `reasoning_content`, and reasoning left
//! in the content between think tags; a call's arguments as an object or as JSON in a string;
//! calls without a type; results of calls that nobody made.

use super::guard::Guard;
use super::python::{trim, trim_start};
use crate::{Error, Result};
use serde_json::{Map, Value, json};

/// Who says something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Instructions that precede the conversation (`system` and `developer`).
    System,
    /// The person.
    User,
    /// The model.
    Assistant,
    /// The result of a call.
    Tool,
}

impl Role {
    /// The word for it in templates.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub struct Message {
    /// Who says it.
    pub role: Role,
    /// What is said; empty where a message only calls tools.
    pub content: String,
    /// What an assistant thought before it, if that is known apart from the content.
    pub reasoning: Option<String>,
    /// The calls of an assistant.
    pub tool_calls: Vec<ToolCall>,
}

/// A call that an assistant made.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// The function's name.
    pub name: String,
    /// Its arguments by name, in the order they were given.
    pub arguments: Map<String, Value>,
}

impl Message {
    /// A message of plain text.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        Message { role, content: content.into(), reasoning: None, tool_calls: Vec::new() }
    }

    /// Reads a request's `messages`. Fields that no template needs are ignored. Errs on the first
    /// field that is not understood, naming it.
    pub fn list(messages: &Value) -> Result<Vec<Message>> {
        let Some(messages) = messages.as_array() else {
            return Err(unexpected("messages", messages, "a list of messages"));
        };
        let read = |(i, message)| Message::read(message, &format!("messages[{i}]"));
        messages.iter().enumerate().map(read).collect()
    }

    fn read(message: &Value, at: &str) -> Result<Message> {
        if !message.is_object() {
            return Err(unexpected(at, message, "an object with role and content"));
        }
        let role = match message["role"].as_str() {
            Some("system" | "developer") => Role::System,
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("tool" | "function") => Role::Tool,
            _ => {
                let expected = "one of system, developer, user, assistant, tool";
                return Err(unexpected(&format!("{at}.role"), &message["role"], expected));
            }
        };
        let mut read = Message::new(role, content(&message["content"], &format!("{at}.content"))?);
        if role == Role::Assistant {
            let thought = ["reasoning_content", "reasoning"].map(|field| message[field].as_str());
            read.reasoning = thought.into_iter().flatten().next().map(str::to_owned);
            read.tool_calls = calls(message, at)?;
        }
        Ok(read)
    }

    /// Shows every string of the message that comes from outside.
    pub(super) fn each_string(&self, see: &mut dyn FnMut(&str)) {
        see(&self.content);
        self.reasoning.iter().for_each(|text| see(text));
        for call in &self.tool_calls {
            see(&call.name);
            for (name, value) in &call.arguments {
                see(name);
                super::guard::strings(value, see);
            }
        }
    }

    /// The message as templates take it.
    pub(super) fn to_json(&self, guard: &Guard) -> Value {
        let mut message = json!({ "role": self.role.as_str() });
        let (mut reasoning, mut content) = (self.reasoning.as_deref(), guard.hide(&self.content));
        if self.role == Role::User {
            content = guard.hide_wrapped(&self.content);
        }
        if let (Role::Assistant, None) = (self.role, reasoning)
            && let Some((thought, said)) = split_reasoning(&self.content)
        {
            reasoning = Some(thought);
            content = guard.hide_fenced(said);
        }
        message["content"] = content.into();
        if let Some(reasoning) = reasoning {
            message["reasoning_content"] = guard.hide(reasoning).into();
        }
        if !self.tool_calls.is_empty() {
            let calls = self.tool_calls.iter().map(|call| {
                let (name, arguments) = (guard.hide(&call.name), guard.hide_map(&call.arguments));
                json!({ "type": "function", "function": { "name": name, "arguments": arguments } })
            });
            message["tool_calls"] = calls.collect();
        }
        message
    }
}

/// Reasoning that a client left in the content, and what was said after it, cut where the model's
/// template cuts them: it would not find the tags among data.
fn split_reasoning(content: &str) -> Option<(&str, &str)> {
    let content = trim(content);
    let (thought, _) = content.split_once("</think>")?;
    let (_, said) = content.rsplit_once("</think>")?;
    let thought = thought.rsplit_once("<think>").map_or(thought, |(_, thought)| thought);
    Some((trim(thought), said.trim_start_matches('\n')))
}

/// The messages as the template wants their order: one system message at most, first.
pub(super) fn arrange(messages: &[Message]) -> Result<Vec<Message>> {
    let error = |problem: &str| {
        Err(Error::Request { param: "messages".into(), problem: problem.to_owned() })
    };
    let Some(first) = messages.first() else {
        return error("expected at least one message, found an empty list");
    };
    if first.role == Role::Tool {
        return error("the first one is the result of a tool, but nothing before it called one");
    }
    if !messages.iter().any(|m| m.role == Role::User) {
        return error("expected at least one message with role user, found none");
    }
    let is_system = |m: &&Message| m.role == Role::System;
    let system: Vec<&Message> = messages.iter().filter(is_system).collect();
    let mut arranged = match system[..] {
        [] => vec![],
        [only] => vec![only.clone()],
        _ => {
            let texts = system.iter().map(|m| trim(&m.content)).filter(|text| !text.is_empty());
            vec![Message::new(Role::System, texts.collect::<Vec<_>>().join("\n\n"))]
        }
    };
    arranged.extend(messages.iter().filter(|m| !is_system(m)).cloned());
    Ok(arranged)
}

/// Text, `null`, or a list of text parts.
fn content(content: &Value, at: &str) -> Result<String> {
    match content {
        Value::Null => Ok(String::new()),
        Value::String(text) => Ok(text.clone()),
        Value::Array(parts) => (parts.iter().enumerate())
            .map(|(i, part)| part_text(part, &format!("{at}[{i}]")))
            .collect(),
        _ => Err(unexpected(at, content, "text, null, or a list of text parts")),
    }
}

fn part_text<'a>(part: &'a Value, at: &str) -> Result<&'a str> {
    if let Some(text) = part.as_str() {
        return Ok(text);
    }
    let kind = part["type"].as_str();
    let holds = |words: [&str; 4]| words.iter().any(|word| kind.is_some_and(|k| k.contains(word)));
    if holds(["image", "video", "audio", "file"]) || !part["image_url"].is_null() {
        let problem = "images, sound, video and files cannot be read: this engine runs the text \
                       part of the model only";
        return Err(Error::Request { param: at.to_owned(), problem: problem.to_owned() });
    }
    let text = if kind == Some("refusal") { &part["refusal"] } else { &part["text"] };
    text.as_str().ok_or_else(|| unexpected(at, part, "a part {\"type\": \"text\", \"text\": ...}"))
}

/// An assistant's calls: `tool_calls`, or the older `function_call`.
fn calls(message: &Value, at: &str) -> Result<Vec<ToolCall>> {
    if !message["function_call"].is_null() && message["tool_calls"].is_null() {
        return Ok(vec![call(&message["function_call"], &format!("{at}.function_call"))?]);
    }
    match &message["tool_calls"] {
        Value::Null => Ok(vec![]),
        Value::Array(calls) => (calls.iter().enumerate())
            .map(|(i, item)| {
                let at = format!("{at}.tool_calls[{i}]");
                match item.get("function") {
                    Some(function) => call(function, &format!("{at}.function")),
                    None => call(item, &at),
                }
            })
            .collect(),
        other => Err(unexpected(&format!("{at}.tool_calls"), other, "a list of calls, or null")),
    }
}

fn call(call: &Value, at: &str) -> Result<ToolCall> {
    let name = call["name"].as_str().filter(|name| !name.is_empty());
    let Some(name) = name else {
        return Err(unexpected(&format!("{at}.name"), &call["name"], "the name of a function"));
    };
    Ok(ToolCall { name: name.to_owned(), arguments: arguments(&call["arguments"]) })
}

/// Arguments by name. Models and clients write what they like here, and a conversation must not
/// end because of it: what is no object becomes the one argument `arguments`.
fn arguments(given: &Value) -> Map<String, Value> {
    match given {
        Value::Null => Map::new(),
        Value::Object(map) => map.clone(),
        Value::String(text) if trim_start(text).is_empty() => Map::new(),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(map)) => map,
            Ok(Value::Null) => Map::new(),
            _ => Map::from_iter([("arguments".to_owned(), given.clone())]),
        },
        _ => Map::from_iter([("arguments".to_owned(), given.clone())]),
    }
}

fn unexpected(param: &str, found: &Value, expected: &str) -> Error {
    let found = match found {
        Value::Null => "nothing".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
        Value::String(text) => format!("{:?}", text.chars().take(60).collect::<String>()),
        other => other.to_string(),
    };
    Error::Request {
        param: param.to_owned(),
        problem: format!("expected {expected}, found {found}"),
    }
}
