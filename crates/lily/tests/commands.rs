//! The commands that need no text: what they print, and what scripts can rely on.

mod lily;

use lily::{demo, lily, run, run_with};
use std::process::{Command, Stdio};

#[test]
fn wrong_flags_are_exit_code_2() {
    let cases: [&[&str]; 7] = [
        &[],
        &["sing"],
        &["doctor", "--loud"],
        &["logits", "--ids", "1", "--out", "x", "--threads", "0"],
        &["run", "--max-tokens", "-5", "Hello!"],
        &["logits", "--ids", "1", "--out", "x", "--kv", "q4"],
        &["bench", "--max-seq", "0"],
    ];
    for args in cases {
        let done = run(args);
        assert_eq!(done.code, Some(2), "{args:?}: {}", done.stderr);
        assert_eq!(done.stdout, "", "{args:?}");
        assert!(done.stderr.contains("Usage") || done.stderr.contains("--help"), "{args:?}");
    }
}

#[test]
fn more_threads_than_make_sense_are_refused() {
    let done = run(&["bench", "--threads", "1024"]);
    match std::thread::available_parallelism().map_or(1, usize::from) {
        256.. => eprintln!("skipped: on this machine 1024 threads make sense"),
        _ => {
            assert_eq!(done.code, Some(2), "{}", done.stderr);
            assert!(done.stderr.contains("--threads 1024"), "{}", done.stderr);
        }
    }
}

#[test]
fn help_lists_commands_and_exit_codes() {
    let done = run(&["--help"]);
    assert_eq!(done.code, Some(0));
    for word in ["verify", "logits", "bench", "doctor", "completions", "Exit codes"] {
        assert!(done.stdout.contains(word), "{word} in {}", done.stdout);
    }
    assert!(run(&["--version"]).stdout.starts_with("lily "));
}

#[test]
fn verify_tells_good_from_different() {
    let demo = demo().display().to_string();
    let done = run(&["verify", &demo, "--any-size", "--checksums", "--packed"]);
    assert_eq!(done.code, Some(0), "{}{}", done.stdout, done.stderr);
    assert!(done.stdout.contains("good"), "{}", done.stdout);
    let done = run(&["verify", &demo]);
    assert_eq!(done.code, Some(1));
    assert!(done.stdout.contains("hidden_size is 128"), "{}", done.stdout);
    assert_eq!(done.stderr, "");
    let broken = tempfile::tempdir().unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(lily::demo().join(name), broken.path().join(name)).unwrap();
    }
    let broken = broken.path();
    let verify_broken = || run(&["verify", "--any-size", &broken.display().to_string()]);
    let done = verify_broken();
    assert_eq!(done.code, Some(0), "{}", done.stdout);
    assert!(done.stdout.contains("No tokenizer.json"), "{}", done.stdout);
    std::fs::write(broken.join("tokenizer.json"), "{}").unwrap();
    let done = verify_broken();
    assert_eq!(done.code, Some(1), "{}", done.stdout);
    assert!(done.stdout.contains("tokenizer.json: "), "{}", done.stdout);
    for name in ["tokenizer.json", "chat_template.jinja"] {
        std::fs::copy(lily::demo().join(name), broken.join(name)).unwrap();
    }
    assert_eq!(verify_broken().code, Some(0));
    std::fs::write(broken.join("generation_config.json"), "{").unwrap();
    let done = verify_broken();
    assert_eq!(done.code, Some(1), "{}", done.stdout);
    assert!(done.stdout.contains("generation_config.json: not JSON"), "{}", done.stdout);
    std::fs::remove_file(broken.join("chat_template.jinja")).unwrap();
    std::fs::remove_file(broken.join("generation_config.json")).unwrap();
    let done = verify_broken();
    assert!(done.code == Some(1) && done.stdout.contains("chat_template.jinja: is missing"));
    let done = run(&["verify", "/no/such/folder"]);
    assert_eq!(done.code, Some(1));
    assert!(done.stdout.contains("lily pull"), "{}", done.stdout);
}

#[test]
fn tokenize_prints_one_line_of_json() {
    let demo = demo();
    let folder = demo.display().to_string();
    let file = demo.join("tokenizer.json").display().to_string();
    let first = run(&["tokenize", "Who are you?<|im_end|>"]);
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let ids: Vec<u32> = serde_json::from_str(&first.stdout).unwrap();
    assert!(ids.len() > 1 && ids.last() == Some(&1746), "{ids:?}");
    assert_eq!(first.stdout.lines().count(), 1);
    for tokenizer in [&folder, &file] {
        let done = run(&["tokenize", "--tokenizer", tokenizer, "Who are you?<|im_end|>"]);
        assert_eq!(done.stdout, first.stdout, "{}", done.stderr);
        assert_eq!(done.stderr, "");
    }
    let piped = run_with(&["tokenize", "--tokenizer", &folder], "Who are you?<|im_end|>");
    assert_eq!(piped.stdout, first.stdout, "{}", piped.stderr);
    let other = tempfile::NamedTempFile::new().unwrap();
    let other = other.path().display().to_string();
    let done = run(&["tokenize", "--tokenizer", &other, "x"]);
    assert_eq!(done.code, Some(1));
    assert!(done.stderr.contains(&other), "{}", done.stderr);
    // An empty variable is as good as none.
    let output = lily(&["tokenize", "Who are you?<|im_end|>"]).env("LILY_MODEL", "").output();
    assert_eq!(String::from_utf8(output.unwrap().stdout).unwrap(), first.stdout);
    let done = run(&["tokenize", "--tokenizer", "/no/such/file", "x"]);
    assert_eq!(done.code, Some(1));
    assert!(done.stderr.contains("/no/such/file"), "{}", done.stderr);
}

#[test]
fn doctor_says_what_fits_and_what_to_remove() {
    let cache = tempfile::tempdir().unwrap();
    std::fs::create_dir(cache.path().join("lily")).unwrap();
    let packed = cache.path().join("lily/some-0123-rows-1.packed");
    std::fs::write(&packed, [0; 2048]).unwrap();
    let output = lily(&["doctor"]).env("XDG_CACHE_HOME", cache.path()).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    for word in ["memory", "disk", "cpu", "scalar", "262144", "19.5 GB"] {
        assert!(text.contains(word), "{word} in {text}");
    }
    let packed = packed.canonicalize().unwrap();
    let remove = format!("rm {}", packed.display());
    assert!(text.lines().any(|line| line.contains("2.05 kB") && line.ends_with(&remove)), "{text}");
    let done = run(&["doctor", "--model", "/no/such/folder"]);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(done.stdout.contains("cannot be used"), "{}", done.stdout);
}

#[test]
fn bench_rows_can_be_read_by_programs() {
    let flags = ["bench", "--context", "3,300", "--decode", "2", "--rounds", "1"];
    let done = run(&[&flags[..], &["--format", "jsonl"]].concat());
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let rows: Vec<serde_json::Value> =
        done.stdout.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    for (row, context) in rows.iter().zip([3, 300]) {
        assert_eq!(row["context"], context);
        let rate = |name: &str| row[name].as_f64().unwrap();
        assert!(rate("prefill_tokens_per_s") > 0.0 && rate("decode_tokens_per_s") > 0.0, "{row}");
        assert_eq!(row["checkpoint"], "lily-demo");
    }
    let done = run(&flags);
    let lines: Vec<&str> = done.stdout.lines().collect();
    assert!(lines.len() == 3 && lines[0].starts_with("context,prefill_tokens_per_s"), "{lines:?}");
    let done = run(&["bench", "--context", "40000"]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("32768"), "{}", done.stderr);
}

#[test]
fn completions_complete() {
    let done = run(&["completions", "bash"]);
    assert_eq!(done.code, Some(0));
    let script = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(script.path(), &done.stdout).unwrap();
    let words = "source \"$1\"; COMP_WORDS=(lily ver); COMP_CWORD=1; COMP_LINE='lily ver'; \
                 _lily lily ver lily; echo \"${COMPREPLY[@]}\"";
    let bash = Command::new("bash").args(["-c", words, "bash"]).arg(script.path()).output();
    match bash {
        Ok(output) => {
            let text = String::from_utf8_lossy(&output.stdout).into_owned();
            assert_eq!(text.trim(), "verify", "{}", String::from_utf8_lossy(&output.stderr));
        }
        Err(_) => eprintln!("skipped: completion in a shell needs bash"),
    }
    assert!(run(&["completions", "zsh"]).stdout.starts_with("#compdef lily"));
    assert_eq!(run(&["completions", "perl"]).code, Some(2));
}

#[test]
fn nobody_need_listen_on_stderr() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits").display().to_string();
    let messages = folder.path().join("messages.json");
    std::fs::write(&messages, r#"[{"role": "user", "content": "Hello!"}]"#).unwrap();
    let messages = messages.display().to_string();
    let Ok(full) = std::fs::File::options().write(true).open("/dev/full") else {
        eprintln!("skipped: needs /dev/full");
        return;
    };
    let cases: [&[&str]; 6] = [
        &["run", "--temperature", "0", "Hello!"],
        &["chat"],
        &["tokenize", "Hello!"],
        &["render", "--messages", &messages],
        &["logits", "--ids", "1,2", "--out", &out],
        &["bench", "--context", "4", "--decode", "1", "--rounds", "1"],
    ];
    for args in cases {
        let status =
            lily(args).stdout(Stdio::null()).stderr(full.try_clone().unwrap()).status().unwrap();
        assert_eq!(status.code(), Some(0), "{args:?}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = lily(&["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    // The script may have gone into the pipe before it was closed.
    assert!(matches!(output.status.code(), Some(141 | 0)), "{:?}", output.status);
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
}
