//! Streams of tokens against the whole text: characters cut anywhere, stop strings across tokens.

use super::*;
use crate::fuzzing::until_stop;
use proptest::prelude::*;

/// Token `i` is piece `i`; a piece `None` is a special token.
struct Pieces(Vec<Option<Vec<u8>>>);

impl Vocabulary for Pieces {
    fn bytes(&self, id: u32) -> &[u8] {
        match self.0.get(id as usize) {
            Some(Some(bytes)) => bytes,
            Some(None) => b"<|im_end|>",
            None => b"",
        }
    }

    fn special(&self, id: u32) -> bool {
        matches!(self.0.get(id as usize), Some(None))
    }
}

fn pieces<T: AsRef<[u8]>>(parts: &[T]) -> Pieces {
    Pieces(parts.iter().map(|part| Some(part.as_ref().to_vec())).collect())
}

/// All deltas, the last one from `finish`, and the stop string that was found.
fn run(pieces: &Pieces, stops: &[&str]) -> (Vec<String>, Option<String>) {
    let mut detokenizer = Detokenizer::new(pieces, stops.iter().copied());
    let mut deltas: Vec<String> =
        (0..pieces.0.len() as u32).map(|id| detokenizer.push(id)).collect();
    deltas.push(detokenizer.finish());
    assert_eq!(detokenizer.finish(), "", "finish flushes once");
    (deltas, detokenizer.stopped().map(str::to_owned))
}

fn check<T: AsRef<[u8]>>(parts: &[T], stops: &[&str], deltas: &[&str], stopped: Option<&str>) {
    let (got, found) = run(&pieces(parts), stops);
    assert_eq!((got, found.as_deref()), (deltas.iter().map(|d| d.to_string()).collect(), stopped));
}

#[test]
fn plain_text_is_not_delayed() {
    check(&["Hello", ",", " world"], &[], &["Hello", ",", " world", ""], None);
    check(&["Hello", ",", " world"], &["\n\n"], &["Hello", ",", " world", ""], None);
}

#[test]
fn a_character_comes_with_its_last_byte() {
    check(&[&b"\xe2\x82"[..], b"\xac!"], &[], &["", "€!", ""], None);
    check(&[&b"a\xf0"[..], b"\x9f", b"\x98", b"\x80"], &[], &["a", "", "", "😀", ""], None);
}

#[test]
fn wrong_bytes_become_one_replacement_at_once() {
    check(&[&b"\xff"[..], b"a"], &[], &["\u{fffd}", "a", ""], None);
    // The beginning of a character, then something else.
    check(&[&b"\xe2\x82"[..], b"a"], &[], &["", "\u{fffd}a", ""], None);
    // A byte that no valid character can have second.
    check(&[&b"\xe0"[..], b"\x80", b"b"], &[], &["", "\u{fffd}\u{fffd}", "b", ""], None);
}

#[test]
fn half_a_character_at_the_end_is_flushed_once() {
    check(&[&b"a\xf0\x9f\x98"[..]], &[], &["a", "\u{fffd}"], None);
}

#[test]
fn special_and_unknown_tokens_give_nothing_and_break_nothing() {
    let pieces = Pieces(vec![Some(b"\xe2\x82".to_vec()), None, Some(b"\xac".to_vec())]);
    assert_eq!(run(&pieces, &["<|im"]).0.concat(), "€");
    let mut detokenizer = Detokenizer::new(&pieces, ["x"]);
    assert_eq!(detokenizer.push(u32::MAX), "");
}

#[test]
fn a_stop_string_ends_the_text_across_tokens() {
    check(&["one\n", "\ntwo", "three"], &["\n\n"], &["one", "", "", ""], Some("\n\n"));
    check(&["ab", "c", "END", "x"], &["cE", "q"], &["ab", "", "", "", ""], Some("cE"));
}

#[test]
fn text_that_only_began_as_a_stop_string_follows() {
    check(&["one\n", "two"], &["\n\n"], &["one", "\ntwo", ""], None);
    check(&["one\n"], &["\n\n"], &["one", "\n"], None);
    check(&["aa", "b"], &["aab!"], &["", "", "aab"], None);
    check(&["aaa", "ab"], &["aab"], &["a", "a", ""], Some("aab"));
}

#[test]
fn the_stop_string_completed_first_wins_then_the_longest() {
    check(&["xabc"], &["abc", "b"], &["xa", ""], Some("b"));
    check(&["xabc"], &["c", "bc", "abc"], &["x", ""], Some("abc"));
}

#[test]
fn empty_stop_strings_are_ignored() {
    check(&["abc"], &["", "b", ""], &["a", ""], Some("b"));
    check(&["abc"], &[""], &["abc", ""], None);
}

#[test]
fn nothing_follows_a_stop_string() {
    check(&[&b"a.\xe2"[..], b"\x82\xac"], &["."], &["a", "", ""], Some("."));
}

#[test]
fn tokens_of_a_tokenizer_give_the_text_back() {
    let tokenizer = crate::testing::demo_tokenizer();
    let text = "Příliš žluťoučký kůň, 日本語, 👩‍👩‍👧‍👦.";
    let ids = tokenizer.encode(&format!("{text}<|im_end|>"));
    assert!(ids.len() > text.chars().count(), "characters are split over tokens");
    let mut detokenizer = Detokenizer::new(tokenizer, ["never"]);
    let deltas: Vec<String> = ids.iter().map(|&id| detokenizer.push(id)).collect();
    assert!(deltas.iter().all(|delta| !delta.contains(char::REPLACEMENT_CHARACTER)));
    assert_eq!(deltas.concat() + &detokenizer.finish(), text);
}

#[test]
fn a_long_stream_with_stop_strings_that_nearly_match_is_read_once() {
    let stop = "a".repeat(4096) + "b";
    let pieces = pieces(&["a"]);
    let mut detokenizer = Detokenizer::new(&pieces, [stop]);
    let bytes: usize = (0..1 << 20).map(|_| detokenizer.push(0).len()).sum();
    assert_eq!(bytes + detokenizer.finish().len(), 1 << 20);
}

/// Text with characters of every length, joined emoji, and what stop strings are made of.
fn text() -> impl Strategy<Value = String> {
    let part = prop::sample::select(vec![
        "a",
        "b",
        "ab",
        "\n",
        "\n\n",
        " ",
        "END",
        "EN",
        "příliš žluťoučký kůň",
        "e\u{301}",
        "日本語",
        "한국어",
        "😀",
        "👩‍👩‍👧‍👦",
        "🏳️‍🌈",
        "\u{200d}",
        "\u{fffd}",
        "ﷺ",
        "\u{10ffff}",
    ]);
    prop::collection::vec(part, 0..24).prop_map(|parts| parts.concat())
}

/// `bytes` cut at every place that `cuts` names.
fn cut(bytes: &[u8], cuts: &[prop::sample::Index]) -> Pieces {
    let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(bytes.len() + 1)).collect();
    at.extend([0, bytes.len()]);
    at.sort_unstable();
    Pieces(at.windows(2).map(|pair| Some(bytes[pair[0]..pair[1]].to_vec())).collect())
}

fn cuts() -> impl Strategy<Value = Vec<prop::sample::Index>> {
    prop::collection::vec(any::<prop::sample::Index>(), 0..40)
}

const STOPS: &[&str] = &["END", "\n\n", "aba", "žluť", "👩‍👩", "本語한", "\u{fffd}a", ""];

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..Default::default() })]

    #[test]
    fn deltas_are_the_whole_text(text in text(), cuts in cuts()) {
        let (deltas, stopped) = run(&cut(text.as_bytes(), &cuts), &[]);
        prop_assert_eq!((deltas.concat(), stopped), (text, None));
    }

    #[test]
    fn deltas_are_the_text_up_to_the_stop_string(
        text in text(), cuts in cuts(), stops in prop::sample::subsequence(STOPS, 0..=STOPS.len()),
    ) {
        let (deltas, stopped) = run(&cut(text.as_bytes(), &cuts), &stops);
        prop_assert_eq!((deltas.concat(), stopped), until_stop(text.as_bytes(), &stops));
    }

    #[test]
    fn any_bytes_are_as_lossy_as_the_whole(
        bytes in prop::collection::vec(
            prop_oneof![any::<u8>(), prop::sample::select(&b"a\n\xf0\x9f\x98\x80\xe2\x82\xac\xc3"[..])],
            0..64,
        ),
        cuts in cuts(),
    ) {
        let (deltas, stopped) = run(&cut(&bytes, &cuts), STOPS);
        prop_assert_eq!((deltas.concat(), stopped), until_stop(&bytes, STOPS));
    }
}
