//! The safetensors files of one checkpoint: found through the index, opened, and read by tensor
//! name at byte positions. It knows no model: which tensors there should be is `verify`'s matter.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::UNIX_EPOCH;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::error::{Error, Result, shown};
use crate::safetensors::{Entry, Header, Strict, header_bytes, parse_header};

/// The file that says in which shard each tensor lies.
pub const INDEX: &str = "model.safetensors.index.json";
/// The one file of a checkpoint that is not split.
pub const SINGLE: &str = "model.safetensors";

/// The largest `config.json` or index that is read, in bytes; the published ones have 24 KB and
/// 216 KB.
const MAX_JSON: u64 = 16 << 20;

/// The most shards that are opened: each holds a file open, and macOS gives a process 256.
const MAX_SHARDS: usize = 200;

/// What the bytes of a checkpoint were when it was opened: a packed copy of them is good as long
/// as this stays the same.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Source {
    /// The safetensors files, by name.
    pub files: Vec<SourceFile>,
}

/// One file of a [`Source`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceFile {
    /// Its name in the checkpoint's folder; `embedded` for the one inside the program.
    pub name: String,
    /// Its size in bytes.
    pub bytes: u64,
    /// When it was last written, in nanoseconds since 1970; 0 where that is not known.
    pub modified_ns: u64,
    /// SHA-256 of its safetensors header (without the length), in hex.
    pub header_sha256: String,
}

/// The open files of a checkpoint.
#[derive(Debug)]
pub struct Shards {
    dir: Option<PathBuf>,
    shards: Vec<Shard>,
    /// Shard and entry of each tensor.
    places: HashMap<String, (usize, usize)>,
}

#[derive(Debug)]
struct Shard {
    bytes: Bytes,
    header: Header,
    identity: SourceFile,
}

#[derive(Debug)]
enum Bytes {
    File(File),
    Embedded(&'static [u8]),
}

/// What was found in a folder: the files that are whole, and all that is wrong with the others.
#[derive(Debug)]
pub(crate) struct Found {
    pub shards: Shards,
    /// Lines in a user's words, each beginning with a file's name.
    pub problems: Vec<String>,
    /// Tensors that the index puts into a file that could not be opened; there is no use in
    /// reporting each of them as missing.
    pub lost: Vec<String>,
}

impl Shards {
    /// Opens the safetensors files of `dir` and reads their headers: those that
    /// `model.safetensors.index.json` names, else the only one there.
    ///
    /// # Errors
    /// [`Error::Files`] with every problem of every file.
    pub fn open(dir: &Path) -> Result<Shards> {
        let Found { shards, problems, .. } = Shards::find(dir);
        if problems.is_empty() {
            return Ok(shards);
        }
        Err(Error::Files { dir: dir.into(), problems })
    }

    /// A checkpoint of one safetensors file inside the program.
    ///
    /// # Errors
    /// [`Error::Files`] with every problem of its header.
    pub fn embedded(bytes: &'static [u8]) -> Result<Shards> {
        let file_bytes = bytes.len() as u64;
        let header = header_bytes(&bytes[..bytes.len().min(8)], file_bytes)
            .map_err(|problem| vec![problem])
            .and_then(|length| {
                let json = &bytes[8..8 + length];
                Ok((parse_header(json, file_bytes)?, hex(&Sha256::digest(json))))
            });
        let (header, header_sha256) =
            header.map_err(|problems| Error::Files { dir: "embedded".into(), problems })?;
        let identity = SourceFile {
            name: "embedded".into(),
            bytes: file_bytes,
            modified_ns: 0,
            header_sha256,
        };
        let mut shards = Shards { dir: None, shards: Vec::new(), places: HashMap::new() };
        shards.add(Shard { bytes: Bytes::Embedded(bytes), header, identity });
        Ok(shards)
    }

    /// Opens what can be opened in `dir` and collects the problems of the rest.
    pub(crate) fn find(dir: &Path) -> Found {
        let shards = Shards { dir: Some(dir.into()), shards: Vec::new(), places: HashMap::new() };
        let mut found = Found { shards, problems: Vec::new(), lost: Vec::new() };
        match files_of(dir) {
            Ok(Files::Indexed(index)) => found.open_indexed(dir, index),
            Ok(Files::Single(name)) => match Shard::open(dir, &name) {
                Ok(shard) => found.shards.add(shard),
                Err(problems) => found.fail(&name, problems),
            },
            Err(problem) => found.problems.push(problem),
        }
        found
    }

    fn add(&mut self, shard: Shard) {
        for (i, entry) in shard.header.entries.iter().enumerate() {
            self.places.entry(entry.name.clone()).or_insert((self.shards.len(), i));
        }
        self.shards.push(shard);
    }

    /// Every tensor of every file.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.places.values().map(|&(shard, i)| &self.shards[shard].header.entries[i])
    }

    /// The tensor `name`, and the file in which it lies.
    pub fn get(&self, name: &str) -> Option<(&Entry, &str)> {
        let &(shard, i) = self.places.get(name)?;
        let shard = &self.shards[shard];
        Some((&shard.header.entries[i], &shard.identity.name))
    }

    /// Fills `out` with the bytes of tensor `name` from `offset` on. Nothing is mapped or kept.
    ///
    /// # Errors
    /// [`Error::Read`] where the file cannot be read, or was cut since it was opened.
    ///
    /// # Panics
    /// Where there is no such tensor, or it has no such bytes.
    pub fn read(&self, name: &str, offset: u64, out: &mut [u8]) -> Result<()> {
        let &(shard, i) = self.places.get(name).unwrap_or_else(|| panic!("no tensor {name}"));
        let shard = &self.shards[shard];
        let Entry { range, .. } = &shard.header.entries[i];
        let bytes = range.end - range.start;
        assert!(
            offset.checked_add(out.len() as u64).is_some_and(|end| end <= bytes),
            "{name} has {bytes} bytes, asked for {} from {offset}",
            out.len()
        );
        let start = shard.header.data_start + range.start + offset;
        match &shard.bytes {
            Bytes::Embedded(bytes) => {
                out.copy_from_slice(&bytes[start as usize..start as usize + out.len()]);
                Ok(())
            }
            Bytes::File(file) => file.read_exact_at(out, start).map_err(|error| Error::Read {
                file: shard.identity.name.clone(),
                name: name.into(),
                what: match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => {
                        "the file became shorter since it was opened".into()
                    }
                    _ => error.to_string(),
                },
            }),
        }
    }

    /// The identity of the bytes that were opened, files by name.
    pub fn source(&self) -> Source {
        let mut files: Vec<_> = self.shards.iter().map(|shard| shard.identity.clone()).collect();
        files.sort_by(|a, b| a.name.cmp(&b.name));
        Source { files }
    }

    /// The folder; none for the embedded one.
    pub fn dir(&self) -> Option<&Path> {
        self.dir.as_deref()
    }
}

impl Found {
    fn fail(&mut self, file: &str, problems: Vec<String>) {
        self.problems.extend(problems.into_iter().map(|problem| format!("{file}: {problem}")));
    }

    /// Opens the files of an index, and holds the index against their headers.
    fn open_indexed(&mut self, dir: &Path, index: Index) {
        let mut names_of: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for (name, file) in &index.weight_map {
            names_of.entry(file).or_default().push(name);
        }
        for (&file, names) in &names_of {
            match Shard::open(dir, file) {
                Ok(shard) => {
                    let there: std::collections::HashSet<_> =
                        shard.header.entries.iter().map(|entry| entry.name.as_str()).collect();
                    let absent: Vec<_> =
                        names.iter().copied().filter(|name| !there.contains(name)).collect();
                    if let Some(first) = absent.first() {
                        self.problems.push(format!(
                            "{INDEX}: puts {}{} into {file}, where there is no such tensor",
                            shown(first),
                            and_others(absent.len() - 1)
                        ));
                    }
                    self.lost.extend(absent.into_iter().map(String::from));
                    self.shards.add(shard);
                }
                Err(problems) => {
                    self.fail(file, problems);
                    self.lost.extend(names.iter().map(|&name| name.into()));
                }
            }
        }
        let index: HashMap<_, _> = index.weight_map.into_iter().collect();
        let mut unnamed = Vec::new();
        for (s, shard) in self.shards.shards.iter().enumerate() {
            for (i, entry) in shard.header.entries.iter().enumerate() {
                match index.get(&entry.name) {
                    // Of two tensors of one name the index picks one.
                    Some(file) if *file == shard.identity.name => {
                        self.shards.places.insert(entry.name.clone(), (s, i));
                    }
                    Some(_) => (),
                    None => unnamed.push((&entry.name, &shard.identity.name)),
                }
            }
        }
        if let Some((name, file)) = unnamed.first() {
            self.problems.push(format!(
                "{INDEX}: does not name {}{}, which {file} holds",
                shown(name),
                and_others(unnamed.len() - 1)
            ));
        }
    }
}

/// ` and 3 others`, or nothing.
fn and_others(count: usize) -> String {
    match count {
        0 => String::new(),
        1 => " and one other".into(),
        _ => format!(" and {count} others"),
    }
}

impl Shard {
    fn open(dir: &Path, name: &str) -> std::result::Result<Shard, Vec<String>> {
        let (file, metadata) = open_file(&dir.join(name)).map_err(|problem| vec![problem])?;
        let unreadable = |error: std::io::Error| vec![format!("cannot be read: {error}")];
        let mut start = [0; 8];
        let start = &mut start[..metadata.len().min(8) as usize];
        file.read_exact_at(start, 0).map_err(unreadable)?;
        let length = header_bytes(start, metadata.len()).map_err(|problem| vec![problem])?;
        let mut json = vec![0; length];
        file.read_exact_at(&mut json, 8).map_err(unreadable)?;
        let header = parse_header(&json, metadata.len())?;
        let modified = metadata.modified().ok().and_then(|t| t.duration_since(UNIX_EPOCH).ok());
        let identity = SourceFile {
            name: name.into(),
            bytes: metadata.len(),
            modified_ns: modified.map_or(0, |since| since.as_nanos() as u64),
            header_sha256: hex(&Sha256::digest(&json)),
        };
        Ok(Shard { bytes: Bytes::File(file), header, identity })
    }
}

/// Which files make the checkpoint.
enum Files {
    Indexed(Index),
    Single(String),
}

fn files_of(dir: &Path) -> std::result::Result<Files, String> {
    if is_there(&dir.join(INDEX)) {
        let text = read_json(&dir.join(INDEX)).map_err(|problem| format!("{INDEX}: {problem}"))?;
        let index = parse_index(&text).map_err(|problem| format!("{INDEX}: {problem}"))?;
        return Ok(Files::Indexed(index));
    }
    if is_there(&dir.join(SINGLE)) {
        return Ok(Files::Single(SINGLE.into()));
    }
    let mut names: Vec<_> = names_in(dir)?;
    names.retain(|name| name.ends_with(".safetensors"));
    match names.len() {
        0 => Err("no .safetensors file".into()),
        1 => Ok(Files::Single(names.remove(0))),
        n => Err(format!(
            "{INDEX}: missing, and there are {n} .safetensors files; fetch it from where they came"
        )),
    }
}

/// The names in a folder, sorted; those that are not UTF-8 are none of ours.
pub(crate) fn names_in(dir: &Path) -> std::result::Result<Vec<String>, String> {
    let read = || -> std::io::Result<Vec<String>> {
        fs::read_dir(dir)?
            .filter_map(|entry| entry.map(|entry| entry.file_name().into_string().ok()).transpose())
            .collect()
    };
    let mut names = read().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            "no such directory; `lily pull` fetches a checkpoint".to_string()
        }
        std::io::ErrorKind::NotADirectory => "a file, expected a directory".to_string(),
        _ => error.to_string(),
    })?;
    names.sort();
    Ok(names)
}

/// The index of a checkpoint in several files.
#[derive(Debug, PartialEq, Eq)]
pub struct Index {
    /// Tensor name and file name, in the order of the file.
    pub weight_map: Vec<(String, String)>,
}

/// Reads `model.safetensors.index.json`. Its `metadata` is not used.
///
/// # Errors
/// In a user's words: no JSON, two entries of one name, no entries, too many files, or a file name
/// that leads out of the folder.
pub fn parse_index(text: &str) -> std::result::Result<Index, String> {
    #[derive(Deserialize)]
    struct Raw {
        weight_map: Strict<String>,
    }
    if text.trim().is_empty() {
        return Err("the file is empty".into());
    }
    let raw: Raw = serde_json::from_str(text)
        .map_err(|error| format!("not a safetensors index: {}", shown(&error.to_string())))?;
    let weight_map = raw.weight_map.0;
    if weight_map.is_empty() {
        return Err("its weight_map is empty".into());
    }
    let mut files: Vec<_> = weight_map.iter().map(|(_, file)| file.as_str()).collect();
    files.sort_unstable();
    files.dedup();
    if files.len() > MAX_SHARDS {
        return Err(format!("names {} files, at most {MAX_SHARDS} are opened", files.len()));
    }
    for file in files {
        let plain = !file.contains(['/', '\\', '\0']) && file.ends_with(".safetensors");
        if !plain {
            return Err(format!(
                "names the file {}, expected a .safetensors file in the same directory",
                shown(file)
            ));
        }
    }
    Ok(Index { weight_map })
}

/// The text of a small JSON file, or why it cannot be read.
pub(crate) fn read_json(path: &Path) -> std::result::Result<String, String> {
    let (file, metadata) = open_file(path)?;
    if metadata.len() > MAX_JSON {
        return Err(format!("has {} bytes, at most {MAX_JSON} are read", metadata.len()));
    }
    let mut bytes = vec![0; metadata.len() as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|error| format!("cannot be read: {error}"))?;
    String::from_utf8(bytes).map_err(|_| "is not UTF-8 text".into())
}

/// Whether there is an entry of this name, be it a symlink that leads nowhere.
pub(crate) fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
}

/// Opens a regular file for reading, through symlinks. Nothing else is opened: a pipe would wait,
/// a device has no end.
fn open_file(path: &Path) -> std::result::Result<(File, fs::Metadata), String> {
    let metadata = fs::metadata(path).map_err(|error| {
        let target = fs::read_link(path);
        match (error.kind(), target) {
            (std::io::ErrorKind::NotFound, Ok(target)) => format!(
                "a symlink to {}, which does not exist (an interrupted or cleaned-up download?); \
                 fetch it again",
                target.display()
            ),
            (_, Ok(target)) => {
                format!("a symlink to {}, which cannot be followed: {error}", target.display())
            }
            (std::io::ErrorKind::NotFound, Err(_)) => "missing; fetch it again".into(),
            _ => format!("cannot be read: {error}"),
        }
    })?;
    if !metadata.is_file() {
        let what = if metadata.is_dir() { "a directory" } else { "not a regular file" };
        return Err(format!("{what}, expected a file"));
    }
    let file = File::open(path).map_err(|error| format!("cannot be opened: {error}"))?;
    // Of the file that is open, should it have been replaced in between.
    let metadata = file.metadata().map_err(|error| format!("cannot be read: {error}"))?;
    Ok((file, metadata))
}

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
