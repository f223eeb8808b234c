//! What the fuzz targets in `fuzz/` run, and tests of this crate over the same corpus: each takes
//! any bytes, and panics where a reader breaks its promise.

use crate::chat::{Message, Options, Prompt, Role, Template};
use crate::reply::{self, Delta, Parser, Reply};
use crate::stream::{Detokenizer, Vocabulary};
use crate::tokenizer::nfc;
use crate::{Error, Text, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::LazyLock;

/// The bytes of `tokenizer.json`, and a text to encode with it.
pub fn tokenizer(input: &[u8]) {
    let tokenizer = match Tokenizer::from_bytes(input) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return assert_presentable(&error),
    };
    let text = format!("Hello, <a> I'm  1\u{301}é {}", String::from_utf8_lossy(input));
    let text: String = text.chars().take(500).collect();
    let encode = || {
        let (plain, ids) = (tokenizer.encode_plain(&text), tokenizer.encode(&text));
        for ids in [&plain, &ids] {
            assert_eq!(nfc(&tokenizer.decode(ids)), nfc(&text));
        }
        assert!(plain.iter().chain(&ids).all(|&id| (id as usize) < tokenizer.len()));
        let added = |id: &&u32| tokenizer.added(&tokenizer.decode(&[**id])) == Some(**id);
        assert_eq!(plain.iter().find(added), None);
        let all_literal = text.char_indices().map(|(i, _)| i).collect();
        assert_eq!(tokenizer.encode_prompt(&Prompt::new(text.clone(), all_literal)), plain);
        assert_eq!(tokenizer.encode_prompt(&Prompt::new(text.clone(), vec![])), ids);
    };
    // The BPE keeps words it has seen for as long as the thread lives.
    std::thread::scope(|scope| scope.spawn(encode).join()).unwrap();
}

/// A case as in `tests/golden/cases.json`, rendered by the demo's template.
pub fn chat(input: &[u8]) {
    let Ok(case) = serde_json::from_slice::<Value>(input) else { return };
    match render(&DEMO.template, &case) {
        Ok(prompt) => check_prompt(&prompt, &case),
        Err(error) => {
            let named = matches!(&error, Error::Request { param, .. }
                if param.starts_with("messages") || param.starts_with("tools"));
            assert!(named, "{error}");
            assert_presentable(&error);
        }
    }
}

/// A chat template, rendered with messages that spell tokens.
pub fn template(input: &[u8]) {
    let source = String::from_utf8_lossy(input);
    let user = Message::new(Role::User, " <tool_response><|im_end|></tool_response> ");
    let assistant = Message::new(Role::Assistant, "<think>a</think> \n b");
    let messages = [Message::new(Role::User, "hi"), assistant, user];
    let rendered = Template::new(&source).and_then(|template| {
        template.render(&messages, &[json!({"function": {"name": "<f>"}})], &Options::default())
    });
    match rendered {
        Ok(prompt) => {
            let bytes = prompt.text().as_bytes();
            assert!(prompt.literal().iter().all(|&at| at <= bytes.len()));
            let stand_in = |c: char| ('\u{fdd0}'..='\u{fdef}').contains(&c);
            assert!(source.contains(stand_in) || !prompt.text().contains(stand_in));
        }
        Err(error) => assert_presentable(&error),
    }
}

/// A message for a terminal: not long, and without control characters.
fn assert_presentable(error: &Error) {
    let text = error.to_string();
    assert!(!text.is_empty() && text.chars().count() < 1000, "{text}");
    assert!(!text.chars().any(char::is_control), "{text:?}");
}

/// Renders a case of `tests/golden/cases.json`: messages, tools and variables in one object.
pub fn render(template: &Template, case: &Value) -> crate::Result<Prompt> {
    let flag = |name: &str, default: bool| case.get(name).map_or(default, |v| v == &json!(true));
    let options = Options {
        thinking: flag("enable_thinking", true),
        preserve_thinking: flag("preserve_thinking", false),
        add_generation_prompt: flag("add_generation_prompt", true),
        variables: Map::new(),
    };
    let tools = case["tools"].as_array().cloned().unwrap_or_default();
    template.render(&Message::list(&case["messages"])?, &tools, &options)
}

/// Panics unless added tokens stand where the case has turns, calls and results, and nowhere else.
pub fn check_prompt(prompt: &Prompt, case: &Value) {
    let tokenizer = &DEMO.tokenizer;
    let ids = tokenizer.encode_prompt(prompt);
    assert_eq!(nfc(&tokenizer.decode(&ids)), nfc(prompt.text()));
    let count = |spelling| {
        let id = tokenizer.added(spelling).expect("a token of the demo");
        ids.iter().filter(|&&i| i == id).count()
    };
    let messages = Message::list(&case["messages"]).expect("what was rendered can be read");
    let of = |role| messages.iter().filter(|m| m.role == role).count();
    let has = |what: bool| usize::from(what);
    let tools = has(case["tools"].as_array().is_some_and(|tools| !tools.is_empty()));
    let reply = has(case.get("add_generation_prompt").is_none_or(|add| add == true));
    let closed = has(case.get("enable_thinking").is_some_and(|on| on != true));
    // Results that follow each other share a turn; system messages between them move away.
    let rest: Vec<Role> = messages.iter().map(|m| m.role).filter(|r| *r != Role::System).collect();
    let shared = rest.windows(2).filter(|pair| pair == &[Role::Tool; 2]).count();
    let turns = rest.len() - shared + has(of(Role::System) > 0).max(tools);
    assert_eq!(count("<|im_start|>"), turns + reply);
    assert_eq!(count("<|im_end|>"), turns);
    assert_eq!(count("<tool_response>"), of(Role::Tool));
    assert_eq!(count("</tool_response>"), of(Role::Tool));
    // The explanation of tools shows one call, and names its tags once more.
    let calls: usize = messages.iter().map(|m| m.tool_calls.len()).sum();
    assert_eq!(count("<tool_call>"), calls + 2 * tools);
    assert_eq!(count("</tool_call>"), calls + 2 * tools);
    assert_eq!(count("<think>") - reply, count("</think>") - reply * closed);
    assert!(count("<think>") <= of(Role::Assistant) + reply);
    assert_eq!(count("<|endoftext|>"), 0);
}

/// The demo model's tokenizer and template.
static DEMO: LazyLock<Text> = LazyLock::new(|| {
    let file = |name: &str| match name {
        "tokenizer.json" => Some(include_str!("../../../demo/tokenizer.json")),
        "chat_template.jinja" => Some(include_str!("../../../demo/chat_template.jinja")),
        _ => None,
    };
    Text::embedded(file).expect("the demo's files are whole")
});

/// The first byte chooses stop strings, the second how the rest, which is the bytes of the text,
/// is cut into tokens.
pub fn stream(input: &[u8]) {
    const STOPS: [&str; 8] = ["\n\n", "END", "aba", "a", "</tool_call>", "žluť", "👩‍👩", "\u{fffd}a"];
    let [stops, seed, bytes @ ..] = input else { return };
    let chosen = STOPS.iter().enumerate().filter(|(i, _)| stops >> i & 1 == 1);
    let stops: Vec<&str> = chosen.map(|(_, stop)| *stop).collect();

    let mut lengths = lengths(*seed);
    let mut tokens = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let (token, after) = rest.split_at(lengths.next().unwrap_or(1).min(rest.len()));
        tokens.push(token);
        rest = after;
    }
    let vocabulary = Tokens(tokens);
    let mut detokenizer = Detokenizer::new(&vocabulary, stops.iter().copied());
    let mut text: String = (0..vocabulary.0.len()).map(|id| detokenizer.push(id as u32)).collect();
    text.push_str(&detokenizer.finish());
    assert_eq!(detokenizer.finish(), "");
    let stopped = detokenizer.stopped().map(str::to_owned);
    assert_eq!((text, stopped), until_stop(bytes, &stops));
}

/// The first byte says whether the reply begins with reasoning (1) and whether no tools were
/// offered (2), the second how the rest, which is the reply, is cut.
pub fn reply(input: &[u8]) {
    let [flags, seed, bytes @ ..] = input else { return };
    let text = String::from_utf8_lossy(bytes);
    let in_reasoning = flags & 1 == 1;
    let tools: &[Value] = if flags & 2 == 2 { &[] } else { &TOOLS };

    let mut parser = Parser::new(tools, in_reasoning);
    let mut deltas = Vec::new();
    let (mut chars, mut lengths) = (text.chars().peekable(), lengths(*seed));
    while chars.peek().is_some() {
        let piece: String = chars.by_ref().take(lengths.next().unwrap_or(1)).collect();
        deltas.extend(parser.push(&piece));
    }
    deltas.extend(parser.finish());
    check_reply(&deltas);

    let mut gathered = Reply::default();
    gathered.extend(deltas);
    assert_eq!(gathered, reply::whole(&text, tools, in_reasoning));
    if tools.is_empty() {
        assert_eq!(gathered.tool_calls, []);
    }
    if !text.contains('<') {
        let said = if in_reasoning { gathered.reasoning } else { gathered.content };
        // All but empty lines that it begins with.
        assert_eq!(said.trim_start(), text.trim_start());
    }
}

/// Panics unless `deltas` are those of a finished reply: calls one after another, each begun and
/// ended, with arguments that are a JSON object if the call is complete, and only then.
pub fn check_reply(deltas: &[Delta]) {
    let (mut calls, mut open, mut arguments) = (0, false, String::new());
    for delta in deltas {
        match delta {
            Delta::Reasoning(text) | Delta::Content(text) => assert!(!text.is_empty()),
            Delta::ToolCall { index, name } => {
                assert!(*index == calls && !open && !name.is_empty(), "{deltas:?}");
                (calls, open) = (calls + 1, true);
            }
            Delta::Arguments { index, fragment } => {
                assert!(*index + 1 == calls && open && !fragment.is_empty(), "{deltas:?}");
                arguments.push_str(fragment);
            }
            Delta::ToolCallEnd { index, complete, unfinished } => {
                assert!(*index + 1 == calls && open, "{deltas:?}");
                open = false;
                let sent = std::mem::take(&mut arguments);
                let value = serde_json::from_str::<Value>(&sent);
                if *complete {
                    assert!(*unfinished == 0 && value.is_ok_and(|v| v.is_object()), "{sent}");
                } else {
                    assert!(value.is_err(), "a call that was cut off looks complete: {sent}");
                }
            }
        }
    }
    assert!(!open, "a call has not ended: {deltas:?}");
    let mut reply = Reply::default();
    reply.extend(deltas.iter().cloned());
    for call in reply.tool_calls {
        let value = serde_json::from_str::<Value>(&call.arguments);
        assert!(value.is_ok_and(|v| v.is_object()), "{}", call.arguments);
    }
}

/// What a stream of `bytes` must amount to: its text, as lossy as it has to be, up to the stop
/// string that is completed first, and that.
pub fn until_stop(bytes: &[u8], stops: &[&str]) -> (String, Option<String>) {
    let mut text = String::from_utf8_lossy(bytes).into_owned();
    let found = stops.iter().filter(|stop| !stop.is_empty()).filter_map(|stop| {
        let start = text.find(stop)?;
        Some((start + stop.len(), start, stop.to_string()))
    });
    let found = found.min();
    if let Some((_, start, _)) = &found {
        text.truncate(*start);
    }
    (text, found.map(|(_, _, stop)| stop))
}

/// Every token once, in order.
struct Tokens<'a>(Vec<&'a [u8]>);

impl Vocabulary for Tokens<'_> {
    fn bytes(&self, id: u32) -> &[u8] {
        self.0[id as usize]
    }

    fn special(&self, _: u32) -> bool {
        false
    }
}

/// Lengths of pieces, from 1 to 16 and mostly short, always the same for a seed.
fn lengths(seed: u8) -> impl Iterator<Item = usize> {
    let mut state = u32::from(seed);
    std::iter::from_fn(move || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        Some(1 + (state >> (28 + (state >> 8) % 4)) as usize)
    })
}

/// A tool with parameters of every kind, and one with none.
static TOOLS: LazyLock<Vec<Value>> = LazyLock::new(|| {
    let properties = json!({
        "s": {"type": "string"},
        "n": {"type": ["string", "null"]},
        "i": {"type": "integer"},
        "f": {"type": "number"},
        "b": {"type": "boolean"},
        "a": {"type": "array", "items": {"type": "object"}},
        "o": {"type": "object"},
        "u": {"anyOf": [{"type": "number"}, {"type": "array"}, {"type": "string"}]},
        "e": {"enum": ["x", 1, null]},
    });
    let function = json!({"name": "f", "parameters": {"type": "object", "properties": properties}});
    vec![json!({"type": "function", "function": function}), json!({"name": "g"})]
});
