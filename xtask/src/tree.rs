//! The source files of the workspace as text, so that checks are functions of values and their
//! tests need no disk.

use anyhow::Context;
use std::path::Path;

/// One source file.
pub struct File {
    /// Its path from the root of the workspace, with `/` between the parts.
    pub path: String,
    /// What is in it.
    pub text: String,
}

/// All source files, in order of their paths.
pub struct Tree(pub Vec<File>);

/// What counts as source; data (weights, vectors, corpora) does not.
const EXTENSIONS: [&str; 8] = ["rs", "toml", "md", "py", "metal", "h", "jinja", "sh"];
/// Folders at the top that may hold source.
const FOLDERS: [&str; 9] =
    ["crates", "xtask", "reference", "fuzz", "bench", "eval", "demo", ".ci", ".cargo"];

impl Tree {
    /// Reads the workspace at `root`.
    pub fn read(root: &Path) -> anyhow::Result<Tree> {
        let mut files = Vec::new();
        let mut folders: Vec<_> = FOLDERS.iter().map(|f| root.join(f)).collect();
        for entry in std::fs::read_dir(root)? {
            let path = entry?.path();
            if path.is_file() {
                add(root, &path, &mut files)?;
            }
        }
        while let Some(folder) = folders.pop() {
            let Ok(entries) = std::fs::read_dir(&folder) else { continue };
            for entry in entries {
                let path = entry?.path();
                if path.is_dir() && path.file_name().is_some_and(|name| name != "target") {
                    folders.push(path);
                } else if path.is_file() {
                    add(root, &path, &mut files)?;
                }
            }
        }
        files.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(Tree(files))
    }

    /// The file at `path`, if there is one.
    pub fn get(&self, path: &str) -> Option<&File> {
        self.0.iter().find(|f| f.path == path)
    }

    /// Rust files.
    pub fn rust(&self) -> impl Iterator<Item = &File> {
        self.0.iter().filter(|f| f.path.ends_with(".rs"))
    }
}

fn add(root: &Path, path: &Path, files: &mut Vec<File>) -> anyhow::Result<()> {
    let name = path.strip_prefix(root)?.to_string_lossy().replace('\\', "/");
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    if EXTENSIONS.contains(&extension) || name.starts_with(".ci/") {
        let text = std::fs::read_to_string(path).with_context(|| format!("{name}: not text"))?;
        files.push(File { path: name, text });
    }
    Ok(())
}

impl File {
    /// The crate the file belongs to: `checkpoint` for `crates/checkpoint/src/config.rs`.
    pub fn krate(&self) -> Option<&str> {
        self.path.strip_prefix("crates/")?.split('/').next()
    }

    /// Its name without folders.
    pub fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }

    /// Whether all of it is compiled for tests alone.
    pub fn is_test(&self) -> bool {
        ["/tests/", "/benches/", "/examples/"].iter().any(|part| self.path.contains(part))
            || self.name() == "tests.rs"
            || self.name() == "testing.rs"
    }

    /// Lines of code that ship, numbered from 1: comments are blanked, and everything from a
    /// `#[cfg(test)]` on a module to the end of the file is left out (tests stand last).
    pub fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let test_module = |lines: &[&str], i: usize| {
            lines[i].trim() == "#[cfg(test)]"
                && lines[i + 1..].iter().find(|l| !l.trim().starts_with("#[")).is_some_and(|l| {
                    l.trim_start().trim_start_matches("pub ").starts_with("mod ")
                        && !l.ends_with(';')
                })
        };
        let lines: Vec<&str> = self.text.lines().collect();
        let end = if self.is_test() {
            0
        } else {
            (0..lines.len()).find(|&i| test_module(&lines, i)).unwrap_or(lines.len())
        };
        lines.into_iter().take(end).enumerate().map(|(i, line)| (i + 1, without_comment(line)))
    }
}

/// The line up to `//`, unless that stands in a string (a URL).
fn without_comment(line: &str) -> &str {
    let mut from = 0;
    while let Some(at) = line[from..].find("//").map(|at| from + at) {
        if line[..at].matches('"').count().is_multiple_of(2) {
            return &line[..at];
        }
        from = at + 2;
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_what_ships() {
        let text = "use a; // note\nlet url = \"http://x\";\n#[cfg(test)]\nmod tests {\n  env::var();\n}\n";
        let file = File { path: "crates/text/src/a.rs".into(), text: text.into() };
        let code: Vec<_> = file.code().collect();
        assert_eq!(code, [(1, "use a; "), (2, "let url = \"http://x\";")]);
        assert_eq!(file.krate(), Some("text"));
    }

    #[test]
    fn a_test_file_ships_nothing() {
        let file = File { path: "crates/text/tests/a.rs".into(), text: "fn f() {}".into() };
        assert_eq!(file.code().count(), 0);
    }
}
