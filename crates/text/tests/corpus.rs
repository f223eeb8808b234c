//! The fuzz targets without the fuzzer: over the committed corpus, and over a fixed number of
//! inputs made from it by cutting, joining and inserting. Every run sees the same inputs.

use lily_text::fuzzing;
use std::fs;
use std::path::Path;

/// Inputs made for each target; a few seconds together.
const MADE: usize = 20_000;

/// What the readers look for.
const WORDS: &[&str] = &[
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<function=f>",
    "<function=",
    "</function>",
    "<parameter=s>",
    "<parameter=n>",
    "<parameter=i>",
    "<parameter=a>",
    "<parameter=",
    "</parameter>",
    "<",
    ">",
    "\n",
    "\n\n",
    " ",
    "\r",
    "{",
    "}",
    "[",
    "]",
    ",",
    ":",
    "\"",
    "'",
    "\\",
    "\"name\": ",
    "\"arguments\": {",
    "null",
    "None",
    "True",
    "42",
    "1e999",
    "<|im_end|>",
    "<|im_start|>",
    "<tool_response>",
    "</tool_response>",
    "\"role\": ",
    "\"content\": ",
    "\"tool_calls\": ",
    "\"user\"",
    "\"assistant\"",
    "\"tool\"",
    "\"id\": ",
    "{{",
    "{%-",
    "%}",
    " in ",
    " | ",
    "messages",
    "loop",
    ".split",
    "\u{fdd0}",
    "END",
    "aba",
    "žluť",
    "👩‍👩",
    "\u{fffd}",
];

#[test]
fn stream() {
    run("stream", fuzzing::stream);
}

#[test]
fn tokenizer() {
    run("tokenizer", fuzzing::tokenizer);
}

#[test]
fn chat() {
    run("chat", fuzzing::chat);
}

#[test]
fn template() {
    run("template", fuzzing::template);
}

#[test]
fn reply() {
    run("reply", fuzzing::reply);
}

fn run(name: &str, target: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let entries = fs::read_dir(&dir).unwrap_or_else(|e| panic!("{}: {e}", dir.display()));
    let mut files: Vec<_> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(corpus.len() >= 10, "{}: only {} inputs", dir.display(), corpus.len());
    let check = |input: &[u8], what: &str| {
        let held = std::panic::catch_unwind(|| target(input));
        assert!(held.is_ok(), "{what}: {:?}", String::from_utf8_lossy(input));
    };
    for (file, input) in files.iter().zip(&corpus) {
        check(input, &file.display().to_string());
    }
    let mut random = Random(1);
    for i in 0..MADE {
        let mut input = corpus[random.below(corpus.len())].clone();
        for _ in 0..1 + random.below(4) {
            change(&mut input, &corpus, &mut random);
        }
        check(&input, &format!("{name}, input {i}"));
    }
}

fn change(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let end = at + random.below((input.len() - at).min(16) + 1);
    match random.below(5) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 => drop(input.drain(at..end)),
        2 => {
            let again = input[at..end].to_vec();
            input.splice(at..at, again);
        }
        3 => {
            let other = &corpus[random.below(corpus.len())];
            input.splice(at.., other[random.below(other.len())..].iter().copied());
        }
        _ => {
            let word = WORDS[random.below(WORDS.len())];
            input.splice(at..at, word.bytes());
        }
    }
}

/// The xorshift64* generator.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % n.max(1)
    }
}
