//! POST /v1/completions, in-process.

mod common;

use axum::http::StatusCode;
use common::{Parrot, TOKENIZER, json, post, ready, send, settle, text_of};
use lily_server::{App, Settings};
use serde_json::{Value, json};

fn start() -> (lily_engine::Engine, App) {
    let engine = Parrot::default().engine();
    let state = ready(&engine, Settings::default());
    (engine, state)
}

async fn complete(state: &App, body: Value) -> (StatusCode, Value) {
    json(state, post("/v1/completions", body.to_string())).await
}

/// What the parrot makes of a prompt without messages.
fn continuation(prompt: &str, tokens: usize) -> String {
    let mut history = TOKENIZER.encode(prompt);
    let n = history.len();
    for _ in 0..tokens {
        history.push(history[history.len() / 2]);
    }
    TOKENIZER.decode(&history[n..])
}

/// The JSON of a stream's events.
async fn events(state: &App, body: Value) -> Vec<Value> {
    let response = send(state, post("/v1/completions", body.to_string())).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(response.headers()["content-type"], "text/event-stream");
    let text = text_of(response).await;
    let mut events: Vec<_> = text.split_terminator("\n\n").map(str::to_owned).collect();
    assert_eq!(events.pop().as_deref(), Some("data: [DONE]"));
    events
        .iter()
        .map(|e| serde_json::from_str(e.strip_prefix("data: ").unwrap()).unwrap())
        .collect()
}

#[tokio::test]
async fn a_prompt_is_continued() {
    let (_engine, state) = start();
    let prompt = "The quick brown fox, 日本語 👍🏽 jumps over";
    let ids = TOKENIZER.encode(prompt);
    for form in [json!(prompt), json!([prompt]), json!(ids), json!([ids])] {
        let (status, body) =
            complete(&state, json!({"prompt": form, "max_tokens": 20, "model": "any"})).await;
        assert_eq!(status, StatusCode::OK, "{body}");
        assert_eq!((&body["object"], &body["model"]), (&json!("text_completion"), &json!("any")));
        let choice = &body["choices"][0];
        assert_eq!(choice["text"], continuation(prompt, 20));
        assert_eq!(
            (&choice["finish_reason"], &choice["logprobs"]),
            (&json!("length"), &json!(null))
        );
        let n = ids.len();
        assert_eq!(body["usage"]["prompt_tokens"], n);
        assert_eq!(body["usage"]["completion_tokens"], 20);
        assert_eq!(body["usage"]["total_tokens"], n + 20);
        assert_eq!(body["timings"]["predicted_n"], 20);
        assert_eq!(body["timings"]["prompt_n"], n);
    }
    // Without max_tokens: what remains.
    let (_, body) = complete(&state, json!({"prompt": prompt})).await;
    assert_eq!(body["usage"]["total_tokens"], 2000);
}

#[tokio::test]
async fn a_stream_is_the_whole_in_parts() {
    let (_engine, state) = start();
    let prompt = "čeština 中文字 👩‍💻 abc";
    let parts = events(&state, json!({"prompt": prompt, "max_tokens": 50, "stream": true})).await;
    let text: String = parts.iter().map(|p| p["choices"][0]["text"].as_str().unwrap()).collect();
    assert_eq!(text, continuation(prompt, 50));
    assert!(parts.iter().all(|part| part.get("usage").is_none()));
    let reasons: Vec<_> = parts.iter().map(|p| p["choices"][0]["finish_reason"].clone()).collect();
    assert_eq!(reasons.last(), Some(&json!("length")));
    assert!(reasons[..reasons.len() - 1].iter().all(Value::is_null));

    let body = json!({
        "prompt": prompt, "max_tokens": 5, "stream": true, "stream_options": {"include_usage": true}
    });
    let parts = events(&state, body).await;
    let (last, parts) = parts.split_last().unwrap();
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(5)));
    assert!(parts.iter().all(|part| part.get("usage").is_none()));
}

#[tokio::test]
async fn echo_gives_the_prompt_and_its_log_probabilities() {
    let (_engine, state) = start();
    let prompt = "Ünïcödé 👍 abc def ghi jkl mno pqr";
    let n = TOKENIZER.encode(prompt).len();
    for (max_tokens, stream) in [(0, false), (1, false), (1, true), (3, true)] {
        let request = json!({
            "prompt": prompt, "max_tokens": max_tokens, "echo": true, "logprobs": 2,
            "stream": stream
        });
        let choice = if stream {
            let parts = events(&state, request).await;
            let mut all = parts[0]["choices"][0].clone();
            for part in &parts[1..] {
                let choice = &part["choices"][0];
                let text =
                    all["text"].as_str().unwrap().to_owned() + choice["text"].as_str().unwrap();
                all["text"] = json!(text);
                for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                    let more = choice["logprobs"][list].as_array().unwrap().clone();
                    all["logprobs"][list].as_array_mut().unwrap().extend(more);
                }
            }
            all
        } else {
            complete(&state, request).await.1["choices"][0].clone()
        };
        let text = choice["text"].as_str().unwrap();
        assert_eq!(text, prompt.to_owned() + &continuation(prompt, max_tokens));
        let logprobs = &choice["logprobs"];
        let list = |name: &str| logprobs[name].as_array().unwrap().clone();
        let tokens = list("tokens");
        assert_eq!(tokens.len(), n + max_tokens);
        for name in ["token_logprobs", "top_logprobs", "text_offset"] {
            assert_eq!(list(name).len(), tokens.len(), "{name}");
        }
        assert_eq!(
            (&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]),
            (&Value::Null, &Value::Null)
        );
        let offsets: Vec<_> = list("text_offset").iter().map(|o| o.as_u64().unwrap()).collect();
        for (i, token) in tokens.iter().enumerate() {
            let (token, at) = (token.as_str().unwrap(), offsets[i] as usize);
            // A token that is a part of a character is spelled in bytes.
            if !token.starts_with("bytes:") {
                let rest: String = text.chars().skip(at).collect();
                assert!(rest.starts_with(token), "{token:?} at {at} of {text:?}");
            }
            if i > 0 {
                let own = &logprobs["token_logprobs"][i];
                let top = logprobs["top_logprobs"][i].as_object().unwrap();
                assert!(own.as_f64().unwrap() <= 0.0);
                assert!((2..=3).contains(&top.len()), "{top:?}");
                assert_eq!(&top[token], own);
            }
        }
        // The generated ones are greedy: the best of all.
        for i in n..tokens.len() {
            let best = logprobs["top_logprobs"][i].as_object().unwrap().values();
            let best = best.map(|v| v.as_f64().unwrap()).fold(f64::MIN, f64::max);
            assert_eq!(logprobs["token_logprobs"][i].as_f64(), Some(best));
        }
    }
    let (_, body) =
        complete(&state, json!({"prompt": prompt, "max_tokens": 2, "echo": true})).await;
    assert_eq!(body["choices"][0]["text"], prompt.to_owned() + &continuation(prompt, 2));
    assert_eq!(body["choices"][0]["logprobs"], Value::Null);
}

#[tokio::test]
async fn a_stop_string_ends_the_text_before_it_and_the_generation_with_it() {
    let (engine, state) = start();
    let prompt = "one two three four five six seven";
    let whole = continuation(prompt, 100);
    let stop = whole.get(20..27).unwrap();
    let before = &whole[..whole.find(stop).unwrap()];
    for stops in [json!(stop), json!(["never said", stop])] {
        let (_, body) = complete(&state, json!({"prompt": prompt, "stop": stops})).await;
        assert_eq!(body["choices"][0]["text"], before);
        assert_eq!(body["choices"][0]["finish_reason"], "stop");
        let counted = body["usage"]["completion_tokens"].as_u64().unwrap();
        let needed = TOKENIZER.encode(&whole[..before.len() + stop.len()]).len() as u64;
        assert!((needed..needed + 3).contains(&counted), "{counted} tokens for {needed}");
        let parts = events(&state, json!({"prompt": prompt, "stop": stops, "stream": true})).await;
        let text: String =
            parts.iter().map(|p| p["choices"][0]["text"].as_str().unwrap()).collect();
        assert_eq!(text, before);
    }
    settle(&engine).await;
}

#[tokio::test]
async fn what_is_wrong_is_named() {
    let (engine, state) = start();
    let long = "word ".repeat(3000);
    for (body, param, words) in [
        (json!({}), Value::Null, "missing field `prompt`"),
        (json!({"prompt": null}), json!("prompt"), "a string, a list of one string"),
        (json!({"prompt": 7}), json!("prompt"), "a string, a list of one string"),
        (json!({"prompt": ""}), json!("prompt"), "no tokens"),
        (json!({"prompt": []}), json!("prompt"), "no tokens"),
        (json!({"prompt": ["a", "b"]}), json!("prompt"), "one prompt"),
        (json!({"prompt": [[1], [2]]}), json!("prompt"), "one prompt"),
        (json!({"prompt": [1, "b"]}), json!("prompt[1]"), "expected a whole number"),
        (json!({"prompt": [-1]}), json!("prompt[0]"), "a token id"),
        (json!({"prompt": [1, 99999]}), json!("prompt[1]"), "below"),
        (json!({"prompt": "a", "suffix": "b"}), json!("suffix"), "not supported"),
        (json!({"prompt": "a", "logprobs": 21}), json!("logprobs"), "from 0 to 20"),
        (json!({"prompt": "a", "logprobs": true}), json!("logprobs"), "expected a whole number"),
        (json!({"prompt": "a", "best_of": 3}), json!("best_of"), "one choice"),
        (json!({"prompt": "a", "stop": [1]}), json!("stop[0]"), "string"),
        (json!({"prompt": "a", "stop": ""}), json!("stop"), "not empty"),
        (json!({"prompt": "a", "max_tokens": "5"}), json!("max_tokens"), "expected a whole number"),
    ] {
        let (status, answer) = complete(&state, body.clone()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {answer}");
        let error = &answer["error"];
        assert_eq!(
            (&error["param"], &error["type"]),
            (&param, &json!("invalid_request_error")),
            "{answer}"
        );
        assert!(error["message"].as_str().unwrap().contains(words), "{answer} lacks {words:?}");
    }
    let (status, answer) = complete(&state, json!({"prompt": long})).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert_eq!(answer["error"]["code"], "context_length_exceeded");
    assert!(
        answer["error"]["message"].as_str().unwrap().contains("maximum context length is 2000")
    );
    settle(&engine).await;
}
