//! `lily logits`: the independent expected result, and what goes wrong with ids and files.

mod lily;

use lily::{demo, run};
use std::collections::HashMap;
use std::path::Path;

/// The f32 and i32 tensors of a safetensors file, as f64.
fn tensors(path: &Path) -> HashMap<String, Vec<f64>> {
    let bytes = std::fs::read(path).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    let mut tensors = HashMap::new();
    for (name, tensor) in header.as_object().unwrap() {
        let number = |i: usize| tensor["data_offsets"][i].as_u64().unwrap() as usize;
        let convert: fn([u8; 4]) -> f64 = match tensor["dtype"].as_str() {
            Some("F32") => |word| f64::from(f32::from_le_bytes(word)),
            Some("I32") => |word| f64::from(i32::from_le_bytes(word)),
            _ => continue,
        };
        let data = &bytes[8 + length..][number(0)..number(1)];
        let words = data.chunks_exact(4).map(|word| convert(word.try_into().unwrap()));
        tensors.insert(name.clone(), words.collect());
    }
    tensors
}

/// The largest difference between logits and expected logits; places of the best id agree.
fn difference(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

#[test]
fn the_tiny_model_gives_the_independent_result() {
    let Some(shared) = lily_checkpoint::testing::shared() else { return };
    let tiny = shared.join("spec/tiny");
    let expected = tensors(&tiny.join("expected.safetensors"));
    let ids: Vec<String> = expected["ids"].iter().map(|id| id.to_string()).collect();
    let (ids, tiny) = (ids.join(","), tiny.display().to_string());
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("logits.safetensors");
    for split in ["174", "70,3,101", "1,63,64,46"] {
        let out = out.display().to_string();
        let done = run(&[
            "logits",
            "--model",
            &tiny,
            "--any-size",
            "--isa",
            "scalar",
            "--kv",
            "f32",
            "--ids",
            &ids,
            "--split",
            split,
            "--out",
            &out,
        ]);
        assert_eq!(done.code, Some(0), "{}", done.stderr);
        let found = &tensors(Path::new(&out))["logits"];
        let difference = difference(found, &expected["logits_fp32_dequant"]);
        eprintln!("split {split}: largest difference {difference:.1e}");
        // The expected logits were computed in f32 by other code, in another order of sums.
        assert!(difference <= 1e-3, "split {split}: {difference}");
    }
}

#[test]
fn the_demo_folder_is_the_embedded_demo() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).display().to_string();
    let demo = demo().display().to_string();
    let done = run(&["logits", "--ids", "1,2,3", "--out", &at("a")]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    assert!(done.stderr.contains("toy model"), "{}", done.stderr);
    let done =
        run(&["logits", "--model", &demo, "--any-size", "--ids", "1,2,3", "--out", &at("b")]);
    assert_eq!(done.code, Some(0), "{}", done.stderr);
    let (a, b) = (std::fs::read(at("a")).unwrap(), std::fs::read(at("b")).unwrap());
    assert!(a == b, "the logits differ");
    assert_eq!(tensors(Path::new(&at("a")))["logits"].len(), 3 * 1792);
}

#[test]
fn bad_input_is_refused_in_words() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("out").display().to_string();
    let demo = demo().display().to_string();
    let cases: [(&[&str], i32, &str); 8] = [
        (&["--ids", "1,1792"], 2, "id 1792 (number 1) is out of range"),
        (&["--ids", "1,two"], 2, "\"two\" is not a token id"),
        (&["--ids", ""], 2, "no token ids"),
        (&["--ids", "1,2", "--split", "1,2"], 2, "add up to 3"),
        (&["--ids", "1,2,3", "--split", "0,3"], 2, "0 is no length"),
        (&["--ids", "1", "--isa", "vax"], 2, "scalar"),
        (&["--ids", "1", "--model", "/no/such/folder"], 1, "lily pull"),
        (&["--ids", "1", "--model", &demo], 1, "--any-size"),
    ];
    for (args, code, words) in cases {
        let done = run(&[&["logits", "--out", &out], args].concat());
        assert_eq!(done.code, Some(code), "{args:?}: {}", done.stderr);
        assert!(done.stderr.contains(words), "{args:?}: {}", done.stderr);
        assert!(!Path::new(&out).exists(), "{args:?}");
    }
    let many = vec!["1"; 40_000].join(",");
    let ids = folder.path().join("ids");
    std::fs::write(&ids, many).unwrap();
    let done = run(&["logits", "--ids", &format!("@{}", ids.display()), "--out", &out]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("--ids: 40000 ids, but"), "{}", done.stderr);
    let done = run(&["logits", "--ids", "@/no/such/file", "--out", &out]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    // A checkpoint is not written over, by whatever name.
    let copy = folder.path().join("model");
    std::fs::create_dir(&copy).unwrap();
    for name in ["config.json", "model.safetensors"] {
        std::fs::copy(lily::demo().join(name), copy.join(name)).unwrap();
    }
    let weights = copy.join("../model/model.safetensors").display().to_string();
    let before = std::fs::read(&weights).unwrap();
    let model = copy.display().to_string();
    let done = run(&["logits", "--model", &model, "--any-size", "--ids", "1", "--out", &weights]);
    assert_eq!(done.code, Some(2), "{}", done.stderr);
    assert!(done.stderr.contains("a file of the checkpoint"), "{}", done.stderr);
    assert!(std::fs::read(&weights).unwrap() == before);
    let done = run(&["logits", "--ids", "1", "--out", "/no/such/folder/out"]);
    assert_eq!(done.code, Some(1), "{}", done.stderr);
    assert!(done.stderr.contains("/no/such/folder/out"), "{}", done.stderr);
}
