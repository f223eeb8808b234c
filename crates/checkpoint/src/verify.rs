//! A checkpoint held against the table of tensors: all that differs, at once and in a user's
//! words, and what the checkpoint is where it is not ours.
//!
//! [`verify`] is the command's; opening a checkpoint makes the same comparison without looking at
//! values or checksums.

use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

use crate::config::{self, Config};
use crate::error::shown;
use crate::grouped::Grouped;
use crate::recognise::recognise;
use crate::safetensors::Described;
use crate::shards::{Found, Shards, hex, is_there, names_in, read_json};
use crate::tensors::{Dtype, is_skipped, table};

/// The repository that `lily pull` fetches.
pub const REPOSITORY: &str = "mlx-community/Qwen3.6-35B-A3B-4bit";
/// The revision of [`REPOSITORY`] that `lily pull` fetches.
pub const REVISION: &str = "38740b847e4cb78f352aba30aa41c76e08e6eb46";

/// A file of the published checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct PublishedFile {
    /// Its name.
    pub name: &'static str,
    /// Its size.
    pub bytes: u64,
    /// SHA-256 of all of it, in hex.
    pub sha256: &'static str,
}

/// The shards of [`REPOSITORY`] at [`REVISION`].
pub const PUBLISHED: [PublishedFile; 4] = [
    PublishedFile {
        name: "model-00001-of-00004.safetensors",
        bytes: 5_288_196_018,
        sha256: "09f3e6ecb0b7af6e6a38bc8169a134c821b0924c2679b2bb8f4426ad38d032b8",
    },
    PublishedFile {
        name: "model-00002-of-00004.safetensors",
        bytes: 5_368_472_749,
        sha256: "31dcdb1c49eebdb1505bd14e3cb33f9cf900bd2546b638f2464694ae763a033f",
    },
    PublishedFile {
        name: "model-00003-of-00004.safetensors",
        bytes: 5_368_324_139,
        sha256: "3e66de06a1f03dade16a612a368cfce4a4c9caa4efd7d28185454384082cec03",
    },
    PublishedFile {
        name: "model-00004-of-00004.safetensors",
        bytes: 4_377_211_365,
        sha256: "a5d0cf03519c26f8b506df6b0ba60526e5c08c8cea22d0c21ce92950e58a5422",
    },
];

/// Lines of one section of a report; the rest is counted.
const MOST_LINES: usize = 24;

/// Bytes that are read at once where files are read through.
const CHUNK: usize = 1 << 20;

/// What [`verify`] looks at beside names, dtypes, shapes and sizes.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Accept other sizes than Qwen3.6-35B-A3B's.
    pub any_size: bool,
    /// Read the scales, biases and other bf16 tensors (2.2 GB of the full model's 19.5), and report
    /// NaN and infinity.
    pub values: bool,
    /// Read every byte, and compare the files with the published SHA-256; where they lie in a hub
    /// cache, also with the checksums that the cache gives them as names.
    pub checksums: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { any_size: false, values: true, checksums: false }
    }
}

/// How far [`verify`] is with the part that takes time.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// `values` or `checksums`.
    pub part: &'a str,
    /// The file or tensor that is being read.
    pub name: &'a str,
    /// Bytes read so far in this part.
    pub done: u64,
    /// Bytes that this part will read.
    pub total: u64,
}

/// What a comparison of a checkpoint with the table found. `Display` shows it to a user.
#[derive(Debug)]
pub struct Report {
    dir: PathBuf,
    /// What the checkpoint is where it is not ours.
    kind: Option<String>,
    sections: Vec<Section>,
    /// What is worth saying of a checkpoint that is fine.
    notes: Vec<String>,
}

/// Differences of one kind.
#[derive(Debug)]
struct Section {
    title: String,
    lines: Vec<String>,
}

impl Report {
    fn new(dir: &Path) -> Report {
        Report { dir: dir.into(), kind: None, sections: Vec::new(), notes: Vec::new() }
    }

    /// Whether Lily can run the checkpoint and nothing that was looked at is wrong with it.
    pub fn ok(&self) -> bool {
        self.sections.is_empty()
    }

    /// What the checkpoint is, as a noun phrase ("an AWQ checkpoint"), where it was recognised as
    /// another kind than Lily runs.
    pub fn kind(&self) -> Option<&str> {
        self.kind.as_deref()
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
            write!(f, "{dir}: good")?;
        } else {
            write!(f, "{dir}: Lily cannot run this checkpoint")?;
        }
        if let Some(kind) = &self.kind {
            write!(
                f,
                "\n  It is {kind}. Lily runs MLX affine 4-bit, group {}: get it with `lily pull`.",
                config::GROUP
            )?;
        }
        for section in &self.sections {
            write!(f, "\n{}:", section.title)?;
            for line in &section.lines {
                write!(f, "\n  {line}")?;
            }
        }
        for note in &self.notes {
            write!(f, "\n  {note}")?;
        }
        Ok(())
    }
}

/// Compares the checkpoint in the folder `dir` with all that is known of it, and reports every
/// difference. `progress` is called about once a mebibyte while values or checksums are read.
pub fn verify(dir: &Path, options: Options, progress: &mut dyn FnMut(Progress)) -> Report {
    verify_against(&PUBLISHED, dir, options, progress)
}

fn verify_against(
    published: &[PublishedFile],
    dir: &Path,
    options: Options,
    progress: &mut dyn FnMut(Progress),
) -> Report {
    let (mut report, opened) = examine(dir, options.any_size);
    // Values and checksums of files whose layout is wrong would say nothing more.
    let Some((config, shards)) = opened.filter(|_| report.ok()) else {
        return report;
    };
    if options.values {
        check_values(&config, &shards, &mut report, progress);
    }
    let sums = options.checksums.then(|| checksums(published, dir, &shards, progress));
    let sizes = sizes(&config);
    report.notes.push(if sizes.is_empty() {
        whose_weights(published, &shards, sums.as_ref())
    } else {
        format!("Not Qwen3.6-35B-A3B, but a model with its layers: {}.", sizes.join("; "))
    });
    if let Some(sums) = sums {
        if sums.cached > 0 {
            report.notes.push(format!(
                "{} of {} files have the checksum under which the hub's cache keeps them.",
                sums.cached, sums.files
            ));
        } else if sums.published == 0 {
            report.notes.push("No checksums are known for its files.".into());
        }
        report.add("checksums", sums.damaged);
    }
    if !report.ok() {
        report.notes.clear();
    }
    report
}

/// Reads config, index and headers in `dir` and compares them with the table.
pub(crate) fn examine(dir: &Path, any_size: bool) -> (Report, Option<(Config, Shards)>) {
    let mut report = Report::new(dir);
    let files = match names_in(dir) {
        Ok(files) => files,
        Err(problem) => {
            report.kind = kind_of_file(dir);
            report.add("directory", vec![problem]);
            return (report, None);
        }
    };
    let object = read_config(dir);
    let (config, problems) = match &object {
        Ok(object) => config::read(object),
        Err(problem) => (None, vec![problem.clone()]),
    };
    report.add("config.json", problems);
    let Found { shards, problems, lost } = Shards::find(dir);
    report.add("files", problems);
    if let Some(config) = &config {
        if !any_size {
            let title = "sizes other than Qwen3.6-35B-A3B's (--any-size accepts them)";
            report.add(title, sizes(config));
        }
        // Where no file could be opened there is nothing to compare.
        if shards.entries().next().is_some() {
            compare_tensors(config, &shards, &lost, &mut report);
        }
    }
    if !report.ok() {
        report.kind = recognise(object.as_ref().ok(), &files, &shards);
    }
    (report, config.map(|config| (config, shards)))
}

/// Compares the tensors of `shards` with the table of `config`.
pub(crate) fn compare(config: &Config, shards: &Shards) -> Report {
    let mut report = Report::new(shards.dir().unwrap_or(Path::new("embedded")));
    compare_tensors(config, shards, &[], &mut report);
    report
}

/// What a path is that was given in place of a folder.
fn kind_of_file(path: &Path) -> Option<String> {
    if !path.is_file() {
        return None;
    }
    let mut start = [0; 4];
    File::open(path).and_then(|mut file| file.read_exact(&mut start)).ok()?;
    (&start == b"GGUF").then(|| "a GGUF file".into())
}

fn read_config(dir: &Path) -> Result<Map<String, Value>, String> {
    let path = dir.join("config.json");
    if !is_there(&path) {
        return Err(match names_in(&dir.join("snapshots")).as_deref() {
            Ok([.., last]) => format!(
                "missing; this is a model's folder in the hub's cache, give the directory \
                 snapshots/{} in it",
                shown(last)
            ),
            _ => "missing; a checkpoint is a directory with config.json in it, and `lily pull` \
                  fetches one"
                .into(),
        });
    }
    read_json(&path).and_then(|text| config::parse(&text))
}

fn sizes(config: &Config) -> Vec<String> {
    let line = |(name, here, full)| format!("{name} is {here}, Qwen3.6-35B-A3B has {full}");
    config.other_sizes().into_iter().map(line).collect()
}

fn compare_tensors(config: &Config, shards: &Shards, lost: &[String], report: &mut Report) {
    let lost: HashSet<&str> = lost.iter().map(String::as_str).collect();
    let table = table(config);
    let (mut missing, mut wrong, mut unexpected) =
        (Grouped::default(), Grouped::default(), Grouped::default());
    for tensor in &table {
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
    let known: HashSet<&str> = table.iter().map(|tensor| tensor.name.as_str()).collect();
    let mut others: Vec<&str> = shards.entries().map(|entry| entry.name.as_str()).collect();
    others.retain(|name| !is_skipped(name) && !known.contains(name));
    others.sort_unstable();
    for name in others {
        unexpected.add(name, "", "");
    }
    report.add_grouped("tensors of another dtype or shape", &wrong);
    if missing.total() == table.len() {
        report.add("missing tensors", vec![format!("all {} that this model has", table.len())]);
    } else {
        report.add_grouped("missing tensors", &missing);
    }
    report.add_grouped("tensors that this model does not have", &unexpected);
    let gigabytes = table.iter().map(|tensor| tensor.bytes()).sum::<u64>() as f64 / 1e9;
    report
        .notes
        .push(format!("{} tensors, {gigabytes:.3} GB, all as they should be.", table.len()));
    if !report.ok() {
        report.notes.clear();
    }
}

/// Reports the bf16 tensors that hold NaN or infinity.
fn check_values(
    config: &Config,
    shards: &Shards,
    report: &mut Report,
    progress: &mut dyn FnMut(Progress),
) {
    let mut table = table(config);
    table.retain(|tensor| tensor.dtype == Dtype::BF16);
    let total = table.iter().map(|tensor| tensor.bytes()).sum();
    let (mut done, mut broken, mut unread) = (0, Grouped::default(), Vec::new());
    let mut buffer = vec![0; CHUNK];
    for tensor in &table {
        let bytes = tensor.bytes();
        let mut offset = 0;
        while offset < bytes {
            let part = &mut buffer[..(bytes - offset).min(CHUNK as u64) as usize];
            progress(Progress { part: "values", name: &tensor.name, done: done + offset, total });
            if let Err(error) = shards.read(&tensor.name, offset, part) {
                unread.push(error.to_string());
                break;
            }
            if let Some(i) = finite_bf16(part) {
                let element = offset / 2 + i as u64;
                broken.add(&tensor.name, "", &format!(": first at element {element}"));
                break;
            }
            offset += part.len() as u64;
        }
        done += bytes;
    }
    report.add("files", unread);
    report.add_grouped("tensors that hold NaN or infinity", &broken);
}

/// The index of the first bf16 element (little-endian) that is NaN or infinite; none where all are
/// finite. A last odd byte is not looked at.
pub fn finite_bf16(bytes: &[u8]) -> Option<usize> {
    // All ones in the exponent, which is the low seven bits of the second byte and the top bit of
    // the first.
    bytes.as_chunks().0.iter().position(|&[low, high]| high & 0x7f == 0x7f && low & 0x80 != 0)
}

/// Whether the weights are the published ones, as far as was looked.
fn whose_weights(published: &[PublishedFile], shards: &Shards, sums: Option<&Checksums>) -> String {
    match sums {
        Some(sums) if sums.published == published.len() => {
            format!("Its files are, byte for byte, those of {REPOSITORY} at {}.", &REVISION[..8])
        }
        None if has_published_sizes(published, shards) => format!(
            "Its files have the sizes of those of {REPOSITORY} (--checksums compares every byte)."
        ),
        _ => "Its weights are not the published ones: a fine-tune, a DWQ build or another \
              conversion of the same layout. Lily runs it."
            .into(),
    }
}

/// Whether the files are named and sized as the published ones. Both lists are in the order of
/// their names.
fn has_published_sizes(published: &[PublishedFile], shards: &Shards) -> bool {
    let files = shards.source().files;
    files.len() == published.len()
        && files.iter().zip(published).all(|(f, p)| f.name == p.name && f.bytes == p.bytes)
}

/// What the checksums of all files say.
struct Checksums {
    /// How many files there are.
    files: usize,
    /// How many are published files, to the last byte.
    published: usize,
    /// How many have the checksum that the hub's cache gives them as a name.
    cached: usize,
    /// A line for each file that is not what it should be.
    damaged: Vec<String>,
}

fn checksums(
    published: &[PublishedFile],
    dir: &Path,
    shards: &Shards,
    progress: &mut dyn FnMut(Progress),
) -> Checksums {
    let files = shards.source().files;
    let total = files.iter().map(|file| file.bytes).sum();
    let comparable = has_published_sizes(published, shards);
    let mut sums = Checksums { files: files.len(), published: 0, cached: 0, damaged: Vec::new() };
    let (mut done, mut other) = (0, Vec::new());
    for (i, file) in files.iter().enumerate() {
        let path = dir.join(&file.name);
        let mut at =
            |read| progress(Progress { part: "checksums", name: &file.name, done: read, total });
        let found = match sha256(&path, done, &mut at) {
            Ok(found) => found,
            Err(error) => {
                sums.damaged.push(format!("{}: cannot be read: {error}", file.name));
                continue;
            }
        };
        done += file.bytes;
        let differs = |expected: &str| {
            format!(
                "{}: damaged: expected SHA-256 {expected}, found {found}; delete it and fetch it \
                 again",
                file.name
            )
        };
        let cached = cached_checksum(&path);
        if comparable && found == published[i].sha256 {
            sums.published += 1;
        }
        match cached {
            Some(expected) if expected == found => sums.cached += 1,
            Some(expected) => sums.damaged.push(differs(&expected)),
            None if comparable && found != published[i].sha256 => {
                other.push(differs(published[i].sha256));
            }
            None => (),
        }
    }
    // Damage strikes a file or two; where no file is a published one, these are other weights.
    if sums.published > 0 {
        sums.damaged.append(&mut other);
    }
    sums
}

/// SHA-256 of a file; `at` hears how many bytes were read, counted from `before`.
fn sha256(path: &Path, before: u64, at: &mut dyn FnMut(u64)) -> std::io::Result<String> {
    let mut file = File::open(path)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0; CHUNK];
    let mut read = before;
    loop {
        at(read);
        let bytes = file.read(&mut buffer)?;
        if bytes == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..bytes]);
        read += bytes as u64;
    }
}

/// The checksum that the hub's cache gives a large file as its name, to which the file's name in
/// the snapshot is a symlink.
fn cached_checksum(path: &Path) -> Option<String> {
    let target = path.read_link().ok()?;
    let name = target.file_name()?.to_str()?;
    let is_sha256 =
        name.len() == 64 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    is_sha256.then(|| name.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{small_config, write_checkpoint};

    /// A checkpoint of full sizes would have 20 GB: these files are published as far as the code
    /// under test is told.
    #[test]
    fn published_files_are_told_from_other_weights_and_from_damage() {
        let dir = tempfile::tempdir().unwrap();
        write_checkpoint(dir.path(), &small_config(), 3, 1).unwrap();
        let name = |i| format!("model-0000{}-of-00003.safetensors", i + 1);
        let published: Vec<PublishedFile> = (0..3)
            .map(|i| {
                let bytes = std::fs::read(dir.path().join(name(i))).unwrap();
                PublishedFile {
                    name: name(i).leak(),
                    bytes: bytes.len() as u64,
                    sha256: hex(&Sha256::digest(&bytes)).leak(),
                }
            })
            .collect();
        let look = || {
            let (_, shards) = examine(dir.path(), true).1.unwrap();
            let sums = checksums(&published, dir.path(), &shards, &mut |_| ());
            (whose_weights(&published, &shards, Some(&sums)), sums)
        };
        let (words, sums) = look();
        assert_eq!((sums.published, sums.damaged.len()), (3, 0));
        assert!(words.starts_with("Its files are, byte for byte, those of"), "{words}");

        let path = dir.path().join(name(1));
        let mut bytes = std::fs::read(&path).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&path, bytes).unwrap();
        let (_, sums) = look();
        assert_eq!((sums.published, sums.damaged.len()), (2, 1));
        let line = &sums.damaged[0];
        assert!(line.starts_with(&format!("{}: damaged: expected SHA-256", name(1))), "{line}");

        write_checkpoint(dir.path(), &small_config(), 3, 2).unwrap();
        let (words, sums) = look();
        assert_eq!((sums.published, sums.damaged.len()), (0, 0));
        assert!(words.contains("a fine-tune"), "{words}");

        std::fs::remove_file(&path).unwrap();
        assert!(examine(dir.path(), true).0.to_string().contains("missing"));
    }
}
