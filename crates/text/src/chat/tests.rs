//! Renderings against Python's Jinja, the shapes of messages that clients send, and messages that
//! spell control tokens.

use super::*;
use crate::fuzzing::{check_prompt, render};
use crate::testing::{demo_tokenizer, shared};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use std::path::Path;
use std::process::{Command, Stdio};

const CASES: &str = include_str!("../../tests/golden/cases.json");
const RENDERINGS: &str = include_str!("../../tests/golden/renderings.json");
const SOURCE: &str = include_str!("../../../../demo/chat_template.jinja");

fn demo() -> Template {
    Template::new(SOURCE).unwrap()
}

#[track_caller]
fn same(name: &Value, ours: &Result<Prompt>, theirs: &Value) {
    match (ours, theirs["text"].as_str()) {
        (Ok(prompt), Some(text)) => assert_eq!(prompt.text(), text, "{name}"),
        (Err(Error::Request { .. }), None) => {}
        (ours, _) => panic!("{name}: {ours:?}\nPython: {theirs}"),
    }
}

#[test]
fn the_demo_template_renders_as_in_python() {
    let cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    let renderings: Vec<Value> = serde_json::from_str(RENDERINGS).unwrap();
    assert_eq!(cases.len(), renderings.len());
    for (case, rendering) in cases.iter().zip(&renderings) {
        same(&case["name"], &render(&demo(), case), rendering);
    }
}

#[test]
fn the_real_template_renders_as_in_python_and_as_the_demo_template() {
    let Some(dir) = shared() else { return };
    let path = dir.join("spec/chat_template.jinja");
    let real = Template::new(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let mut cases: Vec<Value> = serde_json::from_str(CASES).unwrap();
    let mut runner = TestRunner::deterministic();
    cases.extend((0..600).map(|_| conversation().new_tree(&mut runner).unwrap().current()));
    let Some(theirs) = python(&path, &cases) else { return };
    for (case, theirs) in cases.iter().zip(&theirs) {
        same(case, &render(&real, case), theirs);
        same(case, &render(&demo(), case), theirs);
    }
    let demo_path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../demo/chat_template.jinja");
    let demo_in_python = python(&demo_path, &cases).unwrap();
    for ((case, real), demo) in cases.iter().zip(&theirs).zip(&demo_in_python) {
        assert_eq!(real["text"], demo["text"], "{case}");
    }
    let rendered = theirs.iter().filter(|t| t["text"].is_string()).count();
    eprintln!("{rendered} of {} random conversations rendered, all equal", cases.len());
    assert!(rendered > 400);
}

/// What `render.py` makes of the cases; says aloud why not.
fn python(template: &Path, cases: &[Value]) -> Option<Vec<Value>> {
    let jinja =
        Command::new("python3").args(["-c", "import jinja2"]).stderr(Stdio::null()).status();
    if !jinja.is_ok_and(|status| status.success()) {
        eprintln!("skipped: needs python3 with jinja2");
        return None;
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/render.py");
    let input = tempfile::NamedTempFile::new().unwrap();
    serde_json::to_writer(&input, cases).unwrap();
    let output = Command::new("python3")
        .arg(script)
        .arg(template)
        .stdin(input.reopen().unwrap())
        .stderr(Stdio::inherit())
        .output()
        .unwrap();
    assert!(output.status.success());
    Some(serde_json::from_slice(&output.stdout).unwrap())
}

/// Text in which every tag and blank that templates look at may stand anywhere.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[a-z .]{1,8}",
        3 => "[ \n\t\r]{1,3}",
        4 => prop::sample::select(vec![
            "<think>", "</think>", "<tool_response>", "</tool_response>", "<tool_call>",
            "<|im_end|>", "<|im_start|>", "<", ">", "é", "\u{1d}", "\u{85}", "\u{a0}", "\"", "\\",
            "{{", "{%", "\u{fdd0}", "\u{fdd3}",
        ])
        .prop_map(String::from),
    ];
    let wrapped = "[ \n]{0,2}<tool_response>[a-z<>\n]{0,5}</tool_response>[ \n]{0,2}";
    prop_oneof![
        6 => prop::collection::vec(piece, 0..7).prop_map(|pieces| pieces.concat()),
        1 => wrapped,
    ]
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        text().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        (-300..300i32, any::<i32>()).prop_map(|(e, m)| json!(f64::from(m) * 10f64.powi(e / 4))),
        any::<bool>().prop_map(Value::from),
        Just(Value::Null),
    ];
    leaf.prop_recursive(3, 12, 3, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..3).prop_map(Value::from),
            prop::collection::vec((text(), inner), 0..3)
                .prop_map(|pairs| Value::Object(pairs.into_iter().collect())),
        ]
    })
}

fn said() -> impl Strategy<Value = Value> {
    prop_oneof![
        6 => text().prop_map(Value::from),
        1 => Just(Value::Null),
        1 => prop::collection::vec(text().prop_map(|t| json!({"type": "text", "text": t})), 0..3)
            .prop_map(Value::from),
    ]
}

fn one_message() -> impl Strategy<Value = Value> {
    let arguments = prop::collection::vec((text(), value()), 0..3)
        .prop_map(|pairs| Value::Object(pairs.into_iter().collect()));
    let name = text().prop_filter("a function has a name", |name| !name.is_empty());
    let calls = prop::collection::vec((name, arguments), 0..3).prop_map(|calls| {
        let call = |(name, arguments)| json!({"function": {"name": name, "arguments": arguments}});
        calls.into_iter().map(call).collect::<Value>()
    });
    prop_oneof![
        3 => said().prop_map(|c| json!({"role": "user", "content": c})),
        2 => said().prop_map(|c| json!({"role": "tool", "content": c})),
        2 => (said(), calls).prop_map(|(c, calls)| {
            json!({"role": "assistant", "content": c, "tool_calls": calls})
        }),
        1 => (said(), text()).prop_map(|(c, r)| {
            json!({"role": "assistant", "content": c, "reasoning_content": r})
        }),
    ]
}

/// A conversation that Python's side takes as it is.
fn conversation() -> impl Strategy<Value = Value> {
    let tool = value().prop_map(|parameters| {
        json!({"type": "function", "function": {"name": "f", "parameters": parameters}})
    });
    (
        prop::option::of(said()),
        said(),
        prop::collection::vec(one_message(), 0..6),
        prop::collection::vec(tool, 0..3),
        any::<[bool; 3]>(),
    )
        .prop_map(|(system, first, rest, tools, [thinking, preserve, add])| {
            let system = system.map(|c| json!({"role": "system", "content": c}));
            let first = json!({"role": "user", "content": first});
            let messages: Vec<Value> = system.into_iter().chain([first]).chain(rest).collect();
            json!({
                "messages": messages, "tools": tools, "enable_thinking": thinking,
                "preserve_thinking": preserve, "add_generation_prompt": add,
            })
        })
}

proptest! {
    /// Added tokens stand where turns, calls and results are, and nowhere else.
    #[test]
    fn messages_spell_no_control_token(case in conversation()) {
        let Ok(prompt) = render(&demo(), &case) else { return Ok(()) };
        check_prompt(&prompt, &case);
    }
}

/// The prompt of these messages, by the demo's template.
fn prompt(messages: Value) -> String {
    let messages = Message::list(&messages).unwrap();
    demo().render(&messages, &[], &Options::default()).unwrap().text().to_owned()
}

const REPLY: &str = "<|im_start|>assistant\n<think>\n";

/// B1: agents send system messages anywhere, and several of them.
#[test]
fn b1_system_messages_are_joined_at_the_beginning() {
    let messages = json!([
        { "role": "user", "content": "hi" },
        { "role": "system", "content": " Be brief. " },
        { "role": "assistant", "content": "hello" },
        { "role": "system", "content": "" },
        { "role": "system", "content": [{ "type": "text", "text": "Be kind." }] },
        { "role": "user", "content": "bye" },
    ]);
    assert_eq!(
        prompt(messages),
        "<|im_start|>system\nBe brief.\n\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n\
         <|im_start|>assistant\nhello<|im_end|>\n<|im_start|>user\nbye<|im_end|>\n"
            .to_owned()
            + REPLY
    );
}

/// B2: `developer` is what newer clients call the system.
#[test]
fn b2_developer_messages_are_system_messages() {
    let messages = json!([
        { "role": "developer", "content": "A" },
        { "role": "user", "content": "hi" },
        { "role": "developer", "content": "B" },
    ]);
    let expected = "<|im_start|>system\nA\n\nB<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n";
    assert_eq!(prompt(messages), expected.to_owned() + REPLY);
}

/// B3: on the wire arguments are JSON in a string, and models do not always write JSON.
#[test]
fn b3_arguments_are_an_object_or_a_string_of_anything() {
    let with = |arguments: Value| {
        prompt(json!([
            { "role": "user", "content": "go" },
            { "role": "assistant", "content": null, "tool_calls": [
                { "id": "1", "function": { "name": "f", "arguments": arguments } },
            ]},
            { "role": "tool", "tool_call_id": "another", "content": "done" },
        ]))
    };
    let object = with(json!({ "b": "x\ny", "a": [1, 2.0, null], "c": true }));
    assert!(object.contains(
        "<tool_call>\n<function=f>\n<parameter=b>\nx\ny\n</parameter>\n\
         <parameter=a>\n[1, 2.0, null]\n</parameter>\n<parameter=c>\ntrue\n</parameter>\n\
         </function>\n</tool_call><|im_end|>\n\
         <|im_start|>user\n<tool_response>\ndone\n</tool_response><|im_end|>\n"
    ));
    assert_eq!(with(json!(r#" {"b": "x\ny", "a": [1, 2.0, null], "c": true} "#)), object);

    let none = with(json!({}));
    for nothing in [json!(null), json!(""), json!(" "), json!("null"), json!("{}")] {
        assert_eq!(with(nothing), none);
    }
    for (odd, shown) in [
        (json!("{\"path\": \"a.txt\", \"con"), "{\"path\": \"a.txt\", \"con"),
        (json!("plain words"), "plain words"),
        (json!("[1, 2]"), "[1, 2]"),
        (json!([1, 2]), "[1, 2]"),
        (json!(7), "7"),
    ] {
        assert!(with(odd).contains(&format!("<parameter=arguments>\n{shown}\n</parameter>")));
    }
}

/// A6: reasoning comes back under either name, and stays if that is asked for.
#[test]
fn a6_old_reasoning_stays_if_asked_for() {
    let conversation = |field: &str| {
        let mut messages = json!([
            { "role": "user", "content": "1+1?" },
            { "role": "assistant", "content": "2" },
            { "role": "user", "content": "2+2?" },
        ]);
        messages[1][field] = "Easy.".into();
        Message::list(&messages).unwrap()
    };
    for field in ["reasoning_content", "reasoning"] {
        let messages = conversation(field);
        let render = |preserve_thinking| {
            let options = Options { preserve_thinking, ..Options::default() };
            demo().render(&messages, &[], &options).unwrap().text().to_owned()
        };
        assert!(!render(false).contains("Easy."));
        // What the model said in the first turn is, to the character, a part of the next prompt.
        let first = demo().render(&messages[..1], &[], &Options::default()).unwrap();
        let next = first.text().to_owned() + "Easy.\n</think>\n\n2<|im_end|>\n";
        assert!(render(true).starts_with(&next), "{}", render(true));
    }
}

#[test]
fn the_older_form_of_calls_is_understood() {
    let text = prompt(json!([
        { "role": "user", "content": "go" },
        { "role": "assistant", "content": "", "function_call": { "name": "f", "arguments": "{}" } },
        { "role": "function", "name": "f", "content": "done" },
    ]));
    assert!(text.contains("<function=f>\n</function>") && text.contains("<tool_response>\ndone"));
}

#[test]
fn what_cannot_be_rendered_is_refused_by_its_field() {
    let user = json!({ "role": "user", "content": "hi" });
    for (messages, expected) in [
        (json!([]), "messages: expected at least one message, found an empty list"),
        (json!("hi"), "messages: expected a list of messages, found \"hi\""),
        (json!(["hi"]), "messages[0]: expected an object with role and content, found \"hi\""),
        (
            json!([{ "role": "system", "content": "x" }]),
            "messages: expected at least one message with role user, found none",
        ),
        (
            json!([{ "role": "tool", "content": "x" }, user]),
            "messages: the first one is the result of a tool, but nothing before it called one",
        ),
        (
            json!([user, { "role": "robot", "content": "x" }]),
            "messages[1].role: expected one of system, developer, user, assistant, tool, found \
             \"robot\"",
        ),
        (
            json!([user, { "content": "x" }]),
            "messages[1].role: expected one of system, developer, user, assistant, tool, found \
             nothing",
        ),
        (
            json!([{ "role": "user", "content": 7 }]),
            "messages[0].content: expected text, null, or a list of text parts, found 7",
        ),
        (
            json!([{ "role": "user", "content": [
                { "type": "text", "text": "what is this?" },
                { "type": "image_url", "image_url": { "url": "data:image/png;base64,AA" } },
            ]}]),
            "messages[0].content[1]: images, sound, video and files cannot be read: this engine \
             runs the text part of the model only",
        ),
        (
            json!([{ "role": "user", "content": [{ "type": "text" }] }]),
            "messages[0].content[0]: expected a part {\"type\": \"text\", \"text\": ...}, found an \
             object",
        ),
        (
            json!([user, { "role": "assistant", "tool_calls": {} }]),
            "messages[1].tool_calls: expected a list of calls, or null, found an object",
        ),
        (
            json!([user, { "role": "assistant", "tool_calls": [{ "function": {} }] }]),
            "messages[1].tool_calls[0].function.name: expected the name of a function, found \
             nothing",
        ),
        (
            json!([{ "role": "user", "content": "<tool_response>x</tool_response>" }]),
            "messages: There is no question: expected a message with role user.",
        ),
    ] {
        let render = |m| demo().render(&Message::list(m)?, &[], &Options::default());
        assert_eq!(render(&messages).unwrap_err().to_string(), expected);
    }
    let messages = [Message::new(Role::User, "hi")];
    for (tool, expected) in [
        (json!("f"), "tools[0]: expected {\"type\": \"function\", \"function\": {...}}"),
        (
            json!({ "type": "web_search" }),
            "tools[0].type: expected \"function\": other tools cannot be used",
        ),
        (
            json!({ "type": "function", "function": { "name": "" } }),
            "tools[0].function.name: expected the name of the function",
        ),
    ] {
        let error = demo().render(&messages, &[tool], &Options::default()).unwrap_err();
        assert_eq!(error.to_string(), expected);
    }
}

/// A template that nobody has seen yet may use any of this; Python prints what is expected here.
#[test]
fn jinja_is_pythons() {
    let messages = [Message::new(Role::User, "hi"), Message::new(Role::Assistant, "yo")];
    let variables = json!({
        "v": { "b": [1, 2.5, 1e16, 1e-5, true, null, "ä<>&'\"\u{1}"], "a": {}, "e": [] },
    });
    let options =
        Options { variables: variables.as_object().unwrap().clone(), ..Options::default() };
    for (source, expected) in [
        (
            "{{ v | tojson }}",
            r#"{"b": [1, 2.5, 1e+16, 1e-05, true, null, "ä<>&'\"\u0001"], "a": {}, "e": []}"#,
        ),
        (
            "{{ {'x': [1, {'y': []}], 'z': {}} | tojson(indent=2) }}",
            "{\n  \"x\": [\n    1,\n    {\n      \"y\": []\n    }\n  ],\n  \"z\": {}\n}",
        ),
        (
            "{{ {'b': 1, 'a': [1]} | tojson(separators=(',', ':'), sort_keys=true) }}",
            r#"{"a":[1],"b":1}"#,
        ),
        ("{{ v.b[4] }} {{ v.b[5] }} {{ 2.0 }} {{ v.b[2] | string }}", "True None 2.0 1e+16"),
        (
            "{{ '\x1c a '.strip() ~ 'xxbxx'.strip('x') ~ ' c '|trim ~ 'a,b'.split(',')[-1] }}",
            "abcb",
        ),
        ("{% for k, x in {'a': 1}.items() %}{{ k }}={{ x }}{% endfor %}", "a=1"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.previtem.role }}<{{ m.role }}{% endfor %}",
            "user<assistant",
        ),
        ("{{ messages[0].nothing is defined }}{{ messages[0].nothing }}", "False"),
        (
            "{% set ns = namespace(n=0) %}{% for m in messages[::-1] %}{% set ns.n = ns.n + loop.index %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("  {% if true %}\n  a\n  {% endif %}\nb\n", "  a\nb"),
        ("{{ enable_thinking }} {{ preserve_thinking }}", "True False"),
    ] {
        let prompt = Template::new(source).unwrap().render(&messages, &[], &options).unwrap();
        assert_eq!(prompt.text(), expected, "{source}");
    }
}

#[test]
fn a_template_at_fault_is_stopped_and_named() {
    let render = |source: &str| {
        let messages = [Message::new(Role::User, "hi")];
        Template::new(source)?.render(&messages, &[], &Options::default())
    };
    for (source, expected) in [
        ("{% for %}", "chat template: syntax error"),
        ("{{ nothing.at.all }}", "chat template: undefined value"),
        ("{{ messages | unheard_of }}", "chat template: unknown filter"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "chat template: "),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "chat template: takes too long",
        ),
        (
            "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(99) %}\
             {% set ns.s = ns.s ~ ns.s %}{% endfor %}",
            "chat template: takes too long",
        ),
        ("{{ strftime_now('%!') }}", "chat template: "),
        ("{{ '{:>99999999999}'.format('a') }}", "chat template: invalid operation: a width"),
        ("{{ '%99999999999s' | format('a') }}", "chat template: takes too long"),
        ("{{ raise_exception('No. ' ~ messages[0].content) }}", "messages: No. hi"),
    ] {
        let error = render(source).unwrap_err().to_string();
        assert!(error.starts_with(expected), "expected {expected:?}: {error}");
    }
    let error = Template::new(&" ".repeat(MAX_SOURCE + 1)).unwrap_err().to_string();
    assert!(error.starts_with("chat template: has 1048577 bytes"), "{error}");
}

/// Long conversations stay far from the limit that stops endless templates.
#[test]
fn a_long_conversation_is_rendered() {
    let mut messages = vec![Message::new(Role::System, "s".repeat(100_000))];
    for _ in 0..3000 {
        messages.push(Message::new(Role::User, "<q> ".repeat(100)));
        messages.push(Message::new(Role::Assistant, "<think>\nhm\n</think>\n\na".repeat(10)));
    }
    messages.push(Message::new(Role::User, "x".repeat(4_000_000)));
    let prompt = demo().render(&messages, &[], &Options::default()).unwrap();
    assert!(prompt.text().len() > 5_000_000);
}

/// Characters that stand in for others while the template runs may be in the messages too.
#[test]
fn every_noncharacter_may_be_said() {
    let noncharacters: String = ('\u{fdd0}'..='\u{fdef}').collect();
    let said = format!("{noncharacters}<|im_end|>{noncharacters}");
    let prompt =
        demo().render(&[Message::new(Role::User, said.clone())], &[], &Options::default()).unwrap();
    assert_eq!(prompt.text(), format!("<|im_start|>user\n{said}<|im_end|>\n{REPLY}"));
    assert_eq!(prompt.literal(), [prompt.text().find("<|im_end|>").unwrap()]);

    let private: String = ('\u{e000}'..='\u{f8ff}').collect();
    let all = [Message::new(Role::User, noncharacters + &private)];
    let error = demo().render(&all, &[], &Options::default()).unwrap_err().to_string();
    assert!(error.starts_with("messages: every private or unassigned character"), "{error}");
}

/// Data keeps its place in words: the blank or line break that the template puts before it is
/// encoded together with it.
#[test]
fn no_border_shows_in_the_ids() {
    let tokenizer = demo_tokenizer();
    let prompt =
        demo().render(&[Message::new(Role::User, "Hello <b>")], &[], &Options::default()).unwrap();
    assert_eq!(tokenizer.encode_prompt(&prompt), tokenizer.encode(prompt.text()));
}
