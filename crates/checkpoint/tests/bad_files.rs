//! Checkpoints that are spoiled in one way each, and what a user hears of it. The table of all of
//! them is printed by `cargo test -p lily-checkpoint --test bad_files -- --nocapture`.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::json;

use lily_checkpoint::safetensors::encode_header;
use lily_checkpoint::testing::{small_config, write_checkpoint};
use lily_checkpoint::verify::{Options, verify};
use lily_checkpoint::{Checkpoint, OpenOptions};

const ONE: &str = "model.safetensors";
const NORM: &str = "language_model.model.norm.weight";
const INDEX: &str = "model.safetensors.index.json";
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

/// A way to spoil a checkpoint.
struct Case {
    name: &'static str,
    /// In how many files the checkpoint is before.
    shards: usize,
    spoil: fn(&Path),
    /// What must be among what is printed.
    expected: &'static str,
    /// Whether only reading the values shows it; then the checkpoint opens.
    in_values: bool,
}

const fn case(name: &'static str, shards: usize, expected: &'static str, spoil: fn(&Path)) -> Case {
    Case { name, shards, spoil, expected, in_values: false }
}

/// Edits the header of the file as JSON text; the data stays as it is.
fn edit_header(path: &Path, edit: impl Fn(String) -> String) {
    let bytes = fs::read(path).unwrap();
    let length = u64::from_le_bytes(*bytes.first_chunk().unwrap()) as usize;
    let old = String::from_utf8(bytes[8..8 + length].to_vec()).unwrap();
    let new = edit(old.clone());
    assert_ne!(old, new, "the edit changed nothing");
    let length = (new.len() as u64).to_le_bytes();
    fs::write(path, [&length, new.as_bytes(), &bytes[8 + old.len()..]].concat()).unwrap();
}

/// Sets one key of one tensor's entry in the header.
fn edit_entry(path: &Path, name: &str, key: &str, value: serde_json::Value) {
    edit_header(path, |header| {
        let mut header: serde_json::Value = serde_json::from_str(&header).unwrap();
        header[name][key] = value.clone();
        header.to_string()
    });
}

fn edit_text(path: &Path, old: &str, new: &str) {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.contains(old), "{old} is not in {}", path.display());
    fs::write(path, text.replacen(old, new, 1)).unwrap();
}

fn set_len(path: &Path, change: impl Fn(u64) -> u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(change(file.metadata().unwrap().len())).unwrap();
}

/// Writes `bytes` over the start of tensor `name`.
fn overwrite(path: &Path, name: &str, bytes: &[u8]) {
    let file = fs::read(path).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap());
    let header: serde_json::Value = serde_json::from_slice(&file[8..8 + length as usize]).unwrap();
    let start = header[name]["data_offsets"][0].as_u64().unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.write_all_at(bytes, 8 + length + start).unwrap();
}

fn cases() -> Vec<Case> {
    vec![
        case(
            "no such directory",
            1,
            "directory:\n  no such directory; `lily pull` fetches",
            |dir| {
                fs::remove_dir_all(dir).unwrap();
            },
        ),
        case("a file in place of the directory", 1, "a file, expected a directory", |dir| {
            fs::remove_dir_all(dir).unwrap();
            fs::write(dir, "x").unwrap();
        }),
        case(
            "an empty directory",
            1,
            "config.json:\n  missing; a checkpoint is a directory",
            |dir| {
                fs::remove_dir_all(dir).unwrap();
                fs::create_dir(dir).unwrap();
            },
        ),
        case("no config.json", 1, "config.json:\n  missing", |dir| {
            fs::remove_file(dir.join("config.json")).unwrap();
        }),
        case("config.json is empty", 1, "config.json:\n  the file is empty", |dir| {
            fs::write(dir.join("config.json"), "").unwrap();
        }),
        case("config.json is cut", 1, "not valid JSON: EOF while parsing", |dir| {
            set_len(&dir.join("config.json"), |bytes| bytes / 2);
        }),
        case("config.json is binary", 1, "config.json:\n  is not UTF-8 text", |dir| {
            fs::write(dir.join("config.json"), b"{\"a\":\"\xff\xfe\"}").unwrap();
        }),
        case(
            "config.json of 1 TB",
            1,
            "has 1000000000000 bytes, at most 16777216 are read",
            |dir| {
                set_len(&dir.join("config.json"), |_| 1_000_000_000_000);
            },
        ),
        case("config.json is a directory", 1, "a directory, expected a file", |dir| {
            fs::remove_file(dir.join("config.json")).unwrap();
            fs::create_dir(dir.join("config.json")).unwrap();
        }),
        case(
            "a size of 0",
            1,
            "text_config.hidden_size: expected a whole number from 1 to 65536, found 0",
            |dir| edit_text(&dir.join("config.json"), "\"hidden_size\": 128", "\"hidden_size\": 0"),
        ),
        case("no .safetensors at all", 1, "files:\n  no .safetensors file", |dir| {
            fs::remove_file(dir.join(ONE)).unwrap();
        }),
        case("a zero-byte file", 1, "model.safetensors: the file is empty (0 bytes)", |dir| {
            set_len(&dir.join(ONE), |_| 0);
        }),
        case("a file of 5 bytes", 1, "not a safetensors file: it has only 5 bytes", |dir| {
            set_len(&dir.join(ONE), |_| 5);
        }),
        case("truncated in the header", 1, "truncated: the header alone has", |dir| {
            set_len(&dir.join(ONE), |_| 1000);
        }),
        case("truncated by one byte", 1, "lie outside the file, whose data has", |dir| {
            set_len(&dir.join(ONE), |bytes| bytes - 1);
        }),
        case("longer by ten bytes", 1, "after the last tensor belong to none", |dir| {
            set_len(&dir.join(ONE), |bytes| bytes + 10);
        }),
        case(
            "a header of 2^63 bytes",
            1,
            "its header would have 9223372036854775808 bytes",
            |dir| {
                let file = File::options().write(true).open(dir.join(ONE)).unwrap();
                file.write_all_at(&(1u64 << 63).to_le_bytes(), 0).unwrap();
            },
        ),
        case("a header of 100 GB in 1 TB", 1, "would have 100000000000 bytes, at most", |dir| {
            let file = File::options().write(true).open(dir.join(ONE)).unwrap();
            file.write_all_at(&100_000_000_000u64.to_le_bytes(), 0).unwrap();
            file.set_len(1_000_000_000_000).unwrap();
        }),
        case("a header of 30,000 tensors", 1, "and 29976 more", |dir| {
            let names: Vec<String> = (0..30_000).map(|i| format!("t{i}x")).collect();
            let none = &[0][..];
            let header = encode_header(names.iter().map(|name| (name.as_str(), "U8", none)), 0);
            fs::write(dir.join(ONE), header).unwrap();
        }),
        case("a header that is no JSON", 1, "damaged header: key must be a string", |dir| {
            edit_header(&dir.join(ONE), |header| header.replacen("{\"", "{!", 1));
        }),
        case("overlapping tensors", 1, "overlap", |dir| {
            // Each has its own size, and the biases come first in the data.
            edit_entry(&dir.join(ONE), NORM, "data_offsets", json!([2, 258]));
        }),
        case("a tensor out of range", 1, "lie outside the file", |dir| {
            edit_entry(
                &dir.join(ONE),
                NORM,
                "data_offsets",
                json!([1u64 << 62, (1u64 << 62) + 256]),
            );
        }),
        case("a tensor that ends before it begins", 1, "before they begin", |dir| {
            edit_entry(&dir.join(ONE), NORM, "data_offsets", json!([256, 0]));
        }),
        case("a negative offset", 1, "invalid value: integer `-1`", |dir| {
            edit_header(&dir.join(ONE), |header| {
                header.replacen("\"data_offsets\":[", "\"data_offsets\":[-1,", 1)
            });
        }),
        case(
            "a shape that overflows",
            1,
            "bf16 (4294967296, 4294967296) is larger than any file",
            |dir| {
                edit_entry(&dir.join(ONE), NORM, "shape", json!([1u64 << 32, 1u64 << 32]));
            },
        ),
        case(
            "a shape that its bytes contradict",
            1,
            "bf16 (64) has 128 bytes, the header",
            |dir| {
                edit_entry(&dir.join(ONE), NORM, "shape", json!([64]));
            },
        ),
        case("a dtype that does not exist", 1, "norm.weight: unknown dtype BF17", |dir| {
            edit_entry(&dir.join(ONE), NORM, "dtype", "BF17".into());
        }),
        case(
            "a wrong dtype",
            1,
            "expected bf16 (128), found f16 (128) in model.safetensors",
            |dir| {
                edit_entry(&dir.join(ONE), NORM, "dtype", "F16".into());
            },
        ),
        case(
            "a wrong shape",
            1,
            "conv1d.weight (layers 0-1): expected bf16 (256, 4, 1), found bf16 (256, 1, 4)",
            |dir| {
                edit_header(&dir.join(ONE), |header| header.replace("[256,4,1]", "[256,1,4]"));
            },
        ),
        case("two tensors of one name", 1, "language_model.lm_head.scales appears twice", |dir| {
            edit_header(&dir.join(ONE), |header| {
                header.replacen("lm_head.biases", "lm_head.scales", 1)
            });
        }),
        case(
            "a tensor under another name",
            1,
            "missing tensors (1):\n  language_model.model.norm.weight",
            |dir| {
                edit_header(&dir.join(ONE), |header| {
                    header.replacen("model.norm.w", "model.morn.w", 1)
                });
            },
        ),
        case(
            "a missing shard",
            2,
            "model-00002-of-00002.safetensors: missing; fetch it again",
            |dir| {
                fs::remove_file(dir.join(SECOND)).unwrap();
            },
        ),
        case("several files and no index", 2, "index.json: missing, and there are 2", |dir| {
            fs::remove_file(dir.join(INDEX)).unwrap();
        }),
        case("an index that is no JSON", 2, "not a safetensors index: expected", |dir| {
            fs::write(dir.join(INDEX), "shards").unwrap();
        }),
        case("an index that is empty", 2, "index.json: the file is empty", |dir| {
            fs::write(dir.join(INDEX), "").unwrap();
        }),
        case("an index without a weight_map", 2, "missing field `weight_map`", |dir| {
            fs::write(dir.join(INDEX), "{\"metadata\":{}}").unwrap();
        }),
        case(
            "an index that names a tensor that is not there",
            2,
            "puts language_model.model.ghost into model-00001-of-00002.safetensors, where there is no",
            |dir| {
                let ghost = format!("\"weight_map\":{{\"language_model.model.ghost\":\"{FIRST}\",");
                edit_text(&dir.join(INDEX), "\"weight_map\":{", &ghost);
            },
        ),
        case(
            "an index that leaves a tensor out",
            2,
            "does not name language_model.lm_head.biases",
            |dir| {
                let text = fs::read_to_string(dir.join(INDEX)).unwrap();
                let mut index: serde_json::Value = serde_json::from_str(&text).unwrap();
                let map = index["weight_map"].as_object_mut().unwrap();
                map.shift_remove("language_model.lm_head.biases").unwrap();
                fs::write(dir.join(INDEX), index.to_string()).unwrap();
            },
        ),
        case(
            "an index that names a tensor twice",
            2,
            "language_model.lm_head.biases appears twice",
            |dir| {
                edit_text(&dir.join(INDEX), "lm_head.scales", "lm_head.biases");
            },
        ),
        case(
            "an index that leads out of the directory",
            2,
            "names the file ../up.safetensors",
            |dir| {
                edit_text(&dir.join(INDEX), FIRST, "../up.safetensors");
            },
        ),
        case("a dangling symlink", 2, "a symlink to ../blobs/gone, which does not exist", |dir| {
            fs::remove_file(dir.join(FIRST)).unwrap();
            symlink("../blobs/gone", dir.join(FIRST)).unwrap();
        }),
        case("a looping symlink", 2, "which cannot be followed: ", |dir| {
            fs::remove_file(dir.join(FIRST)).unwrap();
            symlink(FIRST, dir.join(FIRST)).unwrap();
        }),
        case("a symlink to the directory itself", 2, "a directory, expected a file", |dir| {
            fs::remove_file(dir.join(FIRST)).unwrap();
            symlink(".", dir.join(FIRST)).unwrap();
        }),
        case("a symlink to an endless device", 1, "not a regular file, expected a file", |dir| {
            fs::remove_file(dir.join(ONE)).unwrap();
            symlink("/dev/zero", dir.join(ONE)).unwrap();
        }),
        case("a Git LFS pointer", 2, "a Git LFS pointer, not the file itself", |dir| {
            let pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n";
            fs::write(dir.join(SECOND), pointer).unwrap();
        }),
        case("a web page", 1, "a web page, not a safetensors file", |dir| {
            fs::write(dir.join(ONE), "<!DOCTYPE html><html>Not found</html>").unwrap();
        }),
        case("a GGUF file under this name", 1, "a GGUF file; Lily reads MLX safetensors", |dir| {
            fs::write(dir.join(ONE), b"GGUF\x03\0\0\0\0\0\0\0").unwrap();
        }),
        Case {
            in_values: true,
            ..case("NaN in a scale", 1, "lm_head.scales: first at element 1", |dir| {
                let bytes = [0x80, 0x3f, 0xc0, 0x7f]; // 1.0 and NaN
                overwrite(&dir.join(ONE), "language_model.lm_head.scales", &bytes);
            })
        },
        Case {
            in_values: true,
            ..case("infinity in a norm", 1, "model.norm.weight: first at element 0", |dir| {
                overwrite(&dir.join(ONE), NORM, &[0x80, 0xff]);
            })
        },
    ]
}

#[test]
fn every_bad_file_is_a_clear_error_within_seconds() {
    let root = tempfile::tempdir().unwrap();
    let options = Options { any_size: true, ..Options::default() };
    let mut failures = Vec::new();
    for Case { name, shards, spoil, expected, in_values } in cases() {
        let dir = root.path().join("checkpoint");
        fs::create_dir(&dir).unwrap();
        write_checkpoint(&dir, &small_config(), shards, 1).unwrap();
        let good = verify(&dir, options, &mut |_| ());
        assert!(good.ok(), "{good}");
        spoil(&dir);
        let start = Instant::now();
        let report = verify(&dir, options, &mut |_| ());
        let took = start.elapsed();
        let printed = report.to_string().replace(dir.to_str().unwrap(), "DIR");
        println!("--- {name}\n{printed}");
        let opened = Checkpoint::open(&dir, OpenOptions { any_size: true });
        if report.ok() || !printed.contains(expected) || took > Duration::from_secs(5) {
            failures.push(format!("{name}: expected {expected:?} in {took:?}:\n{printed}"));
        }
        if opened.is_ok() != in_values {
            failures.push(format!("{name}: opened is {}", opened.is_ok()));
        }
        if let Err(error) = opened {
            assert_eq!(error.to_string(), report.to_string(), "{name}");
        }
        if dir.is_dir() { fs::remove_dir_all(&dir) } else { fs::remove_file(&dir).or(Ok(())) }
            .unwrap();
    }
    assert!(failures.is_empty(), "{}", failures.join("\n\n"));
    // Address space, so that memory which was asked for and never touched counts too.
    match fs::read_to_string("/proc/self/status") {
        Ok(status) => {
            let line = status.lines().find(|line| line.starts_with("VmPeak:")).unwrap();
            let kib: u64 = line.split_whitespace().nth(1).unwrap().parse().unwrap();
            assert!(kib < 1 << 20, "{line}");
        }
        Err(_) => eprintln!("skipped: the bound on memory needs /proc"),
    }
}
