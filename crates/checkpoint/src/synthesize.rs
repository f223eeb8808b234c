//! Writes random checkpoints: of any sizes, in the exact layout of the published one, with a
//! tokenizer of our own making. For tests and measurements without the real weights.
//!
//! A random model is a fair stand-in only if it behaves like a model: every block must matter, and
//! none may drown the others; routers must prefer some experts; gates and decays must spread. The
//! constants below see to that, and `crates/model/tests` holds them to it:
//!
//! - each block adds 5 to 50 % of the norm of the residual stream it adds to;
//! - logits have a standard deviation of 1 to 3;
//! - the busiest expert of a layer gets at least twice the mean.
//!
//! Weights are random codes with a scale and a bias for each group, of either sign, as in the
//! published files; nothing is quantised. Each piece of a tensor depends on the seed, the tensor's
//! name and the piece's place alone, so the files are the same for any number of threads.

mod tokenizer;
mod vision;

use std::path::Path;

use half::bf16;
use serde_json::json;

use crate::config::{CONV_TAPS, Config, GROUP};
use crate::error::Result;
use crate::tensors::{Dtype, PREFIX, Tensor, table};
use crate::writer::{Writer, in_parallel, to_json};
pub use tokenizer::tokenizer_json;

/// How to write a checkpoint.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// The same seed gives the same files.
    pub seed: u64,
    /// Write the vision tower's tensors too, which Lily passes over; of full size, 0.9 GB.
    pub vision: bool,
    /// Threads that make numbers.
    pub threads: usize,
}

impl Default for Options {
    fn default() -> Options {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        Options { seed: 0, vision: false, threads }
    }
}

/// Bytes of the tensors that [`synthesize`] writes.
pub fn synthesized_bytes(config: &Config, options: Options) -> u64 {
    shards(config, options).iter().flatten().map(Tensor::bytes).sum()
}

/// Writes a random checkpoint of `config` into the new folder `dir`: four files with an index, and
/// beside them `files` (name, text), such as a chat template. A vocabulary of Qwen's size gets a
/// tokenizer.
///
/// `progress` hears how many bytes are done, of how many, and says whether to go on.
///
/// # Errors
/// [`crate::Error::File`] where `dir` is there and not empty, or cannot be written;
/// [`crate::Error::Stopped`]. What was written is removed.
pub fn synthesize(
    dir: &Path,
    config: &Config,
    options: Options,
    files: &[(&str, &str)],
    progress: &mut dyn FnMut(u64, u64) -> bool,
) -> Result<()> {
    let shards = shards(config, options);
    let total = shards.iter().flatten().map(Tensor::bytes).sum();
    let writer = Writer::create(dir, &shards, true)?;
    writer.file("config.json", config.to_json().as_bytes())?;
    if config.vocab >= tokenizer::IDS {
        writer.file("tokenizer.json", tokenizer_json().as_bytes())?;
        writer.file("tokenizer_config.json", &to_json(&tokenizer::settings()))?;
        let generation = json!({
            "do_sample": true,
            "eos_token_id": config.stop_ids,
            "temperature": 1.0,
            "top_k": 20,
            "top_p": 0.95,
        });
        writer.file("generation_config.json", &to_json(&generation))?;
    }
    for (name, text) in files {
        writer.file(name, text.as_bytes())?;
    }
    let pieces: Vec<Piece> = shards.iter().flatten().flat_map(pieces).collect();
    in_parallel(pieces.len(), options.threads, &mut |done| progress(done, total), |i| {
        pieces[i].write(options.seed, &writer)
    })?;
    writer.finish()
}

// How tensors lie in files.

/// The tensors of each of the four files. As in the published checkpoint, files are about equally
/// large and a module's parts can lie in two: a cut is made between two modules, another between
/// scales and biases, and one between weights and scales. Inside a file no order is kept.
fn shards(config: &Config, options: Options) -> Vec<Vec<Tensor>> {
    let mut tensors = if options.vision { vision::table(config) } else { Vec::new() };
    tensors.extend(table(config));
    let total: u64 = tensors.iter().map(Tensor::bytes).sum();
    let mut shards = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        let cut_before = [".weight", ".biases", ".scales"].get(shards.len() - 1);
        if let Some(part) = cut_before
            && bytes >= total * shards.len() as u64 / 4
            && tensor.name.ends_with(part)
        {
            shards.push(Vec::new());
        }
        bytes += tensor.bytes();
        shards.last_mut().expect("there is one").push(tensor);
    }
    for shard in &mut shards {
        shard.sort_by_key(|tensor| Numbers::new(0, &tensor.name, 0).next());
    }
    shards
}

/// Bytes of one piece, about.
const PIECE: usize = 1 << 20;

/// Consecutive rows of a tensor.
struct Piece<'a> {
    tensor: &'a Tensor,
    first_row: usize,
    rows: usize,
    row_bytes: usize,
}

fn pieces(tensor: &Tensor) -> Vec<Piece<'_>> {
    let rows: usize = tensor.shape[..tensor.shape.len() - 1].iter().product();
    let row_bytes = tensor.bytes() as usize / rows;
    let at_once = (PIECE / row_bytes).max(1);
    (0..rows)
        .step_by(at_once)
        .map(|first_row| Piece {
            tensor,
            first_row,
            rows: at_once.min(rows - first_row),
            row_bytes,
        })
        .collect()
}

impl Piece<'_> {
    /// Makes and writes the piece. Returns its bytes.
    fn write(&self, seed: u64, writer: &Writer) -> Result<u64> {
        let name = self.tensor.name.as_str();
        let bytes = self.rows * self.row_bytes;
        let mut out = Vec::with_capacity(bytes + 8);
        if self.tensor.dtype == Dtype::U32 {
            let mut numbers = Numbers::new(seed, name, self.first_row);
            while out.len() < bytes {
                out.extend(numbers.next().to_le_bytes());
            }
            out.truncate(bytes);
        } else if let Some((module, part)) = quantised_part(name) {
            let groups = bytes / 2;
            let per_row = self.row_bytes / 2;
            let gain = Gain::of(module);
            // Scales and biases of a group come from the same numbers, which are drawn twice.
            let mut numbers = Numbers::new(seed, module, self.first_row);
            let mut row = 1.0;
            for group in 0..groups {
                if group % per_row == 0 {
                    row = gain.row(seed, module, self.first_row + group / per_row);
                }
                let inputs = per_row * GROUP;
                let (scale, bias) = gain.group(&mut numbers, inputs, row, group % per_row);
                let value = if part == "scales" { scale } else { bias };
                out.extend(value.to_le_bytes());
            }
        } else {
            let mut numbers = Numbers::new(seed, name, self.first_row);
            let first = self.first_row * self.row_bytes / 2;
            for i in 0..bytes / 2 {
                let value = bf16::from_f32(plain(name, first + i, &mut numbers));
                out.extend(value.to_le_bytes());
            }
        }
        writer.write(name, (self.first_row * self.row_bytes) as u64, &out)?;
        Ok(bytes as u64)
    }
}

/// The module and part (`scales`, `biases`) that a bf16 tensor of a quantised module is.
fn quantised_part(name: &str) -> Option<(&str, &str)> {
    let (module, part) = name.rsplit_once('.')?;
    ["scales", "biases"].contains(&part).then_some((module, part))
}

// What the numbers are.

/// Share of the power of an embedding that all tokens have in common. Without it the values of
/// long contexts would average to nothing, and no expert would be busier than another.
const COMMON: f32 = 0.15;

/// How much the residual stream grows in a layer whose two blocks each add a quarter of it. The
/// blocks' outputs grow with it, so that late layers matter as much as early ones.
const GROWTH: f32 = 1.06;

/// The sizes of a quantised module's values.
#[derive(Clone, Copy)]
struct Gain {
    /// Root mean square of an output where that of the inputs is 1; of the embedding, that of an
    /// element's own part.
    gain: f32,
    /// Codes are 0 to this.
    most_code: f32,
    /// What is added to all elements of a group, with the group's sign, the same in every row.
    common: f32,
    /// How much rows differ: standard deviation of the logarithm of a row's size.
    rows: f32,
}

impl Gain {
    /// The table. Norms bring inputs to 1. SiLU, gates and averages over tokens make less of them,
    /// for which the modules at the end of a block make up.
    fn of(module: &str) -> Gain {
        let name = module.strip_prefix(PREFIX).unwrap_or(module);
        let (layer, name) = match name.strip_prefix("model.layers.").and_then(|n| n.split_once('.'))
        {
            Some((layer, name)) => (layer.parse().unwrap_or(0), name),
            None => (0, name),
        };
        let depth = GROWTH.powi(layer);
        let (gain, most_code, common, rows) = match name {
            "model.embed_tokens" => ((1.0 - COMMON).sqrt(), 15.0, COMMON.sqrt(), 0.0),
            "lm_head" => (1.6, 15.0, 0.0, 0.0),
            // Larger rows are chosen more often: that makes some experts busier than others.
            "mlp.gate" => (1.5, 255.0, 0.0, 0.2),
            "mlp.shared_expert_gate" => (1.0, 255.0, 0.0, 0.0),
            // Sigmoids and SiLUs of these shall spread.
            "self_attn.q_proj" | "linear_attn.in_proj_z" | "linear_attn.in_proj_b" => {
                (1.5, 15.0, 0.0, 0.0)
            }
            "linear_attn.in_proj_a" => (0.7, 15.0, 0.0, 0.0),
            "self_attn.o_proj" => (0.6 * depth, 15.0, 0.0, 0.0),
            "linear_attn.out_proj" => (0.22 * depth, 15.0, 0.0, 0.0),
            "mlp.switch_mlp.down_proj" => (0.6 * depth, 15.0, 0.0, 0.0),
            "mlp.shared_expert.down_proj" => (0.3 * depth, 15.0, 0.0, 0.0),
            _ => (1.0, 15.0, 0.0, 0.0),
        };
        Gain { gain, most_code, common, rows }
    }

    /// Scale and bias of a group in a row of `inputs` elements. As where a model was quantised, zero
    /// is on the grid and a scale can be negative. `row` is that of [`Gain::row`].
    fn group(self, numbers: &mut Numbers, inputs: usize, row: f32, group: usize) -> (bf16, bf16) {
        let inputs = if self.common > 0.0 { 1.0 } else { inputs as f32 };
        // Standard deviation of a uniform code.
        let spread = ((self.most_code + 1.0).powi(2) - 1.0).sqrt() / 12f32.sqrt();
        let draw = numbers.next();
        let size = 0.75 + 0.5 * unit(draw);
        let sign = if draw & 1 == 0 { 1.0 } else { -1.0 };
        let zero = (self.most_code / 2.0).floor() + (draw >> 1 & 1) as f32;
        let scale = bf16::from_f32(sign * size * row * self.gain / (inputs.sqrt() * spread));
        let common = match self.common {
            0.0 => 0.0,
            size if Numbers::new(1, "common", group).next() & 1 == 0 => size,
            size => -size,
        };
        (scale, bf16::from_f32(common - scale.to_f32() * zero))
    }

    /// How much larger than the others a row is.
    fn row(self, seed: u64, module: &str, row: usize) -> f32 {
        match self.rows {
            0.0 => 1.0,
            spread => (spread * Numbers::new(!seed, module, row).normal() - spread * spread).exp(),
        }
    }
}

/// Element `i` of a tensor that is not quantised.
fn plain(name: &str, i: usize, numbers: &mut Numbers) -> f32 {
    let end = |end: &str| name.ends_with(end);
    let normal = numbers.normal();
    if !name.starts_with(PREFIX) {
        // The vision tower is never run.
        0.02 * normal
    } else if end("layernorm.weight") || end("model.norm.weight") {
        // A few channels are much larger than the others, as in trained models.
        let outlier = if unit(numbers.next()) < 1.0 / 128.0 { 4.0 } else { 1.0 };
        outlier * (0.25 * normal).exp()
    } else if end("q_norm.weight") || end("k_norm.weight") {
        1.3 * (0.15 * normal).exp()
    } else if end("linear_attn.norm.weight") {
        (0.15 * normal).exp()
    } else if end("conv1d.weight") {
        // The last tap is the current token's.
        let now = (i + 1).is_multiple_of(CONV_TAPS);
        0.35 * normal + if now { 0.7 } else { 0.0 }
    } else if end("A_log") {
        (1.0 + 15.0 * unit(numbers.next())).ln()
    } else if end("dt_bias") {
        // Steps of 0.001 to 0.1 before softplus, as such models are initialised.
        let step = 0.001 * 100f32.powf(unit(numbers.next()));
        step.exp_m1().ln()
    } else {
        unreachable!("{name} is quantised")
    }
}

/// A uniform number in [0, 1) from the upper bits of a draw.
fn unit(draw: u64) -> f32 {
    (draw >> 40) as f32 / (1u32 << 24) as f32
}

/// The generator SplitMix64 (Steele, Lea, Flood 2014), started by what it makes numbers for.
struct Numbers(u64);

impl Numbers {
    fn new(seed: u64, name: &str, place: usize) -> Numbers {
        // FNV-1a of the name, then one step for each part, so that no two starts are neighbours.
        let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
        });
        let mut numbers = Numbers(seed);
        numbers.0 = numbers.next() ^ hash;
        numbers.0 = numbers.next() ^ place as u64;
        numbers.0 = numbers.next();
        numbers
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Mean 0, variance 1, bell-shaped: a sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        let draw = self.next();
        let sum: u64 = (0..4).map(|i| draw >> (16 * i) & 0xffff).sum();
        (sum as f32 / 65536.0 - 2.0) * 3f32.sqrt()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::{Checkpoint, OpenOptions};
    use crate::shards::Shards;
    use crate::testing::small_config;
    use std::collections::HashMap;
    use std::fs;

    fn write(options: Options) -> (tempfile::TempDir, HashMap<String, Vec<u8>>) {
        let dir = tempfile::tempdir().unwrap();
        let files = [("chat_template.jinja", "{{ messages }}")];
        synthesize(dir.path(), &small_config(), options, &files, &mut |_, _| true).unwrap();
        let read = |entry: fs::DirEntry| {
            (entry.file_name().into_string().unwrap(), fs::read(entry.path()).unwrap())
        };
        let files = fs::read_dir(dir.path()).unwrap().map(|entry| read(entry.unwrap())).collect();
        (dir, files)
    }

    #[test]
    fn the_seed_alone_decides() {
        let options = Options { seed: 5, vision: false, threads: 1 };
        let (_dir, one) = write(options);
        assert!(
            one == write(Options { threads: 3, ..options }).1,
            "the number of threads does not"
        );
        let other = write(Options { seed: 6, ..options }).1;
        assert!(one["config.json"] == other["config.json"]);
        for shard in one.keys().filter(|name| name.ends_with(".safetensors")) {
            assert!(one[shard] != other[shard], "{shard}");
        }
    }

    #[test]
    fn the_layout_is_as_awkward_as_the_published_one() {
        let (dir, files) = write(Options { threads: 2, ..Default::default() });
        let checkpoint = Checkpoint::open(dir.path(), OpenOptions { any_size: true }).unwrap();
        assert_eq!(*checkpoint.config(), small_config());
        let shards = Shards::open(dir.path()).unwrap();
        let file = |name: String| shards.get(&name).unwrap().1.to_string();
        let mut split = [0; 2];
        for entry in shards.entries() {
            if let Some(module) = entry.name.strip_suffix(".scales") {
                let scales = file(entry.name.clone());
                split[0] += usize::from(file(format!("{module}.weight")) != scales);
                split[1] += usize::from(file(format!("{module}.biases")) != scales);
            }
        }
        assert_eq!(split, [1, 1], "a module of each kind is split over two files");
        let data = files.iter().filter(|(name, _)| name.ends_with(".safetensors"));
        let starts: Vec<u64> =
            data.map(|(_, bytes)| 8 + u64::from_le_bytes(*bytes.first_chunk().unwrap())).collect();
        assert_eq!(starts.len(), 4);
        assert!(starts.iter().all(|start| start % 2 == 1), "{starts:?}");
    }

    #[test]
    fn the_full_model_has_the_published_size() {
        let options = Options { vision: true, ..Default::default() };
        let shards = shards(&Config::full(), options);
        let bytes: Vec<u64> =
            shards.iter().map(|shard| shard.iter().map(Tensor::bytes).sum()).collect();
        assert_eq!(bytes.len(), 4);
        assert_eq!(bytes.iter().sum::<u64>(), 20_401_929_952);
        assert!(
            bytes.iter().all(|bytes| (4_900_000_000..5_300_000_000).contains(bytes)),
            "{bytes:?}"
        );
        assert_eq!(synthesized_bytes(&Config::full(), Options::default()), 19_508_787_456);
    }

    /// Codes are uniform, scales have either sign, zero is on the grid, and rows have the spread
    /// that the table says.
    #[test]
    fn weights_are_what_the_table_says() {
        for (module, columns, expected) in [
            ("language_model.model.layers.0.mlp.switch_mlp.up_proj", 512, 1.0),
            ("language_model.model.layers.0.mlp.gate", 512, 1.5),
            ("language_model.lm_head", 512, 1.6),
        ] {
            let gain = Gain::of(module);
            let mut numbers = Numbers::new(3, module, 0);
            let (groups, mut squares, mut negative) = (columns / GROUP * 200, 0.0, 0);
            for group in 0..groups {
                let (scale, bias) = gain.group(&mut numbers, columns, 1.0, group % 8);
                let (scale, bias) = (scale.to_f32(), bias.to_f32());
                negative += usize::from(scale < 0.0);
                let zero = -bias / scale;
                assert!((zero - zero.round()).abs() < 0.6 && zero > 6.0, "{zero}");
                for _ in 0..GROUP {
                    let code = (unit(numbers.next()) * (gain.most_code + 1.0)).floor();
                    squares += f64::from((scale * code + bias).powi(2));
                }
            }
            let rms = (squares / (groups * GROUP) as f64 * columns as f64).sqrt();
            assert!((rms / expected - 1.0).abs() < 0.05, "{module}: {rms}");
            assert!((0.4..0.6).contains(&(negative as f64 / groups as f64)));
        }
    }

    #[test]
    fn it_can_be_stopped_and_writes_over_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        let run = |go_on: bool| {
            synthesize(&dir, &small_config(), Options::default(), &[], &mut |_, _| go_on)
        };
        assert!(matches!(run(false), Err(crate::Error::Stopped)));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
        run(true).unwrap();
        assert!(run(true).unwrap_err().to_string().contains("is not empty"));
    }
}
