//! `lily_checkpoint::fuzzing::safetensors_header` on whatever the fuzzer finds.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| lily_checkpoint::fuzzing::safetensors_header(input));
