//! Replies as models write them, whole and in pieces, with thinking on and off.
//!
//! Where a test names a public issue, users of another engine met the problem there.

use super::*;
use crate::fuzzing::check_reply;
use expect_test::{Expect, expect};
use serde_json::json;

mod laws;
mod values;

fn tools() -> Vec<Value> {
    let tool = |name: &str, properties: Value| {
        json!({"type": "function", "function": {
            "name": name, "parameters": {"type": "object", "properties": properties},
        }})
    };
    vec![
        tool("now", json!({})),
        tool("write", json!({"path": {"type": "string"}, "content": {"type": "string"}})),
        tool(
            "edit",
            json!({
                "old": {"type": "string"},
                "new": {"type": "string"},
                "all": {"type": "boolean"},
                "count": {"type": "integer"},
                "edits": {"type": "array", "items": {"type": "object"}},
            }),
        ),
    ]
}

/// Deltas with neighbours of one kind joined: what does not depend on where the text was cut.
fn joined(deltas: impl IntoIterator<Item = Delta>) -> Vec<Delta> {
    let mut joined: Vec<Delta> = Vec::new();
    for delta in deltas {
        match (joined.last_mut(), &delta) {
            (Some(Delta::Reasoning(a)), Delta::Reasoning(b)) => a.push_str(b),
            (Some(Delta::Content(a)), Delta::Content(b)) => a.push_str(b),
            (Some(Delta::Arguments { fragment, .. }), Delta::Arguments { fragment: b, .. }) => {
                fragment.push_str(b)
            }
            _ => joined.push(delta),
        }
    }
    joined
}

/// The deltas of `pieces`, one push each.
fn stream<'a>(
    pieces: impl IntoIterator<Item = &'a str>,
    tools: &[Value],
    in_reasoning: bool,
) -> Vec<Delta> {
    let mut parser = Parser::new(tools, in_reasoning);
    let mut deltas = Vec::new();
    for piece in pieces {
        let new = parser.push(piece);
        assert_eq!(joined(new.clone()), new, "neighbours of one kind come joined");
        deltas.extend(new);
    }
    deltas.extend(parser.finish());
    assert_eq!((parser.finish(), parser.push("<tool_call>")), (vec![], vec![]));
    check_reply(&deltas);
    deltas
}

/// One way to read, whole and in pieces of every small size.
fn read(text: &str, tools: &[Value], in_reasoning: bool) -> Reply {
    let expected = joined(stream([text], tools, in_reasoning));
    for size in [1, 2, 3, 5, 8, 13, 100] {
        let chars: Vec<char> = text.chars().collect();
        let pieces: Vec<String> = chars.chunks(size).map(|piece| piece.iter().collect()).collect();
        let got = stream(pieces.iter().map(String::as_str), tools, in_reasoning);
        assert_eq!(joined(got), expected, "in pieces of {size} characters");
    }
    let reply = whole(text, tools, in_reasoning);
    let mut gathered = Reply::default();
    gathered.extend(expected);
    assert_eq!(gathered, reply);
    reply
}

fn show(reply: &Reply) -> String {
    let mut shown = String::new();
    let mut line = |kind: &str, text: &str| shown.push_str(&format!("{kind} {text}\n"));
    if !reply.reasoning.is_empty() {
        line("thinks", &format!("{:?}", reply.reasoning));
    }
    if !reply.content.is_empty() {
        line("says", &format!("{:?}", reply.content));
    }
    for call in &reply.tool_calls {
        let kind = if call.complete { "calls" } else { "would call" };
        line(kind, &format!("{} {}", call.name, call.arguments));
    }
    shown
}

/// `text` as it stands, in a reply that begins with reasoning or does not.
fn check_as(in_reasoning: bool, text: &str, expected: Expect) {
    expected.assert_eq(&show(&read(text, &tools(), in_reasoning)));
}

/// `text` as what follows the reasoning: with thinking on and off.
fn check(text: &str, expected: Expect) {
    let off = read(text, &tools(), false);
    expected.assert_eq(&show(&off));
    let on = read(&format!("Well: a < b.\n</think>\n\n{text}"), &tools(), true);
    assert_eq!(on, Reply { reasoning: "Well: a < b.".into(), ..off }, "with thinking on");
}

const NOW: &str = "<tool_call>\n<function=now>\n</function>\n</tool_call>";

#[test]
fn a_reply_without_markup_is_content() {
    check(
        "Hello.",
        expect![[r#"
        says "Hello."
    "#]],
    );
    check(
        "  indented\n\nand *more*\n",
        expect![[r#"
        says "  indented\n\nand *more*\n"
    "#]],
    );
    check("", expect![""]);
    check("\n \n", expect![""]);
    check(
        "a < b, <b>bold</b>, <, <<, 1<2<3",
        expect![[r#"
        says "a < b, <b>bold</b>, <, <<, 1<2<3"
    "#]],
    );
}

#[test]
fn reasoning_ends_at_its_tag() {
    check_as(
        true,
        "Hm.\n</think>\n\nYes.",
        expect![[r#"
        thinks "Hm."
        says "Yes."
    "#]],
    );
    check_as(
        true,
        "\n\nHm. \n \r\n</think>Yes.\n",
        expect![[r#"
        thinks "Hm. "
        says "Yes.\n"
    "#]],
    );
    check_as(
        true,
        "\n</think>\n\n    code",
        expect![[r#"
        says "    code"
    "#]],
    );
    check_as(
        true,
        "cut off here\n",
        expect![[r#"
        thinks "cut off here\n"
    "#]],
    );
    check_as(
        true,
        "what does </thin mean, or <think>?",
        expect![[r#"
        thinks "what does </thin mean, or <think>?"
    "#]],
    );
}

/// A model may open what the template has opened, or what it has closed.
#[test]
fn reasoning_that_the_model_opens_itself() {
    check_as(
        true,
        "<think>\nHm.\n</think>\n\nYes.",
        expect![[r#"
        thinks "Hm."
        says "Yes."
    "#]],
    );
    check_as(
        false,
        "<think>\nHm.\n</think>\n\nYes.",
        expect![[r#"
        thinks "Hm."
        says "Yes."
    "#]],
    );
    check_as(
        false,
        "</think>\n\nYes.",
        expect![[r#"
        says "Yes."
    "#]],
    );
    check_as(
        true,
        "Hm.\n</think>\n\n<think>\nOr?\n</think>\n</think>\n\nYes.",
        expect![[r#"
        thinks "Hm.\n\nOr?"
        says "Yes."
    "#]],
    );
}

// https://github.com/vllm-project/vllm/pull/35687
// https://github.com/lmstudio-ai/lmstudio-bug-tracker/issues/2045
#[test]
fn a_call_within_reasoning_ends_it_and_is_delivered() {
    let call = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</function>\n</tool_call>";
    check_as(
        true,
        &format!("I write it.\n\n{call}"),
        expect![[r#"
        thinks "I write it."
        calls write {"path":"a"}
    "#]],
    );
    check_as(
        true,
        &format!("I write it.\n{call}\n{call}\n</think>\n\nDone."),
        expect![[r#"
        thinks "I write it."
        says "Done."
        calls write {"path":"a"}
        calls write {"path":"a"}
    "#]],
    );
    check_as(
        false,
        &format!("<think>\nI write it.\n{call}"),
        expect![[r#"
        thinks "I write it."
        calls write {"path":"a"}
    "#]],
    );
    let json = r#"<tool_call>{"name": "write", "arguments": {"path": "a"}}</tool_call>"#;
    check_as(
        true,
        &format!("I write it.\n{json}"),
        expect![[r#"
        thinks "I write it."
        calls write {"path":"a"}
    "#]],
    );
}

#[test]
fn a_tag_that_reasoning_talks_about_does_not_end_it() {
    check_as(
        true,
        "Use <tool_call> or not? <tool_call>\n</think>\nNo.",
        expect![[r#"
        thinks "Use <tool_call> or not? <tool_call>"
        says "No."
    "#]],
    );
    check_as(
        true,
        "<tool_call>{} and {\"name\"} </think>No.",
        expect![[r#"
        thinks "<tool_call>{} and {\"name\"} "
        says "No."
    "#]],
    );
}

// https://github.com/jundot/omlx/issues/3153
#[test]
fn a_call_that_is_cut_off_keeps_its_name_and_complete_parameters() {
    let text = "Now.\n\n<tool_call>\n<function=edit>\n<parameter=old>\na\n</parameter>\n\
                <parameter=count>\n12\n</parameter>\n<parameter=new>\nlong\n</parameter>\n</function>\n</tool_call>";
    let mut seen = Vec::new();
    for end in text.char_indices().map(|(at, _)| at).chain([text.len()]).filter(|&at| at >= 6) {
        for in_reasoning in [false, true] {
            let opened = if in_reasoning { "Hm.\n</think>\n\n" } else { "" };
            let reply = read(&format!("{opened}{}", &text[..end]), &tools(), in_reasoning);
            // What may still be text: a tag that is not whole.
            if end >= text.find("<function").unwrap_or(0) {
                assert_eq!(reply.content, "Now.");
            }
            let reply = Reply { content: String::new(), reasoning: String::new(), ..reply };
            let shown = show(&reply);
            if seen.last() != Some(&shown) {
                seen.push(shown);
            }
        }
    }
    expect![[r#"

        would call edit {}
        would call edit {"old":"a"}
        would call edit {"old":"a","count":12}
        would call edit {"old":"a","count":12,"new":"long"}
        calls edit {"old":"a","count":12,"new":"long"}
    "#]]
    .assert_eq(&seen.join("").replacen("", "\n", 1));
}

#[test]
fn a_json_call_that_is_cut_off_keeps_its_name_and_complete_parameters() {
    let text = r#"Now. <tool_call>{"name": "edit", "arguments": {"old": "a", "count": 12, "edits": [{"x": 1}], "new": "long"}}</tool_call>"#;
    let mut seen = Vec::new();
    for end in "Now. <tool_call>".len()..=text.len() {
        let reply = read(&text[..end], &tools(), false);
        assert_eq!(reply.content, "Now. ");
        let shown = show(&Reply { content: String::new(), ..reply });
        if seen.last() != Some(&shown) {
            seen.push(shown);
        }
    }
    expect![[r#"

        would call edit {}
        would call edit {"old":"a"}
        would call edit {"old":"a","count":12}
        would call edit {"old":"a","count":12,"edits":[{"x": 1}]}
        would call edit {"old":"a","count":12,"edits":[{"x": 1}],"new":"long"}
        calls edit {"old":"a","count":12,"edits":[{"x": 1}],"new":"long"}
    "#]]
    .assert_eq(&seen.join("").replacen("", "\n", 1));
}

// https://github.com/ddalcu/mlx-serve/blob/main/docs/gotchas/server-http.md
#[test]
fn half_a_value_is_not_presented_as_complete() {
    let text = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=content>\nhalf of";
    for (opened, in_reasoning) in [("", false), ("Hm.\n</think>\n\n", true), ("Hm.\n", true)] {
        let text = format!("{opened}{text}");
        let deltas = joined(stream([text.as_str()], &tools(), in_reasoning));
        let [.., Delta::Arguments { fragment, .. }, end] = &deltas[..] else {
            panic!("{deltas:?}")
        };
        assert_eq!(fragment, r#"{"path":"a","content":"half of"#);
        let unfinished = r#","content":"half of"#.len();
        assert_eq!(*end, Delta::ToolCallEnd { index: 0, complete: false, unfinished });
        let reply = read(&text, &tools(), in_reasoning);
        assert_eq!(reply.tool_calls[0].arguments, r#"{"path":"a"}"#);
    }
    // A number may lack digits, a name may lack letters.
    check(
        "<tool_call>\n<function=edit>\n<parameter=count>\n1",
        expect![[r#"
        would call edit {}
    "#]],
    );
    check("<tool_call>\n<function=ed", expect![""]);
    check(r#"<tool_call>{"name": "ed"#, expect![""]);
    check(r#"<tool_call>{"arguments": {"count": 1}, "#, expect![""]);
    // What cannot be the beginning of a call was not cut off.
    check(
        r#"<tool_call>{"name": unknown} {"#,
        expect![[r#"
        says "<tool_call>{\"name\": unknown} {"
    "#]],
    );
    check(
        r#"<tool_call>{"name": {unknown"#,
        expect![[r#"
        says "<tool_call>{\"name\": {unknown"
    "#]],
    );
}

// https://github.com/ggml-org/llama.cpp/issues/20260
// https://github.com/openclaw/openclaw/issues/61838
// https://github.com/ggml-org/llama.cpp/issues/20761
#[test]
fn text_and_stray_tags_around_calls_are_content() {
    check(
        &format!("I look.\n\n{NOW}"),
        expect![[r#"
        says "I look."
        calls now {}
    "#]],
    );
    check(
        &format!("I look.\n\n{NOW}\n\nLooked. </tool_call> </function> </parameter>"),
        expect![[r#"
        says "I look.\n\nLooked. </tool_call> </function> </parameter>"
        calls now {}
    "#]],
    );
    check(
        "<tool_call>\nnothing of the kind\n</tool_call>",
        expect![[r#"
        says "<tool_call>\nnothing of the kind\n</tool_call>"
    "#]],
    );
    check(
        "<tool_call>\n{\"nam\": 1}\n</tool_call>",
        expect![[r#"
        says "<tool_call>\n{\"nam\": 1}\n</tool_call>"
    "#]],
    );
    check(
        "<tool_call>\n{\"name\": 1}\n</tool_call>",
        expect![[r#"
        says "<tool_call>\n{\"name\": 1}\n</tool_call>"
    "#]],
    );
    check(
        "</tool_call> <parameter=x> <function=> <function=\n> </function>",
        expect![[r#"
        says "</tool_call> <parameter=x> <function=> <function=\n> </function>"
    "#]],
    );
    check(
        "<tool_call><tool_call>\n<function=now></function></tool_call></tool_call>",
        expect![[r#"
        says "<tool_call>\n\n</tool_call>"
        calls now {}
    "#]],
    );
}

// https://github.com/ggml-org/llama.cpp/issues/27733
#[test]
fn stray_thinking_tags_lose_nothing() {
    check(
        "The answer is 4.\n<think>",
        expect![[r#"
        says "The answer is 4.\n<think>"
    "#]],
    );
    check(
        "The answer </think> is <think> 4.\n</think>",
        expect![[r#"
        says "The answer </think> is <think> 4.\n</think>"
    "#]],
    );
    check(
        "The answer is 4. <thi",
        expect![[r#"
        says "The answer is 4. <thi"
    "#]],
    );
    check(
        &format!("{NOW}\n<think>"),
        expect![[r#"
        calls now {}
    "#]],
    );
}

// https://github.com/ggml-org/llama.cpp/issues/21771
#[test]
fn python_values_and_nested_values_are_accepted() {
    check(
        "<tool_call>\n<function=edit>\n<parameter=all>\nTrue\n</parameter>\n<parameter=edits>\n\
         [{\"old\": \"a\", \"new\": null}, {'old': 'it\\'s', 'new': None, 'all': False,}]\n\
         </parameter>\n</function>\n</tool_call>",
        expect![[r#"
            calls edit {"all":true,"edits":[{"old": "a", "new": null}, {"old": "it's", "new": null, "all": false}]}
        "#]],
    );
}

/// Half a tag, or a tag without a name, announces nothing that would have to be taken back.
#[test]
fn a_call_is_announced_only_once_it_is_sure() {
    let mut parser = Parser::new(&tools(), false);
    for piece in ["<tool_call>", "\n", "<function=", "no", "w"] {
        assert_eq!(parser.push(piece), vec![], "{piece:?}");
    }
    assert_eq!(parser.push(">"), vec![Delta::ToolCall { index: 0, name: "now".into() }]);
    let mut parser = Parser::new(&tools(), false);
    assert_eq!(parser.push("<tool_call>\n{\"name\": \"now\", \"arguments\": {"), vec![]);
    assert_eq!(parser.push("}").len(), 0);
    assert_eq!(parser.push("}").len(), 3);
}

// https://github.com/ddalcu/mlx-serve/blob/main/docs/gotchas/tool-calling.md
// https://github.com/vllm-project/vllm/pull/23324
#[test]
fn types_come_from_the_schema() {
    check(
        "<tool_call>\n<function=edit>\n<parameter=old>\n42\n</parameter>\n<parameter=new>\nTrue\n</parameter>\n\
         <parameter=all>\nFalse\n</parameter>\n<parameter=count>\n42\n</parameter>\n<parameter=other>\n7\n</parameter>\n\
         </function>\n</tool_call>",
        expect![[r#"
            calls edit {"old":"42","new":"True","all":false,"count":42,"other":"7"}
        "#]],
    );
    check(
        r#"<tool_call>{"name": "edit", "arguments": {"old": 42, "all": "False", "count": "42", "other": 7}}</tool_call>"#,
        expect![[r#"
            calls edit {"old":"42","all":false,"count":42,"other":7}
        "#]],
    );
}

// https://github.com/sgl-project/sglang/issues/27005
// https://github.com/raullenchai/Rapid-MLX/pull/648
// https://github.com/vllm-project/vllm/pull/37186
#[test]
fn strings_are_delivered_as_they_arrive() {
    for (opened, in_reasoning) in [("", false), ("Hm.\n</think>\n\n", true), ("Hm.\n", true)] {
        let mut parser = Parser::new(&tools(), in_reasoning);
        parser.push(opened);
        parser.push("<tool_call>\n<function=write>\n<parameter=content>");
        let mut fragments = |piece: &str| {
            let deltas = parser.push(piece).into_iter();
            let fragments = deltas.map(|delta| match delta {
                Delta::Arguments { index: 0, fragment } => fragment,
                other => panic!("{other:?}"),
            });
            fragments.collect::<String>()
        };
        assert_eq!(fragments("\n"), r#"{"content":""#);
        assert_eq!(fragments("say"), "say");
        assert_eq!(fragments(" \"hi\""), r#" \"hi\""#);
        assert_eq!(fragments("\n"), "");
        assert_eq!(fragments("</par"), "");
        assert_eq!(fragments("agraph> \u{1}é😀"), r#"\n</paragraph> \u0001é😀"#);
        assert_eq!(fragments(" a < b"), " a < b");
        assert_eq!(fragments("\n</parameter>"), "\"");
        assert_eq!(fragments("\n<parameter=path>x"), r#","path":"x"#);
    }
}

// https://github.com/ml-explore/mlx-lm/issues/1293
// https://github.com/cubist38/mlx-openai-server/issues/83
#[test]
fn several_calls_in_both_forms() {
    let write = "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=content>\nb\nc\n</parameter>\n</function>\n</tool_call>";
    let json = "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \"d\"}}\n</tool_call>";
    check(
        &format!("{write}\n{json}\n{NOW}"),
        expect![[r#"
        calls write {"path":"a","content":"b\nc"}
        calls write {"path":"d"}
        calls now {}
    "#]],
    );
    let deltas = stream([format!("{write}\n{json}").as_str()], &tools(), false);
    let indices: Vec<usize> = (deltas.iter())
        .filter_map(
            |delta| if let Delta::ToolCall { index, .. } = delta { Some(*index) } else { None },
        )
        .collect();
    assert_eq!(indices, [0, 1]);
}

// https://github.com/QwenLM/Qwen3.8/issues/26
// https://github.com/waybarrios/vllm-mlx/issues/161
#[test]
fn reasoning_is_no_content_with_tools_and_without() {
    for tools in [vec![], tools()] {
        let reply = read("Hm.\n</think>\n\nYes.", &tools, true);
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("Hm.", "Yes."));
        let reply = read("<think>\nHm.\n</think>\n\nYes.", &tools, false);
        assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("Hm.", "Yes."));
        assert_eq!(read("Hm.", &tools, true).content, "");
        assert_eq!(read("Yes.", &tools, false).reasoning, "");
    }
    let reply = read(&format!("Hm.\n</think>\n\n{NOW}"), &tools(), true);
    assert_eq!((reply.reasoning.as_str(), reply.content.as_str()), ("Hm.", ""));
}

#[test]
fn without_tools_nothing_is_a_call() {
    for (opened, in_reasoning) in [("", false), ("Hm.\n</think>\n\n", true)] {
        let reply = read(&format!("{opened}Like so:\n\n{NOW}\n"), &[], in_reasoning);
        assert_eq!((reply.content, reply.tool_calls), (format!("Like so:\n\n{NOW}\n"), vec![]));
    }
    // There, a line break need not wait for what follows.
    assert_eq!(Parser::new(&[], false).push("a\n"), [Delta::Content("a\n".into())]);
}

#[test]
fn a_tool_that_nobody_offered_is_a_call() {
    check(
        "<tool_call>\n<function=fly>\n<parameter=to>\n1\n</parameter>\n</function>\n</tool_call>",
        expect![[r#"
        calls fly {"to":"1"}
    "#]],
    );
    check(
        r#"<tool_call>{"name": "fly", "arguments": {"to": 1}}</tool_call>"#,
        expect![[r#"
        calls fly {"to":1}
    "#]],
    );
}

#[test]
fn only_what_may_be_markup_is_held_back() {
    let mut parser = Parser::new(&tools(), true);
    let mut said = |piece: &str| {
        let deltas = parser.push(piece).into_iter();
        let texts = deltas.map(|delta| match delta {
            Delta::Reasoning(text) | Delta::Content(text) => text,
            other => panic!("{other:?}"),
        });
        texts.collect::<String>()
    };
    assert_eq!(said("a "), "a ");
    assert_eq!(said("b <"), "b ");
    assert_eq!(said("/thi"), "");
    assert_eq!(said("s> "), "</this> ");
    assert_eq!(said("\n"), "");
    assert_eq!(said("c</think>"), "\nc");
    assert_eq!(said("d <tool_call>"), "d ");
    assert_eq!(said(" "), "");
    assert_eq!(said("is "), "<tool_call> is ");
    assert_eq!(said("<function=fl"), "<function=fl");
    assert_eq!(said("<function=now>"), "");
    assert_eq!(said("!"), "<function=now>!");
}

#[test]
fn calls_with_missing_or_superfluous_tags() {
    // No <tool_call>.
    check(
        "Now.\n<function=now>\n</function>\n</tool_call>",
        expect![[r#"
        says "Now."
        calls now {}
    "#]],
    );
    check(
        "<function=write><parameter=path>a</parameter></function>",
        expect![[r#"
        calls write {"path":"a"}
    "#]],
    );
    check(
        "<function= write \t>\n<parameter= path >a</parameter></function>",
        expect![[r#"
        calls write {"path":"a"}
    "#]],
    );
    check(
        "Call <function=now> to know.",
        expect![[r#"
        says "Call <function=now> to know."
    "#]],
    );
    // No </tool_call>, no </function>, neither.
    check(
        "<tool_call>\n<function=now>\n</function>\n<tool_call>\n<function=now>\n</function>",
        expect![[r#"
        calls now {}
        calls now {}
    "#]],
    );
    check(
        "<tool_call>\n<function=now>\n</tool_call>\n<tool_call>\n<function=now>\n<tool_call>\n<function=now>\n</tool_call>",
        expect![[r#"
        calls now {}
        calls now {}
        calls now {}
    "#]],
    );
    // Two functions between one pair of tags.
    check(
        "<tool_call>\n<function=now>\n</function>\n<function=now>\n</function>\n</tool_call>",
        expect![[r#"
        calls now {}
        calls now {}
    "#]],
    );
    // No </parameter>.
    check(
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</function>\n</tool_call>\nDone.",
        expect![[r#"
        says "Done."
        calls write {"path":"a"}
    "#]],
    );
    // Twice, and text where none belongs.
    check(
        "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n</parameter>\nhm\n</function>\n</function>\n</tool_call>",
        expect![[r#"
        says "hm"
        calls write {"path":"a"}
    "#]],
    );
}

#[test]
fn json_calls_that_are_nearly_right() {
    // Python, a line break in a string, a brace too few, a brace too many, arguments as a string.
    check(
        "<tool_call>{'name': 'edit', 'arguments': {'all': True, 'old': 'say \"hi\"'}}</tool_call>",
        expect![[r#"
        calls edit {"all":true,"old":"say \"hi\""}
    "#]],
    );
    check(
        "<tool_call>{\"name\": \"write\", \"arguments\": {\"content\": \"a\n</b>\n\"}}</tool_call>",
        expect![[r#"
        calls write {"content":"a\n</b>\n"}
    "#]],
    );
    check(
        "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"path\": \"a\"}\n</tool_call>",
        expect![[r#"
        calls write {"path":"a"}
    "#]],
    );
    check(
        "<tool_call>\n{\"name\": \"now\", \"arguments\": {}}}\n</tool_call>\nDone.",
        expect![[r#"
        says "}\n\nDone."
        calls now {}
    "#]],
    );
    check(
        r#"<tool_call>{"arguments": "{\"path\": \"a\"}", "name": "write", "id": 1}</tool_call>"#,
        expect![[r#"
        calls write {"path":"a"}
    "#]],
    );
    check(
        r#"<tool_call>{"name": "now"}</tool_call> <tool_call>{"name": "now", "arguments": null}</tool_call>"#,
        expect![[r#"
        calls now {}
        calls now {}
    "#]],
    );
    check(
        r#"<tool_call>{"name": "now", "arguments": [1]}</tool_call>"#,
        expect![[r#"
        says "<tool_call>{\"name\": \"now\", \"arguments\": [1]}</tool_call>"
    "#]],
    );
    // A tag in a string is text; after a stray quote it is not.
    check(
        r#"<tool_call>{"name": "write", "arguments": {"content": "a</tool_call>"}}</tool_call>"#,
        expect![[r#"
        calls write {"content":"a</tool_call>"}
    "#]],
    );
    check(
        &format!(
            "<tool_call>\n{{\"name\": \"write\", \"arguments\": {{\"content\": \"5\" wide\"}}}}\n</tool_call>\n{NOW}"
        ),
        expect![[r#"
        says "<tool_call>\n{\"name\": \"write\", \"arguments\": {\"content\": \"5\" wide\"}}\n</tool_call>"
        calls now {}
    "#]],
    );
}
