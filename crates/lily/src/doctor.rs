//! `lily doctor`: what this machine has, what fits into it, and which packed weights lie around.

use crate::args::ModelArgs;
use crate::error::Error;
use crate::load::{CHUNK, OUTPUTS, Source};
use crate::machine::{self, Memory, gigabytes};
use crate::packed_files;
use clap::Args;
use lily_checkpoint::{Config, tensors};
use lily_device::cpu::isa;
use lily_model::{Kv, Options, pack};
use std::fmt::Write;
use std::path::{Path, PathBuf};

/// What to look at.
#[derive(Args, Debug)]
pub struct Doctor {
    #[command(flatten)]
    model: ModelArgs,
}

/// Contexts that people ask for, in tokens.
const CONTEXTS: [usize; 4] = [4_096, 32_768, 131_072, 262_144];

/// Prints the findings to stdout. [`Error::Differs`] where the checkpoint that was
/// named cannot be used.
pub fn run(args: Doctor) -> Result<(), Error> {
    let memory = Memory::now();
    let mut usable = true;
    let mut text = String::new();
    machine_lines(&mut text, &memory);
    text.push('\n');
    match args.model.dir().map(|dir| (dir, Source::open(&args.model))) {
        None => fits(&mut text, "Qwen3.6-35B-A3B", &Config::full(), &memory),
        Some((dir, Ok(source))) => {
            fits(&mut text, &dir.display().to_string(), source.config(), &memory);
        }
        Some((dir, Err(error))) => {
            usable = false;
            let _ = writeln!(text, "{} cannot be used:\n  {error}\n", dir.display());
            fits(&mut text, "Qwen3.6-35B-A3B", &Config::full(), &memory);
        }
    }
    text.push('\n');
    packed_lines(
        &mut text,
        &packed_files::known(&args.model.dir().cloned().into_iter().collect::<Vec<_>>()),
    );
    std::io::Write::write_all(&mut std::io::stdout(), text.as_bytes())?;
    if usable { Ok(()) } else { Err(Error::Differs) }
}

fn machine_lines(text: &mut String, memory: &Memory) {
    let (processor, cores) = machine::processor();
    let _ = writeln!(text, "machine");
    let _ =
        writeln!(text, "  version    lily {} ({})", env!("CARGO_PKG_VERSION"), env!("LILY_COMMIT"));
    let _ = writeln!(text, "  system     {}", machine::system());
    let _ = writeln!(text, "  processor  {processor}, {cores} cores for us");
    let (total, available) = (gigabytes(memory.total), gigabytes(memory.available));
    let _ = writeln!(text, "  memory     {total}, {available} available");
    if let Some(limit) = &memory.limit {
        let (bytes, left) = (gigabytes(limit.bytes), gigabytes(limit.left));
        let _ = writeln!(
            text,
            "             limited to {bytes}, {left} left ({})",
            limit.path.display()
        );
    }
    let mut places = vec![PathBuf::from(".")];
    places.extend(packed_files::folder());
    for (i, place) in places.iter().enumerate() {
        let free = machine::free_disk(place).map_or_else(|e| e.to_string(), gigabytes);
        let name = if i == 0 { "here" } else { "in the cache folder" };
        let head = if i == 0 { "disk" } else { "" };
        let path = std::path::absolute(place).unwrap_or_else(|_| place.clone());
        let _ = writeln!(text, "  {head:<9}  {free} free {name}, {}", path.display());
    }
    let isas: Vec<String> = isa::available().iter().rev().map(ToString::to_string).collect();
    let _ = writeln!(text, "devices");
    let _ = writeln!(text, "  cpu        instruction sets, best first: {}", isas.join(", "));
}

/// The table of what fits, computed from the model's sizes.
fn fits(text: &mut String, name: &str, config: &Config, memory: &Memory) {
    let file: u64 = tensors::table(config).iter().map(tensors::Tensor::bytes).sum();
    let _ = writeln!(
        text,
        "what fits: {name} on the CPU, one sequence, keys and values in bf16\n  \
         {} of tensors on disk, packed once into a file of {}",
        gigabytes(file),
        gigabytes(pack::file_bytes(config)),
    );
    let _ = writeln!(text, "  context   weights  keys, values  state    scratch  together");
    let contexts = CONTEXTS.into_iter().filter(|&c| c < config.max_positions);
    for max_seq in contexts.chain([config.max_positions]) {
        let options = Options { slots: 1, max_seq, chunk: CHUNK, outputs: OUTPUTS, kv: Kv::Bf16 };
        let plan = lily_model::plan(config, options);
        let (need, have) = (plan.total(), memory.usable());
        let verdict = match need.checked_sub(have) {
            None | Some(0) => "fits".to_owned(),
            Some(missing) => format!("{} too much", gigabytes(missing)),
        };
        let _ = writeln!(
            text,
            "  {max_seq:<8}  {:<7}  {:<12}  {:<7}  {:<7}  {:<8}  {verdict}",
            gigabytes(plan.weights),
            gigabytes(plan.state.kv + plan.state.tables),
            gigabytes(plan.state.delta),
            gigabytes(plan.scratch),
            gigabytes(need),
        );
    }
}

fn packed_lines(text: &mut String, files: &[(PathBuf, u64)]) {
    if files.is_empty() {
        let _ = writeln!(text, "packed weights: none found");
        return;
    }
    let _ = writeln!(text, "packed weights (safe to remove: they are made again when needed)");
    for (path, bytes) in files {
        let _ = writeln!(text, "  {:<8} rm {}", gigabytes(*bytes), quoted(path));
    }
}

/// The path as a shell takes it.
fn quoted(path: &Path) -> String {
    let path = path.display().to_string();
    let plain = |c: char| c.is_alphanumeric() || "/._-+@".contains(c);
    if path.chars().all(plain) { path } else { format!("'{}'", path.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_full_model_is_planned_from_its_sizes() {
        let memory = Memory { total: 24 << 30, available: 20_000_000_000, limit: None };
        let mut text = String::new();
        fits(&mut text, "it", &Config::full(), &memory);
        // 10 layers x 2 heads x 256 x (key, value) x 2 bytes = 20,480 bytes a token.
        let row =
            |context: &str| text.lines().find(|l| l.trim_start().starts_with(context)).unwrap();
        assert!(row("4096 ").ends_with("fits"), "{text}");
        assert!(row("262144").contains("5.4") && row("262144").contains("too much"), "{text}");
        assert!(text.contains("19.5 GB of tensors"), "{text}");
    }

    #[test]
    fn commands_can_be_pasted() {
        assert_eq!(quoted(Path::new("/a/b-1.packed")), "/a/b-1.packed");
        assert_eq!(quoted(Path::new("/a b/it's")), r"'/a b/it'\''s'");
    }
}
