//! Affine quantisation, and the conversion of an unquantised Hugging Face checkpoint to the MLX
//! layout by it.
//!
//! A group of [`GROUP`] elements shares a scale and a bias: `w = scale * q + bias`, q of 4 or 8
//! bits. The rule is that of MLX's CPU backend, to the bit; its Metal kernel breaks ties another
//! way, so the published files, made on a Mac, differ from ours in about one word of a hundred.

use std::collections::BTreeSet;
use std::path::Path;

use half::bf16;
use serde_json::{Map, Value};

use crate::config::{self, Config, GROUP};
use crate::error::{Error, Result};
use crate::grouped::Grouped;
use crate::safetensors::Described;
use crate::shards::{Shards, is_there, read_json};
use crate::tensors::{Dtype, PREFIX, Tensor, table};
use crate::writer::{Writer, in_parallel, to_json};

/// Quantises one group to `bits` (4 or 8): returns scale and bias before they are rounded to bf16,
/// and writes the codes.
///
/// The value of larger magnitude becomes the bias, so that it is exact, and 0 is on the grid. The
/// scale is negative where that value is the largest one.
fn quantize_group(w: &[f32; GROUP], bits: u32, codes: &mut [u8; GROUP]) -> (f32, f32) {
    let (mut low, mut high) = (w[0], w[0]);
    for &x in w {
        low = if x < low { x } else { low };
        high = if x > high { x } else { high };
    }
    let most = ((1u32 << bits) - 1) as f32;
    let low_is_edge = low.abs() > high.abs();
    let step = ((high - low) / most).max(1e-7);
    let mut scale = if low_is_edge { step } else { -step };
    let edge = if low_is_edge { low } else { high };
    let steps = (edge / scale).round_ties_even();
    let mut bias = 0.0;
    if steps != 0.0 {
        scale = edge / steps;
        bias = edge;
    }
    for (code, &x) in codes.iter_mut().zip(w) {
        *code = ((x - bias) / scale).round_ties_even().clamp(0.0, most) as u8;
    }
    (scale, bias)
}

/// A quantised piece of a tensor: the bytes of its three parts, as the checkpoint stores them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Quantized {
    /// Codes, the first element in the lowest bits: `bits / 8` bytes an element.
    pub weight: Vec<u8>,
    /// bf16, one a group.
    pub scales: Vec<u8>,
    /// bf16, one a group.
    pub biases: Vec<u8>,
}

/// Quantises bf16 elements, given as little-endian bytes, to 4 or 8 bits.
///
/// # Errors
/// The index of a group with an element that is not finite, or so large that its scale is not.
///
/// # Panics
/// Where `bytes` is not whole groups, or `bits` is neither 4 nor 8.
pub fn quantize(bytes: &[u8], bits: u32) -> std::result::Result<Quantized, usize> {
    assert!(bits == 4 || bits == 8, "{bits} bits");
    assert!(bytes.len().is_multiple_of(2 * GROUP), "{} bytes are not whole groups", bytes.len());
    let groups = bytes.len() / (2 * GROUP);
    let mut out = Quantized {
        weight: Vec::with_capacity(groups * GROUP * bits as usize / 8),
        scales: Vec::with_capacity(groups * 2),
        biases: Vec::with_capacity(groups * 2),
    };
    let (mut w, mut codes) = ([0.0; GROUP], [0; GROUP]);
    for (i, group) in bytes.chunks_exact(2 * GROUP).enumerate() {
        for (w, pair) in w.iter_mut().zip(group.chunks_exact(2)) {
            *w = bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
        }
        let (scale, bias) = quantize_group(&w, bits, &mut codes);
        let (scale, bias) = (bf16::from_f32(scale), bf16::from_f32(bias));
        if !(scale.is_finite() && w.iter().all(|x| x.is_finite())) {
            return Err(i);
        }
        if bits == 8 {
            out.weight.extend_from_slice(&codes);
        } else {
            out.weight.extend(codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4));
        }
        out.scales.extend(scale.to_le_bytes());
        out.biases.extend(bias.to_le_bytes());
    }
    Ok(out)
}

/// How [`convert`] works; [`Default`] is what `lily quantize` does.
#[derive(Clone, Copy, Debug)]
pub struct ConvertOptions {
    /// Accept other sizes than Qwen3.6-35B-A3B's.
    pub any_size: bool,
    /// Threads that quantise.
    pub threads: usize,
    /// The most bytes of tensors in one file; a larger tensor gets a file of its own.
    pub shard_bytes: u64,
}

impl Default for ConvertOptions {
    fn default() -> ConvertOptions {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        ConvertOptions { any_size: false, threads, shard_bytes: 5 << 30 }
    }
}

/// Bytes of bf16 that are read, quantised and written at once. Each thread holds one such piece
/// and what becomes of it.
const PIECE: usize = 4 << 20;

/// Files that are copied as they are, where the source has them.
const COPIED: [&str; 4] =
    ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"];
/// The largest of these that is read, in bytes.
const MOST_COPIED: u64 = 256 << 20;

/// Bytes that [`convert`] writes, from the config of the checkpoint in `src`.
///
/// # Errors
/// As [`convert`], as far as the config goes.
pub fn converted_bytes(src: &Path, options: ConvertOptions) -> Result<u64> {
    let (config, _) = read_config(src, options.any_size)?;
    Ok(table(&config).iter().map(Tensor::bytes).sum())
}

/// Converts the bf16 checkpoint of this architecture in `src`, named and laid out as Qwen publishes
/// it, to the MLX layout in the new folder `dst`: the text model in affine 4-bit, group 64, routers
/// and shared experts' gates in 8 bits. The vision tower and the MTP head are left out.
///
/// `progress` hears how many bytes of the source are done, of how many, and says whether to go on.
///
/// # Errors
/// [`Error::Config`] and [`Error::Files`] with all that is wrong with the source, before anything
/// is written; [`Error::File`] where `dst` exists or cannot be written; [`Error::Stopped`]. What
/// was written is removed.
pub fn convert(
    src: &Path,
    dst: &Path,
    options: ConvertOptions,
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let (config, json) = read_config(src, options.any_size)?;
    let shards = Shards::open(src)?;
    let modules = modules(&config);
    check_source(src, &modules, &shards)?;
    let writer = Writer::create(dst, &distribute(&config, options.shard_bytes), false)?;
    writer.file("config.json", &to_json(&Value::Object(json)))?;
    for name in COPIED {
        let path = src.join(name);
        if is_there(&path) {
            let failed = |what: String| Error::File { path: path.clone(), what };
            let bytes = std::fs::metadata(&path).map_err(|e| failed(e.to_string()))?.len();
            if bytes > MOST_COPIED {
                return Err(failed(format!("has {bytes} bytes, at most {MOST_COPIED} are read")));
            }
            let text = std::fs::read(&path).map_err(|e| failed(e.to_string()))?;
            writer.file(name, &text)?;
        }
    }
    let pieces: Vec<Piece> = modules.iter().flat_map(|m| m.pieces(PIECE)).collect();
    let total = pieces.iter().map(|piece| piece.bytes as u64).sum();
    in_parallel(pieces.len(), options.threads, &mut |done| progress(done, total), |i| {
        pieces[i].convert(&shards, &writer)
    })?;
    writer.finish()
}

/// The config of the source, and the `config.json` of what it is converted to.
fn read_config(src: &Path, any_size: bool) -> Result<(Config, Map<String, Value>)> {
    let problem = |problem: String| Error::Config(vec![problem]);
    let text = read_json(&src.join("config.json")).map_err(problem)?;
    let mut json = config::parse(&text).map_err(problem)?;
    for key in ["quantization", "quantization_config"] {
        if let Some(found) = json.get(key).filter(|value| !value.is_null()) {
            let what = match found.get("quant_method").and_then(Value::as_str) {
                Some(method) => {
                    format!("quantised already ({method:.40}); it takes the bf16 original")
                }
                None => "quantised already; if it is an MLX checkpoint, run it as it is".into(),
            };
            return Err(problem(format!("{key}: this checkpoint is {what}")));
        }
    }
    let layers = json.get("text_config").and_then(|text| text.get("num_hidden_layers"));
    let layers = layers.and_then(Value::as_u64).unwrap_or(0).min(1 << 10) as usize;
    let quantization = config::quantization(layers);
    json.insert("quantization".into(), quantization.clone());
    json.insert("quantization_config".into(), quantization);
    // Generation stops at what generation_config.json lists; MLX keeps that list in the config.
    let generation = src.join("generation_config.json");
    if json.get("eos_token_id").is_none_or(Value::is_null) && is_there(&generation) {
        let text = read_json(&generation)
            .map_err(|what| Error::File { path: generation.clone(), what })?;
        let parsed = config::parse(&text).map_err(|what| Error::File { path: generation, what })?;
        if let Some(ids) = parsed.get("eos_token_id") {
            json.insert("eos_token_id".into(), ids.clone());
        }
    }
    let config = Config::from_json(&Value::Object(json.clone()).to_string())?;
    let other: Vec<String> = config
        .other_sizes()
        .iter()
        .map(|(name, here, there)| format!("{name}: {here}, in Qwen3.6-35B-A3B {there}"))
        .collect();
    if !any_size && !other.is_empty() {
        let mut problems =
            vec!["other sizes than the model Lily is for; --any-size accepts them".to_string()];
        problems.extend(other);
        return Err(Error::Config(problems));
    }
    Ok((config, json))
}

/// What becomes of a source tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// Quantised to so many bits.
    Quantize(u32),
    /// Stored as 1 + w: the source's norms are centred at zero.
    AddOne,
    /// The bytes stay: the convolution's [channels, 1, taps] becomes [channels, taps, 1].
    Keep,
}

/// One module of the table, and where it comes from.
#[derive(Debug)]
struct Module {
    /// Name in the source.
    source: String,
    /// Shape that the source must have.
    source_shape: Vec<u64>,
    /// Name in the table: of the tensor, or of the module whose three parts are named after it.
    target: String,
    change: Change,
    /// Matrices: experts, or 1.
    count: usize,
    /// Rows of each matrix.
    rows: usize,
    /// Rows of each matrix in the source, and the first that is this module's: gate and up
    /// projections of an expert are one tensor there.
    source_rows: usize,
    first_row: usize,
    /// Elements of a row.
    columns: usize,
}

/// The modules of `config`, in the order of the table.
fn modules(config: &Config) -> Vec<Module> {
    table(config).iter().filter_map(module).collect()
}

/// The module of a tensor of the table; none for scales and biases, which belong to a weight.
fn module(tensor: &Tensor) -> Option<Module> {
    let quantised = tensor.dtype == Dtype::U32;
    if tensor.name.ends_with(".scales") || tensor.name.ends_with(".biases") {
        return None;
    }
    let name = tensor.name.strip_prefix(PREFIX).expect("the table's names have the prefix");
    let mut source = match name.strip_prefix("model.") {
        Some(rest) => format!("model.language_model.{rest}"),
        None => name.to_string(),
    };
    let mut shape = tensor.shape.clone();
    let (mut first_row, mut parts) = (0, 1);
    let mut change = Change::Keep;
    if quantised {
        let bits =
            if name.contains("mlp.gate.") || name.contains("shared_expert_gate") { 8 } else { 4 };
        change = Change::Quantize(bits);
        *shape.last_mut().expect("a matrix has columns") *= 32 / bits as usize;
    } else if name.ends_with("norm.weight") && !name.ends_with("linear_attn.norm.weight") {
        change = Change::AddOne;
    }
    let (count, rows) = match shape[..] {
        [count, rows, _] if quantised => (count, rows),
        [rows, ..] => (1, rows),
        [] => unreachable!("the table has no scalars"),
    };
    let columns = shape.iter().product::<usize>() / (count * rows);
    if name.ends_with("conv1d.weight") {
        shape = vec![rows, 1, columns];
    }
    if let Some((at, part)) = source.split_once("switch_mlp.") {
        let (joined, first, of) = match part {
            "gate_proj.weight" => ("gate_up_proj", 0, 2),
            "up_proj.weight" => ("gate_up_proj", rows, 2),
            _ => ("down_proj", 0, 1),
        };
        source = format!("{at}experts.{joined}");
        (first_row, parts) = (first, of);
        shape[1] *= of;
    }
    Some(Module {
        source,
        source_shape: shape.iter().map(|&n| n as u64).collect(),
        target: if quantised {
            tensor.name.strip_suffix(".weight").unwrap_or(&tensor.name)
        } else {
            &tensor.name
        }
        .into(),
        change,
        count,
        rows,
        source_rows: rows * parts,
        first_row,
        columns,
    })
}

/// Everything in which the source differs from what is expected, as one error.
fn check_source(src: &Path, modules: &[Module], shards: &Shards) -> Result<()> {
    let has = |part: &str| shards.entries().any(|entry| entry.name.contains(part));
    let lost = |what: &str| Err(Error::Files { dir: src.into(), problems: vec![what.into()] });
    if has(PREFIX) && !has("model.language_model.") {
        return lost(
            "its names are those of an MLX checkpoint, which is converted already; \
                     `lily verify` says what it is",
        );
    }
    if has(".mlp.experts.0.") {
        return lost(
            "each expert is a tensor of its own; Lily converts checkpoints that hold a \
                     layer's experts in two (experts.gate_up_proj, experts.down_proj), as Qwen's do",
        );
    }
    let mut wrong = Grouped::default();
    let mut known = BTreeSet::new();
    for module in modules {
        if !known.insert(module.source.as_str()) {
            continue;
        }
        let Some((entry, file)) = shards.get(&module.source) else {
            wrong.add(&module.source, "missing", "");
            continue;
        };
        if entry.dtype != "BF16" || entry.shape != module.source_shape {
            let expected = Described("BF16", &module.source_shape);
            let problem =
                format!("expected {expected}, found {}", Described(&entry.dtype, &entry.shape));
            wrong.add(&module.source, &problem, &format!(" in {file}"));
        }
    }
    let mut names: Vec<_> = shards.entries().map(|entry| entry.name.as_str()).collect();
    names.sort_unstable();
    for name in names {
        let left_out = name.starts_with("mtp.") || name.starts_with("model.visual.");
        if !left_out && !known.contains(name) {
            wrong.add(name, "this architecture has no such tensor", "");
        }
    }
    match wrong.lines(24) {
        lines if lines.is_empty() => Ok(()),
        problems => Err(Error::Files { dir: src.into(), problems }),
    }
}

/// The table, cut into files of at most `most` bytes.
fn distribute(config: &Config, most: u64) -> Vec<Vec<Tensor>> {
    let (mut shards, mut bytes) = (vec![Vec::new()], 0);
    for tensor in table(config) {
        bytes += tensor.bytes();
        if bytes > most && !shards.last().is_some_and(Vec::is_empty) {
            shards.push(Vec::new());
            bytes = tensor.bytes();
        }
        shards.last_mut().expect("there is one").push(tensor);
    }
    shards
}

/// Consecutive rows of a module.
struct Piece<'a> {
    module: &'a Module,
    /// First byte in the source tensor.
    source_start: u64,
    bytes: usize,
    /// First element in the target.
    target_start: u64,
}

impl Module {
    /// Pieces of whole rows, of about `most` bytes in the source.
    fn pieces(&self, most: usize) -> Vec<Piece<'_>> {
        let row_bytes = self.columns * 2;
        let at_once = (most / row_bytes).max(1);
        let mut pieces = Vec::new();
        for matrix in 0..self.count {
            for row in (0..self.rows).step_by(at_once) {
                let source_row = matrix * self.source_rows + self.first_row + row;
                pieces.push(Piece {
                    module: self,
                    source_start: (source_row * row_bytes) as u64,
                    bytes: at_once.min(self.rows - row) * row_bytes,
                    target_start: ((matrix * self.rows + row) * self.columns) as u64,
                });
            }
        }
        pieces
    }
}

impl Piece<'_> {
    /// Reads, converts and writes the piece. Returns its bytes in the source.
    fn convert(&self, shards: &Shards, writer: &Writer) -> Result<u64> {
        let module = self.module;
        let mut bytes = vec![0; self.bytes];
        shards.read(&module.source, self.source_start, &mut bytes)?;
        let not_finite = |element: usize| Error::Read {
            file: shards.get(&module.source).map_or_else(String::new, |(_, file)| file.into()),
            name: module.source.clone(),
            what: format!(
                "a value near element {} is not finite, or too large to quantise; the checkpoint is \
                 damaged, or was trained to no end",
                self.source_start / 2 + element as u64
            ),
        };
        match module.change {
            Change::Quantize(bits) => {
                let out = quantize(&bytes, bits).map_err(|group| not_finite(group * GROUP))?;
                let (start, bits) = (self.target_start, u64::from(bits));
                let group_start = start / GROUP as u64 * 2;
                writer.write(
                    &format!("{}.weight", module.target),
                    start * bits / 8,
                    &out.weight,
                )?;
                writer.write(&format!("{}.scales", module.target), group_start, &out.scales)?;
                writer.write(&format!("{}.biases", module.target), group_start, &out.biases)?;
            }
            Change::AddOne | Change::Keep => {
                for (i, pair) in bytes.chunks_exact_mut(2).enumerate() {
                    let w = bf16::from_le_bytes([pair[0], pair[1]]);
                    if !w.is_finite() {
                        return Err(not_finite(i));
                    }
                    if module.change == Change::AddOne {
                        pair.copy_from_slice(&bf16::from_f32(1.0 + w.to_f32()).to_le_bytes());
                    }
                }
                writer.write(&module.target, self.target_start * 2, &bytes)?;
            }
        }
        Ok(self.bytes as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, OpenOptions};
    use crate::safetensors::encode_header;
    use crate::testing::small_config;
    use serde_json::json;
    use std::fs;

    fn stored(values: impl Iterator<Item = f32>) -> Vec<u8> {
        values.flat_map(|x| bf16::from_f32(x).to_le_bytes()).collect()
    }

    /// Equal to MLX to the bit, on nine kinds of data (`reference/quantize_vectors.py`).
    #[test]
    fn equal_to_mlx() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../reference/golden");
        let bytes = fs::read(dir.join("quantize.safetensors")).unwrap().leak();
        let vectors = Shards::embedded(bytes).unwrap();
        let read = |name: &str| {
            let (entry, _) = vectors.get(name).unwrap_or_else(|| panic!("no {name}"));
            let mut bytes = vec![0; (entry.range.end - entry.range.start) as usize];
            vectors.read(name, 0, &mut bytes).unwrap();
            bytes
        };
        let names: Vec<_> = vectors.entries().map(|entry| entry.name.clone()).collect();
        let kinds: Vec<_> = names.iter().filter_map(|name| name.strip_suffix(".input")).collect();
        assert_eq!(kinds.len(), 9);
        for kind in kinds {
            for bits in [4, 8] {
                let found = quantize(&read(&format!("{kind}.input")), bits).unwrap();
                let part = |part: &str| read(&format!("{kind}.q{bits}.{part}"));
                assert_eq!(found.weight, part("weight"), "{kind}, {bits} bits");
                assert_eq!(found.scales, part("scales"), "{kind}, {bits} bits");
                assert_eq!(found.biases, part("biases"), "{kind}, {bits} bits");
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_refused() {
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let w = (0..128).map(|i| if i == 100 { bad } else { i as f32 });
            assert_eq!(quantize(&stored(w), 4), Err(1), "{bad}");
        }
        // The scale of this group would be infinite.
        let w = (0..64).map(|i| if i % 2 == 0 { 3e38 } else { -3e38 });
        assert_eq!(quantize(&stored(w), 8), Err(0));
    }

    #[test]
    fn pieces_cover_every_row_once() {
        for module in modules(&small_config()) {
            for most in [1, 1000, PIECE] {
                let pieces = module.pieces(most);
                let mut at = 0;
                for piece in &pieces {
                    assert_eq!(piece.target_start, at, "{}", module.target);
                    at += piece.bytes as u64 / 2;
                }
                assert_eq!(at, (module.count * module.rows * module.columns) as u64);
                let last = pieces.last().unwrap();
                let end = last.source_start + last.bytes as u64;
                assert!(end <= module.source_shape.iter().product::<u64>() * 2);
            }
        }
    }

    /// Random tensors under the names and in the shapes of the official files, one file, with a
    /// vision tensor and one of the MTP head.
    struct Official {
        dir: tempfile::TempDir,
        tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
    }

    impl Official {
        fn new(config: &Config) -> Official {
            let mut tensors: Vec<(String, Vec<usize>, Vec<f32>)> = Vec::new();
            let mut seed = 1u64;
            let mut add = |name: &str, shape: Vec<usize>| {
                let values = (0..shape.iter().product()).map(|_| {
                    seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    bf16::from_f32((seed >> 33) as i32 as f32 / (1u32 << 31) as f32 - 0.5).to_f32()
                });
                tensors.push((name.into(), shape, values.collect()));
            };
            for module in modules(config) {
                let shape = module.source_shape.iter().map(|&n| n as usize).collect();
                if !module.target.ends_with("switch_mlp.up_proj") {
                    add(&module.source, shape);
                }
            }
            add("model.visual.blocks.0.norm1.weight", vec![8]);
            add("mtp.fc.weight", vec![4, 8]);
            let official = Official { dir: tempfile::tempdir().unwrap(), tensors };
            let mut json: Value = serde_json::from_str(&config.to_json()).unwrap();
            json.as_object_mut()
                .unwrap()
                .retain(|key, _| !key.contains("quantization") && key != "eos_token_id");
            json["text_config"]["eos_token_id"] = json!(1);
            official.file("config.json", &json.to_string());
            official.file("generation_config.json", "{\"eos_token_id\": [1, 0]}");
            official.file("tokenizer.json", "{\"made\": \"up\"}");
            official.write();
            official
        }

        fn file(&self, name: &str, text: &str) {
            fs::write(self.dir.path().join(name), text).unwrap();
        }

        fn write(&self) {
            let described =
                self.tensors.iter().map(|(name, shape, _)| (name.as_str(), "BF16", &shape[..]));
            let mut bytes = encode_header(described, 0);
            for (_, _, values) in &self.tensors {
                bytes.extend(stored(values.iter().copied()));
            }
            fs::write(self.dir.path().join("model.safetensors"), bytes).unwrap();
        }

        fn values(&self, name: &str) -> &[f32] {
            &self.tensors.iter().find(|(n, _, _)| n == name).unwrap_or_else(|| panic!("{name}")).2
        }

        fn convert(&self, shard_bytes: u64) -> (tempfile::TempDir, Result<()>) {
            let parent = tempfile::tempdir().unwrap();
            let options = ConvertOptions { any_size: true, shard_bytes, ..Default::default() };
            let done =
                convert(self.dir.path(), &parent.path().join("out"), options, &mut |_, _| true);
            (parent, done)
        }

        #[track_caller]
        fn refused(&self, words: &[&str]) {
            let (parent, done) = self.convert(5 << 30);
            let error = done.unwrap_err().to_string();
            for word in words {
                assert!(error.contains(word), "expected {word:?} in: {error}");
            }
            assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0, "nothing is left");
        }
    }

    /// Every tensor of the result, against the source taken apart by hand.
    #[test]
    fn a_converted_checkpoint_holds_the_source() {
        let config = small_config();
        let official = Official::new(&config);
        let (parent, done) = official.convert(100_000);
        done.unwrap();
        let out = parent.path().join("out");
        let checkpoint = Checkpoint::open(&out, OpenOptions { any_size: true }).unwrap();
        assert_eq!(*checkpoint.config(), config);
        assert!(checkpoint.source().files.len() > 2, "several files");
        for name in ["generation_config.json", "tokenizer.json"] {
            assert_eq!(
                fs::read(out.join(name)).unwrap(),
                fs::read(official.dir.path().join(name)).unwrap()
            );
        }
        let read = |name: &str| {
            let mut bytes = vec![0; checkpoint.bytes_of(name) as usize];
            checkpoint.read(name, 0, &mut bytes).unwrap();
            bytes
        };
        let quantised = |target: &str, bits: u32, values: &[f32]| {
            let expected = quantize(&stored(values.iter().copied()), bits).unwrap();
            assert_eq!(
                read(&format!("language_model.{target}.weight")),
                expected.weight,
                "{target}"
            );
            assert_eq!(
                read(&format!("language_model.{target}.scales")),
                expected.scales,
                "{target}"
            );
            assert_eq!(
                read(&format!("language_model.{target}.biases")),
                expected.biases,
                "{target}"
            );
        };
        let plain = |target: &str, values: Vec<f32>| {
            let expected = stored(values.into_iter());
            assert_eq!(read(&format!("language_model.{target}")), expected, "{target}");
        };
        let same = |name: &str| official.values(&format!("model.language_model.{name}")).to_vec();
        let plus_one = |name: &str| same(name).iter().map(|w| 1.0 + w).collect::<Vec<_>>();
        quantised("lm_head", 4, official.values("lm_head.weight"));
        quantised("model.embed_tokens", 4, &same("embed_tokens.weight"));
        plain("model.norm.weight", plus_one("norm.weight"));
        for layer in 0..config.layers {
            let at = |name: &str| format!("layers.{layer}.{name}");
            let model = |name: &str| format!("model.layers.{layer}.{name}");
            for norm in ["input_layernorm.weight", "post_attention_layernorm.weight"] {
                plain(&model(norm), plus_one(&at(norm)));
            }
            if config.is_attention(layer) {
                for norm in ["self_attn.q_norm.weight", "self_attn.k_norm.weight"] {
                    plain(&model(norm), plus_one(&at(norm)));
                }
                for name in ["q_proj", "k_proj", "v_proj", "o_proj"] {
                    let name = format!("self_attn.{name}");
                    quantised(&model(&name), 4, &same(&at(&format!("{name}.weight"))));
                }
            } else {
                for name in ["norm.weight", "A_log", "dt_bias", "conv1d.weight"] {
                    let name = format!("linear_attn.{name}");
                    plain(&model(&name), same(&at(&name)));
                }
                for name in ["in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"] {
                    let name = format!("linear_attn.{name}");
                    quantised(&model(&name), 4, &same(&at(&format!("{name}.weight"))));
                }
            }
            quantised(&model("mlp.gate"), 8, &same(&at("mlp.gate.weight")));
            quantised(
                &model("mlp.shared_expert_gate"),
                8,
                &same(&at("mlp.shared_expert_gate.weight")),
            );
            for name in ["gate_proj", "up_proj", "down_proj"] {
                let name = format!("mlp.shared_expert.{name}");
                quantised(&model(&name), 4, &same(&at(&format!("{name}.weight"))));
            }
            let half = config.expert_hidden * config.dim;
            let joined = same(&at("mlp.experts.gate_up_proj"));
            let part = |first: usize| -> Vec<f32> {
                joined
                    .chunks_exact(2 * half)
                    .flat_map(|e| &e[first..first + half])
                    .copied()
                    .collect()
            };
            quantised(&model("mlp.switch_mlp.gate_proj"), 4, &part(0));
            quantised(&model("mlp.switch_mlp.up_proj"), 4, &part(half));
            quantised(&model("mlp.switch_mlp.down_proj"), 4, &same(&at("mlp.experts.down_proj")));
        }
        // The same bytes whatever the number of threads.
        let options = ConvertOptions { any_size: true, threads: 1, shard_bytes: 100_000 };
        let again = parent.path().join("again");
        convert(official.dir.path(), &again, options, &mut |_, _| true).unwrap();
        for entry in fs::read_dir(&out).unwrap() {
            let name = entry.unwrap().file_name();
            assert!(fs::read(out.join(&name)).unwrap() == fs::read(again.join(&name)).unwrap());
        }
    }

    #[test]
    fn what_cannot_be_converted_is_refused_in_words() {
        let config = small_config();
        let mut official = Official::new(&config);
        let gone = official.tensors.remove(5);
        official.write();
        official.refused(&[&gone.0, "missing"]);
        official.tensors.insert(5, gone);

        official.tensors.push((
            "model.language_model.layers.0.self_attn.q_bias".into(),
            vec![2],
            vec![0.0; 2],
        ));
        official.write();
        official.refused(&["q_bias", "no such tensor"]);
        official.tensors.pop();

        let head =
            official.tensors.iter().position(|(name, _, _)| name == "lm_head.weight").unwrap();
        let whole = official.tensors[head].clone();
        official.tensors[head].1 = vec![config.vocab / 2, config.dim];
        official.tensors[head].2.truncate(config.vocab / 2 * config.dim);
        official.write();
        official.refused(&["lm_head.weight", "expected bf16 (320, 128), found bf16 (160, 128)"]);
        official.tensors[head] = whole.clone();

        official.tensors[head].2[1000] = f32::NAN;
        official.write();
        official.refused(&["lm_head.weight", "near element 960 is not finite"]);
        official.tensors[head] = whole;
        official.write();

        let json = fs::read_to_string(official.dir.path().join("config.json")).unwrap();
        official.file("config.json", &json.replace("\"qwen3_5_moe\"", "\"llama\""));
        official.refused(&["model_type", "llama"]);
        let mut quantised: Value = serde_json::from_str(&json).unwrap();
        quantised["quantization_config"] = json!({ "quant_method": "fp8" });
        official.file("config.json", &quantised.to_string());
        official.refused(&["quantised already (fp8)", "bf16 original"]);
        official.file("config.json", &config.to_json());
        official.refused(&["quantised already", "run it as it is"]);
        fs::remove_file(official.dir.path().join("config.json")).unwrap();
        official.refused(&["config.json", "missing"]);
    }

    #[test]
    fn a_converted_checkpoint_is_not_converted_again() {
        let official = Official::new(&small_config());
        let (parent, done) = official.convert(5 << 30);
        done.unwrap();
        let out = parent.path().join("out");
        let options = ConvertOptions { any_size: true, ..Default::default() };
        let error = convert(&out, &parent.path().join("b"), options, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("run it as it is"), "{error}");
        // Without the config's word, the names tell.
        let json = fs::read(official.dir.path().join("config.json")).unwrap();
        fs::write(out.join("config.json"), json).unwrap();
        let error = convert(&out, &parent.path().join("b"), options, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("converted already"), "{error}");
        // And nothing is ever written over.
        let error = convert(official.dir.path(), &out, options, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("not empty"), "{error}");
    }

    #[test]
    fn sizes_of_another_model_need_a_word() {
        let official = Official::new(&small_config());
        let parent = tempfile::tempdir().unwrap();
        let options = ConvertOptions::default();
        let error =
            convert(official.dir.path(), &parent.path().join("b"), options, &mut |_, _| true);
        let error = error.unwrap_err().to_string();
        assert!(error.contains("--any-size") && error.contains("hidden_size: 128"), "{error}");
    }

    #[test]
    fn a_conversion_can_be_stopped() {
        let official = Official::new(&small_config());
        let parent = tempfile::tempdir().unwrap();
        let options = ConvertOptions { any_size: true, ..Default::default() };
        let done =
            convert(official.dir.path(), &parent.path().join("b"), options, &mut |_, _| false);
        assert!(matches!(done, Err(Error::Stopped)));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
