//! `lily logits`: token ids in, the logits after every one of them out. Needs no tokenizer.

use crate::args::{DeviceArgs, KvKind, MemoryArgs, ModelArgs};
use crate::error::Error;
use crate::load::{self, Source};
use crate::{input, progress};
use clap::Args;
use lily_model::{Outputs, Span};
use std::fs::File;
use std::io::{BufWriter, ErrorKind, Write};
use std::path::{Path, PathBuf};

/// Which ids, cut where, and where the logits go.
#[derive(Args, Debug)]
pub struct Logits {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    device: DeviceArgs,
    /// Token ids: `1,2,3`, or `@FILE` with ids between commas, spaces or brackets
    #[arg(long, value_name = "IDS")]
    ids: String,
    /// Compute in pieces of these lengths; they add up to the number of ids [default: one piece]
    #[arg(long, value_name = "N,N,..", value_delimiter = ',')]
    split: Vec<usize>,
    /// The safetensors file to write: tensor `logits`, f32 (ids, vocabulary)
    #[arg(long, value_name = "FILE")]
    out: PathBuf,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvKind::Bf16)]
    kv: KvKind,
    /// Go on although the memory seems too small
    #[arg(long)]
    force: bool,
}

/// Most tokens of one step: a longer piece is cut, so that scratch memory stays small.
const LONGEST_PIECE: usize = 512;

/// Computes the logits and writes them as they come.
pub fn run(args: Logits) -> Result<(), Error> {
    let ids = parse_ids(&args.ids)?;
    let pieces = pieces(ids.len(), &args.split)?;
    let source = Source::open(&args.model)?;
    let vocab = source.config().vocab;
    if let Some((i, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
        return Err(Error::Usage(format!(
            "--ids: id {id} (number {i}) is out of range: this model has ids 0 to {}",
            vocab - 1
        )));
    }
    let max_seq = u32::try_from(ids.len()).ok();
    let memory = MemoryArgs { max_seq, kv: args.kv, force: args.force };
    let longest = pieces.iter().copied().max().unwrap_or(1);
    let most = source.config().max_positions;
    if ids.len() > most {
        return Err(Error::Usage(format!(
            "--ids: {} ids, but this model has {most} positions; give at most that",
            ids.len()
        )));
    }
    let options = load::options(source.config(), &memory, 1)?;
    let options = lily_model::Options { chunk: longest, outputs: longest, ..options };
    let out = Out::open(&args.out, source.files.dir.as_deref())?;
    let mut model = match load::model(&source, &args.device, options, args.force) {
        Ok(model) => model,
        Err(error) => {
            out.give_back();
            return Err(error);
        }
    };

    let io = |e: std::io::Error| match e.kind() {
        ErrorKind::BrokenPipe => Error::OutputClosed,
        _ => Error::io(&args.out, &e),
    };
    let mut file = BufWriter::new(out.emptied().map_err(io)?);
    file.write_all(&header(ids.len(), vocab)).map_err(io)?;
    let bar = progress::count("tokens", ids.len() as u64);
    let mut rest = ids.as_slice();
    for piece in pieces {
        let (now, after) = rest.split_at(piece);
        let span = Span { slot: 0, ids: now, outputs: Outputs::All };
        let ticket = model.step(&[span], &mut || true).expect("nobody stops this step");
        for logit in model.logits(ticket)? {
            file.write_all(&logit.to_le_bytes()).map_err(io)?;
        }
        bar.inc(piece as u64);
        rest = after;
    }
    let file = file.into_inner().map_err(|e| io(e.into_error()))?;
    // A pipe or a terminal has nothing to bring to a disk.
    if file.metadata().is_ok_and(|m| m.is_file()) {
        file.sync_all().map_err(io)?;
    }
    bar.finish_and_clear();
    say!("{}: logits f32 ({}, {vocab}) by {}", args.out.display(), ids.len(), model.device());
    Ok(())
}

/// The file that the logits go to, opened before anything is computed.
struct Out {
    path: PathBuf,
    file: File,
    existed: bool,
}

impl Out {
    /// Opens `path`, leaving alone what is in it. Errs where it cannot be written, or is a file
    /// of the checkpoint in `dir`.
    fn open(path: &Path, dir: Option<&Path>) -> Result<Out, Error> {
        let place = path.display();
        let real = path.canonicalize().ok();
        let mut files =
            dir.into_iter().flat_map(|dir| std::fs::read_dir(dir).into_iter().flatten());
        let is_same = |entry: std::io::Result<std::fs::DirEntry>| {
            real.is_some() && entry.is_ok_and(|entry| entry.path().canonicalize().ok() == real)
        };
        if files.any(is_same) {
            return Err(Error::Usage(format!(
                "--out {place}: this is a file of the checkpoint; choose another"
            )));
        }
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(|e| {
            Error::Failed(format!("--out {place}: {e}; choose a file that can be written"))
        })?;
        Ok(Out { path: path.into(), file, existed: real.is_some() })
    }

    /// The file, with nothing in it.
    fn emptied(self) -> std::io::Result<File> {
        if self.file.metadata()?.is_file() {
            self.file.set_len(0)?;
        }
        Ok(self.file)
    }

    /// Leaves things as they were.
    fn give_back(self) {
        if !self.existed {
            let _ = std::fs::remove_file(self.path);
        }
    }
}

/// The ids in `1,2,3` or in the file that `@FILE` names.
fn parse_ids(ids: &str) -> Result<Vec<u32>, Error> {
    let (place, text) = match ids.strip_prefix('@') {
        None => ("--ids".to_owned(), ids.to_owned()),
        Some(file) => {
            let path = Path::new(file);
            (input::name(path), input::file(path)?)
        }
    };
    let separators = |c: char| c.is_whitespace() || ",[]".contains(c);
    let words = text.split(separators).filter(|word| !word.is_empty());
    let ids = words.map(|word| {
        word.parse().map_err(|_| {
            Error::Usage(format!("{place}: {word:?} is not a token id; give numbers as in 1,2,3"))
        })
    });
    let ids: Vec<u32> = ids.collect::<Result<_, _>>()?;
    if ids.is_empty() {
        return Err(Error::Usage(format!("{place}: no token ids; give numbers as in 1,2,3")));
    }
    Ok(ids)
}

/// How many tokens each step takes: the split, with pieces that are too long cut.
fn pieces(tokens: usize, split: &[usize]) -> Result<Vec<usize>, Error> {
    let sum = split.iter().try_fold(0_usize, |sum, n| sum.checked_add(*n));
    if split.contains(&0) {
        return Err(Error::Usage("--split: 0 is no length; give lengths from 1 on".into()));
    }
    if !split.is_empty() && sum != Some(tokens) {
        return Err(Error::Usage(format!(
            "--split: its lengths must add up to the {tokens} ids; they add up to {}",
            sum.map_or("too much".into(), |sum| sum.to_string())
        )));
    }
    let split = if split.is_empty() { &[tokens] } else { split };
    Ok(split
        .iter()
        .flat_map(|&n| (0..n).step_by(LONGEST_PIECE).map(move |at| LONGEST_PIECE.min(n - at)))
        .collect())
}

/// What stands before the numbers of a safetensors file with one tensor.
fn header(tokens: usize, vocab: usize) -> Vec<u8> {
    let bytes = tokens as u64 * vocab as u64 * 4;
    let tensor = serde_json::json!({
        "logits": { "dtype": "F32", "shape": [tokens, vocab], "data_offsets": [0, bytes] }
    });
    let mut json = tensor.to_string();
    // Spaces up to a multiple of eight, so that readers may map the numbers in place.
    json.push_str(&" ".repeat(json.len().next_multiple_of(8) - json.len()));
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.as_bytes());
    header
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_from_the_flag_or_a_file() {
        assert_eq!(parse_ids("1,2, 3").unwrap(), [1, 2, 3]);
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), "[4, 5]\n6\n").unwrap();
        assert_eq!(parse_ids(&format!("@{}", file.path().display())).unwrap(), [4, 5, 6]);
        for bad in ["", "1,x", "-1", "4294967296", "@/no/such/file"] {
            assert!(parse_ids(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pieces_add_up() {
        assert_eq!(pieces(3, &[]).unwrap(), [3]);
        assert_eq!(pieces(150, &[70, 3, 77]).unwrap(), [70, 3, 77]);
        assert_eq!(pieces(1030, &[1025, 5]).unwrap(), [512, 512, 1, 5]);
        for bad in [&[1, 1][..], &[3, 0], &[usize::MAX, 4]] {
            assert!(pieces(3, bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn the_numbers_start_aligned() {
        let header = header(2, 3);
        let length = u64::from_le_bytes(header[..8].try_into().unwrap());
        assert_eq!((header.len() as u64, length % 8), (8 + length, 0));
        let json: serde_json::Value = serde_json::from_slice(&header[8..]).unwrap();
        assert_eq!(json["logits"]["data_offsets"], serde_json::json!([0, 24]));
    }
}
