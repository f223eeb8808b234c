//! `lily_text::fuzzing::chat` on whatever the fuzzer finds.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| lily_text::fuzzing::chat(input));
