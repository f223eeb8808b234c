//! No command but `pull` opens a connection to the outside: every command runs with a library
//! preloaded (`connections.c`) that tells of look-ups and connections and refuses them.
#![cfg(target_os = "linux")]

mod lily;

use lily::{Done, Server, demo, lily};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// The compiled `connections.c`; says aloud what is skipped where there is no C compiler.
fn watcher(folder: &Path) -> Option<PathBuf> {
    let library = folder.join("connections.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/connections.c");
    let compiled = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1", "-Wall", "-Werror", "-o"])
        .args([&library, &source])
        .output();
    match compiled {
        Err(_) => {
            eprintln!("skipped: needs a C compiler called cc");
            None
        }
        Ok(output) => {
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            Some(library)
        }
    }
}

/// Lily under the watcher, and the file in which the watcher tells of connections.
fn watched(watcher: &Path, args: &[&str]) -> (Command, PathBuf) {
    let log = watcher.with_extension("log");
    let _ = std::fs::remove_file(&log);
    let mut command = lily(args);
    command
        .env("LD_PRELOAD", watcher)
        .env("LILY_CONNECTIONS", &log)
        .env("HF_HOME", watcher.with_extension("hub"))
        .env("HF_ENDPOINT", "http://hub.invalid");
    (command, log)
}

#[test]
fn only_pull_connects() {
    let folder = tempfile::tempdir().unwrap();
    let Some(watcher) = watcher(folder.path()) else { return };
    let at = |name: &str| folder.path().join(name).display().to_string();
    let (demo, logits) = (demo().display().to_string(), at("logits.safetensors"));
    std::fs::write(at("messages.json"), r#"[{"role": "user", "content": "Hello!"}]"#).unwrap();
    let messages = at("messages.json");
    let quiet: [&[&str]; 8] = [
        &["run", "--temperature", "0", "--max-tokens", "4", "Hello!"],
        &["chat"],
        &["tokenize", "Hello!"],
        &["render", "--messages", &messages],
        &["verify", &demo, "--any-size"],
        &["logits", "--ids", "1,2,3", "--out", &logits],
        &["bench", "--context", "4", "--decode", "2", "--rounds", "1"],
        &["doctor"],
    ];
    for args in quiet {
        let (mut command, log) = watched(&watcher, args);
        let done = Done::from(command.output().expect("lily starts"));
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "", "{args:?}");
    }
    let (command, log) = watched(&watcher, &["serve", "--bind", "127.0.0.1:0"]);
    let server = Server::spawn(command);
    server.wait_until_ready();
    let body = r#"{"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}"#;
    let answer = server.ask(&format!(
        "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    ));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    drop(server);
    assert_eq!(std::fs::read_to_string(&log).unwrap_or_default(), "", "serve");
    // The watcher sees what it is for: pull must try. It would go on trying; seen is enough.
    let (mut command, log) = watched(&watcher, &["pull", "--to", &at("to")]);
    let mut pull = command.stderr(Stdio::null()).spawn().expect("lily starts");
    let start = Instant::now();
    let (seen, ended) = loop {
        let ended = pull.try_wait().expect("pull can be waited for");
        let seen = std::fs::read_to_string(&log).unwrap_or_default();
        let patient = start.elapsed() < Duration::from_secs(60);
        if seen.ends_with('\n') || ended.is_some() || !patient {
            break (seen, ended);
        }
        std::thread::sleep(Duration::from_millis(10));
    };
    if ended.and_then(|status| status.code()) == Some(3) {
        eprintln!("skipped: pull did not get as far as connecting: it needs 20 GB of free disk");
        return;
    }
    let _ = pull.kill(); // it may have ended by itself
    pull.wait().expect("pull ends");
    assert!(seen.contains("getaddrinfo hub.invalid"), "{seen:?}");
}
