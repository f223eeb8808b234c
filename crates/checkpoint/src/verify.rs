//! A checkpoint held against the table of tensors: all that differs, at once and in a user's
//! words, and what the checkpoint is where it is not ours.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::path::{Path, PathBuf};

use crate::config::{self, Config};
use crate::error::shown;
use crate::grouped::Grouped;
use crate::safetensors::Described;
use crate::shards::{Found, Shards, is_there, names_in, read_json};
use crate::tensors::{Tensor, is_skipped, table};

/// Lines of one section of a report; the rest is counted.
const MOST_LINES: usize = 24;

/// What a comparison of a checkpoint with the table found. `Display` shows it to a user.
#[derive(Debug)]
pub struct Report {
    dir: PathBuf,
    sections: Vec<Section>,
    tensors: usize,
    bytes: u64,
}

/// Differences of one kind.
#[derive(Debug)]
struct Section {
    title: String,
    lines: Vec<String>,
}

impl Report {
    fn new(dir: &Path) -> Report {
        Report { dir: dir.into(), sections: Vec::new(), tensors: 0, bytes: 0 }
    }

    /// Whether Lily can run the checkpoint.
    pub fn ok(&self) -> bool {
        self.sections.is_empty()
    }

    fn add(&mut self, title: impl Into<String>, lines: Vec<String>) {
        if !lines.is_empty() {
            self.sections.push(Section { title: title.into(), lines });
        }
    }

    fn add_grouped(&mut self, title: &str, grouped: &Grouped) {
        self.add(format!("{title} ({})", grouped.total()), grouped.lines(MOST_LINES));
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let dir = self.dir.display();
        if self.ok() {
            let gigabytes = self.bytes as f64 / 1e9;
            return write!(
                f,
                "{dir}: {} tensors, {gigabytes:.2} GB: names, dtypes, shapes and sizes are right",
                self.tensors
            );
        }
        write!(f, "{dir}: not a checkpoint that Lily runs")?;
        for section in &self.sections {
            write!(f, "\n{}", section.title)?;
            for line in &section.lines {
                write!(f, "\n  {line}")?;
            }
        }
        Ok(())
    }
}

/// Reads config, index and headers in `dir` and compares them with the table.
pub(crate) fn examine(dir: &Path, any_size: bool) -> (Report, Option<(Config, Shards)>) {
    let mut report = Report::new(dir);
    if let Err(problem) = names_in(dir) {
        report.add("the directory", vec![problem]);
        return (report, None);
    }
    let (config, problems) = read_config(dir);
    report.add("config.json", problems);
    let Found { shards, problems, lost } = Shards::find(dir);
    report.add("files", problems);
    let Some(config) = config else {
        return (report, None);
    };
    if !any_size {
        report.add("sizes other than Qwen3.6-35B-A3B's (--any-size accepts them)", sizes(&config));
    }
    compare_tensors(&config, &shards, &lost, &mut report);
    (report, Some((config, shards)))
}

/// Compares the tensors of `shards` with the table of `config`.
pub(crate) fn compare(config: &Config, shards: &Shards) -> Report {
    let mut report = Report::new(shards.dir().unwrap_or(Path::new("embedded")));
    compare_tensors(config, shards, &[], &mut report);
    report
}

fn read_config(dir: &Path) -> (Option<Config>, Vec<String>) {
    let path = dir.join("config.json");
    if !is_there(&path) {
        return (None, vec!["missing; a checkpoint is a directory with config.json in it".into()]);
    }
    match read_json(&path).and_then(|text| config::parse(&text)) {
        Ok(object) => config::read(&object),
        Err(problem) => (None, vec![problem]),
    }
}

fn sizes(config: &Config) -> Vec<String> {
    let line = |(name, here, full)| format!("{name} {here} ({full})");
    config.other_sizes().into_iter().map(line).collect()
}

fn compare_tensors(config: &Config, shards: &Shards, lost: &[String], report: &mut Report) {
    let lost: HashSet<&str> = lost.iter().map(String::as_str).collect();
    let table = table(config);
    let (mut missing, mut wrong, mut unexpected) =
        (Grouped::default(), Grouped::default(), Grouped::default());
    for tensor in &table {
        report.tensors += 1;
        report.bytes += tensor.bytes();
        match shards.get(&tensor.name) {
            Some((entry, file)) => {
                let shape: Vec<u64> = tensor.shape.iter().map(|&n| n as u64).collect();
                if entry.dtype != tensor.dtype.name() || entry.shape != shape {
                    let problem = format!(
                        "expected {}, found {}",
                        Described(tensor.dtype.name(), &tensor.shape),
                        Described(&entry.dtype, &entry.shape)
                    );
                    wrong.add(&tensor.name, &problem, &format!(" in {}", shown(file)));
                }
            }
            None if lost.contains(tensor.name.as_str()) => (),
            None => missing.add(&tensor.name, "", ""),
        }
    }
    let known: HashMap<&str, &Tensor> = table.iter().map(|t| (t.name.as_str(), t)).collect();
    let mut others: Vec<&str> = shards.entries().map(|entry| entry.name.as_str()).collect();
    others.retain(|name| !is_skipped(name) && !known.contains_key(name));
    others.sort_unstable();
    for name in others {
        unexpected.add(name, "", "");
    }
    report.add_grouped("tensors of another dtype or shape", &wrong);
    report.add_grouped("missing tensors", &missing);
    report.add_grouped("tensors that this model does not have", &unexpected);
}
