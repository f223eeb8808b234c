//! No command but `pull` opens a connection to the outside: every command runs with a library
//! preloaded (`connections.c`) that tells of look-ups and connections and refuses them.
#![cfg(target_os = "linux")]

mod lily;

use lily::{Done, demo, lily};
use std::path::{Path, PathBuf};
use std::process::Command;

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

/// Runs lily under the watcher; gives what it printed, and the connections it tried.
fn watched(watcher: &Path, args: &[&str]) -> (Done, String) {
    let log = watcher.with_extension("log");
    let _ = std::fs::remove_file(&log);
    let done = lily(args)
        .env("LD_PRELOAD", watcher)
        .env("LILY_CONNECTIONS", &log)
        .env("HF_HOME", watcher.with_extension("hub"))
        .env("HF_ENDPOINT", "http://hub.invalid")
        .output()
        .expect("lily starts");
    (done.into(), std::fs::read_to_string(&log).unwrap_or_default())
}

#[test]
fn only_pull_connects() {
    let folder = tempfile::tempdir().unwrap();
    let Some(watcher) = watcher(folder.path()) else { return };
    let at = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(at("messages.json"), r#"[{"role": "user", "content": "Hello!"}]"#).unwrap();
    let (demo, messages, logits) =
        (demo().display().to_string(), at("messages.json"), at("logits.safetensors"));
    let quiet: [&[&str]; 8] = [
        &["run", "--temperature", "0", "--max-tokens", "4", "Hello!"],
        &["chat"],
        &["verify", &demo, "--any-size"],
        &["tokenize", "Hello!"],
        &["render", "--messages", &messages],
        &["logits", "--ids", "1,2,3", "--out", &logits],
        &["bench", "--context", "4", "--decode", "2", "--rounds", "1"],
        &["doctor"],
    ];
    for args in quiet {
        let (done, connections) = watched(&watcher, args);
        assert_eq!(done.code, Some(0), "{args:?}: {}", done.stderr);
        assert_eq!(connections, "", "{args:?}");
    }
    // The watcher sees what it is for: pull must try, and be refused.
    let (done, connections) = watched(&watcher, &["pull", "--to", &at("to")]);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(connections.contains("getaddrinfo hub.invalid"), "{connections:?}");
}
