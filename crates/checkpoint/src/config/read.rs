//! Reading `config.json`: every setting on which the engine relies, checked and named where it
//! deviates. All deviations are listed, each as `path: expected, found`.

use serde_json::{Map, Value};

use super::{CONV_TAPS, Config, GROUP, QWEN_ENDOFTEXT, QWEN_IM_END, QWEN_VOCAB};
use super::{eight_bit_paths, layer_type};
use crate::error::shown;
use crate::grouped::Grouped;

/// The largest value of each size. Far above the full model, and low enough that no product of
/// sizes overflows: all weights together stay below 2^56 bytes, the KV cache of one sequence below
/// 2^58.
mod limit {
    pub const VOCAB: usize = 1 << 22;
    pub const DIM: usize = 1 << 16;
    pub const LAYERS: usize = 1 << 8;
    pub const HEADS: usize = 1 << 10;
    pub const HEAD_DIM: usize = 1 << 12;
    pub const EXPERTS: usize = 1 << 14;
    pub const POSITIONS: usize = 1 << 24;
    pub const STOP_IDS: usize = 64;
}

/// The JSON object in `text`, or why there is none.
pub(crate) fn parse(text: &str) -> std::result::Result<Map<String, Value>, String> {
    if text.trim().is_empty() {
        return Err("the file is empty".into());
    }
    match serde_json::from_str(text) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(other) => Err(format!("expected a JSON object, found {}", show(&other))),
        Err(error) => Err(format!("not valid JSON: {error}")),
    }
}

/// Reads what the engine needs from a parsed `config.json`, and lists what it cannot accept. Where
/// all sizes could be read there is a config, whatever else is listed.
pub(crate) fn read(top: &Map<String, Value>) -> (Option<Config>, Vec<String>) {
    let mut problems = Vec::new();
    let mut at = Section { path: "", object: top, problems: &mut problems };
    at.expect("model_type", "qwen3_5_moe", Presence::Required);
    at.expect("tie_word_embeddings", false, Presence::Optional);
    let Some(text) = at.object("text_config") else {
        // Without it each of the settings below would be one more line about the same thing.
        return (None, problems);
    };
    let mut at = Section { path: "text_config.", object: text, problems: &mut problems };
    check_settings(&mut at);
    let (config, extra) = read_sizes(&mut at);
    // Where another size is unreadable there is no config, but the number of layers may be known.
    let layers = at.present("num_hidden_layers").and_then(Value::as_u64).map(|n| n as usize);
    if let Some(layers) = layers.filter(|layers| (1..=limit::LAYERS).contains(layers)) {
        check_quantization(top, layers, &mut problems);
    }
    let vocab = config.as_ref().map(|config| config.vocab);
    let stop_ids = stop_ids(top, text, vocab, &mut problems);
    let config = config.map(|config| Config { stop_ids, ..config });
    if let Some(config) = &config {
        check_relations(config, &extra, &mut problems);
        if let Some(types) = text.get("layer_types").filter(|value| !value.is_null()) {
            check_layer_types(types, config, &mut problems);
        }
    }
    (config, problems)
}

/// Settings that the engine has built in.
fn check_settings(at: &mut Section) {
    at.expect("model_type", "qwen3_5_moe_text", Presence::Optional);
    at.expect("hidden_act", "silu", Presence::Optional);
    at.expect("attn_output_gate", true, Presence::Optional);
    at.expect("attention_bias", false, Presence::Optional);
    at.expect("norm_topk_prob", true, Presence::Optional);
    at.expect("decoder_sparse_step", 1, Presence::Optional);
    at.expect("tie_word_embeddings", false, Presence::Optional);
    at.expect("linear_conv_kernel_dim", CONV_TAPS, Presence::Required);
    if let Some(value) = at.present("mlp_only_layers")
        && value.as_array().is_none_or(|layers| !layers.is_empty())
    {
        at.unexpected("mlp_only_layers", "an empty list: every layer has experts", value);
    }
    if let Some(value) = at.present("rope_scaling") {
        at.unexpected("rope_scaling", "nothing: Lily runs plain RoPE", value);
    }
}

/// Sizes that `config.json` has twice, or in another form, and [`Config`] once.
#[derive(Default)]
struct Extra {
    delta_value_dim: usize,
    shared_hidden: usize,
    rotary_dim: f64,
}

/// Reads every size; none where one of them is missing or beyond its limit. The stop ids are left
/// empty.
fn read_sizes(at: &mut Section) -> (Option<Config>, Extra) {
    let vocab = at.count("vocab_size", limit::VOCAB);
    let dim = at.count("hidden_size", limit::DIM);
    let layers = at.count("num_hidden_layers", limit::LAYERS);
    let attention_every = at.count("full_attention_interval", limit::LAYERS);
    let q_heads = at.count("num_attention_heads", limit::HEADS);
    let kv_heads = at.count("num_key_value_heads", limit::HEADS);
    let head_dim = at.count("head_dim", limit::HEAD_DIM);
    let delta_k_heads = at.count("linear_num_key_heads", limit::HEADS);
    let delta_v_heads = at.count("linear_num_value_heads", limit::HEADS);
    let delta_head_dim = at.count("linear_key_head_dim", limit::HEAD_DIM);
    let delta_value_dim = at.count("linear_value_head_dim", limit::HEAD_DIM);
    let experts = at.count("num_experts", limit::EXPERTS);
    let experts_per_token = at.count("num_experts_per_tok", limit::EXPERTS);
    let expert_hidden = at.count("moe_intermediate_size", limit::DIM);
    let shared_hidden = at.count("shared_expert_intermediate_size", limit::DIM);
    let max_positions = at.count("max_position_embeddings", limit::POSITIONS);
    let eps = at.number("rms_norm_eps", 1e-30, 1.0);
    let rope = read_rope(at);
    let sizes = || {
        let (rope_theta, rotary_factor) = rope?;
        let extra = Extra {
            delta_value_dim: delta_value_dim?,
            shared_hidden: shared_hidden?,
            rotary_dim: rotary_dim(head_dim?, rotary_factor),
        };
        let config = Config {
            vocab: vocab?,
            dim: dim?,
            layers: layers?,
            attention_every: attention_every?,
            q_heads: q_heads?,
            kv_heads: kv_heads?,
            head_dim: head_dim?,
            rotary_dim: extra.rotary_dim as usize,
            rope_theta,
            delta_k_heads: delta_k_heads?,
            delta_v_heads: delta_v_heads?,
            delta_head_dim: delta_head_dim?,
            experts: experts?,
            experts_per_token: experts_per_token?,
            expert_hidden: expert_hidden?,
            eps: eps? as f32,
            max_positions: max_positions?,
            stop_ids: Vec::new(),
        };
        Some((config, extra))
    };
    match sizes() {
        Some((config, extra)) => (Some(config), extra),
        None => (None, Extra::default()),
    }
}

/// `rope_theta`, and the part of a head that rotates. Qwen writes the latter twice; where the two
/// places differ, MLX and transformers follow `rope_parameters`.
fn read_rope(at: &mut Section) -> Option<(f64, f64)> {
    let outer = match at.present("partial_rotary_factor") {
        Some(_) => Some(at.number("partial_rotary_factor", 0.0, 1.0)?),
        None => None,
    };
    let rope = at.object("rope_parameters")?;
    let path = "text_config.rope_parameters.";
    let mut at = Section { path, object: rope, problems: &mut *at.problems };
    at.expect("rope_type", "default", Presence::Optional);
    at.expect("type", "default", Presence::Optional);
    let theta = at.number("rope_theta", 1.0, 1e15);
    let factor = match (at.present("partial_rotary_factor"), outer) {
        (None, Some(outer)) => Some(outer),
        _ => at.number("partial_rotary_factor", 0.0, 1.0),
    };
    theta.zip(factor)
}

/// `head_dim * factor`. A factor of 14/48 is no binary fraction: a product that misses a whole
/// number by a rounding is that number.
fn rotary_dim(head_dim: usize, factor: f64) -> f64 {
    let product = head_dim as f64 * factor;
    if (product - product.round()).abs() < 1e-9 { product.round() } else { product }
}

/// What must hold between sizes.
fn check_relations(config: &Config, extra: &Extra, problems: &mut Vec<String>) {
    for (name, found, other, expected) in [
        (
            "linear_value_head_dim",
            extra.delta_value_dim,
            "linear_key_head_dim",
            config.delta_head_dim,
        ),
        (
            "shared_expert_intermediate_size",
            extra.shared_hidden,
            "moe_intermediate_size",
            config.expert_hidden,
        ),
    ] {
        if found != expected {
            problems.push(format!(
                "text_config.{name}: expected {expected}, as in {other}, found {found}"
            ));
        }
    }
    for (name, found, other, divisor) in [
        ("num_attention_heads", config.q_heads, "num_key_value_heads", config.kv_heads),
        (
            "linear_num_value_heads",
            config.delta_v_heads,
            "linear_num_key_heads",
            config.delta_k_heads,
        ),
    ] {
        if !found.is_multiple_of(divisor) {
            problems.push(format!(
                "text_config.{name}: expected a multiple of {other}, which is {divisor}, found \
                 {found}"
            ));
        }
    }
    if config.experts_per_token > config.experts {
        problems.push(format!(
            "text_config.num_experts_per_tok: expected at most num_experts, which is {}, found {}",
            config.experts, config.experts_per_token
        ));
    }
    for (what, width) in [
        ("hidden_size", config.dim),
        ("moe_intermediate_size", config.expert_hidden),
        ("num_attention_heads * head_dim", config.q_heads * config.head_dim),
        ("linear_num_value_heads * linear_key_head_dim", config.delta_v_dim()),
    ] {
        if !width.is_multiple_of(GROUP) {
            problems.push(format!(
                "text_config: {what} is {width}, expected a multiple of the quantisation group, \
                 {GROUP}"
            ));
        }
    }
    let rotary = extra.rotary_dim;
    if rotary < 2.0 || rotary % 2.0 != 0.0 {
        problems.push(format!(
            "text_config.rope_parameters.partial_rotary_factor: head_dim * factor is {rotary}, \
             expected an even number of at least 2"
        ));
    }
}

/// `layer_types`, where it is given, must say what `full_attention_interval` says.
fn check_layer_types(value: &Value, config: &Config, problems: &mut Vec<String>) {
    let (layers, every) = (config.layers, config.attention_every);
    let Some(types) = value.as_array() else {
        problems.push(format!("text_config.layer_types: expected a list, found {}", show(value)));
        return;
    };
    if types.len() != layers {
        problems.push(format!(
            "text_config.layer_types: expected {layers} entries, as in num_hidden_layers, found {}",
            types.len()
        ));
    }
    for (layer, found) in types.iter().enumerate().take(layers) {
        let expected = layer_type(config.is_attention(layer));
        if found.as_str() != Some(expected) {
            problems.push(format!(
                "text_config.layer_types[{layer}]: expected \"{expected}\" (every {every}th layer is \
                 full attention), found {}",
                show(found)
            ));
            return; // A shifted pattern is one problem, not one a layer.
        }
    }
}

/// Every text module is affine 4-bit in groups of 64, but for router and shared expert's gate,
/// which have 8 bits. Overrides that say the default again change nothing and are accepted, and so
/// is whatever is said of the vision tower.
fn check_quantization(top: &Map<String, Value>, layers: usize, problems: &mut Vec<String>) {
    // MLX writes the same object under both names and reads the first.
    let key = if top.contains_key("quantization") { "quantization" } else { "quantization_config" };
    let Some(found) = top.get(key).filter(|value| !value.is_null()) else {
        problems.push(
            "quantization: missing; expected MLX affine quantisation, 4 bits, group size 64".into(),
        );
        return;
    };
    let Some(object) = found.as_object() else {
        problems.push(format!("{key}: expected an object, found {}", show(found)));
        return;
    };
    if let Some(method) = object.get("quant_method") {
        problems.push(format!(
            "{key}.quant_method: expected MLX affine quantisation, found {}",
            show(method)
        ));
        return;
    }
    let path = format!("{key}.");
    let mut at = Section { path: &path, object, problems };
    at.expect("mode", "affine", Presence::Optional);
    at.expect("group_size", GROUP, Presence::Required);
    at.expect("bits", 4, Presence::Required);
    let default_bits = object.get("bits").and_then(Value::as_u64);

    let mut wrong = Grouped::default();
    let eight_bit: std::collections::HashSet<String> = eight_bit_paths(layers).collect();
    for (path, value) in object {
        if !path.contains('.') || path.starts_with("vision_tower.") || value == &Value::Bool(true) {
            continue;
        }
        let expected = if eight_bit.contains(path) { 8 } else { 4 };
        let setting = |name: &str| value.get(name).and_then(Value::as_u64);
        let mode = value.get("mode");
        let fits = setting("group_size") == Some(GROUP as u64)
            && setting("bits") == Some(expected)
            && mode.is_none_or(|mode| mode.as_str() == Some("affine"));
        if !fits {
            let problem =
                format!("expected {expected} bits, group size {GROUP}, found {}", show(value));
            wrong.add(path, &problem, "");
        }
    }
    for path in eight_bit_paths(layers) {
        if matches!(object.get(&path), None | Some(Value::Bool(true))) && default_bits != Some(8) {
            wrong.add(&path, "expected an override to 8 bits, found none", "");
        }
    }
    problems.extend(wrong.lines(8).into_iter().map(|line| format!("{key}: {line}")));
}

/// The ids that end a reply: a number or a list, of the top level.
///
/// Where the top level names none, `text_config`'s are taken; for Qwen's own vocabulary that field
/// holds `<|endoftext|>` alone and a chat would never stop, so `<|im_end|>` is added.
fn stop_ids(
    top: &Map<String, Value>,
    text: &Map<String, Value>,
    vocab: Option<usize>,
    problems: &mut Vec<String>,
) -> Vec<u32> {
    let given = |object: &Map<String, Value>| {
        object.get("eos_token_id").filter(|value| !value.is_null()).cloned()
    };
    let (path, value) = match (given(top), given(text)) {
        (Some(value), _) => ("eos_token_id", value),
        (None, Some(value)) => ("text_config.eos_token_id", value),
        (None, None) => {
            problems.push("eos_token_id: missing; without it no reply would end".into());
            return Vec::new();
        }
    };
    let list = match &value {
        Value::Array(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    if list.is_empty() || list.len() > limit::STOP_IDS {
        problems.push(format!(
            "{path}: expected 1 to {} ids, found {}",
            limit::STOP_IDS,
            list.len()
        ));
        return Vec::new();
    }
    let vocab = vocab.unwrap_or(limit::VOCAB);
    let mut ids = Vec::new();
    for value in list {
        match value.as_u64().and_then(|id| u32::try_from(id).ok()) {
            Some(id) if (id as usize) < vocab => {
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            _ => problems.push(format!(
                "{path}: expected ids below vocab_size, which is {vocab}, found {}",
                show(value)
            )),
        }
    }
    if path != "eos_token_id" && vocab == QWEN_VOCAB && ids == [QWEN_ENDOFTEXT] {
        ids.insert(0, QWEN_IM_END);
    }
    ids
}

#[derive(Clone, Copy, PartialEq)]
enum Presence {
    Required,
    Optional,
}

/// One object of the config while it is read: where it is, and where problems go.
struct Section<'a, 'p> {
    /// What stands before a key in messages: empty, or ending in a dot.
    path: &'p str,
    object: &'a Map<String, Value>,
    problems: &'p mut Vec<String>,
}

impl<'a> Section<'a, '_> {
    /// The value of `key`; null counts as absent, as in Python's configs.
    fn present(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn required(&mut self, key: &str, expected: &str) -> Option<&'a Value> {
        let value = self.present(key);
        if value.is_none() {
            self.problems.push(format!("{}{key}: missing; expected {expected}", self.path));
        }
        value
    }

    fn unexpected(&mut self, key: &str, expected: &str, found: &Value) {
        self.problems.push(format!(
            "{}{key}: expected {expected}, found {}",
            self.path,
            show(found)
        ));
    }

    fn expect(&mut self, key: &str, expected: impl Into<Value>, presence: Presence) {
        let expected = expected.into();
        let found = match presence {
            Presence::Required => self.required(key, &expected.to_string()),
            Presence::Optional => self.present(key),
        };
        if let Some(found) = found.filter(|found| **found != expected) {
            self.unexpected(key, &expected.to_string(), found);
        }
    }

    fn object(&mut self, key: &str) -> Option<&'a Map<String, Value>> {
        let value = self.required(key, "an object")?;
        match value.as_object() {
            Some(object) if !object.is_empty() => Some(object),
            _ => {
                self.unexpected(key, "an object", value);
                None
            }
        }
    }

    /// A whole number from 1 to `most`.
    fn count(&mut self, key: &str, most: usize) -> Option<usize> {
        let expected = format!("a whole number from 1 to {most}");
        let value = self.required(key, &expected)?;
        let count = value
            .as_u64()
            .and_then(|count| usize::try_from(count).ok())
            .filter(|count| (1..=most).contains(count));
        if count.is_none() {
            self.unexpected(key, &expected, value);
        }
        count
    }

    /// A number above 0, from `least` to `most`.
    fn number(&mut self, key: &str, least: f64, most: f64) -> Option<f64> {
        let expected = if least > 0.0 {
            format!("a number from {least:e} to {most:e}")
        } else {
            format!("a number above 0, at most {most}")
        };
        let value = self.required(key, &expected)?;
        let number =
            value.as_f64().filter(|number| *number > 0.0 && (least..=most).contains(number));
        if number.is_none() {
            self.unexpected(key, &expected, value);
        }
        number
    }
}

/// A value as it stands in the file, cut where it is long.
fn show(value: &Value) -> String {
    shown(&value.to_string())
}
