//! What holds of every reply, however it is cut.

use super::*;
use proptest::prelude::*;
use proptest::sample::Index;

/// Text of what replies, right and wrong ones, are made of.
fn text() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        "<function=edit>",
        "<function=now>",
        "<function=fly>",
        "</function>",
        "<parameter=old>",
        "<parameter=count>",
        "<parameter=all>",
        "<parameter=edits>",
        "</parameter>",
        "\n",
        "\n\n",
        " ",
        "\r\n",
        "a",
        "b c",
        "<",
        ">",
        "</",
        "<tool",
        "_call>",
        "<function=",
        "<parameter=",
        "</para",
        "meter>",
        "{",
        "}",
        "[",
        "]",
        ",",
        ":",
        "\"",
        "'",
        "\\",
        "{\"name\": \"edit\"",
        ", \"arguments\": {",
        "\"count\": ",
        "\"old\": ",
        "{'name': 'now'",
        "42",
        "-1.5",
        "true",
        "None",
        "\"x\"",
        "žluť",
        "👩‍👩‍👧‍👦",
        "日本",
        "\u{0}",
    ]);
    let call = Just("<tool_call>\n<function=edit>\n<parameter=old>\n");
    let part = prop_oneof![8 => part, 1 => call];
    prop::collection::vec(part, 0..40).prop_map(|parts| parts.concat())
}

/// `text` cut at any characters.
fn cut<'a>(text: &'a str, cuts: &[Index]) -> Vec<&'a str> {
    let mut at: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    at.push(text.len());
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| at[cut.index(at.len())]).collect();
    cuts.extend([0, text.len()]);
    cuts.sort_unstable();
    cuts.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect()
}

fn cuts() -> impl Strategy<Value = Vec<Index>> {
    prop::collection::vec(any::<Index>(), 0..60)
}

/// A call as the template writes it.
fn call(name: &str, parameters: &[(String, String)]) -> String {
    let parameters: String = (parameters.iter())
        .map(|(name, value)| format!("<parameter={name}>\n{value}\n</parameter>\n"))
        .collect();
    format!("<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
}

fn parameters() -> impl Strategy<Value = Vec<(String, String)>> {
    let value = text().prop_filter("what ends a value is not part of it", |value| {
        !value.contains("</parameter>") && !value.contains("</function>")
    });
    let parameters = prop::collection::btree_map("[a-z_]{1,8}", value, 0..4);
    parameters.prop_map(|parameters| parameters.into_iter().collect())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn cuts_change_nothing(
        text in text(), cuts in cuts(), in_reasoning: bool, offered: bool,
    ) {
        let tools = if offered { tools() } else { vec![] };
        let pieces = stream(cut(&text, &cuts), &tools, in_reasoning);
        let at_once = stream([text.as_str()], &tools, in_reasoning);
        prop_assert_eq!(joined(pieces), joined(at_once.clone()));
        let mut gathered = Reply::default();
        gathered.extend(at_once);
        prop_assert_eq!(gathered, whole(&text, &tools, in_reasoning));
    }

    #[test]
    fn what_the_template_writes_is_read_back(
        reasoning in "[a-z<> ]{0,20}",
        content in "[a-z<>\n ]{0,20}",
        calls in prop::collection::vec(("[a-z_]{1,8}", parameters()), 0..3),
        cuts in cuts(),
    ) {
        let (reasoning, content) = (reasoning.trim(), content.trim());
        let mut text = format!("{reasoning}\n</think>\n\n{content}");
        for (i, (name, parameters)) in calls.iter().enumerate() {
            text.push_str(if i > 0 { "\n" } else if content.is_empty() { "" } else { "\n\n" });
            text.push_str(&call(name, parameters));
        }
        let mut reply = Reply::default();
        reply.extend(stream(cut(&text, &cuts), &tools(), true));
        prop_assert_eq!(reply.reasoning, reasoning);
        prop_assert_eq!(reply.content, content);
        prop_assert_eq!(reply.tool_calls.len(), calls.len());
        for (call, (name, parameters)) in reply.tool_calls.iter().zip(&calls) {
            prop_assert!(call.complete);
            prop_assert_eq!(&call.name, name);
            let read: serde_json::Map<String, Value> = serde_json::from_str(&call.arguments)?;
            let written: serde_json::Map<String, Value> =
                parameters.iter().map(|(name, value)| (name.clone(), json!(value))).collect();
            for (name, value) in written {
                // Parameters that have another type than string may be read as that.
                if !["count", "all", "edits"].contains(&name.as_str()) {
                    prop_assert_eq!(read.get(&name), Some(&value));
                }
            }
        }
    }

    #[test]
    fn without_markup_nothing_is_lost(text in "[a-z<>/=_{}\" ]{0,40}", cuts in cuts()) {
        for tools in [vec![], tools()] {
            let mut reply = Reply::default();
            reply.extend(stream(cut(&text, &cuts), &tools, false));
            let visible = !text.trim().is_empty();
            prop_assert_eq!(reply.content, if visible { text.as_str() } else { "" });
        }
    }
}

/// Byte by byte, one case a megabyte. What is held back to be looked at again stays short, so that the time
/// is linear whatever the text.
#[test]
fn what_is_looked_at_twice_is_bounded() {
    let open = "<tool_call>\n<function=edit>\n<parameter=old>\n";
    let whole_value = "<tool_call>\n<function=edit>\n<parameter=edits>\n";
    let object = "<tool_call>\n{\"name\": \"edit\", \"arguments\": {\"old\": \"";
    let endless = [
        ("", "word "),
        ("", "\n"),
        ("", " "),
        ("", "<"),
        ("", "<tool_call>"),
        ("", "<tool_call>\n"),
        ("", "<function=now>\n"),
        ("", "<function="),
        ("", "</think>"),
        ("", "<think>"),
        (open, "x"),
        (open, "\n"),
        (open, "<"),
        (open, "</parameter"),
        (open, "</function>\n"),
        (open, "\n</parameter>\n<parameter=p>"),
        (open, "\n</parameter>\nx"),
        (whole_value, "[ "),
        (object, "x"),
        (object, "\n"),
        (object, "\", \""),
        (object, "\n<"),
        (object, "{"),
        ("<tool_call>{\"name\": {", "[{,"),
        ("<tool_call>{\"name\":", "\","),
        ("<tool_call>\n<function=", "f"),
        ("<tool_call>", " "),
    ];
    for (start, again) in endless {
        for in_reasoning in [false, true] {
            let mut parser = Parser::new(&tools(), in_reasoning);
            parser.push(start);
            let bytes = if again == "x" { 1 << 20 } else { 1 << 16 };
            for at in 0..bytes {
                let at = at % again.len();
                parser.push(&again[at..at + 1]);
                assert!(parser.held() < 512, "{} bytes after {again:?}", parser.held());
            }
            parser.finish();
        }
    }
}
