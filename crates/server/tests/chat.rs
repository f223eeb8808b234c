//! POST /v1/chat/completions, in-process.

mod common;

use std::collections::HashSet;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use common::{Parrot, TOKENIZER, json, post, ready, send, settle, text_of};
use lily_engine::Engine;
use lily_server::{App, Settings};
use serde_json::{Value, json};

fn start() -> (Engine, App) {
    let engine = Parrot::default().engine();
    let state = ready(&engine, Settings::default());
    (engine, state)
}

/// A request whose reply is `says`, with more fields.
fn request(says: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": says}], "temperature": 0});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

async fn ask(state: &App, body: &Value) -> (StatusCode, Value) {
    json(state, post("/v1/chat/completions", body.to_string())).await
}

async fn answer(state: &App, body: &Value) -> Value {
    let (status, answer) = ask(state, body).await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    answer
}

/// The chunks of a stream.
async fn chunks(state: &App, body: &Value) -> Vec<Value> {
    let mut body = body.clone();
    body["stream"] = json!(true);
    let response = send(state, post("/v1/chat/completions", body.to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    assert_eq!(response.headers()["cache-control"], "no-cache");
    let text = text_of(response).await;
    let mut events: Vec<_> = text.split_terminator("\n\n").map(str::to_owned).collect();
    assert_eq!(events.pop().as_deref(), Some("data: [DONE]"));
    events
        .iter()
        .map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

/// What a client makes of a stream: the message, and why it ended.
async fn streamed(state: &App, body: &Value) -> (Value, Value) {
    let chunks = chunks(state, body).await;
    let mut message = json!({"role": null, "content": "", "reasoning_content": ""});
    let mut calls: Vec<Value> = Vec::new();
    let mut finish = Value::Null;
    for (i, chunk) in chunks.iter().enumerate() {
        assert_eq!(chunk["object"], "chat.completion.chunk");
        assert_eq!(chunk["id"], chunks[0]["id"]);
        assert!(chunk.get("usage").is_none(), "{chunk}");
        let choice = &chunk["choices"][0];
        assert!(finish.is_null(), "a chunk after the last: {chunk}");
        finish = choice["finish_reason"].clone();
        let delta = &choice["delta"];
        assert_eq!(delta.get("role").is_some(), i == 0, "the role is in the first: {chunk}");
        if i == 0 {
            message["role"] = delta["role"].clone();
        }
        for name in ["content", "reasoning_content"] {
            let more = delta.get(name).map_or("", |text| text.as_str().unwrap());
            message[name] = json!(message[name].as_str().unwrap().to_owned() + more);
        }
        for call in delta["tool_calls"].as_array().into_iter().flatten() {
            let index = call["index"].as_u64().unwrap() as usize;
            if index == calls.len() {
                assert_eq!(
                    (&call["type"], &call["function"]["arguments"]),
                    (&json!("function"), &json!(""))
                );
                calls.push(json!({"id": call["id"], "function": {"name": call["function"]["name"], "arguments": ""}}));
            } else {
                assert!(
                    call.get("id").is_none() && call["function"].get("name").is_none(),
                    "{call}"
                );
                let arguments = &mut calls[index]["function"]["arguments"];
                let more = call["function"]["arguments"].as_str().unwrap();
                *arguments = json!(arguments.as_str().unwrap().to_owned() + more);
            }
        }
    }
    message["tool_calls"] = json!(calls);
    (message, finish)
}

const CALL: &str = "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n\
                    <parameter=days>\n3\n</parameter>\n</function>\n</tool_call>";

fn tool(name: &str) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "?", "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    }}})
}

#[tokio::test]
async fn a_whole_answer_has_everything_clients_look_for() {
    let (_engine, state) = start();
    let body = request("I see.</think>\n\nHello 👋🏽!", json!({"model": "gpt-9", "seed": 7}));
    let answer = answer(&state, &body).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["model"], "gpt-9");
    assert!(answer["id"].as_str().unwrap().starts_with("chatcmpl-"));
    assert!(answer["created"].as_u64().unwrap() > 1_700_000_000);
    assert!(answer["system_fingerprint"].as_str().unwrap().starts_with("lily-"));
    let choice = &answer["choices"][0];
    let message = json!({
        "role": "assistant", "content": "Hello 👋🏽!", "reasoning_content": "I see.", "refusal": null
    });
    assert_eq!(choice["message"], message);
    assert_eq!((&choice["index"], &choice["finish_reason"]), (&json!(0), &json!("stop")));
    assert_eq!(choice["logprobs"], Value::Null);
    let usage = &answer["usage"];
    // The token that ends the turn counts.
    let said = TOKENIZER.encode_plain("I see.</think>\n\nHello 👋🏽!").len() + 1;
    assert_eq!(usage["completion_tokens"], said);
    let total = usage["prompt_tokens"].as_u64().unwrap() + said as u64;
    assert_eq!(usage["total_tokens"], total);
    assert_eq!(usage["prompt_tokens_details"]["cached_tokens"], 0);
    let reasoning = usage["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    let thought = TOKENIZER.encode_plain("I see.").len() as u64;
    assert!((thought..thought + 12).contains(&reasoning), "{reasoning} for {thought}");
    let timings = &answer["timings"];
    assert_eq!(
        (&timings["predicted_n"], &timings["prompt_n"]),
        (&usage["completion_tokens"], &usage["prompt_tokens"])
    );
    for name in ["prompt_ms", "prompt_per_second", "predicted_ms", "predicted_per_second"] {
        assert!(timings[name].as_f64().unwrap() > 0.0, "{name}");
    }
    assert_eq!(timings["cache_n"], 0);
}

/// Reasoning, content and calls come apart in every combination, and streams say the same.
#[tokio::test]
async fn a_stream_says_what_the_whole_answer_says() {
    let (_engine, state) = start();
    let both = format!(
        "Let me see.</think>\n\nI look it up. {CALL}\n{}",
        CALL.replace("Rome", "Ōsaka \"x\"")
    );
    let open = format!("Hm, {CALL}");
    let spelled = "It ends with <|im_end|> or <think> or </tool_call>, they say.";
    for says in [
        "plain",
        "",
        "a</think>b",
        "👩‍💻 čeština 中文字",
        both.as_str(),
        open.as_str(),
        CALL,
        spelled,
    ] {
        for thinking in [false, true] {
            for tools in [json!(null), json!([tool("get_weather")])] {
                let body = request(says, json!({"enable_thinking": thinking, "tools": tools}));
                let whole = answer(&state, &body).await;
                let choice = &whole["choices"][0];
                let (message, finish) = streamed(&state, &body).await;
                let context = format!("{says:?} {thinking} {tools}: {choice}");
                assert_eq!(finish, choice["finish_reason"], "{context}");
                assert_eq!(message["role"], "assistant");
                let text =
                    |message: &Value, name: &str| message[name].as_str().unwrap_or("").to_owned();
                for name in ["content", "reasoning_content"] {
                    assert_eq!(text(&message, name), text(&choice["message"], name), "{context}");
                }
                let calls = |message: &Value| -> Vec<Value> {
                    let list = message["tool_calls"].as_array().cloned().unwrap_or_default();
                    list.into_iter().map(|call| call["function"].clone()).collect()
                };
                assert_eq!(calls(&message), calls(&choice["message"]), "{context}");
                // Nothing of the markup is left where tools were offered.
                if !tools.is_null() && says.contains("<function=") {
                    assert_eq!(finish, "tool_calls", "{context}");
                    let shown = text(&message, "content") + &text(&message, "reasoning_content");
                    assert!(!shown.contains("<function"), "{context}");
                } else {
                    assert_eq!(finish, "stop", "{context}");
                }
            }
        }
    }
}

#[tokio::test]
async fn tool_calls_have_names_typed_arguments_and_ids_of_their_own() {
    let (_engine, state) = start();
    let two = format!("{CALL}\n{}", CALL.replace("Rome", "3"));
    let body = request(&two, json!({"tools": [tool("get_weather")], "enable_thinking": false}));
    let whole = answer(&state, &body).await;
    let message = &whole["choices"][0]["message"];
    assert_eq!(message.get("content"), Some(&Value::Null));
    let calls = message["tool_calls"].as_array().unwrap();
    let arguments: Vec<Value> = calls
        .iter()
        .map(|call| serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap())
        .collect();
    assert_eq!(arguments, [json!({"city": "Rome", "days": 3}), json!({"city": "3", "days": 3})]);
    let mut ids = HashSet::new();
    for call in calls {
        assert_eq!(
            (&call["type"], &call["function"]["name"]),
            (&json!("function"), &json!("get_weather"))
        );
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        ids.insert(call["id"].to_string());
    }
    assert_eq!(ids.len(), 2);
    // Cut off, it is not a call that ended.
    let body = request(
        CALL,
        json!({
            "tools": [tool("get_weather")], "enable_thinking": false, "max_tokens": TOKENIZER.encode_plain(CALL).len() - 8
        }),
    );
    assert_eq!(answer(&state, &body).await["choices"][0]["finish_reason"], "length");
    assert_eq!(streamed(&state, &body).await.1, "length");
}

#[tokio::test]
async fn usage_comes_last_in_a_stream_and_only_when_asked_for() {
    let (_engine, state) = start();
    let body = request("ok", json!({"stream_options": {"include_usage": true}}));
    let chunks = chunks(&state, &body).await;
    let (last, before) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]));
    assert!(last["usage"]["total_tokens"].as_u64().unwrap() > 0);
    assert!(last["timings"]["predicted_n"].as_u64().unwrap() > 0);
    assert!(before.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(before.last().unwrap()["choices"][0]["finish_reason"], "stop");
    assert_eq!(before.last().unwrap()["choices"][0]["delta"], json!({}));
}

#[tokio::test]
async fn thinking_is_switched_by_the_first_of_many_names_that_is_there() {
    let (_engine, state) = start();
    for (fields, thinks) in [
        (json!({}), true),
        (json!({"chat_template_kwargs": {"enable_thinking": false}}), false),
        (
            json!({"chat_template_kwargs": {"enable_thinking": true}, "enable_thinking": false}),
            true,
        ),
        (
            json!({"chat_template_kwargs": {"enable_thinking": false}, "reasoning_effort": "high"}),
            false,
        ),
        (json!({"chat_template_kwargs": {"other": 1}, "enable_thinking": false}), false),
        (json!({"chat_template_kwargs": null, "enable_thinking": null}), true),
        (json!({"enable_thinking": false}), false),
        (json!({"enable_thinking": true, "reasoning_effort": "none"}), true),
        (json!({"reasoning_effort": "none"}), false),
        (json!({"reasoning_effort": "minimal"}), true),
        (json!({"reasoning_effort": "low"}), true),
        (json!({"reasoning": {"effort": "none"}}), false),
        (json!({"reasoning": {"effort": null}}), true),
        (json!({"thinking": {"type": "disabled"}}), false),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 5}}), true),
    ] {
        let answer = answer(&state, &request("a</think>b", fields.clone())).await;
        let message = &answer["choices"][0]["message"];
        let expected = if thinks { json!("a") } else { Value::Null };
        assert_eq!(message["reasoning_content"], expected, "{fields}");
        let reasoning = &answer["usage"]["completion_tokens_details"]["reasoning_tokens"];
        assert_eq!(reasoning.as_u64().unwrap() > 0, thinks, "{fields}");
    }
    let (status, body) = ask(&state, &request("a", json!({"reasoning_effort": "lots"}))).await;
    assert_eq!(
        (status, &body["error"]["param"]),
        (StatusCode::BAD_REQUEST, &json!("reasoning_effort"))
    );
}

#[tokio::test]
async fn messages_of_every_kind_are_understood() {
    let (_engine, state) = start();
    let call = json!({"id": "call_1", "type": "function",
        "function": {"name": "get_weather", "arguments": "{\"city\": \"Rome\"}"}});
    let loose = json!({"function": {"name": "get_weather", "arguments": {"city": "Rome"}}});
    let user = json!({"role": "user", "content": "yes"});
    for before in [
        json!([]),
        json!([{"role": "system", "content": "Be brief."}]),
        json!([{"role": "system", "content": "A."}, {"role": "system", "content": "B."}]),
        json!([{"role": "developer", "content": "A."}, {"role": "developer", "content": "B."}]),
        json!([user, {"role": "system", "content": "late"}]),
        json!([user, {"role": "assistant", "content": "a", "reasoning_content": "b"}]),
        json!([user, {"role": "assistant", "content": "a", "reasoning": "b"}]),
        json!([user, {"role": "assistant", "content": "a", "name": "x", "refusal": null}]),
        json!([user, {"role": "assistant", "content": null, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "sunny"}]),
        json!([user, {"role": "assistant", "tool_calls": [loose]},
            {"role": "tool", "content": [{"type": "text", "text": "sunny"}]}]),
        json!([{"role": "user", "content": null}]),
        json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]),
    ] {
        let mut messages = before.as_array().unwrap().clone();
        messages.push(json!({"role": "user", "content": [{"type": "text", "text": "fine"}]}));
        let body = json!({"messages": messages, "enable_thinking": false, "temperature": 0,
            // What clients send along.
            "store": false, "metadata": {}, "parallel_tool_calls": true, "service_tier": "auto",
            "user": "u", "logit_bias": null, "stop": null, "tools": null, "n": 1, "stream": null,
            "max_tokens": null, "seed": -1, "top_k": -1, "response_format": {"type": "text"}});
        let answer = answer(&state, &body).await;
        assert_eq!(answer["choices"][0]["message"]["content"], "fine", "{before}");
    }
}

#[tokio::test]
async fn tools_are_hidden_when_the_client_chooses_none() {
    let (_engine, state) = start();
    let tokens = async |fields: Value| {
        let answer = answer(&state, &request("x", fields)).await;
        answer["usage"]["prompt_tokens"].as_u64().unwrap()
    };
    let tools = json!([tool("get_weather")]);
    let none = tokens(json!({})).await;
    assert_eq!(tokens(json!({"tools": tools, "tool_choice": "none"})).await, none);
    assert_eq!(tokens(json!({"tools": []})).await, none);
    assert!(tokens(json!({"tools": tools})).await > none);
    assert!(tokens(json!({"tools": tools, "tool_choice": "auto"})).await > none);
}

#[tokio::test]
async fn log_probabilities_are_of_every_token() {
    let (_engine, state) = start();
    let says = "a 👍 b";
    let n = TOKENIZER.encode_plain(says).len();
    let body =
        request(says, json!({"logprobs": true, "top_logprobs": 2, "enable_thinking": false}));
    let check = |tokens: &[Value]| {
        assert_eq!(tokens.len(), n);
        let bytes: Vec<u8> = tokens
            .iter()
            .flat_map(|token| token["bytes"].as_array().unwrap())
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(String::from_utf8(bytes).unwrap(), says);
        for token in tokens {
            let top = token["top_logprobs"].as_array().unwrap();
            assert_eq!((top.len(), &top[0]["token"]), (2, &token["token"]));
            assert_eq!(top[0]["logprob"], token["logprob"]);
        }
    };
    let whole = answer(&state, &body).await;
    check(whole["choices"][0]["logprobs"]["content"].as_array().unwrap());
    let mut tokens = Vec::new();
    for chunk in chunks(&state, &body).await {
        tokens.extend(
            chunk["choices"][0]["logprobs"]["content"].as_array().cloned().unwrap_or_default(),
        );
    }
    check(&tokens);
}

#[tokio::test]
async fn a_stop_string_is_not_part_of_the_reply() {
    let (engine, state) = start();
    let body =
        request("one, two, three", json!({"stop": [" three", "two"], "enable_thinking": false}));
    let whole = answer(&state, &body).await;
    assert_eq!(whole["choices"][0]["message"]["content"], "one, ");
    assert_eq!(whole["choices"][0]["finish_reason"], "stop");
    let (message, finish) = streamed(&state, &body).await;
    assert_eq!((&message["content"], finish), (&json!("one, "), json!("stop")));
    settle(&engine).await;
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let (engine, state) = start();
    let image = json!([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]);
    let user = |content: Value| json!({"messages": [{"role": "user", "content": content}]});
    for (body, param, words) in [
        (json!({}), json!("messages"), "a list of messages"),
        (json!([]), json!(null), "expected an object"),
        (json!({"messages": []}), json!("messages"), "at least one"),
        (json!({"messages": "hi"}), json!("messages"), "a list of messages"),
        (json!({"messages": ["hi"]}), json!("messages[0]"), "an object"),
        (json!({"messages": [{"content": "hi"}]}), json!("messages[0].role"), "found nothing"),
        (
            json!({"messages": [{"role": "wizard", "content": "hi"}]}),
            json!("messages[0].role"),
            "\"wizard\"",
        ),
        (user(json!(7)), json!("messages[0].content"), "a list of text parts"),
        (user(json!([{"type": "x"}])), json!("messages[0].content[0]"), "a part"),
        (user(json!([{"type": "text"}])), json!("messages[0].content[0]"), "a part"),
        (user(image), json!("messages[0].content[0]"), "image"),
        (user(json!([{"type": "input_audio"}])), json!("messages[0].content[0]"), "sound"),
        (request("x", json!({"temperature": -0.1})), json!("temperature"), "from 0 to"),
        (request("x", json!({"temperature": 99})), json!("temperature"), "found 99"),
        (request("x", json!({"temperature": "hot"})), json!("temperature"), "expected a number"),
        (request("x", json!({"top_p": 1.5})), json!("top_p"), "from 0 to 1"),
        (request("x", json!({"top_k": -2})), json!("top_k"), "from 0"),
        (request("x", json!({"min_p": -1})), json!("min_p"), "from 0 to 1"),
        (request("x", json!({"presence_penalty": 3})), json!("presence_penalty"), "from -2 to 2"),
        (
            request("x", json!({"frequency_penalty": -3})),
            json!("frequency_penalty"),
            "from -2 to 2",
        ),
        (request("x", json!({"repetition_penalty": 0})), json!("repetition_penalty"), "from 0.01"),
        (request("x", json!({"max_tokens": -1})), json!("max_tokens"), "from 0 on"),
        (
            request("x", json!({"max_completion_tokens": -1})),
            json!("max_completion_tokens"),
            "from 0 on",
        ),
        (request("x", json!({"max_tokens": 1.5})), json!("max_tokens"), "expected a whole number"),
        (request("x", json!({"n": 2})), json!("n"), "one choice"),
        (request("x", json!({"n": 0})), json!("n"), "one choice"),
        (request("x", json!({"model": "m".repeat(4000)})), json!("model"), "at most 1000 bytes"),
        (request("x", json!({"seed": true})), json!("seed"), "whole number of 64 bits, found true"),
        (request("x", json!({"seed": 1.5})), json!("seed"), "found 1.5"),
        (
            request("x", json!({"chat_template_kwargs": {"tools": ["x"]}})),
            json!("chat_template_kwargs.tools"),
            "leave it out",
        ),
        (
            request("x", json!({"chat_template_kwargs": {"namespace": 1}})),
            json!("chat_template_kwargs.namespace"),
            "leave it out",
        ),
        (request("x", json!({"stop": 5})), json!("stop"), "expected a string or a list of strings"),
        (request("x", json!({"stop": vec!["x"; 17]})), json!("stop"), "at most 16"),
        (request("x", json!({"logit_bias": {"x": 1}})), json!("logit_bias.x"), "a token id below"),
        (
            request("x", json!({"logit_bias": {"99999": 1}})),
            json!("logit_bias.99999"),
            "a token id below",
        ),
        (
            request("x", json!({"logit_bias": {"5": 101}})),
            json!("logit_bias.5"),
            "from -100 to 100",
        ),
        (request("x", json!({"logprobs": 3})), json!("logprobs"), "expected true or false"),
        (request("x", json!({"top_logprobs": 3})), json!("top_logprobs"), "logprobs"),
        (
            request("x", json!({"logprobs": true, "top_logprobs": 21})),
            json!("top_logprobs"),
            "from 0 to 20",
        ),
        (
            request("x", json!({"response_format": {"type": "json_object"}})),
            json!("response_format.type"),
            "not supported",
        ),
        (
            request("x", json!({"response_format": {"type": "json_schema", "json_schema": {}}})),
            json!("response_format.type"),
            "not supported",
        ),
        (
            request("x", json!({"response_format": "json"})),
            json!("response_format"),
            "expected an object",
        ),
        (request("x", json!({"stream": "yes"})), json!("stream"), "expected true or false"),
        (
            request("x", json!({"stream_options": {"include_usage": 1}})),
            json!("stream_options.include_usage"),
            "expected true or false",
        ),
        (request("x", json!({"tools": {}})), json!("tools"), "expected a list"),
        (
            request("x", json!({"tools": [{"type": "web_search"}]})),
            json!("tools[0].type"),
            "\"function\"",
        ),
        (request("x", json!({"tools": [tool("")]})), json!("tools[0].function.name"), "the name"),
        (
            request("x", json!({"tools": [tool("a")], "tool_choice": "required"})),
            json!("tool_choice"),
            "not supported",
        ),
        (
            request(
                "x",
                json!({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "a"}}}),
            ),
            json!("tool_choice"),
            "not supported",
        ),
        (request("x", json!({"tool_choice": "sometimes"})), json!("tool_choice"), "\"auto\""),
        (
            request("x", json!({"chat_template_kwargs": {"enable_thinking": "no"}})),
            json!("chat_template_kwargs.enable_thinking"),
            "true or false",
        ),
        (request("x", json!({"functions": [{"name": "a"}]})), json!("functions"), "`tools`"),
    ] {
        let (status, answer) = ask(&state, &body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {answer}");
        let error = &answer["error"];
        assert_eq!(
            (&error["param"], &error["type"]),
            (&param, &json!("invalid_request_error")),
            "{answer}"
        );
        assert!(error["message"].as_str().unwrap().contains(words), "{answer} lacks {words:?}");
    }
    // So long that it is not even tokenised.
    let (status, answer) = ask(&state, &request(&"word ".repeat(1_000_000), json!({}))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(answer["error"]["code"], json!("context_length_exceeded"));
    assert!(answer["error"]["message"].as_str().unwrap().contains("at least"), "{answer}");
    let (status, answer) = ask(&state, &request(&"word ".repeat(3000), json!({}))).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let error = &answer["error"];
    assert_eq!(
        (&error["code"], &error["param"]),
        (&json!("context_length_exceeded"), &json!("messages"))
    );
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("maximum context length is 2000 tokens"), "{message}");
    assert!(message.contains("your messages resulted in"), "{message}");
    settle(&engine).await;
}

#[tokio::test]
async fn a_body_that_is_not_json_is_refused_with_the_reason() {
    let (_engine, state) = start();
    let path = "/v1/chat/completions";
    let deep = "[".repeat(100_000);
    for (body, words) in [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("nonsense", "not valid JSON"),
        ("{\"messages\": []} x", "not valid JSON"),
        (deep.as_str(), "not valid JSON"),
        ("[[]]", "expected an object"),
        ("7", "expected an object"),
        ("{\"messages\": [{\"role\": \"user\", \"content\": \"\\ud83d\"}]}", "not valid JSON"),
        ("{\"messages\": [], \"messages\": []}", "duplicate field"),
    ] {
        let (status, answer) = json(&state, post(path, body.to_owned())).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(words), "{answer}");
    }
    let (status, _) = json(&state, post(path, vec![b'{', b'"', 0xff, 0xfe, b'"', b'}'])).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    for kind in [None, Some("text/plain"), Some("application/x-www-form-urlencoded")] {
        let mut request = Request::post(path);
        if let Some(kind) = kind {
            request = request.header("content-type", kind);
        }
        let (status, answer) = json(&state, request.body(Body::from("{}")).unwrap()).await;
        assert_eq!(
            (status, &answer["error"]["param"]),
            (StatusCode::BAD_REQUEST, &json!("content-type"))
        );
    }
    let mut request = post(path, request("hi", json!({})).to_string());
    request
        .headers_mut()
        .insert("content-type", "Application/JSON; charset=utf-8".parse().unwrap());
    assert_eq!(send(&state, request).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn a_failing_model_is_an_error_of_the_server() {
    let (_engine, state) = start();
    let (status, answer) = ask(&state, &request("!fail", json!({}))).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(answer["error"]["type"], "server_error");
    assert!(answer["error"]["message"].as_str().unwrap().contains("told to fail"));
    let body = request("!fail", json!({"stream": true}));
    let response = send(&state, post("/v1/chat/completions", body.to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    let text = text_of(response).await;
    assert!(
        text.contains("data: {\"error\":{\"message\":\"the model failed: told to fail\""),
        "{text}"
    );
    // Others are served.
    answer_is_fine(&state).await;
}

async fn answer_is_fine(state: &App) {
    let body = request("fine", json!({"enable_thinking": false}));
    assert_eq!(answer(state, &body).await["choices"][0]["message"]["content"], "fine");
}

/// Whatever bytes come as a body: they are answered, or refused as the client's mistake.
#[tokio::test]
async fn no_body_is_a_fault_of_the_server() {
    let (engine, state) = start();
    let tool_turn = json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}}]});
    let bodies = [
        ("/v1/chat/completions", request("hello", json!({"max_tokens": 3, "tools": [tool("f")],
            "stop": ["x"], "logit_bias": {"5": 1}, "logprobs": true, "top_logprobs": 2,
            "chat_template_kwargs": {"enable_thinking": false}, "seed": 1, "top_p": 0.5}))),
        ("/v1/chat/completions", json!({"max_tokens": 2, "messages": [
            {"role": "system", "content": "s"}, {"role": "user", "content": [{"type": "text", "text": "a"}]},
            tool_turn, {"role": "tool", "tool_call_id": "c", "content": "r"}]})),
        ("/v1/completions", json!({"prompt": [1, 2, 3], "echo": true, "logprobs": 1, "max_tokens": 1})),
        ("/v1/completions", json!({"prompt": "a b", "stream": true, "max_tokens": 2, "n": 1})),
    ]
    .map(|(path, body)| (path, body.to_string()));
    // Values of other types and sizes, which bytes alone would rarely become.
    let odd = [
        "null",
        "[]",
        "{}",
        "-1",
        "1e300",
        "99999999999999999999",
        "\"\"",
        "true",
        "[[[]]]",
        "\"\\u0000\"",
    ];
    let mut state_of_random = 7u64;
    let mut below = |n: usize| {
        state_of_random = state_of_random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state_of_random >> 33) as usize % n
    };
    let (mut answered, mut refused) = (0, 0);
    for _ in 0..3000 {
        let (path, body) = &bodies[below(bodies.len())];
        let mut body = body.clone().into_bytes();
        for _ in 0..1 + below(3) {
            if body.is_empty() {
                break;
            }
            let at = below(body.len());
            match below(4) {
                0 => body[at] = below(256) as u8,
                1 => drop(body.remove(at)),
                2 => body.truncate(at + 1),
                _ => {
                    // A value gives way to an odd one.
                    let Some(colon) = body[at..].iter().position(|&b| b == b':') else { continue };
                    let start = at + colon + 1;
                    let len = body[start..].iter().position(|b| b",}]".contains(b)).unwrap_or(0);
                    body.splice(start..start + len, odd[below(odd.len())].bytes());
                }
            }
        }
        let shown = String::from_utf8_lossy(&body).into_owned();
        let response = send(&state, post(path, body)).await;
        let status = response.status();
        let text = text_of(response).await;
        match status {
            StatusCode::OK => {
                answered += 1;
                assert!(!text.contains("\"error\""), "{shown}: {text}");
            }
            StatusCode::BAD_REQUEST => {
                refused += 1;
                let error: Value = serde_json::from_str(&text).unwrap();
                assert!(error["error"]["message"].is_string(), "{shown}: {text}");
            }
            _ => panic!("{status} for {shown}: {text}"),
        }
    }
    assert!(answered > 100 && refused > 100, "{answered} answered, {refused} refused");
    settle(&engine).await;
    assert_eq!(engine.health(), Ok(()));
}
