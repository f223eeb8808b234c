//! Values of parameters: where they end, and what their schema makes of them.

use super::*;

/// The arguments of one call of `f` with the parameter `p`, whose schema is given.
fn value(schema: Value, text: &str) -> String {
    let parameters = json!({
        "type": "object",
        "properties": {"p": schema},
        "$defs": {
            "Count": {"type": "integer"},
            "Circle": {"anyOf": [{"$ref": "#/$defs/Circle"}, {"$ref": "#/$defs/Circle"}]},
        },
    });
    let tools = [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
    let call = format!(
        "<tool_call>\n<function=f>\n<parameter=p>\n{text}\n</parameter>\n</function>\n</tool_call>"
    );
    let mut found = Vec::new();
    for (opened, in_reasoning) in [("", false), ("Hm.\n</think>\n\n", true), ("Hm.\n", true)] {
        let reply = read(&format!("{opened}{call}"), &tools, in_reasoning);
        let [call] = &reply.tool_calls[..] else { panic!("{reply:?}") };
        assert!(call.complete && reply.content.is_empty(), "{reply:?}");
        found.push(call.arguments.clone());
    }
    found.dedup();
    assert_eq!(found.len(), 1, "{found:?}");
    let arguments = found.remove(0);
    let value = arguments.strip_prefix(r#"{"p":"#).and_then(|rest| rest.strip_suffix('}'));
    value.unwrap_or_else(|| panic!("{arguments}")).to_owned()
}

fn check(schema: Value, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        assert_eq!(value(schema.clone(), text), *expected, "{text:?} as {schema}");
    }
}

#[test]
fn strings_stay_as_they_are() {
    let cases = [
        ("42", r#""42""#),
        ("null", r#""null""#),
        ("{\"a\": 1}", r#""{\"a\": 1}""#),
        ("", r#""""#),
        ("\n", r#""\n""#),
        ("\n\n a \n\n", r#""\n\n a \n\n""#),
        ("\ta\r\n\u{0}", r#""\ta\r\n\u0000""#),
        (
            "a < b && c > d </par </parameter </paramete>",
            r#""a < b && c > d </par </parameter </paramete>""#,
        ),
        ("<parameter=q>\nx", r#""<parameter=q>\nx""#),
        ("</function>", r#""</function>""#),
        ("</function>\n</tool_cal>", r#""</function>\n</tool_cal>""#),
        ("<tool_call>\n</tool_call>", r#""<tool_call>\n</tool_call>""#),
        ("<think></think>", r#""<think></think>""#),
        ("\n<\n<\n", r#""\n<\n<\n""#),
        ("příliš žluťoučký 👩‍👩‍👧‍👦 日本", r#""příliš žluťoučký 👩‍👩‍👧‍👦 日本""#),
    ];
    check(json!({"type": "string"}), &cases);
    // So does what has no type.
    check(json!({"description": "anything"}), &cases);
    check(json!(true), &cases);
    check(json!({"type": "telephone"}), &cases);
}

#[test]
fn one_line_break_at_each_end_is_no_part_of_a_value() {
    let parse = |value: &str| {
        let call = format!(
            "<tool_call><function=write><parameter=path>{value}</parameter></function></tool_call>"
        );
        read(&call, &tools(), false).tool_calls[0].arguments.clone()
    };
    assert_eq!(parse("a"), r#"{"path":"a"}"#);
    assert_eq!(parse("\na"), r#"{"path":"a"}"#);
    assert_eq!(parse("a\n"), r#"{"path":"a"}"#);
    assert_eq!(parse("\n\na\n\n"), r#"{"path":"\na\n"}"#);
    assert_eq!(parse(""), r#"{"path":""}"#);
    assert_eq!(parse("\n"), r#"{"path":""}"#);
    assert_eq!(parse("\n\n"), r#"{"path":""}"#);
}

#[test]
fn numbers() {
    check(
        json!({"type": "integer"}),
        &[
            ("42", "42"),
            (" -7 ", "-7"),
            ("0", "0"),
            ("42.0", "42"),
            ("1e3", "1000"),
            ("+5", "5"),
            ("007", "7"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("1.5", r#""1.5""#),
            ("many", r#""many""#),
            ("None", r#""None""#),
            ("", r#""""#),
            ("1,000", r#""1,000""#),
        ],
    );
    check(
        json!({"type": "number"}),
        &[
            ("1.50", "1.50"),
            ("42", "42"),
            ("-1e-3", "-1e-3"),
            (".5", "0.5"),
            ("5.", "5.0"),
            ("0.30000000000000004441", "0.30000000000000004441"),
            ("NaN", r#""NaN""#),
            ("inf", r#""inf""#),
            ("1e999", r#""1e999""#),
        ],
    );
}

#[test]
fn booleans_and_null() {
    check(
        json!({"type": "boolean"}),
        &[
            ("true", "true"),
            ("False", "false"),
            ("TRUE", "true"),
            ("yes", r#""yes""#),
            ("1", r#""1""#),
        ],
    );
    check(json!({"type": "null"}), &[("null", "null"), ("None", "null"), ("no", r#""no""#)]);
}

#[test]
fn arrays_and_objects() {
    let object = json!({"type": "object"});
    check(
        object.clone(),
        &[
            (r#"{"a": 1.10, "b": [true]}"#, r#"{"a": 1.10, "b": [true]}"#),
            ("{'a': True, 'b': None}", r#"{"a": true, "b": null}"#),
            ("{'a': \"it's\", 'b': '\"'}", r#"{"a": "it's", "b": "\""}"#),
            ("{\"a\": \"two\nlines\"}", r#"{"a": "two\nlines"}"#),
            ("[1]", r#""[1]""#),
            ("{a: 1}", r#""{a: 1}""#),
            ("{", r#""{""#),
        ],
    );
    check(
        json!({"type": "array", "items": object}),
        &[
            (r#"[{"a": 1}, {}]"#, r#"[{"a": 1}, {}]"#),
            ("['a', 'b',]", r#"["a", "b"]"#),
            ("[\n  1,\n  2,\n]", "[\n  1,\n  2]"),
            ("[]", "[]"),
            ("a, b", r#""a, b""#),
        ],
    );
    // Too deep for common parsers.
    let deep = "[".repeat(100_000) + &"]".repeat(100_000);
    let tools = [json!({"name": "f", "parameters": {"properties": {"p": {"type": "array"}}}})];
    let call = format!("<tool_call><function=f><parameter=p>{deep}</parameter></function>");
    assert_eq!(
        whole(&call, &tools, false).tool_calls[0].arguments,
        format!("{{\"p\":\"{deep}\"}}")
    );
    let call =
        format!("<tool_call>{{\"name\": \"f\", \"arguments\": {{\"p\": {deep}}}}}</tool_call>");
    assert_eq!(whole(&call, &tools, false).content, call);
}

#[test]
fn unions() {
    let optional = [
        ("null", "null"),
        ("None", "null"),
        ("nul", r#""nul""#),
        ("nullable", r#""nullable""#),
        ("", r#""""#),
        ("N", r#""N""#),
        ("text", r#""text""#),
        ("        None of it", r#""        None of it""#),
        ("42", r#""42""#),
    ];
    check(json!({"type": ["string", "null"]}), &optional);
    check(json!({"anyOf": [{"type": "string"}, {"type": "null"}], "default": null}), &optional);
    check(json!({"type": "string", "nullable": true}), &optional);
    check(
        json!({"oneOf": [{"type": "integer"}, {"type": "string"}]}),
        &[("42", "42"), ("007", r#""007""#), ("1.5", r#""1.5""#), ("x", r#""x""#)],
    );
    check(
        json!({"type": ["boolean", "number", "null"]}),
        &[("True", "true"), ("2", "2"), ("None", "null"), ("x", r#""x""#)],
    );
    check(
        json!({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "string"}]}),
        &[(r#"["a"]"#, r#"["a"]"#), ("a", r#""a""#), ("{}", r#""{}""#)],
    );
}

#[test]
fn types_by_other_keywords() {
    check(json!({"$ref": "#/$defs/Count"}), &[("42", "42")]);
    check(json!({"allOf": [{"$ref": "#/$defs/Count"}], "default": 1}), &[("42", "42")]);
    check(json!({"$ref": "#/$defs/Nowhere"}), &[("42", r#""42""#)]);
    check(json!({"$ref": "#/$defs/Circle"}), &[("42", r#""42""#)]);
    check(json!({"properties": {}}), &[("{}", "{}")]);
    check(json!({"items": {}}), &[("[]", "[]")]);
    check(json!({"enum": ["1", "2"]}), &[("1", r#""1""#)]);
    check(json!({"enum": [1, 2, null]}), &[("1", "1"), ("null", "null")]);
    check(json!({"enum": ["1", 1, 2]}), &[("1", r#""1""#), ("2", "2"), ("x", r#""x""#)]);
    check(json!({"const": true}), &[("True", "true")]);
    check(json!({"type": "string", "enum": ["a"]}), &[("a", r#""a""#), ("1", r#""1""#)]);
}

#[test]
fn parameters_in_any_order_and_repeated() {
    let parameter =
        |name: &str, value: &str| format!("<parameter={name}>\n{value}\n</parameter>\n");
    let call = |parameters: &[String]| {
        let text = format!(
            "<tool_call>\n<function=edit>\n{}</function>\n</tool_call>",
            parameters.concat()
        );
        read(&text, &tools(), false).tool_calls[0].arguments.clone()
    };
    let arguments = call(&[
        parameter("count", "1"),
        parameter("old", "a"),
        parameter("count", "2"),
        parameter("old", "</parameter"),
        parameter("a \"b\"", "c"),
    ]);
    assert_eq!(arguments, r#"{"count":1,"old":"a","a \"b\"":"c"}"#);
    let text = r#"<tool_call>{"name": "edit", "arguments": {"old": "a", "old": "b"}}</tool_call>"#;
    assert_eq!(read(text, &tools(), false).tool_calls[0].arguments, r#"{"old":"a"}"#);
}

#[test]
fn tools_that_are_none_or_odd() {
    let call = "<tool_call><function=f><parameter=p>1</parameter></function></tool_call>";
    for tools in [json!([]), json!([1, null, {}, {"function": {"name": 1}}])] {
        let reply = read(call, tools.as_array().expect("an array"), false);
        assert_eq!((reply.content.as_str(), reply.tool_calls), (call, vec![]), "{tools}");
    }
    for parameters in
        [json!(null), json!(7), json!({"properties": 7}), json!({"properties": {"p": 7}})]
    {
        let tools =
            [json!({"type": "function", "function": {"name": "f", "parameters": parameters}})];
        assert_eq!(read(call, &tools, false).tool_calls[0].arguments, r#"{"p":"1"}"#);
    }
}
