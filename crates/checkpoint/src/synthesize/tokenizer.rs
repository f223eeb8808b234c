//! A tokenizer with as many ids as the published one, made up from the letters of the alphabet: it
//! has the same pipeline (NFC, one regular expression, byte-level BPE) and the same added tokens,
//! and holds no vocabulary of anyone's. English words become two or three tokens, other scripts
//! their bytes.

use serde_json::{Map, Value, json};

/// Ids: base vocabulary and added tokens.
pub const IDS: usize = 248_077;
/// Ids of the base vocabulary; the added tokens' follow.
const BASE: usize = IDS - ADDED.len();

/// The words of the pre-tokenizer, as the published `tokenizer_config.json` spells them.
const WORDS: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";

/// The published model's added tokens in the order of their ids; whether each is special.
const ADDED: [(&str, bool); 33] = [
    ("<|endoftext|>", true),
    ("<|im_start|>", true),
    ("<|im_end|>", true),
    ("<|object_ref_start|>", true),
    ("<|object_ref_end|>", true),
    ("<|box_start|>", true),
    ("<|box_end|>", true),
    ("<|quad_start|>", true),
    ("<|quad_end|>", true),
    ("<|vision_start|>", true),
    ("<|vision_end|>", true),
    ("<|vision_pad|>", true),
    ("<|image_pad|>", true),
    ("<|video_pad|>", true),
    ("<tool_call>", false),
    ("</tool_call>", false),
    ("<|fim_prefix|>", false),
    ("<|fim_middle|>", false),
    ("<|fim_suffix|>", false),
    ("<|fim_pad|>", false),
    ("<|repo_name|>", false),
    ("<|file_sep|>", false),
    ("<tool_response>", false),
    ("</tool_response>", false),
    ("<think>", false),
    ("</think>", false),
    ("<|audio_start|>", true),
    ("<|audio_end|>", true),
    ("<tts_pad>", true),
    ("<tts_text_bos>", true),
    ("<tts_text_eod>", true),
    ("<tts_text_bos_single>", true),
    ("<|audio_pad|>", true),
];

/// `tokenizer_config.json`.
pub fn settings() -> Value {
    json!({
        "add_prefix_space": false,
        "bos_token": null,
        "clean_up_tokenization_spaces": false,
        "eos_token": "<|im_end|>",
        "errors": "replace",
        "model_max_length": 262_144,
        "pad_token": "<|endoftext|>",
        "pretokenize_regex": WORDS,
        "split_special_tokens": false,
        "tokenizer_class": "TokenizersBackend",
        "unk_token": null,
    })
}

/// `tokenizer.json`, about 12 MB, always the same.
pub fn tokenizer_json() -> String {
    let added: Vec<Value> = (BASE..)
        .zip(ADDED)
        .map(|(id, (content, special))| {
            json!({
                "id": id,
                "content": content,
                "single_word": false,
                "lstrip": false,
                "rstrip": false,
                "normalized": false,
                "special": special,
            })
        })
        .collect();
    let byte_level = json!({
        "type": "ByteLevel",
        "add_prefix_space": false,
        "trim_offsets": false,
        "use_regex": false,
    });
    let words = json!({
        "type": "Split",
        "pattern": { "Regex": WORDS },
        "behavior": "Isolated",
        "invert": false,
    });
    let merges = merges();
    let mut vocabulary = Map::new();
    let bytes = (0..=255).map(|byte| letter(byte).to_string());
    let merged = merges.iter().map(|(left, right)| format!("{left}{right}"));
    for (id, token) in bytes.chain(merged).enumerate() {
        vocabulary.insert(token, id.into());
    }
    assert_eq!(vocabulary.len(), BASE, "no two merges make the same token");
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": added,
        "normalizer": { "type": "NFC" },
        "pre_tokenizer": { "type": "Sequence", "pretokenizers": [words, byte_level] },
        "post_processor": byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": null,
            "unk_token": null,
            "continuing_subword_prefix": "",
            "end_of_word_suffix": "",
            "fuse_unk": false,
            "byte_fallback": false,
            "ignore_merges": false,
            "vocab": vocabulary,
            "merges": merges,
        },
    })
    .to_string()
}

/// Letters by how often English uses them, roughly.
const LETTERS: &str = "etaoinshrdlucmfwypvbgkjqxz";

/// The merges that make the base vocabulary beyond the bytes, first come first: pairs of letters,
/// such pairs behind a space, and two pairs together with and without the space, those of frequent
/// letters before others.
fn merges() -> Vec<(String, String)> {
    let space = letter(b' ').to_string();
    let newline = letter(b'\n').to_string();
    let mut merges = Vec::new();
    for unit in [&space, &newline] {
        for length in [1, 2, 4, 8] {
            merges.push((unit.repeat(length), unit.repeat(length)));
        }
    }
    // Pairs with the sum of their letters' ranks, the most frequent first.
    let mut pairs: Vec<(usize, String)> = Vec::new();
    for (a, left) in LETTERS.chars().enumerate() {
        for (b, right) in LETTERS.chars().enumerate() {
            pairs.push((a + b, format!("{left}{right}")));
        }
    }
    pairs.sort_by_key(|pair| pair.0);
    for (_, pair) in &pairs {
        let (left, right) = pair.split_at(1);
        merges.push((left.into(), right.into()));
    }
    for (_, pair) in &pairs {
        let (left, right) = pair.split_at(1);
        merges.push((left.to_uppercase(), right.into()));
    }
    for (_, pair) in &pairs {
        merges.push((space.clone(), pair.clone()));
    }
    let mut fours: Vec<(usize, &str, &str)> = Vec::new();
    for (a, left) in &pairs {
        for (b, right) in &pairs {
            fours.push((a + b, left, right));
        }
    }
    fours.sort_by_key(|four| four.0);
    for (_, left, right) in fours {
        if merges.len() >= BASE - 256 {
            break;
        }
        merges.push((format!("{space}{left}"), right.into()));
        merges.push((left.into(), right.into()));
    }
    merges.truncate(BASE - 256);
    merges
}

/// The letter that stands for a byte in a byte-level vocabulary: itself where it can be seen,
/// else one from U+0100 on, in the order of the bytes.
fn letter(byte: u8) -> char {
    let seen = |byte: u8| matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff);
    if seen(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&byte| !seen(byte)).count() as u32;
    char::from_u32(0x100 + before).expect("68 letters from U+0100 on")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn every_token_can_be_reached() {
        let merges = merges();
        assert_eq!(merges.len(), BASE - 256);
        let mut known: HashMap<String, usize> =
            (0..=255).map(|byte| (letter(byte).to_string(), 0)).collect();
        assert_eq!(known.len(), 256);
        for (i, (left, right)) in merges.iter().enumerate() {
            assert!(known.contains_key(left) && known.contains_key(right), "{left} {right}");
            assert!(known.insert(format!("{left}{right}"), i).is_none(), "{left} {right} twice");
        }
    }

    #[test]
    fn the_added_tokens_are_the_published_ones() {
        let json: Value = serde_json::from_str(&tokenizer_json()).unwrap();
        let added = json["added_tokens"].as_array().unwrap();
        let id = |text: &str| {
            added.iter().find(|token| token["content"] == text).map(|token| token["id"].clone())
        };
        for (text, expected) in [
            ("<|endoftext|>", 248_044),
            ("<|im_end|>", 248_046),
            ("<tool_call>", 248_058),
            ("</think>", 248_069),
            ("<|audio_pad|>", 248_076),
        ] {
            assert_eq!(id(text), Some(json!(expected)));
        }
        let Some(shared) = crate::testing::shared() else { return };
        let text = std::fs::read_to_string(shared.join("tokenizer/tokenizer.json")).unwrap();
        let published: Value = serde_json::from_str(&text).unwrap();
        for part in ["added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder"] {
            assert_eq!(json[part], published[part], "{part}");
        }
    }
}
