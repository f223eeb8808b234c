//! `tokenizer.json` as Lily reads it: one pipeline, every setting of it checked.
//!
//! Whatever passes here can be encoded with without a panic; whatever does not is refused with
//! the setting's name, what was found and what was expected.

use super::{SPLIT, Tokenizer};
use serde::de::{Error as _, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::fmt;
use tokenizers::models::bpe::{BPE, Vocab};

/// The file's top level; settings that do not change what text becomes are not read.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: Model,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    content: String,
    #[serde(default)]
    single_word: bool,
    #[serde(default)]
    lstrip: bool,
    #[serde(default)]
    rstrip: bool,
    #[serde(default)]
    normalized: bool,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct Model {
    #[serde(default, rename = "type")]
    kind: Option<String>,
    #[serde(default)]
    dropout: Option<f32>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
    vocab: Spellings,
    merges: Vec<Merge>,
}

/// The vocabulary: each spelling once.
struct Spellings(Vocab);

impl<'de> Deserialize<'de> for Spellings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Entries;
        impl<'de> Visitor<'de> for Entries {
            type Value = Spellings;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a map from tokens to ids")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Spellings, A::Error> {
                let mut vocab = Vocab::default();
                while let Some((token, id)) = map.next_entry::<String, u32>()? {
                    if let Some(other) = vocab.insert(token, id) {
                        return Err(A::Error::custom(format_args!(
                            "the token of id {id} is in the vocabulary twice, also as {other}"
                        )));
                    }
                }
                Ok(Spellings(vocab))
            }
        }
        deserializer.deserialize_map(Entries)
    }
}

/// Two tokens that become one: `["a", "b"]`, or `"a b"` in older files.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Pair;
        impl<'de> Visitor<'de> for Pair {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
                f.write_str("a merge: two tokens, as a list or with a blank between them")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<Merge, E> {
                match text.split_once(' ') {
                    Some((a, b)) if !b.contains(' ') => Ok(Merge(a.to_owned(), b.to_owned())),
                    _ => Err(E::custom(format_args!("merge {text:?} is not two tokens"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Merge, A::Error> {
                match (seq.next_element()?, seq.next_element()?, seq.next_element::<String>()?) {
                    (Some(a), Some(b), None) => Ok(Merge(a, b)),
                    _ => Err(A::Error::custom("a merge is not a list of two tokens")),
                }
            }
        }
        deserializer.deserialize_any(Pair)
    }
}

/// Reads and checks the file. The error is one sentence without the file's name.
pub(super) fn read(json: &[u8]) -> Result<Tokenizer, String> {
    let file: File = serde_json::from_slice(json).map_err(|e| {
        format!("cannot be read: {e}; a complete copy comes with the checkpoint (`lily pull`)")
    })?;
    let nfc = match file.normalizer.get("type").and_then(Value::as_str) {
        Some("NFC") => true,
        None if file.normalizer.is_null() => false,
        _ => return Err(unexpected("normalizer", &file.normalizer, r#"{"type":"NFC"} or null"#)),
    };
    check_split(&file.pre_tokenizer)?;
    let is_byte_level = |v: &Value| v.get("type").and_then(Value::as_str) == Some("ByteLevel");
    if !is_byte_level(&file.decoder) {
        return Err(unexpected("decoder", &file.decoder, "type ByteLevel"));
    }
    if !file.post_processor.is_null() && !is_byte_level(&file.post_processor) {
        let expected = "type ByteLevel or null: no token is put around a text";
        return Err(unexpected("post_processor", &file.post_processor, expected));
    }
    build(file.model, file.added_tokens, nfc)
}

fn unexpected(place: &str, found: &Value, expected: &str) -> String {
    let mut found = found.to_string();
    if let Some((end, _)) = found.char_indices().nth(200) {
        found.truncate(end);
        found.push('…');
    }
    format!("{place}: expected {expected}, found {found}")
}

/// The pre-tokenizer is `Split` by [`SPLIT`], then `ByteLevel` without a split of its own.
fn check_split(pre_tokenizer: &Value) -> Result<(), String> {
    let steps = pre_tokenizer.get("pretokenizers").and_then(Value::as_array);
    let [split, byte_level] = steps.map(Vec::as_slice).unwrap_or_default() else {
        let expected = "a Sequence of Split and ByteLevel";
        return Err(unexpected("pre_tokenizer", pre_tokenizer, expected));
    };
    let holds = |object: &Value, expected: &[(&str, Value)]| {
        expected.iter().all(|(key, value)| object.get(key) == Some(value))
    };
    let isolated =
        [("type", json!("Split")), ("behavior", json!("Isolated")), ("invert", json!(false))];
    if !holds(split, &isolated) {
        let expected = "Split with behavior Isolated, not inverted";
        return Err(unexpected("pre_tokenizer.pretokenizers[0]", split, expected));
    }
    let plain = [
        ("type", json!("ByteLevel")),
        ("add_prefix_space", json!(false)),
        ("use_regex", json!(false)),
    ];
    if !holds(byte_level, &plain) {
        let expected = "ByteLevel with neither add_prefix_space nor use_regex";
        return Err(unexpected("pre_tokenizer.pretokenizers[1]", byte_level, expected));
    }
    let place = "pre_tokenizer.pretokenizers[0].pattern.Regex";
    let pattern = split.pointer("/pattern/Regex").unwrap_or(&Value::Null);
    match pattern.as_str() {
        Some(SPLIT) => Ok(()),
        Some(pattern) if pattern.contains(r"\p{L}") && !pattern.contains(r"\p{M}") => Err(format!(
            "{place} lacks \\p{{M}}: this file was damaged when somebody saved it again with \
                 another tokenizer class, and would split text in Hindi, Thai and other scripts \
                 wrongly; take the tokenizer.json of mlx-community/Qwen3.6-35B-A3B-4bit"
        )),
        _ => Err(unexpected(place, pattern, SPLIT)),
    }
}

fn build(model: Model, added: Vec<Added>, nfc: bool) -> Result<Tokenizer, String> {
    if model.kind.as_deref().is_some_and(|kind| kind != "BPE") {
        return Err(unexpected("model.type", &json!(model.kind), "BPE"));
    }
    let affixed = |affix: &Option<String>| affix.as_ref().is_some_and(|affix| !affix.is_empty());
    for (place, set) in [
        ("dropout", model.dropout.is_some_and(|p| p != 0.0)),
        ("unk_token", model.unk_token.is_some()),
        ("continuing_subword_prefix", affixed(&model.continuing_subword_prefix)),
        ("end_of_word_suffix", affixed(&model.end_of_word_suffix)),
        ("byte_fallback", model.byte_fallback),
    ] {
        if set {
            return Err(format!("model.{place} is set: expected a plain byte-level BPE"));
        }
    }
    let vocab = model.vocab.0;
    let letters = byte_letters();
    let first_added = u32::try_from(vocab.len()).map_err(|_| "model.vocab is too large")?;
    let (bytes, ends) = spell_out(&vocab, &letters)?;
    // The builder copies both halves of a merge into a buffer of the longest token's length.
    let longest = vocab.keys().map(String::len).max().unwrap_or(0);
    if let Some(Merge(a, b)) = model.merges.iter().find(|m| m.0.len() + m.1.len() > longest) {
        return Err(format!("model.merges: {a:?} and {b:?} make a token that is not in the vocab"));
    }
    let merges = model.merges.into_iter().map(|Merge(a, b)| (a, b)).collect();
    let model = BPE::builder()
        .vocab_and_merges(vocab, merges)
        .ignore_merges(model.ignore_merges)
        .build()
        .map_err(|e| format!("model.merges: {e}"))?;
    let mut tokenizer = Tokenizer {
        model,
        letters,
        nfc,
        bytes,
        ends,
        first_added,
        added: HashMap::new(),
        special: Vec::new(),
        added_lens: Vec::new(),
        opens: [false; 256],
    };
    add(&mut tokenizer, added)?;
    Ok(tokenizer)
}

/// The bytes of every token of the base vocabulary, by id, and where each ends. Errs if ids have
/// holes or tokens are not spelled in bytes, and if one of the 256 bytes has no token.
fn spell_out(vocab: &Vocab, letters: &[char; 256]) -> Result<(Vec<u8>, Vec<usize>), String> {
    let byte_of: HashMap<char, u8> = letters.iter().zip(0..=255).map(|(&c, b)| (c, b)).collect();
    let mut by_id: Vec<Option<&str>> = vec![None; vocab.len()];
    for (token, &id) in vocab {
        match by_id.get_mut(id as usize) {
            Some(slot @ None) => *slot = Some(token),
            Some(Some(other)) => {
                return Err(format!("model.vocab: id {id} is both {other:?} and {token:?}"));
            }
            None => {
                let last = vocab.len() - 1;
                return Err(format!(
                    "model.vocab: {token:?} has id {id}, but ids must be 0 to {last} without a \
                     hole"
                ));
            }
        }
    }
    let (mut bytes, mut ends) = (Vec::new(), Vec::with_capacity(vocab.len()));
    for (id, token) in by_id.iter().flatten().enumerate() {
        for letter in token.chars() {
            let Some(&byte) = byte_of.get(&letter) else {
                return Err(format!(
                    "model.vocab: token {id} {token:?} is not spelled in bytes: expected a \
                     byte-level BPE"
                ));
            };
            bytes.push(byte);
        }
        ends.push(bytes.len());
    }
    match letters.iter().position(|letter| !vocab.contains_key(letter.to_string().as_str())) {
        Some(byte) => Err(format!("model.vocab: byte {byte:#04x} has no token of its own")),
        None => Ok((bytes, ends)),
    }
}

/// Puts the added tokens behind the base vocabulary.
fn add(tokenizer: &mut Tokenizer, mut added: Vec<Added>) -> Result<(), String> {
    added.sort_by_key(|token| token.id);
    for token in added {
        let (id, content) = (token.id, &token.content);
        let next = tokenizer.len();
        if id as usize != next {
            return Err(format!(
                "added_tokens: expected id {next} (ids follow the {} of model.vocab without a \
                 hole), found {id} for {content:?}",
                tokenizer.first_added
            ));
        }
        if content.is_empty() {
            return Err(format!("added_tokens: id {id} has no text"));
        }
        if token.single_word || token.lstrip || token.rstrip {
            return Err(format!(
                "added_tokens: {content:?} has single_word, lstrip or rstrip set: expected a \
                 token that stands wherever it is spelled"
            ));
        }
        // Such a token is looked for after normalisation, which leaves ASCII as it is.
        if token.normalized && !content.is_ascii() {
            return Err(format!("added_tokens: {content:?} is normalized and not ASCII"));
        }
        tokenizer.bytes.extend_from_slice(content.as_bytes());
        tokenizer.ends.push(tokenizer.bytes.len());
        tokenizer.special.push(token.special);
        tokenizer.opens[content.as_bytes()[0] as usize] = true;
        if !tokenizer.added_lens.contains(&content.len()) {
            tokenizer.added_lens.push(content.len());
        }
        if let Some(other) = tokenizer.added.insert(token.content, id) {
            return Err(format!("added_tokens: ids {other} and {id} have the same text"));
        }
    }
    tokenizer.added_lens.sort_unstable_by(|a, b| b.cmp(a));
    Ok(())
}

/// The letter for each byte: printable Latin-1 stands for itself, the other 68 bytes are counted
/// from U+0100 on. GPT-2 began this, so that no token's spelling holds a blank or a control.
fn byte_letters() -> [char; 256] {
    let mut shifted = '\u{100}'..;
    std::array::from_fn(|byte| match byte as u8 {
        b @ (b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff) => char::from(b),
        _ => shifted.next().expect("68 letters follow U+0100"),
    })
}
