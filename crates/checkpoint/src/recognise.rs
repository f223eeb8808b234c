//! What a checkpoint is that Lily does not run, in the words in which people look for them. It
//! judges by config, file names and tensor names, never by values, and says nothing where it is
//! not sure.

use std::collections::BTreeSet;

use serde_json::{Map, Value};

use crate::config::GROUP;
use crate::error::shown;
use crate::safetensors::Entry;
use crate::shards::Shards;
use crate::tensors::PREFIX;

/// A noun phrase for the checkpoint whose `config.json` is `config` and whose folder holds `files`;
/// none where it looks like ours.
pub(crate) fn recognise(
    config: Option<&Map<String, Value>>,
    files: &[String],
    shards: &Shards,
) -> Option<String> {
    let entries: Vec<&Entry> = shards.entries().collect();
    by_files(files, &entries)
        .or_else(|| quantiser(config?))
        .or_else(|| by_tensors(&entries))
        .or_else(|| architecture(config?, &entries))
        .or_else(|| unconverted(&entries))
        .or_else(|| mlx(config, &entries))
}

/// Folders without any safetensors file.
fn by_files(files: &[String], entries: &[&Entry]) -> Option<String> {
    let any = |endings: &[&str]| files.iter().any(|file| endings.iter().any(|e| file.ends_with(e)));
    if !entries.is_empty() || any(&[".safetensors"]) {
        None
    } else if any(&[".gguf"]) {
        Some("a GGUF checkpoint".into())
    } else if any(&[".bin", ".pt", ".pth"]) {
        Some("a PyTorch checkpoint (.bin)".into())
    } else {
        None
    }
}

/// Quantisers other than MLX write their name into the config.
fn quantiser(config: &Map<String, Value>) -> Option<String> {
    let text = config.get("text_config").and_then(Value::as_object);
    let method = [Some(config), text]
        .into_iter()
        .flatten()
        .flat_map(|object| [object.get("quantization_config"), object.get("quantization")])
        .flatten()
        .find_map(|quantization| quantization.get("quant_method")?.as_str())?;
    Some(match method {
        "awq" => "an AWQ checkpoint".into(),
        "gptq" => "a GPTQ checkpoint".into(),
        "fp8" => "an FP8 checkpoint".into(),
        "bitsandbytes" => "a bitsandbytes checkpoint".into(),
        "compressed-tensors" => "a compressed-tensors checkpoint (llm-compressor, vLLM)".into(),
        other => format!("a checkpoint quantised by {}", shown(other)),
    })
}

fn by_tensors(entries: &[&Entry]) -> Option<String> {
    let any = |ending: &str| entries.iter().any(|entry| entry.name.ends_with(ending));
    if any(".g_idx") {
        Some("a GPTQ checkpoint".into())
    } else if any(".qweight") {
        Some("an AWQ or GPTQ checkpoint".into())
    } else if any(".weight_packed") {
        Some("a compressed-tensors checkpoint (llm-compressor, vLLM)".into())
    } else if any(".weight_scale_inv") || entries.iter().any(|e| e.dtype.starts_with("F8_E4M3")) {
        Some("an FP8 checkpoint".into())
    } else {
        None
    }
}

fn architecture(config: &Map<String, Value>, entries: &[&Entry]) -> Option<String> {
    let model_type = config.get("model_type").and_then(Value::as_str)?;
    let dense_mlp =
        |entry: &&Entry| entry.name.contains(".mlp.gate_proj.") && !entry.name.contains("expert");
    match model_type {
        "qwen3_5_moe" if entries.iter().any(dense_mlp) => Some("a dense model".into()),
        "qwen3_5_moe" => None,
        "qwen3_5" | "qwen3_5_text" => Some("a dense Qwen3.5 or Qwen3.6 model".into()),
        "qwen3_5_moe_text" => {
            Some("a text-only Hugging Face checkpoint of this architecture".into())
        }
        "qwen3_5_mtp" => Some("only the MTP head of a Qwen3.5 or Qwen3.6 model".into()),
        other => Some(format!("a model of another architecture ({})", shown(other))),
    }
}

/// The official files and everything trained from them, before a conversion to MLX.
fn unconverted(entries: &[&Entry]) -> Option<String> {
    let official = |e: &&Entry| {
        e.name.starts_with("model.language_model.") || e.name.starts_with("model.visual.")
    };
    let first = entries.iter().find(|entry| official(entry))?;
    let how = if first.dtype == "BF16" { " (`lily quantize` converts it)" } else { "" };
    Some(format!("a Hugging Face checkpoint in {}, not converted to MLX{how}", first.dtype))
}

/// MLX conversions with other settings, by the config or by the widths of the tensors.
fn mlx(config: Option<&Map<String, Value>>, entries: &[&Entry]) -> Option<String> {
    let ours: Vec<_> = entries.iter().filter(|entry| entry.name.starts_with(PREFIX)).collect();
    if ours.is_empty() {
        return None;
    }
    if !ours.iter().any(|entry| entry.name.ends_with(".scales")) {
        let dtype =
            ours.iter().find(|entry| entry.name.ends_with("lm_head.weight"))?.dtype.as_str();
        return Some(format!("an MLX checkpoint in {dtype}, not quantised"));
    }
    let quantization = config.and_then(|config| config.get("quantization"));
    let number = |name: &str| quantization.and_then(|q| q.get(name)).and_then(Value::as_u64);
    let mode = quantization.and_then(|q| q.get("mode")).and_then(Value::as_str);
    if let Some(mode) = mode.filter(|mode| *mode != "affine") {
        return Some(format!("an MLX checkpoint in mode {}", shown(mode)));
    }
    let widths = widths(&ours);
    if widths.len() > 1 {
        return Some("a mixed-bit MLX checkpoint (several widths)".into());
    }
    // Bits times group size, which is what the shapes alone tell; the config tells the rest.
    let product = widths.first().copied();
    let group = number("group_size").unwrap_or(GROUP as u64);
    let bits = match (number("bits"), product) {
        (Some(bits), Some(product)) if bits.checked_mul(group) == Some(product) => bits,
        (_, Some(product)) => product / group.max(1),
        (bits, None) => bits?,
    };
    match (bits, group) {
        (4, 64) => None,
        (bits, 64) => Some(format!("an MLX {bits}-bit checkpoint")),
        (bits, group) => Some(format!(
            "an MLX {bits}-bit checkpoint with group size {group} (as some DWQ builds have)"
        )),
    }
}

/// Bits times group size of every quantised module, but for the gates that have 8 bits anyway.
fn widths(entries: &[&&Entry]) -> BTreeSet<u64> {
    let scales: std::collections::HashMap<&str, u64> = entries
        .iter()
        .filter_map(|e| Some((e.name.strip_suffix(".scales")?, *e.shape.last()?)))
        .collect();
    entries
        .iter()
        .filter(|entry| entry.dtype == "U32")
        .filter_map(|entry| {
            let module = entry.name.strip_suffix(".weight")?;
            if module.ends_with(".mlp.gate") || module.ends_with(".shared_expert_gate") {
                return None;
            }
            entry.shape.last()?.checked_mul(32)?.checked_div(*scales.get(module)?)
        })
        .collect()
}
