//! Each rule finds what it is for, and the workspace follows all of them.

use super::*;

/// What `check` says of a tree of (path, text) pairs.
fn says(check: fn(&Tree) -> Vec<Finding>, files: &[(&str, &str)]) -> String {
    let file = |(path, text): &(&str, &str)| File { path: (*path).into(), text: (*text).into() };
    let findings = check(&Tree(files.iter().map(file).collect()));
    findings.into_iter().map(|f| f.text).collect::<Vec<_>>().join("\n")
}

#[test]
fn the_workspace_is_tidy() {
    let findings = check(&Tree::read(&crate::root()).unwrap());
    let broken: Vec<_> = findings.iter().filter(|f| f.error).map(|f| &f.text).collect();
    assert!(broken.is_empty(), "{broken:#?}");
}

#[test]
fn crates_use_only_what_stands_below() {
    let bad = "[dependencies]\nlily-model.workspace = true\nserde = \"1\"\n";
    let path = "crates/text/Cargo.toml";
    assert!(says(edges, &[(path, bad)]).contains("text may not use lily-model"));
    let target = "[target.'cfg(unix)'.dependencies]\ntokio = \"1\"\n";
    assert!(says(edges, &[(path, target)]).contains("text may not use tokio"));
    let path = "crates/engine/Cargo.toml";
    assert_eq!(says(edges, &[(path, "[dev-dependencies]\nlily-checkpoint = \"1\"\n")]), "");
    assert!(
        says(edges, &[(path, "[dependencies]\nlily-checkpoint = \"1\"\n")]).contains("may not")
    );
    assert!(says(edges, &[("crates/common/Cargo.toml", "")]).contains("an eighth crate"));
}

#[test]
fn files_say_what_they_are() {
    assert_eq!(says(headers, &[("crates/text/src/a.rs", "//! Reads replies.\n")]), "");
    assert!(says(headers, &[("crates/text/src/a.rs", "use b;\n")]).contains("does not say"));
    assert_eq!(
        says(headers, &[("reference/a.py", "#!/usr/bin/env python3\n\"\"\"The model.\"\"\"\n")]),
        ""
    );
}

#[test]
fn every_row_is_run_and_tested() {
    let ops = "\nops! {\n    /// y = 0\n    Zero zero (words: u32) {\n        Write y: u32[words];\n    }\n}\n";
    let ops = ("crates/device/src/ops.rs", ops);
    let cpu = "match op { Op::Zero(op) => {} }\n#[test]\nfn zero_is_zero() {}\n";
    assert_eq!(says(kernels, &[ops, ("crates/device/src/cpu/mod.rs", cpu)]), "");
    let found = says(kernels, &[ops, ("crates/device/src/cpu/mod.rs", "fn zero() {}\n")]);
    assert!(found.contains("runs Op::Zero") && found.contains("zero has no test"), "{found}");
    let stray = ("crates/device/src/kernels/one.metal", "// one\n");
    assert!(
        says(kernels, &[ops, ("crates/device/src/cpu/mod.rs", cpu), stray]).contains("called one")
    );
}

#[test]
fn only_the_binary_reads_the_environment() {
    let text = "//! A.\nlet a = std::env::var(\"A\");\n";
    assert!(
        says(environment, &[("crates/text/src/a.rs", text)]).starts_with("crates/text/src/a.rs:2")
    );
    assert_eq!(says(environment, &[("crates/lily/src/a.rs", text)]), "");
    assert_eq!(says(environment, &[("crates/text/tests/a.rs", text)]), "");
}

#[test]
fn only_pull_connects() {
    let text = "use ureq::Agent;\n";
    assert_eq!(says(connections, &[("crates/lily/src/pull.rs", text)]), "");
    assert!(says(connections, &[("crates/lily/src/run.rs", text)]).contains("only"));
}

#[test]
fn commands_survive_a_closed_stderr() {
    let text = "//! A.\neprintln!(\"a\");\n";
    assert!(says(stderr, &[("crates/lily/src/a.rs", text)]).contains("use say!"));
    assert_eq!(says(stderr, &[("crates/lily/tests/a.rs", text)]), "");
}

#[test]
fn unsafe_code_stays_home() {
    let text = "//! A.\n#![forbid(unsafe_code)]\nlet a = unsafe { *b };\n";
    assert!(says(unsafe_code, &[("crates/text/src/lib.rs", text)]).contains("lib.rs:3"));
    assert!(says(unsafe_code, &[("crates/text/src/lib.rs", "//! A.\n")]).contains("add #![forbid"));
    assert_eq!(says(unsafe_code, &[("crates/device/src/a.rs", "unsafe { *b }")]), "");
}

#[test]
fn long_files_are_named() {
    let long = "\n".repeat(TOO_LONG + 1);
    assert!(says(lengths, &[("crates/text/src/a.rs", &long)]).contains("1001 lines"));
}

#[test]
fn files_are_part_of_the_program() {
    let dead = ("crates/text/src/dead.rs", "//! Dead.\n");
    assert!(
        says(dead_files, &[("crates/text/src/lib.rs", "mod alive;\n"), dead]).contains("dead file")
    );
    assert_eq!(says(dead_files, &[("crates/text/src/lib.rs", "pub mod dead;\n"), dead]), "");
    let deep = ("crates/text/src/a/b.rs", "//! B.\n");
    assert_eq!(
        says(
            dead_files,
            &[("crates/text/src/a.rs", "mod b;\n"), ("crates/text/src/lib.rs", "mod a;\n"), deep]
        ),
        ""
    );
    assert_eq!(
        says(
            dead_files,
            &[
                ("crates/text/src/a/mod.rs", "mod b;\n"),
                ("crates/text/src/lib.rs", "mod a;\n"),
                deep
            ]
        ),
        ""
    );
}

#[test]
fn nothing_unfinished() {
    let file = |text| says(leftovers, &[("crates/text/src/a.rs", text)]);
    assert!(file("todo!()").contains("a.rs:1"));
    assert!(file("// TODO later").contains("without an issue"));
    assert_eq!(file("// TODO(#3): later"), "");
    assert!(says(machine_paths, &[("README.md", "cd /home/ann")]).contains("/home/"));
    assert!(says(names, &[("crates/text/src/utils.rs", "")]).contains("name it after"));
}

#[test]
fn documents_are_true() {
    let source = ("crates/text/src/chat.rs", "//! Chat.\n");
    let found = says(documents, &[("ARCHITECTURE.md", "# A\n`gone.rs`\n"), source]);
    assert!(found.contains("there is no gone.rs") && found.contains("tidy --write"), "{found}");
    let map = "# A\n\n## Files\n\n    crates/text/src/\n      chat.rs             Chat\n";
    assert_eq!(says(documents, &[("ARCHITECTURE.md", map), source]), "");
    assert!(says(links, &[("README.md", "[a](docs/A.md)")]).contains("dead link"));
    assert_eq!(says(links, &[("demo/README.md", "[a](../README.md#how)"), ("README.md", "")]), "");
}
