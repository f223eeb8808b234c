//! The packed form of the weights: what a device reads, made once from what the checkpoint holds.
//!
//! A checkpoint's tensors start at odd offsets and lie in several files; no device can read them
//! in place. The packed file holds the same numbers in the order and alignment a device wants:
//! matrices that are multiplied with the same input stand stacked, scale and bias lie side by
//! side, the shared expert stands last among the experts, small vectors are f32. Every array
//! starts at a multiple of [`ALIGN`], so a later start maps the file and computes at once.
//!
//! ```text
//! 0          "LILYPACK"
//! 8          u32 length of the JSON     12  32 bytes SHA-256 of the JSON
//! 44         JSON: Header (layout, source, arrays with offset, bytes and SHA-256)
//! DATA_AT    the arrays
//! ```
//!
//! The data is written and flushed before the header, both under a temporary name: a file with
//! the final name and a whole header was complete when it got them. What the file was made from
//! is part of the header; another source, layout or size makes it stale and it is made anew.

use lily_checkpoint::config::{CONV_TAPS, GROUP};
use lily_checkpoint::verify::finite_bf16;
use lily_checkpoint::{Checkpoint, Config, Source, mmap::Mapping};
use lily_device::HostBytes;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Arrays start at multiples of this: the page size of Apple's machines.
pub const ALIGN: u64 = 16 * 1024;
/// The name of the layout described here, part of the header and of the file's name.
pub const LAYOUT: &str = "rows-1";
/// Where the arrays begin. The header of the full model takes some 80 KB.
const DATA_AT: u64 = 16 * ALIGN;
const MAGIC: &[u8; 8] = b"LILYPACK";
const JSON_AT: u64 = 44;
/// Bytes read or written at a time.
const CHUNK: usize = 4 << 20;

/// What goes wrong between the checkpoint and its packed form.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The checkpoint could not be read.
    #[error(transparent)]
    Checkpoint(#[from] lily_checkpoint::Error),
    /// A scale or bias that is not a number: the checkpoint is damaged.
    #[error(
        "{tensor}: element {index} is {value}; expected finite numbers. The file is damaged: \
         check it with `lily verify --checksums`, fetch it again with `lily pull`"
    )]
    NotFinite {
        /// The tensor's name in the checkpoint.
        tensor: String,
        /// Which element, row-major.
        index: u64,
        /// What stands there.
        value: f32,
    },
    /// The packed file could not be written or read.
    #[error("{path}: {error}")]
    Io {
        /// The packed file.
        path: PathBuf,
        /// The system's words.
        error: std::io::Error,
    },
    /// The packed file is not what this program would make from the checkpoint.
    #[error("{path}: {reason}")]
    Stale {
        /// The packed file.
        path: PathBuf,
        /// What differs.
        reason: String,
    },
}

/// One array of the packed form: where its numbers come from.
#[derive(Debug)]
pub struct Array {
    /// Its name, e.g. `layers.3.up`.
    pub name: String,
    /// Its bytes, without padding.
    pub bytes: u64,
    content: Content,
}

#[derive(Debug)]
enum Content {
    /// A bf16 tensor as f32.
    Vector { tensor: String },
    /// Rows of quantised modules, stacked.
    Matrix { bits: usize, cols: usize, parts: Vec<Part> },
}

/// Rows `first ..` of a quantised module (a stack of experts counts as one tall matrix).
#[derive(Debug)]
struct Part {
    module: String,
    first: usize,
    rows: usize,
}

/// Every array of the packed form, in file order.
pub fn plan(c: &Config) -> Vec<Array> {
    let q = |bits: usize, cols: usize, parts: Vec<(String, usize, usize)>| {
        let rows: usize = parts.iter().map(|p| p.2).sum();
        let bytes = (rows * cols * bits / 8 + rows * cols / GROUP * 4) as u64;
        let parts =
            parts.into_iter().map(|(module, first, rows)| Part { module, first, rows }).collect();
        (bytes, Content::Matrix { bits, cols, parts })
    };
    let v = |elements: usize, tensor: String| (4 * elements as u64, Content::Vector { tensor });
    let mut arrays = Vec::new();
    let mut add = |name: String, (bytes, content): (u64, Content)| {
        arrays.push(Array { name, bytes, content });
    };

    let model = "language_model.model";
    let embed = vec![(format!("{model}.embed_tokens"), 0, c.vocab)];
    add("embed".into(), q(4, c.dim, embed));
    for i in 0..c.layers {
        let (to, from) = (format!("layers.{i}"), format!("{model}.layers.{i}"));
        add(format!("{to}.mixer_norm"), v(c.dim, format!("{from}.input_layernorm.weight")));
        if c.is_attention(i) {
            let from = format!("{from}.self_attn");
            let (q_rows, kv_rows) = (2 * c.q_heads * c.head_dim, c.kv_heads * c.head_dim);
            let input = vec![
                (format!("{from}.q_proj"), 0, q_rows),
                (format!("{from}.k_proj"), 0, kv_rows),
                (format!("{from}.v_proj"), 0, kv_rows),
            ];
            add(format!("{to}.input"), q(4, c.dim, input));
            add(format!("{to}.q_norm"), v(c.head_dim, format!("{from}.q_norm.weight")));
            add(format!("{to}.k_norm"), v(c.head_dim, format!("{from}.k_norm.weight")));
            let output = vec![(format!("{from}.o_proj"), 0, c.dim)];
            add(format!("{to}.output"), q(4, c.q_heads * c.head_dim, output));
        } else {
            let from = format!("{from}.linear_attn");
            let input = vec![
                (format!("{from}.in_proj_qkv"), 0, c.conv_channels()),
                (format!("{from}.in_proj_z"), 0, c.delta_v_dim()),
                (format!("{from}.in_proj_b"), 0, c.delta_v_heads),
                (format!("{from}.in_proj_a"), 0, c.delta_v_heads),
            ];
            add(format!("{to}.input"), q(4, c.dim, input));
            let taps = c.conv_channels() * CONV_TAPS;
            add(format!("{to}.conv"), v(taps, format!("{from}.conv1d.weight")));
            add(format!("{to}.a_log"), v(c.delta_v_heads, format!("{from}.A_log")));
            add(format!("{to}.dt_bias"), v(c.delta_v_heads, format!("{from}.dt_bias")));
            add(format!("{to}.norm"), v(c.delta_head_dim, format!("{from}.norm.weight")));
            let output = vec![(format!("{from}.out_proj"), 0, c.dim)];
            add(format!("{to}.output"), q(4, c.delta_v_dim(), output));
        }

        let moe_norm = format!("{from}.post_attention_layernorm.weight");
        add(format!("{to}.moe_norm"), v(c.dim, moe_norm));
        let from = format!("{from}.mlp");
        let router = vec![
            (format!("{from}.gate"), 0, c.experts),
            (format!("{from}.shared_expert_gate"), 0, 1),
        ];
        add(format!("{to}.router"), q(8, c.dim, router));
        // Expert by expert, gate over up; the shared expert is the last of them.
        let hidden = c.expert_hidden;
        let mut up = Vec::with_capacity(2 * c.experts + 2);
        for e in 0..c.experts {
            up.push((format!("{from}.switch_mlp.gate_proj"), e * hidden, hidden));
            up.push((format!("{from}.switch_mlp.up_proj"), e * hidden, hidden));
        }
        up.push((format!("{from}.shared_expert.gate_proj"), 0, hidden));
        up.push((format!("{from}.shared_expert.up_proj"), 0, hidden));
        add(format!("{to}.up"), q(4, c.dim, up));
        let down = vec![
            (format!("{from}.switch_mlp.down_proj"), 0, c.experts * c.dim),
            (format!("{from}.shared_expert.down_proj"), 0, c.dim),
        ];
        add(format!("{to}.down"), q(4, hidden, down));
    }
    add("norm".into(), v(c.dim, format!("{model}.norm.weight")));
    add("head".into(), q(4, c.dim, vec![("language_model.lm_head".into(), 0, c.vocab)]));
    arrays
}

/// Length of the packed file in bytes.
pub fn file_bytes(c: &Config) -> u64 {
    DATA_AT + plan(c).iter().map(|a| a.bytes.next_multiple_of(ALIGN)).sum::<u64>()
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Header {
    layout: String,
    source: Source,
    file_bytes: u64,
    arrays: Vec<HeaderArray>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct HeaderArray {
    name: String,
    offset: u64,
    bytes: u64,
    sha256: String,
}

/// The packed weights, in memory or mapped.
pub struct Packed {
    data: HostBytes,
    arrays: Vec<HeaderArray>,
}

impl Packed {
    /// Packs into memory: for small models, where a file would not pay.
    pub fn in_memory(checkpoint: &Checkpoint) -> Result<Packed, Error> {
        let mut arrays = Vec::new();
        // u128, so that the bytes are aligned to 16.
        let mut data: Vec<u128> = Vec::new();
        for array in plan(checkpoint.config()) {
            let offset = 16 * data.len();
            data.resize(data.len() + (array.bytes as usize).div_ceil(16), 0);
            let mut rest = &mut bytemuck::cast_slice_mut(&mut data)[offset..];
            write_array(checkpoint, &array, &mut |bytes: &[u8]| {
                let (to, after) = std::mem::take(&mut rest).split_at_mut(bytes.len());
                to.copy_from_slice(bytes);
                rest = after;
                Ok(())
            })?;
            arrays.push(HeaderArray {
                name: array.name,
                offset: offset as u64,
                bytes: array.bytes,
                sha256: String::new(),
            });
        }
        struct InMemory(Vec<u128>);
        impl AsRef<[u8]> for InMemory {
            fn as_ref(&self) -> &[u8] {
                bytemuck::cast_slice(&self.0)
            }
        }
        Ok(Packed { data: Arc::new(InMemory(data)), arrays })
    }

    /// Maps the packed file, after comparing its header with what the checkpoint would give.
    /// Reads the header only. [`Error::Stale`] says that it must be made anew.
    pub fn open(path: &Path, checkpoint: &Checkpoint) -> Result<Packed, Error> {
        let io = |error| Error::Io { path: path.into(), error };
        let mut file = File::open(path).map_err(io)?;
        let header = read_header(path, &mut file)?;
        let mut want = blank_header(checkpoint);
        for (want, found) in want.arrays.iter_mut().zip(&header.arrays) {
            want.sha256.clone_from(&found.sha256);
        }
        if header != want {
            let what = if header.layout != want.layout {
                format!("has layout {}, this program uses {}", header.layout, want.layout)
            } else if header.source != want.source {
                "was made from other files, or the checkpoint's files have changed since".into()
            } else {
                "lists other arrays than this checkpoint has".into()
            };
            return Err(Error::Stale { path: path.into(), reason: what });
        }
        let mapping = Mapping::open(path)?;
        Ok(Packed { data: Arc::new(mapping), arrays: header.arrays })
    }

    /// All bytes, header included; [`Packed::range`] says where an array lies.
    pub fn data(&self) -> HostBytes {
        self.data.clone()
    }

    /// Where the array `name` lies in the data. Panics if there is none of that name: names come
    /// from [`plan`].
    pub fn range(&self, name: &str) -> std::ops::Range<usize> {
        let found = self.arrays.iter().find(|a| a.name == name);
        let array = found.unwrap_or_else(|| panic!("no packed array `{name}`"));
        array.offset as usize..(array.offset + array.bytes) as usize
    }

    /// Bytes of all arrays.
    pub fn weights_bytes(&self) -> u64 {
        self.arrays.iter().map(|a| a.bytes).sum()
    }
}

/// Writes the packed file of `checkpoint` to `path`, replacing what is there only when the new
/// file is complete. `progress` hears (bytes done, bytes in all). Holds some megabytes of memory.
///
/// The temporary file is locked while it is written: a second process that packs the same
/// checkpoint waits, and then finds the file made.
pub fn write(
    path: &Path,
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let temporary = temporary_path(path);
    let io = |error| Error::Io { path: temporary.clone(), error };
    let mut options = File::options();
    options.read(true).write(true).create(true).truncate(false); // not before it is locked
    let mut file = options.open(&temporary).map_err(io)?;
    file.lock().map_err(io)?;
    if Packed::open(path, checkpoint).is_ok() {
        return Ok(()); // made by another process while we waited
    }
    // The lock may be on a file that was renamed away meanwhile: then the name leads elsewhere.
    if !same_file(&file, &temporary) {
        return write(path, checkpoint, progress);
    }
    let result = write_locked(&mut file, &temporary, checkpoint, progress).and_then(|()| {
        fs::rename(&temporary, path).map_err(io)?;
        sync_directory(path)
    });
    if result.is_err() {
        // Best effort: what remains has no valid header and is overwritten by the next attempt.
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// Where the packed file of `checkpoint` may lie, in the order in which to look: beside the
/// checkpoint, then (its folder may be read-only) in `cache`. None for the one in the binary.
pub fn places(checkpoint: &Checkpoint, cache: &Path) -> Vec<PathBuf> {
    let Some(dir) = checkpoint.dir() else { return vec![] };
    let source = serde_json::to_vec(&checkpoint.source()).expect("strings and numbers");
    let id = &hex(&Sha256::digest(&source))[..16];
    vec![
        dir.join(format!("lily-{LAYOUT}.packed")),
        cache.join(format!("{id}-lily-{LAYOUT}.packed")),
    ]
}

/// The name a packed file has until it is complete.
pub fn temporary_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_owned();
    name.push(".incomplete");
    path.with_file_name(name)
}

fn write_locked(
    file: &mut File,
    path: &Path,
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<(), Error> {
    let io = |error| Error::Io { path: path.into(), error };
    let mut header = blank_header(checkpoint);
    // No header from an earlier attempt survives, and the space is the file's before we begin.
    file.set_len(0).map_err(io)?;
    file.set_len(header.file_bytes).map_err(io)?;
    let mut done = 0;
    for (array, entry) in plan(checkpoint.config()).iter().zip(&mut header.arrays) {
        file.seek(SeekFrom::Start(entry.offset)).map_err(io)?;
        let mut hash = Sha256::new();
        write_array(checkpoint, array, &mut |bytes: &[u8]| {
            file.write_all(bytes).map_err(io)?;
            hash.update(bytes);
            done += bytes.len() as u64;
            progress(done, header.file_bytes - DATA_AT);
            Ok(())
        })?;
        entry.sha256 = hex(&hash.finalize());
    }
    file.sync_all().map_err(io)?;

    let json = serde_json::to_vec(&header).expect("a header of strings and numbers");
    assert!(JSON_AT + json.len() as u64 <= DATA_AT, "header of {} bytes", json.len());
    let mut bytes = MAGIC.to_vec();
    bytes.extend((json.len() as u32).to_le_bytes());
    bytes.extend(Sha256::digest(&json));
    bytes.extend(&json);
    file.seek(SeekFrom::Start(0)).map_err(io)?;
    file.write_all(&bytes).map_err(io)?;
    file.sync_all().map_err(io)
}

/// Reads every byte of the packed file and compares it with the checksums of its header, and its
/// header with the checkpoint. Returns the names of the arrays that differ: empty is good.
pub fn verify(
    path: &Path,
    checkpoint: &Checkpoint,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Vec<String>, Error> {
    let io = |error| Error::Io { path: path.into(), error };
    let arrays = Packed::open(path, checkpoint)?.arrays;
    let mut file = File::open(path).map_err(io)?;
    let total = file.metadata().map_err(io)?.len() - DATA_AT;
    let (mut damaged, mut done) = (Vec::new(), 0);
    let mut buffer = vec![0; CHUNK];
    for array in arrays {
        file.seek(SeekFrom::Start(array.offset)).map_err(io)?;
        let mut hash = Sha256::new();
        let mut left = array.bytes as usize;
        while left > 0 {
            let part = &mut buffer[..left.min(CHUNK)];
            file.read_exact(part).map_err(io)?;
            hash.update(&*part);
            left -= part.len();
            done += part.len() as u64;
            progress(done, total);
        }
        if hex(&hash.finalize()) != array.sha256 {
            damaged.push(array.name);
        }
    }
    Ok(damaged)
}

/// The header without checksums: all that can be told before reading the weights.
fn blank_header(checkpoint: &Checkpoint) -> Header {
    let mut offset = DATA_AT;
    let mut arrays = Vec::new();
    for Array { name, bytes, .. } in plan(checkpoint.config()) {
        arrays.push(HeaderArray { name, offset, bytes, sha256: String::new() });
        offset += bytes.next_multiple_of(ALIGN);
    }
    Header { layout: LAYOUT.into(), source: checkpoint.source(), file_bytes: offset, arrays }
}

fn read_header(path: &Path, file: &mut File) -> Result<Header, Error> {
    let io = |error| Error::Io { path: path.into(), error };
    let stale = |reason: &str| Error::Stale { path: path.into(), reason: reason.into() };
    let length = file.metadata().map_err(io)?.len();
    if length < DATA_AT {
        return Err(stale("is too short for a packed checkpoint"));
    }
    let mut start = [0; JSON_AT as usize];
    file.read_exact(&mut start).map_err(io)?;
    let json_bytes = u64::from(u32::from_le_bytes(start[8..12].try_into().expect("four bytes")));
    if &start[..8] != MAGIC || json_bytes > DATA_AT - JSON_AT {
        return Err(stale("has no header: it was never completed, or is another kind of file"));
    }
    let mut json = vec![0; json_bytes as usize];
    file.read_exact(&mut json).map_err(io)?;
    if Sha256::digest(&json)[..] != start[12..44] {
        return Err(stale("has a damaged header"));
    }
    let header: Header =
        serde_json::from_slice(&json).map_err(|_| stale("has a header of another version"))?;
    if header.file_bytes != length {
        let reason = format!("is {length} bytes long, expected {}", header.file_bytes);
        return Err(stale(&reason));
    }
    Ok(header)
}

/// Sends the bytes of an array, in order, to `sink`.
fn write_array(
    checkpoint: &Checkpoint,
    array: &Array,
    sink: &mut dyn FnMut(&[u8]) -> Result<(), Error>,
) -> Result<(), Error> {
    match &array.content {
        Content::Vector { tensor } => {
            let values = read(checkpoint, tensor, 0, checkpoint.bytes_of(tensor) as usize)?;
            check_finite(tensor, 0, &values)?;
            // bf16 is the upper half of an f32.
            let wide: Vec<u8> = values.chunks_exact(2).flat_map(|b| [0, 0, b[0], b[1]]).collect();
            sink(&wide)
        }
        Content::Matrix { bits, cols, parts } => {
            let row_bytes = cols * bits / 8;
            for part in parts {
                let tensor = format!("{}.weight", part.module);
                for (first, bytes) in chunks(part.first * row_bytes, part.rows * row_bytes) {
                    sink(&read(checkpoint, &tensor, first, bytes)?)?;
                }
            }
            let row_bytes = cols / GROUP * 2;
            let mut pairs = Vec::new();
            for part in parts {
                let [scales, biases] = ["scales", "biases"].map(|x| format!("{}.{x}", part.module));
                for (first, bytes) in chunks(part.first * row_bytes, part.rows * row_bytes) {
                    let scale = read(checkpoint, &scales, first, bytes)?;
                    let bias = read(checkpoint, &biases, first, bytes)?;
                    check_finite(&scales, first as u64 / 2, &scale)?;
                    check_finite(&biases, first as u64 / 2, &bias)?;
                    pairs.clear();
                    for (s, b) in scale.chunks_exact(2).zip(bias.chunks_exact(2)) {
                        pairs.extend([s[0], s[1], b[0], b[1]]);
                    }
                    sink(&pairs)?;
                }
            }
            Ok(())
        }
    }
}

/// Cuts `bytes` bytes from `first` on into (start, length) of at most [`CHUNK`].
fn chunks(first: usize, bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..bytes).step_by(CHUNK).map(move |at| (first + at, CHUNK.min(bytes - at)))
}

fn read(c: &Checkpoint, tensor: &str, first: usize, bytes: usize) -> Result<Vec<u8>, Error> {
    let mut buffer = vec![0; bytes];
    c.read(tensor, first as u64, &mut buffer)?;
    Ok(buffer)
}

/// Errs if one of the bf16 values is infinite or not a number; `first` is their index in `tensor`.
fn check_finite(tensor: &str, first: u64, values: &[u8]) -> Result<(), Error> {
    match finite_bf16(values) {
        None => Ok(()),
        Some(i) => {
            let value = half::bf16::from_le_bytes([values[2 * i], values[2 * i + 1]]).to_f32();
            Err(Error::NotFinite { tensor: tensor.into(), index: first + i as u64, value })
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

/// Makes the rename itself last through a power failure.
fn sync_directory(path: &Path) -> Result<(), Error> {
    let directory = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let sync = File::open(directory).and_then(|d| d.sync_all());
    sync.map_err(|error| Error::Io { path: directory.into(), error })
}
