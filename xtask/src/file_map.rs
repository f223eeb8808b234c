//! The file map of ARCHITECTURE.md, made from what each file says of itself in its first sentence.

use crate::tree::{File, Tree};
use std::fmt::Write;

/// The document that holds the map, and the heading it stands under.
pub const DOCUMENT: &str = "ARCHITECTURE.md";
const HEADING: &str = "\n## Files\n";

/// The document with its map as it should be; `None` where there is no document. A document
/// without the heading gets it at its end.
pub fn updated(tree: &Tree) -> Option<String> {
    let text = &tree.get(DOCUMENT)?.text;
    let (before, after) = match text.split_once(HEADING) {
        None => (text.as_str(), ""),
        Some((before, section)) => {
            (before, section.find("\n## ").map_or("", |next| &section[next..]))
        }
    };
    Some(format!("{}\n{HEADING}\n{}{after}", before.trim_end(), map(tree)))
}

/// One line a file, under the folder it lies in.
fn map(tree: &Tree) -> String {
    let listed = tree.0.iter().filter(|f| is_listed(f));
    let mut files: Vec<_> = listed.filter_map(|f| Some((f.path.rsplit_once('/')?, f))).collect();
    files.sort_by_key(|(path, _)| *path);
    let mut text = String::new();
    let mut last = "";
    for ((folder, name), file) in files {
        if folder != last {
            // Four spaces: a block of code, in which the columns stand.
            let _ = writeln!(text, "    {folder}/");
            last = folder;
        }
        let _ = writeln!(text, "      {name:<19} {}", first_sentence(&file.text));
    }
    text
}

/// Source that a reader may look for.
fn is_listed(file: &File) -> bool {
    let extension = file.name().rsplit('.').next();
    file.path.contains('/') && matches!(extension, Some("rs" | "metal" | "h" | "py"))
}

/// The first sentence of the comment that a file opens with, in one line.
fn first_sentence(text: &str) -> String {
    let lines = text.lines().filter(|line| !line.starts_with("#!") || line.starts_with("#![")).map(
        |line| {
            let line = line.trim().trim_start_matches("\"\"\"").trim_start_matches("//!");
            line.trim_start_matches("//").trim()
        },
    );
    let paragraph: Vec<&str> = lines.take_while(|line| !line.is_empty()).collect();
    let paragraph = paragraph.join(" ");
    let end = [". ", ".\"\"\""].iter().filter_map(|end| paragraph.find(end)).min();
    let sentence = &paragraph[..end.unwrap_or(paragraph.len())];
    sentence.trim_end_matches("\"\"\"").trim_end_matches('.').to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_speak_for_themselves() {
        assert_eq!(first_sentence("//! Reads\n//! replies. And more.\n"), "Reads replies");
        assert_eq!(first_sentence("#!/usr/bin/env python3\n\"\"\"The model.\"\"\"\n"), "The model");
        assert_eq!(first_sentence("// zero: y = 0\n//\n// more\n"), "zero: y = 0");
    }

    #[test]
    fn only_the_map_changes() {
        let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
        let document = "# A\n\n## Files\n\nold\n\n## B\nb\n";
        let source = file("crates/a/src/b.rs", "//! Does b.\n");
        let tree = Tree(vec![file(DOCUMENT, document), source]);
        let map = "    crates/a/src/\n      b.rs                Does b\n";
        assert_eq!(updated(&tree).unwrap(), format!("# A\n\n## Files\n\n{map}\n## B\nb\n"));
    }
}
