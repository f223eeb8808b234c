//! The fuzz targets without the fuzzer: over the committed corpus, and over a fixed number of
//! inputs made from it by cutting, repeating and overwriting. Every run sees the same inputs.

use std::fs;
use std::path::Path;

use lily_checkpoint::fuzzing;

/// Inputs made for each target; about two seconds together.
const MUTATED: usize = 20_000;

/// What the parsers look for.
const WORDS: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"\"",
    b"null",
    b"true",
    b"false",
    b"0",
    b"1",
    b"64",
    b"-1",
    b"1e999",
    b"0.5",
    b"18446744073709551615",
    b"18446744073709551616",
    b"4294967296",
    b"\\u0000",
    b"\\ud800",
    b"\xff",
    b"\"dtype\"",
    b"\"shape\"",
    b"\"data_offsets\"",
    b"\"BF16\"",
    b"\"U32\"",
    b"\"weight_map\"",
    b".safetensors",
    b"../",
    b"\"bits\"",
    b"\"layer_types\"",
];

#[test]
fn safetensors_header() {
    run("safetensors_header", fuzzing::safetensors_header);
}

#[test]
fn index() {
    run("index", fuzzing::index);
}

#[test]
fn config() {
    run("config", fuzzing::config);
}

fn run(name: &str, target: fn(&[u8])) {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut files: Vec<_> = fs::read_dir(&dir)
        .unwrap_or_else(|error| panic!("{}: {error}", dir.display()))
        .map(|entry| entry.unwrap().path())
        .collect();
    files.sort();
    let corpus: Vec<Vec<u8>> = files.iter().map(|file| fs::read(file).unwrap()).collect();
    assert!(corpus.len() >= 10, "{}: only {} inputs", dir.display(), corpus.len());
    for (file, input) in files.iter().zip(&corpus) {
        println!("{}", file.display());
        target(input);
    }
    let mut random = Random(1);
    for i in 0..MUTATED {
        let mut input = corpus[random.below(corpus.len())].clone();
        for _ in 0..1 + random.below(4) {
            mutate(&mut input, &corpus, &mut random);
        }
        // Shown where the target panics: the input that does it.
        let shown = std::panic::catch_unwind(|| target(&input));
        assert!(shown.is_ok(), "{name}: input {i}: {:?}", String::from_utf8_lossy(&input));
    }
}

fn mutate(input: &mut Vec<u8>, corpus: &[Vec<u8>], random: &mut Random) {
    let at = random.below(input.len() + 1);
    let end = at + random.below(input.len() - at + 1);
    match random.below(6) {
        0 if at < input.len() => input[at] ^= 1 << random.below(8),
        1 => drop(input.drain(at..end)),
        2 => {
            let copy = input[at..end].to_vec();
            input.splice(at..at, copy);
        }
        3 => input.truncate(at),
        4 => {
            let other = &corpus[random.below(corpus.len())];
            let cut = random.below(other.len() + 1);
            input.splice(at.., other[cut..].iter().copied());
        }
        _ => {
            let word = WORDS[random.below(WORDS.len())];
            let end = (at + random.below(word.len() + 1)).min(input.len());
            input.splice(at..end, word.iter().copied());
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
