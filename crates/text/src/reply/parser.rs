//! The state machine that reads a reply.

use super::Delta;
use super::channel::Channel;
use super::json::{self, Object, Scan};
use super::schema::{self, Delivery, Tools, Types};
use super::tags::{self, Closing, Look, Opening};
use serde_json::Value;
use std::collections::HashSet;

/// Parses a reply as it arrives. Where the pieces are cut changes nothing but where the deltas are.
#[derive(Debug, Clone)]
pub struct Parser {
    tools: Tools,
    /// Text that may be a marker, and is not all here.
    rest: String,
    state: State,
    /// Whether text is reasoning; otherwise content.
    in_reasoning: bool,
    reasoning: Channel,
    content: Channel,
    /// A call has ended, `</tool_call>` has not been seen.
    enveloped: bool,
    /// How many calls have begun.
    calls: usize,
    call: Call,
    deltas: Vec<Delta>,
}

#[derive(Debug, Clone)]
enum State {
    /// In reasoning or content.
    Text,
    /// In a function, between its parameters.
    Function,
    /// In a parameter's value.
    Value(Sink),
    /// In what seems to be a call in JSON.
    Json(Scan),
    /// The reply has ended.
    Ended,
}

/// The call that is being read.
#[derive(Debug, Clone, Default)]
struct Call {
    name: String,
    parameters: HashSet<String>,
    /// How many bytes of arguments were delivered, and how many of them before the last parameter.
    sent: usize,
    before: usize,
}

/// What becomes of a parameter's value.
#[derive(Debug, Clone)]
enum Sink {
    /// Nothing is known of it yet: a line break would not be part of it.
    Begin(String),
    /// It is a string, and delivered as it comes.
    String,
    /// As `String`, unless this turns out to be all, and null.
    StringOrNull { key: String, text: String, types: Types },
    /// It is delivered when it is complete.
    Whole { key: String, text: String, types: Types },
    /// The call already has a parameter of that name.
    Repeated,
}

/// What a state does with the text before it.
enum Step {
    /// It used that many bytes, or at least changed the state.
    Took(usize),
    /// It needs to see more. Never at the end of the reply.
    Wait,
}

use Step::{Took, Wait};

/// What a tag in text means.
enum Mark {
    Think,
    EndThink,
    Superfluous,
    EndEnvelope,
    Call(Opening),
}

/// What a tag in a function means.
enum Part {
    Parameter(String),
    Superfluous,
    End,
    EndEnvelope,
    /// Another call begins, and this one was not ended.
    Call,
}

impl Parser {
    /// A parser of one reply.
    ///
    /// `tools` are those that the model was offered: OpenAI tool objects (`{"type": "function",
    /// "function": {"name", "parameters"}}`, or the inner object), whose JSON schemas give the
    /// types of parameters. Numbers, booleans, null, arrays and objects are taken as JSON or
    /// Python would write them; what does not look like its type is a string, and so is a
    /// parameter that is not in the schema or has no type there.
    ///
    /// `in_reasoning` says that the prompt ends with an open `<think>`, so that the reply begins
    /// with reasoning.
    pub fn new(tools: &[Value], in_reasoning: bool) -> Parser {
        let tools = Tools::new(tools);
        Parser {
            // Only a call can take line breaks away from content.
            content: Channel::new(tools.any()),
            reasoning: Channel::new(true),
            tools,
            rest: String::new(),
            state: State::Text,
            in_reasoning,
            enveloped: false,
            calls: 0,
            call: Call::default(),
            deltas: Vec::new(),
        }
    }

    /// Takes in more of the reply and gives what is certain now, neighbours of one kind joined.
    /// After [`Self::finish`] it gives nothing.
    pub fn push(&mut self, text: &str) -> Vec<Delta> {
        self.run(text, false);
        std::mem::take(&mut self.deltas)
    }

    /// The reply has ended, or was cut off: gives what was held back and ends a call that is
    /// open. A second call gives nothing.
    pub fn finish(&mut self) -> Vec<Delta> {
        self.run("", true);
        match std::mem::replace(&mut self.state, State::Ended) {
            State::Text => {
                let text = self.channel().finish();
                self.say(text);
            }
            State::Function => self.end_call(false, 0),
            State::Value(Sink::String) => self.end_call(false, self.call.sent - self.call.before),
            State::Value(_) => self.end_call(false, 0),
            State::Json(scan) => {
                let call = scan.recover().is_some_and(|object| self.json_call(object, false));
                if !call && !scan.is_cut_off() {
                    self.write(scan.text());
                    let text = self.channel().finish();
                    self.say(text);
                }
            }
            State::Ended => {}
        }
        std::mem::take(&mut self.deltas)
    }

    /// How many bytes will be looked at again when more text comes.
    #[cfg(test)]
    pub(super) fn held(&self) -> usize {
        self.rest.len()
    }

    /// Moves through what is held back and `text`, as far as it is certain what they are; with
    /// `end`, to the end.
    fn run(&mut self, text: &str, end: bool) {
        let mut all = std::mem::take(&mut self.rest);
        all.push_str(text);
        let mut at = 0;
        while at < all.len() {
            let text = &all[at..];
            let step = match &self.state {
                State::Text => self.text(text, end),
                State::Function => self.function(text, end),
                State::Value(_) => self.value(text, end),
                State::Json(_) => self.json(text, end),
                State::Ended => return,
            };
            match step {
                Took(bytes) => at += bytes,
                Wait => break,
            }
        }
        all.drain(..at);
        self.rest = all;
    }

    /// In reasoning or content.
    fn text(&mut self, text: &str, end: bool) -> Step {
        let plain = text.find('<').unwrap_or(text.len());
        if plain > 0 {
            self.write(&text[..plain]);
            return Took(plain);
        }
        match self.mark(text, end) {
            Look::Yes(mark, bytes) => {
                match mark {
                    Mark::Superfluous => {}
                    Mark::Think | Mark::EndThink => {
                        self.channel().part();
                        self.in_reasoning = matches!(mark, Mark::Think);
                    }
                    Mark::EndEnvelope => {
                        self.channel().part();
                        self.enveloped = false;
                    }
                    Mark::Call(Opening::Function(name)) => {
                        self.begin_call(name);
                        self.state = State::Function;
                    }
                    Mark::Call(Opening::Json) => {
                        self.state = State::Json(Scan::new(&text[..bytes]));
                    }
                }
                Took(bytes)
            }
            Look::Unsure if !end => Wait,
            Look::Unsure if self.is_markup(text) => {
                self.channel().part();
                Took(text.len())
            }
            Look::Unsure | Look::No => {
                self.write("<");
                Took(1)
            }
        }
    }

    /// The tag that `text` begins with, of those that mean something here.
    fn mark(&mut self, text: &str, end: bool) -> Look<Mark> {
        let (fresh, enveloped) = (self.channel().fresh(), self.enveloped);
        let word = |word, mark| tags::word(text, word).map(|()| mark);
        let only_if = |condition: bool, look: Look<Mark>| if condition { look } else { Look::No };
        let think = if self.in_reasoning { Mark::Superfluous } else { Mark::Think };
        let end_think = if self.in_reasoning { Mark::EndThink } else { Mark::Superfluous };
        only_if(fresh, word("<think>", think))
            .or(|| only_if(fresh || self.in_reasoning, word("</think>", end_think)))
            .or(|| only_if(enveloped, word("</tool_call>", Mark::EndEnvelope)))
            .or(|| only_if(enveloped && fresh, word("</function>", Mark::Superfluous)))
            .or(|| {
                if !self.tools.any() {
                    return Look::No;
                }
                tags::opening(text, &self.tools, enveloped && fresh, end).map(Mark::Call)
            })
    }

    /// Whether `text`, the beginning of a tag and the end of the reply, is dropped: it is all there
    /// is of a call.
    fn is_markup(&mut self, text: &str) -> bool {
        let opens = text.starts_with("<tool_call>") || text.starts_with("<function=");
        (self.tools.any() && opens) || (self.enveloped && self.channel().fresh())
    }

    /// In a function, between its parameters. Text has no business here, and is content.
    fn function(&mut self, text: &str, end: bool) -> Step {
        let plain = text.find('<').unwrap_or(text.len());
        if plain > 0 {
            self.write(&text[..plain]);
            return Took(plain);
        }
        let word = |word, part| tags::word(text, word).map(|()| part);
        let part = word("</function>", Part::End)
            .or(|| word("</tool_call>", Part::EndEnvelope))
            .or(|| word("</parameter>", Part::Superfluous))
            .or(|| tags::named(text, "<parameter=").map(|name| Part::Parameter(name.to_owned())))
            .or(|| tags::opening(text, &self.tools, true, end).map(|_| Part::Call));
        match part {
            Look::Yes(part, bytes) => {
                self.content.part();
                match part {
                    Part::Superfluous => {}
                    Part::Parameter(name) => self.state = State::Value(Sink::Begin(name)),
                    Part::End => self.end_call(true, 0),
                    Part::EndEnvelope => {
                        self.end_call(true, 0);
                        self.enveloped = false;
                    }
                    Part::Call => {
                        self.end_call(true, 0);
                        return Took(0);
                    }
                }
                Took(bytes)
            }
            Look::Unsure if end => Took(text.len()),
            Look::Unsure => Wait,
            Look::No => {
                self.write("<");
                Took(1)
            }
        }
    }

    /// In a parameter's value.
    fn value(&mut self, text: &str, end: bool) -> Step {
        if let State::Value(Sink::Begin(name)) = &mut self.state {
            let name = std::mem::take(name);
            self.state = State::Value(self.begin_parameter(name));
            return Took(usize::from(text.starts_with('\n')));
        }
        let plain = text.find(['\n', '<']).unwrap_or(text.len());
        if plain > 0 {
            self.extend_value(&text[..plain]);
            return Took(plain);
        }
        match tags::closing(text) {
            Look::Yes(closing, bytes) => {
                self.end_parameter();
                if closing == Closing::Call {
                    self.end_call(true, 0);
                    self.enveloped = false;
                }
                Took(bytes)
            }
            Look::Unsure if end => Took(text.len()),
            Look::Unsure => Wait,
            Look::No => {
                self.extend_value(&text[..1]);
                Took(1)
            }
        }
    }

    /// In what seems to be a call in JSON.
    fn json(&mut self, text: &str, end: bool) -> Step {
        let State::Json(scan) = &mut self.state else { unreachable!("only called in JSON") };
        let (bytes, ended) = scan.take(text, end);
        if !ended {
            return if bytes == 0 { Wait } else { Took(bytes) };
        }
        let State::Json(scan) = std::mem::replace(&mut self.state, State::Text) else {
            unreachable!("it was JSON above")
        };
        let call = scan.parse().is_some_and(|object| self.json_call(object, true));
        if !call {
            self.write(scan.text());
        }
        Took(bytes)
    }

    /// The channel that text goes to.
    fn channel(&mut self) -> &mut Channel {
        if self.in_reasoning { &mut self.reasoning } else { &mut self.content }
    }

    /// Text that is no markup.
    fn write(&mut self, text: &str) {
        let text = self.channel().push(text);
        self.say(text);
    }

    /// Text as it is delivered.
    fn say(&mut self, text: String) {
        let reasoning = self.in_reasoning;
        match self.deltas.last_mut() {
            _ if text.is_empty() => {}
            Some(Delta::Reasoning(last)) if reasoning => last.push_str(&text),
            Some(Delta::Content(last)) if !reasoning => last.push_str(&text),
            _ if reasoning => self.deltas.push(Delta::Reasoning(text)),
            _ => self.deltas.push(Delta::Content(text)),
        }
    }

    fn begin_call(&mut self, name: String) {
        self.channel().part();
        self.in_reasoning = false;
        self.enveloped = true;
        self.call = Call { name: name.clone(), ..Call::default() };
        self.deltas.push(Delta::ToolCall { index: self.calls, name });
        self.calls += 1;
    }

    /// Delivers a part of the arguments of the call that is being read.
    fn send(&mut self, json: &str) {
        self.call.sent += json.len();
        let at = self.calls - 1;
        match self.deltas.last_mut() {
            _ if json.is_empty() => {}
            Some(Delta::Arguments { index, fragment }) if *index == at => fragment.push_str(json),
            _ => self.deltas.push(Delta::Arguments { index: at, fragment: json.to_owned() }),
        }
    }

    /// Delivers what stands before a value: what separates it from the one before, and its name.
    fn send_key(&mut self, key: &str) {
        let separator = if self.call.sent == 0 { "{" } else { "," };
        self.call.before = self.call.sent.max(1);
        self.send(&format!("{separator}{}:", json::string(key)));
    }

    fn send_parameter(&mut self, key: &str, value: &str) {
        self.send_key(key);
        self.send(value);
    }

    fn begin_parameter(&mut self, key: String) -> Sink {
        if !self.call.parameters.insert(key.clone()) {
            return Sink::Repeated;
        }
        let types = self.tools.types(&self.call.name, &key);
        match types.delivery() {
            Delivery::Whole => Sink::Whole { key, text: String::new(), types: types.clone() },
            Delivery::StringOrNull => {
                Sink::StringOrNull { key, text: String::new(), types: types.clone() }
            }
            Delivery::String => {
                self.send_key(&key);
                self.send("\"");
                Sink::String
            }
        }
    }

    fn extend_value(&mut self, more: &str) {
        let State::Value(sink) = &mut self.state else { unreachable!("only called in a value") };
        match sink {
            Sink::String => self.send(json::escaped(more).as_str()),
            Sink::StringOrNull { key, text, .. } => {
                text.push_str(more);
                if !schema::may_be_null(text) {
                    let (key, text) = (std::mem::take(key), std::mem::take(text));
                    *sink = Sink::String;
                    self.send_key(&key);
                    self.send("\"");
                    self.send(json::escaped(&text).as_str());
                }
            }
            Sink::Whole { text, .. } => text.push_str(more),
            Sink::Begin(_) | Sink::Repeated => {}
        }
    }

    fn end_parameter(&mut self) {
        match std::mem::replace(&mut self.state, State::Function) {
            State::Value(Sink::String) => self.send("\""),
            State::Value(
                Sink::Whole { key, text, types } | Sink::StringOrNull { key, text, types },
            ) => self.send_parameter(&key, &types.coerce(&text)),
            _ => {}
        }
    }

    /// Ends the call that is being read; what follows is content.
    fn end_call(&mut self, complete: bool, unfinished: usize) {
        if complete {
            self.send(if self.call.sent == 0 { "{}" } else { "}" });
        }
        self.deltas.push(Delta::ToolCallEnd { index: self.calls - 1, complete, unfinished });
        self.content.part();
        self.state = State::Text;
    }

    /// A call in JSON, all at once. False if its arguments cannot be any.
    fn json_call(&mut self, object: Object, complete: bool) -> bool {
        let Some(arguments) = self.tools.coerce_arguments(&object) else { return false };
        self.begin_call(object.name);
        for (key, value) in arguments {
            if self.call.parameters.insert(key.clone()) {
                self.send_parameter(&key, &value);
            }
        }
        self.end_call(complete, 0);
        true
    }
}
