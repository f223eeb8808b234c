//! `cargo xtask tidy`: the rules of the house that no compiler knows.
//!
//! Each check is a function from the source files to findings; a finding says where, what, and
//! what to do. The rules themselves are the constants at the top.

use crate::file_map;
use crate::tree::{File, Tree};
use anyhow::bail;
use std::collections::BTreeSet;
use std::path::Path;

/// Who may use whom: a crate, and the crates of ours it may depend on. Development dependencies
/// may reach anything below.
const EDGES: [(&str, &[&str]); 7] = [
    ("checkpoint", &[]),
    ("text", &[]),
    ("device", &[]),
    ("model", &["checkpoint", "device"]),
    ("engine", &["model"]),
    ("server", &["text", "engine"]),
    ("lily", &["checkpoint", "text", "device", "model", "engine", "server"]),
];
/// Libraries that only some crates may use: the server is the only async code, and only the
/// binary can open a connection to the outside.
const LIMITED: [(&str, &[&str]); 7] = [
    ("tokio", &["server", "lily"]),
    ("axum", &["server", "lily"]),
    ("hyper", &["server"]),
    ("ureq", &["lily"]),
    ("reqwest", &[]),
    ("clap", &["lily", "xtask"]),
    ("anyhow", &["xtask"]),
];
/// Where the binary's HTTP client may be named.
const CONNECTING: &str = "crates/lily/src/pull";
/// Where `unsafe` may stand.
const UNSAFE: [&str; 2] = ["crates/device/src/", "crates/checkpoint/src/mmap.rs"];
/// Lines of a file: more is mentioned, much more is refused.
const LONG: usize = 600;
const TOO_LONG: usize = 1000;
/// Names that say nothing of what is inside.
const EMPTY_NAMES: [&str; 7] =
    ["utils", "util", "common", "prelude", "helpers", "helper", "manager"];
/// What is not finished, or not meant to stay.
const LEFTOVERS: [&str; 6] = ["todo!(", "unimplemented!(", "dbg!(", "#[ignore", "FIXME", "XXX"];
/// Paths of somebody's machine.
const MACHINE_PATHS: [&str; 4] = ["/home/", "/Users/", "/root/", "/work/"];

/// Something that breaks a rule (`error`), or bends it.
#[derive(Debug, PartialEq)]
pub struct Finding {
    error: bool,
    text: String,
}

fn error(text: impl Into<String>) -> Finding {
    Finding { error: true, text: text.into() }
}

/// Checks the workspace at `root`; prints what it finds and fails if a rule is broken. With
/// `write`, first puts right what a program can: the file map.
pub fn run(root: &Path, write: bool) -> anyhow::Result<()> {
    let mut tree = Tree::read(root)?;
    if let Some(text) = file_map::updated(&tree).filter(|_| write) {
        std::fs::write(root.join(file_map::DOCUMENT), text)?;
        tree = Tree::read(root)?;
    }
    let findings = check(&tree);
    for f in &findings {
        eprintln!("{}: {}", if f.error { "error" } else { "note" }, f.text);
    }
    let errors = findings.iter().filter(|f| f.error).count();
    if errors > 0 {
        bail!("tidy: {errors} broken rules in {} files", tree.0.len());
    }
    eprintln!("tidy: {} files follow the rules", tree.0.len());
    Ok(())
}

/// All checks.
pub fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for check in [
        edges,
        headers,
        kernels,
        environment,
        connections,
        stderr,
        unsafe_code,
        lengths,
        names,
        dead_files,
        leftovers,
        machine_paths,
        documents,
        links,
    ] {
        findings.extend(check(tree));
    }
    findings
}

/// Cargo.toml files follow [`EDGES`] and [`LIMITED`].
fn edges(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.0.iter().filter(|f| f.path.ends_with("/Cargo.toml")) {
        let krate = file.krate().unwrap_or_else(|| file.path.split('/').next().unwrap_or_default());
        let manifest: toml::Table = match file.text.parse() {
            Ok(manifest) => manifest,
            Err(e) => {
                findings.push(error(format!("{}: {e}", file.path)));
                continue;
            }
        };
        let Some((_, allowed)) = EDGES.iter().find(|(name, _)| *name == krate) else {
            if file.krate().is_some() {
                findings.push(error(format!(
                    "{}: an eighth crate: give it a line in EDGES and in ARCHITECTURE.md",
                    file.path
                )));
            }
            continue;
        };
        for (section, allowed) in [
            ("dependencies", allowed.to_vec()),
            ("build-dependencies", vec![]),
            ("dev-dependencies", below(krate)),
        ] {
            for dependency in dependencies(&manifest, section) {
                let ours = dependency.strip_prefix("lily-");
                if ours.is_some_and(|name| !allowed.contains(&name)) {
                    findings.push(error(format!(
                        "{}: {krate} may not use {dependency} ({section}); it may use: {}",
                        file.path,
                        if allowed.is_empty() {
                            "no crate of ours".into()
                        } else {
                            allowed.join(", ")
                        }
                    )));
                }
                let limited = LIMITED.iter().find(|(name, _)| *name == dependency);
                if section == "dependencies"
                    && limited.is_some_and(|(_, who)| !who.contains(&krate))
                {
                    findings
                        .push(error(format!("{}: {krate} may not use {dependency}", file.path)));
                }
            }
        }
    }
    findings
}

/// The names in one section of a manifest, also under `[target.*]`.
fn dependencies(manifest: &toml::Table, section: &str) -> Vec<String> {
    let targets = manifest.get("target").and_then(|t| t.as_table());
    let tables = targets.into_iter().flat_map(|t| t.values()).filter_map(|t| t.as_table());
    std::iter::once(manifest)
        .chain(tables)
        .filter_map(|table| table.get(section)?.as_table())
        .flat_map(|table| table.keys().cloned())
        .collect()
}

/// Every crate of ours that `krate` stands on, directly or not.
fn below(krate: &str) -> Vec<&'static str> {
    let mut found = BTreeSet::new();
    let mut next = vec![krate.to_owned()];
    while let Some(name) = next.pop() {
        for used in EDGES.iter().filter(|(k, _)| *k == name).flat_map(|(_, used)| *used) {
            if found.insert(*used) {
                next.push((*used).to_owned());
            }
        }
    }
    found.into_iter().collect()
}

/// Each file opens by saying what it is.
fn headers(tree: &Tree) -> Vec<Finding> {
    let says = |file: &File| {
        let first =
            file.text.lines().find(|l| !l.starts_with("#!") || l.starts_with("#![")).unwrap_or("");
        match file.path.rsplit('.').next() {
            Some("rs") => first.starts_with("//! ") && first.len() > 10,
            Some("py") => first.starts_with("\"\"\"") && first.len() > 10,
            Some("metal" | "h") => first.starts_with("// "),
            _ => true,
        }
    };
    (tree.0.iter().filter(|f| !says(f)))
        .map(|f| error(format!("{}: its first line does not say what it is (`//! ...`)", f.path)))
        .collect()
}

/// The rows of `ops.rs`: (`RmsNorm`, `rms_norm`).
fn rows(ops: &str) -> Vec<(&str, &str)> {
    let table = ops.split_once("\nops! {").map_or("", |(_, rest)| rest);
    let table = table.split_once("\n}").map_or(table, |(table, _)| table);
    (table.lines())
        .filter_map(|line| {
            let row = line.strip_prefix("    ")?;
            if !row.starts_with(|c: char| c.is_ascii_uppercase()) {
                return None;
            }
            row.split_once('(')?.0.trim().split_once(' ')
        })
        .collect()
}

/// Every row of the table runs on the CPU and has a test of its name; GPU kernels are the rows.
fn kernels(tree: &Tree) -> Vec<Finding> {
    let Some(ops) = tree.get("crates/device/src/ops.rs") else {
        return vec![error("crates/device/src/ops.rs: the table of operations is gone")];
    };
    let device: Vec<&File> = tree.rust().filter(|f| f.krate() == Some("device")).collect();
    if !device.iter().any(|f| f.path.contains("/cpu")) {
        return vec![];
    }
    let mut findings = Vec::new();
    let rows = rows(&ops.text);
    if rows.is_empty() {
        findings.push(error(format!("{}: no rows found in `ops! {{`", ops.path)));
    }
    for (op, kernel) in &rows {
        let handled = (device.iter().filter(|f| f.path.contains("/cpu")))
            .any(|f| f.text.contains(&format!("Op::{op}(")));
        if !handled {
            findings.push(error(format!("{}: no device under cpu/ runs Op::{op}", ops.path)));
        }
        let tested = device.iter().any(|f| {
            let mut test = false;
            f.text.lines().any(|line| {
                let line = line.trim();
                let found = test && line.strip_prefix("fn ").is_some_and(|l| l.starts_with(kernel));
                test = line == "#[test]" || (test && line.starts_with("#["));
                found
            })
        });
        if !tested {
            findings.push(error(format!(
                "{}: {kernel} has no test: name one `fn {kernel}...` in the device crate",
                ops.path
            )));
        }
    }
    for file in tree.0.iter().filter(|f| f.path.ends_with(".metal")) {
        let kernel = file.name().trim_end_matches(".metal");
        if !rows.iter().any(|(_, name)| *name == kernel) {
            findings.push(error(format!("{}: no row of ops.rs is called {kernel}", file.path)));
        }
    }
    findings
}

/// Settings are flags: only the binary reads the environment.
fn environment(tree: &Tree) -> Vec<Finding> {
    each_line(tree, |file, line| {
        let reads = ["env::var", "env::vars", "var_os("].iter().any(|call| line.contains(call));
        (reads && !matches!(file.krate(), Some("lily") | None))
            .then(|| "reads the environment; take a parameter that the binary fills".into())
    })
}

/// One file can connect to the outside; everything else only listens.
fn connections(tree: &Tree) -> Vec<Finding> {
    each_line(tree, |file, line| {
        let connects =
            ["ureq", "TcpStream::connect", "UdpSocket", "hyper::client", "ToSocketAddrs"]
                .iter()
                .any(|word| line.contains(word));
        (connects && !file.path.starts_with(CONNECTING) && file.krate().is_some())
            .then(|| "opens a connection; only `lily pull` may".into())
    })
}

/// Commands do not panic because nobody reads stderr.
fn stderr(tree: &Tree) -> Vec<Finding> {
    each_line(tree, |file, line| {
        let prints = line.contains("eprint") && file.path != "crates/lily/src/say.rs";
        (prints && file.krate() == Some("lily"))
            .then(|| "panics where stderr is closed or full; use say!".into())
    })
}

/// `unsafe` stands where [`UNSAFE`] says, and each crate says so to the compiler.
fn unsafe_code(tree: &Tree) -> Vec<Finding> {
    let mut findings = each_line(tree, |file, line| {
        let is_word = |w: &str| w == "unsafe";
        let found = line.split(|c: char| !c.is_alphanumeric() && c != '_').any(is_word);
        let allowed = UNSAFE.iter().any(|place| file.path.starts_with(place));
        let literal = line.contains('"');
        (found && !allowed && !literal)
            .then(|| format!("unsafe code; it may stand in {}", UNSAFE.join(", ")))
    });
    for file in tree.rust() {
        let root = file.path.ends_with("/src/lib.rs") || file.path.ends_with("/src/main.rs");
        let (forbid, deny) = ("#![forbid(unsafe_code)]", "#![deny(unsafe_code)]");
        let says = match file.krate() {
            Some("device") => true,
            Some("checkpoint") => file.text.contains(deny),
            _ => file.text.contains(forbid),
        };
        if root && !file.path.starts_with("fuzz/") && !says {
            findings.push(error(format!("{}: add {forbid}", file.path)));
        }
    }
    findings
}

/// Files a reader can take in.
fn lengths(tree: &Tree) -> Vec<Finding> {
    let source =
        |f: &&File| ["rs", "py", "metal", "h"].iter().any(|e| f.name().ends_with(&format!(".{e}")));
    (tree.0.iter().filter(source))
        .filter_map(|f| {
            let lines = f.text.lines().count();
            let text = format!("{}: {lines} lines; split it by what a reader looks for", f.path);
            (lines > LONG).then_some(Finding { error: lines > TOO_LONG, text })
        })
        .collect()
}

/// Names that mean something.
fn names(tree: &Tree) -> Vec<Finding> {
    (tree.rust())
        .filter(|f| {
            let stem = f.name().trim_end_matches(".rs");
            EMPTY_NAMES.contains(&stem) || ["_v2", "_new", "_old"].iter().any(|s| stem.ends_with(s))
        })
        .map(|f| error(format!("{}: name it after what it does", f.path)))
        .collect()
}

/// Every file is part of the program.
fn dead_files(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust().filter(|f| f.path.contains("/src/") && !f.path.contains("/src/bin/")) {
        let stem = file.name().trim_end_matches(".rs");
        if ["lib", "main"].contains(&stem) {
            continue;
        }
        let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
        let (module, above) = match stem {
            "mod" => {
                let (above, name) = folder.rsplit_once('/').unwrap_or(("", folder));
                (name, above.to_owned())
            }
            _ => (stem, folder.to_owned()),
        };
        let named = |f: &File| {
            let declares = format!("mod {module};");
            let by_path = format!("\"{}\"", file.name());
            f.text.lines().any(|l| {
                l.trim_start().starts_with(&declares)
                    || l.split_once(&declares)
                        .is_some_and(|(before, _)| before.trim_start().starts_with("pub"))
                    || (l.contains("#[path") && l.contains(&by_path))
            })
        };
        // The parent: lib.rs, main.rs or mod.rs beside it, or the file named after the folder.
        let parent = |f: &&File| {
            f.path.rsplit_once('/').is_some_and(|(dir, _)| dir == above)
                || f.path == format!("{above}.rs")
        };
        if !tree.rust().filter(parent).any(named) {
            findings.push(error(format!("{}: no `mod {module};` names it: dead file", file.path)));
        }
    }
    findings
}

/// Nothing unfinished is called done.
fn leftovers(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust() {
        for (i, line) in file.text.lines().enumerate() {
            let found = LEFTOVERS.iter().find(|word| line.contains(*word));
            let word = match found {
                Some(word) => word,
                None if line.contains("TODO") && !line.contains("TODO(#") => {
                    &"TODO without an issue, as in TODO(#12)"
                }
                None => continue,
            };
            // This file lists the words.
            if !file.path.starts_with("xtask/src/tidy") {
                findings.push(error(format!("{}:{}: {word}", file.path, i + 1)));
            }
        }
    }
    findings
}

/// The project knows no machine but the reader's.
fn machine_paths(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.0.iter().filter(|f| !f.path.starts_with("xtask/src/tidy")) {
        for (i, line) in file.text.lines().enumerate() {
            if let Some(path) = MACHINE_PATHS.iter().find(|path| line.contains(*path)) {
                findings.push(error(format!(
                    "{}:{}: a path of one machine: {path}",
                    file.path,
                    i + 1
                )));
            }
        }
    }
    findings
}

/// ARCHITECTURE.md has the file map as the files give it, and names no file that is not there.
fn documents(tree: &Tree) -> Vec<Finding> {
    let Some(document) = tree.get(file_map::DOCUMENT) else { return vec![] };
    let mut findings = Vec::new();
    if file_map::updated(tree).is_some_and(|text| text != document.text) {
        findings.push(error(format!(
            "{}: its file map is not what the files say; `cargo xtask tidy --write` makes it anew",
            document.path
        )));
    }
    let word = |c: char| c.is_alphanumeric() || "._-/".contains(c);
    let words: BTreeSet<&str> = (document.text.split(|c: char| !word(c)))
        .map(|w| w.rsplit('/').next().unwrap_or(w))
        .filter(|w| w.ends_with(".rs") || w.ends_with(".metal"))
        .collect();
    let there = |w: &str| tree.0.iter().any(|f| f.name() == w);
    let missing = words.iter().filter(|w| !there(w));
    findings.extend(missing.map(|w| error(format!("{}: there is no {w}", document.path))));
    findings
}

/// Links between documents lead somewhere.
fn links(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.0.iter().filter(|f| f.path.ends_with(".md")) {
        for target in file.text.split("](").skip(1).filter_map(|rest| rest.split(')').next()) {
            let target = target.split('#').next().unwrap_or_default();
            if target.is_empty() || target.contains(':') || !target.ends_with(".md") {
                continue;
            }
            let folder = file.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            let mut path: Vec<&str> = folder.split('/').filter(|p| !p.is_empty()).collect();
            for part in target.split('/') {
                match part {
                    ".." => _ = path.pop(),
                    "." => {}
                    _ => path.push(part),
                }
            }
            if tree.get(&path.join("/")).is_none() {
                findings.push(error(format!("{}: dead link to {target}", file.path)));
            }
        }
    }
    findings
}

/// Findings about lines of code that ship.
fn each_line(tree: &Tree, check: impl Fn(&File, &str) -> Option<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for file in tree.rust().filter(|f| !f.path.starts_with("xtask/")) {
        for (number, line) in file.code() {
            if let Some(text) = check(file, line) {
                findings.push(error(format!("{}:{number}: {text}", file.path)));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests;
