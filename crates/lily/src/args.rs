//! The flags that several commands share: one table for names, defaults and help.

use clap::builder::{OsStringValueParser, TypedValueParser};
use clap::{Args, ValueEnum};
use lily_device::cpu::Isa;
use std::path::PathBuf;

/// Which checkpoint.
#[derive(Args, Clone, Debug)]
pub struct ModelArgs {
    /// Folder of the checkpoint [default: the toy model inside this program]
    #[arg(long, value_name = "DIR", env = "LILY_MODEL", hide_env_values = true, value_parser = path_parser())]
    pub model: Option<PathBuf>,
    /// Accept a checkpoint of this architecture with other sizes than Qwen3.6-35B-A3B
    #[arg(long)]
    pub any_size: bool,
}

impl ModelArgs {
    /// The folder, if one was given.
    pub fn dir(&self) -> Option<&PathBuf> {
        given(&self.model)
    }
}

/// Takes any path, also an empty one: what an empty environment variable gives.
pub fn path_parser() -> impl TypedValueParser<Value = PathBuf> {
    OsStringValueParser::new().map(PathBuf::from)
}

/// The path, unless it is empty: an empty environment variable is as good as none.
pub fn given(path: &Option<PathBuf>) -> Option<&PathBuf> {
    path.as_ref().filter(|path| !path.as_os_str().is_empty())
}

/// What computes.
#[derive(Args, Clone, Debug)]
pub struct DeviceArgs {
    /// What computes
    #[arg(long, value_enum, default_value_t = DeviceKind::Auto)]
    pub device: DeviceKind,
    /// Instruction set of the CPU device; `scalar` is the reference [default: the best there is]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<Isa>,
    /// Threads of the CPU device [default: one for each core]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
}

/// Kinds of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DeviceKind {
    /// The best this machine has.
    Auto,
    /// The processor.
    Cpu,
}

/// How much to keep in memory.
#[derive(Args, Clone, Debug)]
pub struct MemoryArgs {
    /// Longest sequence, prompt and reply together, in tokens [default: 32768, or the model's most]
    #[arg(long, value_name = "N", allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(2..))]
    pub max_seq: Option<u32>,
    /// How keys and values are stored
    #[arg(long, value_enum, default_value_t = KvKind::Bf16)]
    pub kv: KvKind,
    /// Go on although the memory seems too small
    #[arg(long)]
    pub force: bool,
}

/// Storage of keys and values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum KvKind {
    /// 4 bytes an element.
    F32,
    /// 2 bytes an element.
    Bf16,
}

/// How tokens are chosen. What is left out comes from the checkpoint's generation_config.json.
#[derive(Args, Clone, Debug, Default)]
#[command(next_help_heading = "Sampling (left out: the checkpoint's own defaults)")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token
    #[arg(long, value_name = "T", allow_negative_numbers = true)]
    pub temperature: Option<f32>,
    /// Only the K most likely tokens are candidates; 0: all
    #[arg(long, value_name = "K", allow_negative_numbers = true)]
    pub top_k: Option<u32>,
    /// Only the most likely tokens that together reach probability P
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub top_p: Option<f32>,
    /// Only tokens at least P times as likely as the most likely one
    #[arg(long, value_name = "P", allow_negative_numbers = true)]
    pub min_p: Option<f32>,
    /// Subtracted from the logit of every token that the reply has
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// Subtracted from a token's logit for every time that the reply has it
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Divides the logit of every token that prompt or reply have
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub repetition_penalty: Option<f32>,
    /// Same seed, same reply [default: another each time]
    #[arg(long, value_name = "N", allow_negative_numbers = true)]
    pub seed: Option<u64>,
}
