//! Renderings against Python's Jinja, the shapes of messages that clients send, and messages that
//! spell control tokens.

use super::*;
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

/// A case of `render.py`: messages, tools and variables in one object.
fn render(template: &Template, case: &Value) -> Result<Prompt> {
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
        let tokenizer = demo_tokenizer();
        let ids = tokenizer.encode_prompt(&prompt);
        prop_assert_eq!(tokenizer.decode(&ids), tokenizer.decode(&tokenizer.encode(prompt.text())));
        let count = |spelling| {
            let id = tokenizer.added(spelling).unwrap();
            ids.iter().filter(|&&i| i == id).count()
        };
        let messages = Message::list(&case["messages"]).unwrap();
        let of = |role| messages.iter().filter(|m| m.role == role).count();
        let shared = messages.windows(2).filter(|m| m.iter().all(|m| m.role == Role::Tool)).count();
        let has = |what: bool| usize::from(what);
        let tools = has(case["tools"] != json!([]));
        let (system, reply) = (of(Role::System), has(case["add_generation_prompt"] == true));
        let turns = messages.len() - shared - system + system.max(tools);
        prop_assert_eq!(count("<|im_start|>"), turns + reply);
        prop_assert_eq!(count("<|im_end|>"), turns);
        prop_assert_eq!(count("<tool_response>"), of(Role::Tool));
        prop_assert_eq!(count("</tool_response>"), of(Role::Tool));
        let calls: usize = messages.iter().map(|m| m.tool_calls.len()).sum();
        // The explanation of tools shows one call, and names its tags once more.
        prop_assert_eq!(count("<tool_call>"), calls + 2 * tools);
        prop_assert_eq!(count("</tool_call>"), calls + 2 * tools);
        let closed = has(case["enable_thinking"] == false);
        prop_assert_eq!(count("<think>") - reply, count("</think>") - reply * closed);
        prop_assert!(count("<think>") <= of(Role::Assistant) + reply);
        prop_assert_eq!(count("<|endoftext|>"), 0);
    }
}
