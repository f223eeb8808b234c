//! Ids against the complete Hugging Face pipeline, and files that must be refused.

use super::*;
use crate::testing::{demo_tokenizer, shared};
use proptest::prelude::*;
use serde_json::{Value, json};
use std::sync::OnceLock;

fn demo_json() -> Value {
    serde_json::from_slice(include_bytes!("../../../../demo/tokenizer.json")).unwrap()
}

/// The demo's `tokenizer.json` in the hands of the `tokenizers` crate alone.
fn hugging_face() -> &'static tokenizers::Tokenizer {
    static HF: OnceLock<tokenizers::Tokenizer> = OnceLock::new();
    HF.get_or_init(|| {
        let json = include_bytes!("../../../../demo/tokenizer.json");
        tokenizers::Tokenizer::from_bytes(json).unwrap()
    })
}

/// The same without added tokens, so that nothing is recognised.
fn hugging_face_plain() -> &'static tokenizers::Tokenizer {
    static HF: OnceLock<tokenizers::Tokenizer> = OnceLock::new();
    HF.get_or_init(|| {
        let mut json = demo_json();
        json["added_tokens"] = json!([]);
        tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap()
    })
}

#[track_caller]
fn check(text: &str) {
    let ours = demo_tokenizer();
    let theirs = |hf: &tokenizers::Tokenizer| hf.encode(text, false).unwrap().get_ids().to_vec();
    let ids = ours.encode(text);
    assert_eq!(ids, theirs(hugging_face()), "encode {text:?}");
    let plain = ours.encode_plain(text);
    assert_eq!(plain, theirs(hugging_face_plain()), "encode_plain {text:?}");
    for ids in [&ids, &plain] {
        assert_eq!(ours.decode(ids), nfc(text), "decode");
        assert_eq!(ours.decode(ids), hugging_face().decode(ids, false).unwrap(), "decode {text:?}");
    }
}

#[test]
fn ids_equal_hugging_face() {
    for text in [
        "",
        " ",
        "  ",
        "\n",
        " \n ",
        "Hello, world!",
        "  one\t two\n\nthree  \n",
        "a  b   c\u{a0}\u{a0}d\u{3000} e",
        "trailing blanks   ",
        "I'm 1234, WE'RE coding. it'S 'ſ 'K",
        "def f(x: int) -> str:\n    return f\"{x=}\"\n",
        "Caffè già, perché l'AI è utile.",
        "中文测试：こんにちは。 हिन्दी ไทย العربية",
        "👩‍💻 cafe\u{301} é \u{301}!I <\u{338}",
        "\u{1100}\u{1161}\u{11a8} \u{212b} \u{0344} q\u{307}\u{323}",
        "<think>penso</think>",
        "<tool_call>get_weather</tool_call>",
        "<|im_start|>user\nhi<|im_end|>\n <|im_end| ><|im_end|>",
        "<|<|im_start|><tts_text_bos_single><tts_text_bos>",
        "  <|im_end|>  \n<|im_end|>e\u{301}<|im_end|>\u{301}",
        "\r\n\r\n \r x\u{85}y\u{2028}z",
    ] {
        check(text);
    }
}

#[test]
fn characters_between_letters_and_blanks_equals_hugging_face() {
    let mut text = String::new();
    for c in (1..=char::MAX as u32).filter_map(char::from_u32) {
        // What lies beyond the accents is sampled, for the test's time.
        if (c as u32) < 0x370 || (c as u32).is_multiple_of(31) {
            text.extend(['a', c, ' ', c, c, '\n']);
        }
        if text.len() > 4000 {
            check(&std::mem::take(&mut text));
        }
    }
    check(&text);
}

proptest! {
    #[test]
    fn random_text_equals_hugging_face(pieces in proptest::collection::vec(pieces(), 0..20)) {
        let text = pieces.concat();
        check(&text);
        prop_assert_eq!(words(&text).collect::<Vec<_>>(), words_by_hugging_face(&text));
    }

    /// What a message spells is never a token of the template's.
    #[test]
    fn plain_text_has_no_added_token(pieces in proptest::collection::vec(pieces(), 0..20)) {
        let t = demo_tokenizer();
        let text = pieces.concat();
        prop_assert!(t.encode_plain(&text).iter().all(|&id| id < t.first_added));
        let literal = text.char_indices().map(|(i, _)| i).collect();
        prop_assert_eq!(t.encode_prompt(&Prompt::new(text.clone(), literal)), t.encode_plain(&text));
    }
}

/// Characters and strings at which something is decided.
fn pieces() -> impl Strategy<Value = String> {
    prop_oneof![
        4 => "[ \t\n\r\u{a0}]{1,4}",
        4 => "[a-zA-Z'é]{1,6}",
        2 => "[0-9.,!?<>|/_-]{1,3}",
        2 => any::<char>().prop_map(String::from),
        1 => "[\u{300}-\u{310}\u{1100}-\u{11ff}]{1,3}",
        2 => prop::sample::select(vec!["<|im_end|>", "<think>", "</think>", "<|im_", "end|>", "<"])
            .prop_map(String::from),
    ]
}

/// A blank before a word belongs to it, and BPE sees a border only where an added token stands.
#[test]
fn literal_characters_begin_no_token_and_cut_no_word() {
    let t = demo_tokenizer();
    let end = t.added("<|im_end|>").unwrap();
    let text = "say <|im_end|> twice<|im_end|>";
    let first = text.find('<').unwrap();
    let ids = t.encode_prompt(&Prompt::new(text.into(), vec![first]));
    assert_eq!(ids[ids.len() - 1], end);
    assert_eq!(ids[..ids.len() - 1], t.encode_plain("say <|im_end|> twice"));
    // A literal character inside of what the template wrote does not matter.
    let ids = t.encode_prompt(&Prompt::new("<|im_end|>".into(), vec![1]));
    assert_eq!(ids, [end]);
}

/// The words of `text` by the `tokenizers` crate, with the look-ahead.
fn words_by_hugging_face(text: &str) -> Vec<String> {
    use tokenizers::SplitDelimiterBehavior;
    use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};
    let pattern = SplitPattern::Regex(SPLIT.into());
    let split = Split::new(pattern, SplitDelimiterBehavior::Isolated, false).unwrap();
    let mut text = PreTokenizedString::from(text);
    split.pre_tokenize(&mut text).unwrap();
    let splits = text.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(word, ..)| word.to_owned()).filter(|word| !word.is_empty()).collect()
}

#[test]
fn words_keep_one_blank_before_them() {
    let check = |text, expected: &[&str]| {
        assert_eq!(words(text).collect::<Vec<_>>(), expected);
        assert_eq!(words_by_hugging_face(text), expected);
    };
    check("a   b  ", &["a", "  ", " b", "  "]);
    check("  \n  \n a", &["  \n  \n", " a"]);
    check("\t\tx \u{a0}\u{3000}.", &["\t", "\tx", " \u{a0}", "\u{3000}", "."]);
    check("", &[]);
}

#[test]
fn the_longest_of_several_added_tokens_counts() {
    let mut json = demo_json();
    for (at, content) in [(3, "<a>"), (4, "<a><b>"), (5, "<a><b><c>")] {
        json["added_tokens"][at]["content"] = json!(content);
    }
    let text = "<a><a><b> <a><b><c><b>";
    let ours = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap().encode(text);
    let theirs = tokenizers::Tokenizer::from_bytes(json.to_string()).unwrap();
    assert_eq!(ours, theirs.encode(text, false).unwrap().get_ids());
    assert_eq!(ours[..2], [1747, 1748]);
}

#[test]
fn a_million_blanks_are_one_word_and_its_neighbour() {
    let text = format!("a{}b", " ".repeat(3_000_000));
    let lens: Vec<usize> = words(&text).map(str::len).collect();
    assert_eq!(lens, [1, 2_999_999, 2]);
}

#[test]
fn special_tokens_are_the_control_tokens() {
    let t = demo_tokenizer();
    let special = |s| t.special(t.added(s).unwrap());
    assert!(special("<|im_start|>") && special("<|endoftext|>"));
    assert!(!special("<think>") && !special("</tool_call>"));
    assert!(!t.special(0) && !t.special(t.len() as u32) && !t.special(u32::MAX));
    assert_eq!(t.token_bytes(t.len() as u32), b"");
    assert_eq!(t.openers(), ['<']);
    assert_eq!(t.len(), 1777);
}

#[test]
fn the_real_tokenizer_gives_its_published_ids() {
    let Some(dir) = shared() else { return };
    let start = std::time::Instant::now();
    let t = Tokenizer::from_file(dir.join("tokenizer/tokenizer.json")).unwrap();
    eprintln!("loaded in {} ms", start.elapsed().as_millis());
    assert_eq!(t.len(), 248_077);
    let user = |text: &str| format!("<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n");
    let goldens: [(&str, &[u32]); 12] = [
        ("Hello, world!", &[9419, 11, 1814, 0]),
        (
            "Caffè già, perché l'AI è utile.",
            &[34, 2562, 4311, 69028, 11, 58902, 324, 6, 15015, 11094, 175523, 13],
        ),
        ("中文测试：こんにちは。", &[99986, 99449, 4960, 85951, 1710]),
        ("  one\t two\n\nthree  \n", &[220, 799, 197, 1330, 271, 26952, 2228]),
        ("I'm 1234, we're coding.", &[40, 2688, 220, 16, 17, 18, 19, 11, 567, 2224, 10505, 13]),
        (
            "def f(x: int) -> str:\n    return f\"{x=}\"\n",
            &[
                727, 281, 2007, 25, 514, 8, 1411, 592, 25, 198, 262, 460, 281, 13724, 87, 28, 9571,
                198,
            ],
        ),
        ("\u{301}!I", &[52033, 87383]),
        ("<think>penso</think>", &[248068, 2664, 684, 248069]),
        ("<tool_call>get_weather</tool_call>", &[248058, 447, 67017, 248059]),
        (
            &(user("Quanto fa 17 * 23?") + "<think>\n"),
            &[
                248045, 846, 198, 2114, 13168, 2148, 220, 16, 22, 348, 220, 17, 18, 30, 248046,
                198, 248045, 74455, 198, 248068, 198,
            ],
        ),
        (
            &(user("Rispondi solo: sì") + "<think>\n\n</think>\n\n"),
            &[
                248045, 846, 198, 49, 158648, 13138, 25, 187179, 248046, 198, 248045, 74455, 198,
                248068, 271, 248069, 271,
            ],
        ),
        ("👩‍💻 cafe\u{301} é", &[9008, 239, 102, 373, 235, 88995, 119, 50203, 3825]),
    ];
    for (text, ids) in goldens {
        assert_eq!(t.encode(text), ids, "{text:?}");
    }
}

/// Every token that merges can reach is reached from its own text; the others never appear.
#[test]
fn entries_of_the_real_vocabulary_that_no_merge_reaches_stay_unused() {
    let Some(dir) = shared() else { return };
    let path = dir.join("tokenizer/tokenizer.json");
    let t = Tokenizer::from_file(&path).unwrap();
    let hf = tokenizers::Tokenizer::from_file(&path).unwrap();
    let json: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let made: std::collections::HashSet<String> = json["model"]["merges"]
        .as_array()
        .unwrap()
        .iter()
        .map(|m| m[0].as_str().unwrap().to_owned() + m[1].as_str().unwrap())
        .collect();
    let mut unreached = 0;
    for (spelling, id) in json["model"]["vocab"].as_object().unwrap() {
        if made.contains(spelling) || spelling.chars().count() == 1 {
            continue;
        }
        unreached += 1;
        let id = id.as_u64().unwrap() as u32;
        let text = String::from_utf8(t.token_bytes(id).to_vec()).unwrap();
        let ids = t.encode(&text);
        assert!(ids.len() > 1 && !ids.contains(&id), "{text:?} became {ids:?}");
        assert_eq!(ids, hf.encode(text, false).unwrap().get_ids());
    }
    assert_eq!(unreached, 201);
}

#[test]
fn a_damaged_or_foreign_file_is_refused_with_its_reason() {
    type Damage = fn(&mut Value);
    let cases: [(&str, Damage); 22] = [
        ("normalizer: expected", |j| j["normalizer"] = json!({"type": "Lowercase"})),
        ("lacks \\p{M}", |j| {
            let regex = &mut j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"];
            *regex = json!(regex.as_str().unwrap().replace(r"\p{M}", ""));
        }),
        ("pattern.Regex: expected", |j| {
            j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = json!("(a*)*b");
        }),
        ("pre_tokenizer: expected a Sequence", |j| j["pre_tokenizer"] = Value::Null),
        ("Isolated", |j| j["pre_tokenizer"]["pretokenizers"][0]["behavior"] = json!("Removed")),
        ("add_prefix_space", |j| {
            j["pre_tokenizer"]["pretokenizers"][1]["add_prefix_space"] = json!(true);
        }),
        ("decoder: expected", |j| j["decoder"] = Value::Null),
        ("no token is put around", |j| j["post_processor"] = json!({"type": "BertProcessing"})),
        ("model.type", |j| j["model"]["type"] = json!("Unigram")),
        ("missing field `model`", |j| drop(j.as_object_mut().unwrap().remove("model"))),
        ("byte_fallback", |j| j["model"]["byte_fallback"] = json!(true)),
        ("continuing_subword_prefix", |j| {
            j["model"]["continuing_subword_prefix"] = json!("##");
        }),
        ("ids must be 0 to", |j| j["model"]["vocab"]["the"] = json!(4_000_000_000u32)),
        ("is both", |j| j["model"]["vocab"]["new"] = json!(7)),
        ("invalid", |j| j["model"]["vocab"]["the"] = json!(-1)),
        ("not spelled in bytes", |j| j["model"]["vocab"]["a b"] = json!(1744)),
        ("model.merges", |j| j["model"]["merges"][0] = json!(["zzz", "yyy"])),
        ("is not two tokens", |j| j["model"]["merges"][0] = json!("a b c")),
        ("expected id", |j| j["added_tokens"][3]["id"] = json!(99_999)),
        ("expected id", |j| j["added_tokens"][0]["id"] = json!(3)),
        ("lstrip", |j| j["added_tokens"][3]["lstrip"] = json!(true)),
        ("have the same text", |j| j["added_tokens"][3]["content"] = json!("<think>")),
    ];
    for (expected, damage) in cases {
        let mut json = demo_json();
        damage(&mut json);
        let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err().to_string();
        assert!(error.contains(expected), "expected {expected:?} in: {error}");
        assert!(error.starts_with("tokenizer.json: ") && error.len() < 700, "{error}");
    }
    for json in [&b""[..], b"{", b"[]", b"null", b"\xff\xfe", b"{\"model\":{}}"] {
        Tokenizer::from_bytes(json).unwrap_err();
    }
    // A merge longer than the longest token.
    let mut json = demo_json();
    let long = json["model"]["vocab"].as_object().unwrap().keys().max_by_key(|k| k.len()).unwrap();
    json["model"]["merges"][0] = json!([long, long]);
    let error = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap_err().to_string();
    assert!(error.contains("not in the vocab"), "{error}");
}

#[test]
fn merges_may_be_strings_as_in_older_files() {
    let mut json = demo_json();
    for merge in json["model"]["merges"].as_array_mut().unwrap() {
        *merge = json!(format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()));
    }
    let t = Tokenizer::from_bytes(json.to_string().as_bytes()).unwrap();
    let text = "What is the capital of France?";
    assert_eq!(t.encode(text), demo_tokenizer().encode(text));
}
