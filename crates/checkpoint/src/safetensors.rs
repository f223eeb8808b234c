//! The safetensors container: the header of one file, read and written. It knows bytes only; which
//! files make a checkpoint is `shards`' matter.
//!
//! A file is the header's length (u64, little-endian), the header (JSON: name to dtype, shape and
//! byte range), and the data. Nothing is aligned: the data of the published shards begins at odd
//! bytes.
//!
//! The `safetensors` crate reads the same format; it is not used here because it takes the last of
//! two tensors with one name without a word, stops at the first fault and names it tersely, refuses
//! a header with a dtype it does not know (where a user should hear that the file is FP8), and
//! hands out slices of a buffer that holds the file, where the packer must read parts.

use std::collections::HashSet;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Range;

use serde::de::{Deserialize, Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};

use crate::error::shown;

/// The longest header that is read, in bytes. The published checkpoint's are below 90 KB; with
/// every expert a tensor of its own they would be 4 MB.
pub const MAX_HEADER: u64 = 16 << 20;

/// Problems of one file that are kept; the rest is counted.
const MOST_PROBLEMS: usize = 16;

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// As in the header.
    pub name: String,
    /// As in the header: `U32`, `BF16`, `F8_E4M3` and so on.
    pub dtype: String,
    /// Row-major.
    pub shape: Vec<u64>,
    /// Where its bytes lie, from the start of the file's data section.
    pub range: Range<u64>,
}

/// What a file holds. All entries lie within the file, do not overlap, and have the size that
/// their dtype and shape say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// In the order of the header.
    pub entries: Vec<Entry>,
    /// Where the data section starts in the file.
    pub data_start: u64,
}

/// The length of the header, from the first bytes of a file (8, or all of a shorter one).
///
/// # Errors
/// In words for a user, where a file of `file_bytes` cannot hold such a header. A file of another
/// format is named where its first bytes tell.
pub fn header_bytes(start: &[u8], file_bytes: u64) -> Result<usize, String> {
    if file_bytes == 0 {
        return Err("the file is empty (0 bytes); fetch it again".into());
    }
    if let Some(other) = other_format(start) {
        return Err(other.into());
    }
    let length = start.first_chunk().map(|&bytes| u64::from_le_bytes(bytes));
    let (Some(length), Some(after)) = (length, file_bytes.checked_sub(8)) else {
        return Err(format!("not a safetensors file: it has only {file_bytes} bytes"));
    };
    if length > MAX_HEADER {
        return Err(format!(
            "not a safetensors file, or damaged: its header would have {length} bytes, at most \
             {MAX_HEADER} are read"
        ));
    }
    if length > after {
        return Err(format!(
            "truncated: the header alone has {length} bytes, the file {file_bytes}; fetch it again"
        ));
    }
    Ok(length as usize)
}

/// What a file is whose first bytes are those of a format that users meet in place of safetensors.
fn other_format(start: &[u8]) -> Option<&'static str> {
    let formats: [(&[u8], &str); 6] = [
        (b"GGUF", "a GGUF file; Lily reads MLX safetensors"),
        (b"version ", "a Git LFS pointer, not the file itself; run `git lfs pull` or `lily pull`"),
        (b"<!DOCTYP", "a web page, not a safetensors file; fetch it again"),
        (b"<!doctyp", "a web page, not a safetensors file; fetch it again"),
        (b"<html", "a web page, not a safetensors file; fetch it again"),
        (b"PK\x03\x04", "a zip file (PyTorch?); Lily reads MLX safetensors"),
    ];
    formats.into_iter().find(|(magic, _)| start.starts_with(magic)).map(|(_, what)| what)
}

/// Reads the header `json` of a file of `file_bytes`.
///
/// # Errors
/// Every fault of the header, in words for a user: JSON that does not parse, two tensors of one
/// name, a dtype that safetensors does not have, a shape whose size overflows or differs from the
/// byte range, ranges outside the file, overlaps, and bytes that belong to no tensor.
pub fn parse_header(json: &[u8], file_bytes: u64) -> Result<Header, Vec<String>> {
    let data_start = 8 + json.len() as u64;
    let Some(data_bytes) = file_bytes.checked_sub(data_start) else {
        return Err(vec![format!("truncated: the file has {file_bytes} bytes")]);
    };
    let raw: Strict<RawEntry> = serde_json::from_slice(json)
        .map_err(|error| vec![format!("damaged header: {}", shown(&error.to_string()))])?;
    let mut problems = Problems::default();
    let entries: Vec<Entry> = raw
        .0
        .into_iter()
        .map(|(name, raw)| {
            let [begin, end] = raw.data_offsets;
            let entry = Entry { name, dtype: raw.dtype, shape: raw.shape, range: begin..end };
            if let Err(problem) = check_entry(&entry, data_bytes) {
                problems.push(format!("{}: {problem}", shown(&entry.name)));
            }
            entry
        })
        .collect();
    if problems.all.is_empty() {
        check_cover(&entries, data_bytes, &mut problems);
    }
    match problems.finish() {
        problems if problems.is_empty() => Ok(Header { entries, data_start }),
        problems => Err(problems),
    }
}

fn check_entry(entry: &Entry, data_bytes: u64) -> Result<(), String> {
    let Range { start, end } = entry.range;
    let bits = element_bits(&entry.dtype)
        .ok_or_else(|| format!("unknown dtype {}", shown(&entry.dtype)))?;
    let described = Described(&entry.dtype, &entry.shape);
    let bytes = entry
        .shape
        .iter()
        .try_fold(bits, |product, &n| product.checked_mul(n))
        .ok_or_else(|| format!("{described} is larger than any file"))?
        .div_ceil(8);
    if start > end {
        return Err(format!("its bytes end ({end}) before they begin ({start})"));
    }
    if end > data_bytes {
        return Err(format!(
            "its bytes {start}..{end} lie outside the file, whose data has {data_bytes} bytes; the \
             file is truncated or damaged, fetch it again"
        ));
    }
    if end - start != bytes {
        return Err(format!("{described} has {bytes} bytes, the header gives it {}", end - start));
    }
    Ok(())
}

/// Every byte of the data belongs to exactly one tensor, as the format demands.
fn check_cover(entries: &[Entry], data_bytes: u64, problems: &mut Problems) {
    let mut by_start: Vec<&Entry> = entries.iter().filter(|e| !e.range.is_empty()).collect();
    by_start.sort_by_key(|entry| entry.range.start);
    for pair in by_start.windows(2) {
        let (this, next) = (&pair[0].range, &pair[1].range);
        if this.end > next.start {
            problems.push(format!(
                "{} (bytes {}..{}) and {} (bytes {}..{}) overlap",
                shown(&pair[0].name),
                this.start,
                this.end,
                shown(&pair[1].name),
                next.start,
                next.end
            ));
        }
    }
    let mut covered = 0;
    for entry in &by_start {
        if entry.range.start > covered {
            problems.push(format!("bytes {covered}..{} belong to no tensor", entry.range.start));
        }
        covered = covered.max(entry.range.end);
    }
    if covered < data_bytes {
        problems.push(format!(
            "bytes {covered}..{data_bytes} after the last tensor belong to none: the file is longer \
             than its header says"
        ));
    }
}

/// Bits of one element of a dtype of the format.
pub fn element_bits(dtype: &str) -> Option<u64> {
    Some(match dtype {
        "F4" => 4,
        "F6_E2M3" | "F6_E3M2" => 6,
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E4M3FNUZ"
        | "F8_E5M2FNUZ" => 8,
        "U16" | "I16" | "F16" | "BF16" => 16,
        "U32" | "I32" | "F32" => 32,
        "U64" | "I64" | "F64" | "C64" => 64,
        _ => return None,
    })
}

/// The start of a file that holds these tensors (name, dtype, shape) one after another in this
/// order: the length of the header and the header itself, marked as MLX marks its files. Lengthened
/// by `spaces`, which moves the data that follows.
pub fn encode_header<'a>(
    tensors: impl IntoIterator<Item = (&'a str, &'a str, &'a [usize])>,
    spaces: usize,
) -> Vec<u8> {
    let mut header = serde_json::Map::new();
    header.insert("__metadata__".into(), serde_json::json!({ "format": "mlx" }));
    let mut offset = 0;
    for (name, dtype, shape) in tensors {
        let bits = element_bits(dtype).unwrap_or_else(|| panic!("{dtype} is no dtype"));
        let bytes = (shape.iter().product::<usize>() as u64 * bits).div_ceil(8);
        header.insert(
            name.into(),
            serde_json::json!({
                "dtype": dtype,
                "shape": shape,
                "data_offsets": [offset, offset + bytes],
            }),
        );
        offset += bytes;
    }
    let mut json = serde_json::to_vec(&header).expect("a JSON value prints");
    json.resize(json.len() + spaces, b' ');
    [&(json.len() as u64).to_le_bytes(), json.as_slice()].concat()
}

/// A dtype and a shape as messages show them: `bf16 (8192, 4, 1)`.
pub(crate) struct Described<'a, N>(pub &'a str, pub &'a [N]);

impl<N: fmt::Display> fmt::Display for Described<'_, N> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        const MOST: usize = 8;
        write!(f, "{} (", shown(&self.0.to_lowercase()))?;
        for (i, n) in self.1.iter().take(MOST).enumerate() {
            write!(f, "{}{n}", if i == 0 { "" } else { ", " })?;
        }
        if self.1.len() > MOST {
            write!(f, ", ... {} dimensions", self.1.len())?;
        }
        f.write_str(")")
    }
}

/// Problems, kept up to a number that a reader would read.
#[derive(Default)]
struct Problems {
    all: Vec<String>,
    more: usize,
}

impl Problems {
    fn push(&mut self, problem: String) {
        if self.all.len() < MOST_PROBLEMS { self.all.push(problem) } else { self.more += 1 }
    }

    fn finish(mut self) -> Vec<String> {
        if self.more > 0 {
            self.all.push(format!("and {} more such problems", self.more));
        }
        self.all
    }
}

/// A tensor as the header writes it; keys that the format does not have are passed over.
#[derive(serde::Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// A JSON object in which a name appears once, in the file's order, without `__metadata__`. (serde's
/// own maps keep the last of two without a word.)
pub(crate) struct Strict<V>(pub Vec<(String, V)>);

impl<'de, V: Deserialize<'de>> Deserialize<'de> for Strict<V> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(StrictVisitor(PhantomData))
    }
}

struct StrictVisitor<V>(PhantomData<V>);

impl<'de, V: Deserialize<'de>> Visitor<'de> for StrictVisitor<V> {
    type Value = Strict<V>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object of tensors by name")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Strict<V>, A::Error> {
        let mut names = HashSet::new();
        let mut entries = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            if !names.insert(name.clone()) {
                return Err(A::Error::custom(format!("{} appears twice", shown(&name))));
            }
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let value = map
                .next_value()
                .map_err(|error| A::Error::custom(format!("{}: {error}", shown(&name))))?;
            entries.push((name, value));
        }
        Ok(Strict(entries))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of the given JSON over `data` bytes of data.
    fn parse(json: &str, data: u64) -> Result<Header, Vec<String>> {
        parse_header(json.as_bytes(), 8 + json.len() as u64 + data)
    }

    #[test]
    fn a_written_header_reads_back() {
        let file = encode_header([("a", "U32", &[2, 3][..]), ("b", "BF16", &[5])], 3);
        let length = header_bytes(&file, file.len() as u64 + 34).unwrap();
        assert_eq!(length, file.len() - 8);
        let header = parse_header(&file[8..], file.len() as u64 + 34).unwrap();
        assert_eq!(header.data_start, file.len() as u64);
        let entry = |name: &str, dtype: &str, shape: &[u64], range| Entry {
            name: name.into(),
            dtype: dtype.into(),
            shape: shape.to_vec(),
            range,
        };
        assert_eq!(
            header.entries,
            [entry("a", "U32", &[2, 3], 0..24), entry("b", "BF16", &[5], 24..34)]
        );
    }

    #[test]
    fn lengths_that_cannot_be_are_named() {
        let length = |n: u64| n.to_le_bytes();
        for (start, file_bytes, expected) in [
            (&[][..], 0, "the file is empty (0 bytes)"),
            (b"abc", 3, "it has only 3 bytes"),
            (&length(0), 7, "it has only 7 bytes"),
            (&length(100), 50, "truncated: the header alone has 100 bytes, the file 50"),
            (&length(u64::MAX), 50, "its header would have 18446744073709551615 bytes"),
            (&length(MAX_HEADER + 1), u64::MAX, "its header would have 16777217 bytes"),
            (b"GGUF\x03\0\0\0", 900, "a GGUF file"),
            (b"version https://git-lfs", 130, "a Git LFS pointer"),
            (b"<!DOCTYPE html>", 900, "a web page"),
            (b"PK\x03\x04....", 900, "a zip file"),
        ] {
            let error = header_bytes(start, file_bytes).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        assert_eq!(header_bytes(&length(42), 50), Ok(42));
    }

    #[test]
    fn each_fault_of_a_header_is_named() {
        let one = |dtype: &str, shape: &str, offsets: &str| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}"#)
        };
        let two = |a: &str, b: &str, offsets_a: &str, offsets_b: &str| {
            format!(
                r#"{{"{a}":{{"dtype":"U8","shape":[4],"data_offsets":{offsets_a}}},
                   "{b}":{{"dtype":"U8","shape":[4],"data_offsets":{offsets_b}}}}}"#
            )
        };
        for (json, data, expected) in [
            (String::new(), 0, "damaged header: EOF"),
            ("[]".into(), 0, "expected an object of tensors by name"),
            ("{\"a\":1}".into(), 0, "damaged header: a: invalid type: integer `1`"),
            ("{} x".into(), 0, "trailing characters"),
            ("{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}".into(), 1, "missing field `data_offsets`"),
            (one("U8", "[1]", "[0,1,2]"), 1, "a: "),
            (one("U8", "[-1]", "[0,1]"), 1, "a: invalid value: integer `-1`"),
            (one("U8", "[1.5]", "[0,1]"), 1, "a: invalid type: floating point"),
            (one("U8", "[1]", "[0,18446744073709551616]"), 1, "a: invalid type"),
            (one("U7", "[1]", "[0,1]"), 1, "a: unknown dtype U7"),
            (one("U8", "[1]", "[1,0]"), 1, "a: its bytes end (0) before they begin (1)"),
            (one("U8", "[4]", "[0,4]"), 3, "a: its bytes 0..4 lie outside the file"),
            (one("BF16", "[4]", "[0,4]"), 4, "a: bf16 (4) has 8 bytes, the header gives it 4"),
            (
                one("U32", "[4294967296,4294967296]", "[0,4]"),
                4,
                "a: u32 (4294967296, 4294967296) is larger than any file",
            ),
            (two("a", "a", "[0,4]", "[4,8]"), 8, "a appears twice"),
            (two("a", "b", "[0,4]", "[3,7]"), 7, "a (bytes 0..4) and b (bytes 3..7) overlap"),
            (two("a", "b", "[0,4]", "[5,9]"), 9, "bytes 4..5 belong to no tensor"),
            (one("U8", "[1]", "[0,1]"), 9, "bytes 1..9 after the last tensor belong to none"),
        ] {
            let problems = parse(&json, data).unwrap_err();
            assert_eq!(problems.len(), 1, "{problems:#?}");
            assert!(problems[0].contains(expected), "{json}: {}", problems[0]);
        }
    }

    #[test]
    fn a_name_that_would_steer_the_terminal_is_escaped() {
        let json = "{\"a\\u001b[2J\":{\"dtype\":\"U7\",\"shape\":[],\"data_offsets\":[0,0]}}";
        assert_eq!(parse(json, 0).unwrap_err(), ["a\\u{1b}[2J: unknown dtype U7"]);
    }

    #[test]
    fn many_faults_are_counted_not_listed() {
        let entries: Vec<_> = (0..1000)
            .map(|i| format!(r#""t{i}":{{"dtype":"U7","shape":[],"data_offsets":[0,0]}}"#))
            .collect();
        let problems = parse(&format!("{{{}}}", entries.join(",")), 0).unwrap_err();
        assert_eq!(problems.len(), MOST_PROBLEMS + 1);
        assert_eq!(problems[MOST_PROBLEMS], "and 984 more such problems");
    }

    #[test]
    fn scalars_empty_tensors_and_padding_are_fine() {
        let json = r#"{"__metadata__":{"format":"mlx"},
            "scalar":{"dtype":"F32","shape":[],"data_offsets":[0,4]},
            "none":{"dtype":"F32","shape":[0,7],"data_offsets":[4,4]},
            "nibbles":{"dtype":"F4","shape":[3],"data_offsets":[4,6]}}   "#;
        assert_eq!(parse(json, 6).unwrap().entries.len(), 3);
    }
}
