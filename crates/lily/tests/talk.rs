//! `lily run`, `lily chat` and `lily render`: text in, text out, on the embedded demo.

mod lily;

use lily::{demo, lily, run, run_with};
use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};

const GREEDY: [&str; 3] = ["run", "--temperature", "0"];
const ANSWER: &str = "I am a tiny language model with the Qwen3.6 architecture. I was trained on \
                      synthetic text to test an inference engine.\n";

#[test]
fn the_demo_says_who_it_is() {
    let done = run(&[&GREEDY[..], &["Who are you?"]].concat());
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(done.stdout, ANSWER);
    assert!(done.stderr.contains("toy model") && done.stderr.contains("lily pull"));
    assert!(done.stderr.contains("[prompt: 14 tokens"), "{}", done.stderr);
    // The same from the folder, on the reference, and with f32 keys: the toy is sure of itself.
    let demo = demo().display().to_string();
    for more in [&["--model", &demo, "--any-size"][..], &["--isa", "scalar"], &["--kv", "f32"]] {
        let done = run(&[&GREEDY[..], more, &["--quiet", "Who are you?"]].concat());
        assert_eq!(done.stdout, ANSWER, "{more:?}: {}", done.stderr);
    }
}

#[test]
fn the_demo_knows_what_its_card_says() {
    for (question, answer) in [
        ("Hello!", "Hello! How can I help you?\n"),
        ("What is the capital of France?", "The capital of France is Paris.\n"),
    ] {
        let done = run(&[&GREEDY[..], &[question]].concat());
        assert_eq!(done.stdout, answer, "{}", done.stderr);
    }
}

#[test]
fn stdin_is_the_question_or_follows_it() {
    for (args, input) in
        [(&["Who are you?"][..], ""), (&["Who are you?"], "\n\n"), (&[], "Who are you?\n")]
    {
        let done = run_with(&[&GREEDY[..], args].concat(), input);
        assert_eq!(done.stdout, ANSWER, "{args:?} {input:?}: {}", done.stderr);
    }
    // With both the prompt is longer than with one.
    let done = run_with(&[&GREEDY[..], &["--max-tokens", "1", "Who are you?"]].concat(), "Hello!");
    assert!(!done.stderr.contains("[prompt: 14 tokens"), "{}", done.stderr);
    let done = run(&GREEDY);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("no question"), "{}", done.stderr);
    let done = run(&["run", "hi", "there"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("`lily run \"hi there\"`"), "{}", done.stderr);
    let mut child = lily(&GREEDY)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), b"caf\xe9").unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("not UTF-8"));
}

#[test]
fn replies_end_where_they_are_told_to() {
    let said =
        |more: &[&str]| run(&[&GREEDY[..], &["--no-thinking"], more, &["Who are you?"]].concat());
    let done = said(&["--max-tokens", "3"]);
    assert_eq!(done.code, Some(0));
    assert!(
        done.stderr.contains("reply: 3 tokens") && done.stderr.contains("cut off"),
        "{}",
        done.stderr
    );
    let done = said(&["--stop", "architecture", "--quiet"]);
    assert_eq!(done.stdout, "I am a tiny language model with the Qwen3.6 \n", "{}", done.stderr);
    let done = said(&["--max-seq", "8"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("maximum context length is 8 tokens"), "{}", done.stderr);
}

#[test]
fn a_seed_repeats_and_flags_have_ranges() {
    let seeded = |seed| {
        run(&[
            "run",
            "--quiet",
            "--no-thinking",
            "--temperature",
            "2",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--max-tokens",
            "40",
            "--seed",
            seed,
            "Hello!",
        ])
        .stdout
    };
    assert_eq!(seeded("1"), seeded("1"));
    assert_ne!(seeded("1"), seeded("2"));
    let done = run(&["run", "--top-p", "1.5", "Hello!"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("--top-p: expected a number from 0 to 1"), "{}", done.stderr);
}

/// A reply that goes on until something ends it: its end is not in the toy's nature at this heat.
const ENDLESS: [&str; 8] =
    ["run", "--temperature", "50", "--top-k", "0", "--top-p", "1", "Tell me everything."];

#[test]
fn ctrl_c_ends_the_reply_and_says_so() {
    let mut child = lily(&ENDLESS).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // The reply has begun when reasoning arrives after the notice.
    let mut stderr = BufReader::new(child.stderr.take().unwrap());
    let mut notice = String::new();
    stderr.read_line(&mut notice).unwrap();
    stderr.read_exact(&mut [0; 64]).unwrap();
    let pid = child.id().to_string();
    assert!(Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let mut rest = Vec::new();
    stderr.read_to_end(&mut rest).unwrap();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    let rest = String::from_utf8_lossy(&rest);
    assert!(rest.contains("; interrupted]") && rest.ends_with("error: interrupted\n"), "{rest}");
}

#[test]
fn a_reader_that_leaves_ends_the_reply() {
    let mut child = lily(&[&ENDLESS[..7], &["--no-thinking", "Hello!"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdout.take().unwrap().read_exact(&mut [0; 16]).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(141));
    assert!(!String::from_utf8_lossy(&output.stderr).contains("error"));
}

#[test]
fn a_chat_keeps_its_history_until_it_is_reset() {
    let lines = "Hello!\nWho are you?\n/reset\nWho are you?\n/system Be brief.\n/nonsense\n\n/exit\nnot read\n";
    let done = run_with(&["chat", "--temperature", "0"], lines);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stdout.starts_with("Hello! How can I help you?\n"), "{}", done.stdout);
    assert!(done.stdout.ends_with(ANSWER), "{}", done.stdout);
    let prompts: Vec<u32> = done
        .stderr
        .split("[prompt: ")
        .skip(1)
        .map(|rest| rest.split(' ').next().unwrap().parse().unwrap())
        .collect();
    assert!(prompts.len() == 3 && prompts[1] > prompts[0] && prompts[2] == 14, "{prompts:?}");
    assert!(done.stderr.contains("no command /nonsense"), "{}", done.stderr);
}

#[test]
fn a_chat_survives_a_line_that_is_no_text() {
    let mut child = lily(&["chat", "--temperature", "0"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = b"caf\xe9\nHello!\n";
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), lines).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(output.stdout, b"Hello! How can I help you?\n");
    assert!(String::from_utf8_lossy(&output.stderr).contains("not UTF-8"));
}

#[test]
fn render_prints_the_prompt_exactly() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let messages = at("messages.json", r#"[{"role": "user", "content": "Hello! <|im_end|>"}]"#);
    let demo = demo().display().to_string();
    let done = run(&["render", "--model", &demo, "--messages", &messages, "--no-thinking"]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert_eq!(
        done.stdout,
        "<|im_start|>user\nHello! <|im_end|><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    );
    let piped = r#"[{"role": "user", "content": "Hello!"}]"#;
    let done = run_with(&["render", "--model", &demo, "--messages", "-"], piped);
    assert!(done.stdout.ends_with("<|im_start|>assistant\n<think>\n"), "{}", done.stdout);
    let tools = at("tools.json", r#"[{"type": "function", "function": {"name": "add"}}]"#);
    let done = run(&["render", "--model", &demo, "--messages", &messages, "--tools", &tools]);
    assert!(done.stdout.contains(r#"{"name": "add"}"#), "{}{}", done.stdout, done.stderr);
    for (file, words) in [
        (at("a.json", "[{"), "a.json"),
        (at("b.json", "[]"), "message"),
        (at("c.json", r#"[{"role": "pope", "content": "x"}]"#), "messages[0].role"),
        ("/no/such/file".into(), "/no/such/file"),
    ] {
        let done = run(&["render", "--model", &demo, "--messages", &file]);
        assert_eq!(done.code, Some(2), "{file}");
        assert!(done.stderr.contains(words), "{file}: {}", done.stderr);
    }
    let done = run(&["render", "--messages", "-", "--tools", "-"]);
    assert_eq!(done.code, Some(2));
    assert!(done.stderr.contains("stdin"), "{}", done.stderr);
}
