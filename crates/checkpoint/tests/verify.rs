//! What `verify` says of checkpoints that are whole: ours, fine-tunes, and every kind that users
//! have instead.

use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use lily_checkpoint::safetensors::encode_header;
use lily_checkpoint::tensors::table;
use lily_checkpoint::testing::{shared, small_config, write_checkpoint};
use lily_checkpoint::verify::{Options, PUBLISHED, Report, finite_bf16, verify};
use lily_checkpoint::{Checkpoint, Config, OpenOptions};

/// A tensor of a made-up file: name, dtype, shape.
type Row = (String, &'static str, Vec<usize>);

/// The table of the full model as rows to change.
fn rows() -> Vec<Row> {
    table(&Config::full()).into_iter().map(|t| (t.name, t.dtype.name(), t.shape)).collect()
}

fn full_config() -> Value {
    serde_json::from_str(&Config::full().to_json()).unwrap()
}

/// Writes a checkpoint whose data is a hole in the file, and takes no space whatever its size.
fn write_sparse(dir: &Path, config: &Value, rows: &[Row]) {
    fs::write(dir.join("config.json"), config.to_string()).unwrap();
    write_sparse_file(&dir.join("model.safetensors"), rows, 0);
}

fn write_sparse_file(path: &Path, rows: &[Row], spaces: usize) {
    let header = encode_header(rows.iter().map(|(n, d, s)| (n.as_str(), *d, &s[..])), spaces);
    fs::write(path, &header).unwrap();
    let bytes = |row: &Row| {
        let element = lily_checkpoint::safetensors::element_bits(row.1).unwrap() / 8;
        row.2.iter().product::<usize>() as u64 * element
    };
    let data: u64 = rows.iter().map(bytes).sum();
    File::options().write(true).open(path).unwrap().set_len(header.len() as u64 + data).unwrap();
}

fn look(dir: &Path) -> Report {
    verify(dir, Options { values: false, ..Options::default() }, &mut |_| ())
}

/// Makes each quantised module `bits` wide in groups of `group`, where `which` says so.
fn requantise(rows: &mut [Row], bits: usize, group: usize, which: impl Fn(&str) -> bool) {
    let columns: std::collections::HashMap<String, usize> = rows
        .iter()
        .filter_map(|(n, _, s)| Some((n.strip_suffix(".scales")?.to_string(), s.last()? * 64)))
        .collect();
    for (name, _, shape) in rows.iter_mut() {
        let (module, part) = name.rsplit_once('.').unwrap();
        if let Some(columns) = columns.get(module).filter(|_| which(module)) {
            let last = shape.last_mut().unwrap();
            *last = if part == "weight" { columns * bits / 32 } else { columns / group };
        }
    }
}

fn rename(rows: &mut [Row], from: &str, to: &str) {
    for row in rows {
        row.0 = row.0.replace(from, to);
    }
}

#[test]
fn each_kind_of_checkpoint_that_is_not_ours_is_named() {
    let everything = |_: &str| true;
    let kinds: Vec<(&str, Value, Vec<Row>)> = vec![
        (
            "an MLX 8-bit checkpoint",
            {
                let mut config = full_config();
                config["quantization"] = json!({"group_size": 64, "bits": 8, "mode": "affine"});
                config
            },
            {
                let mut rows = rows();
                requantise(&mut rows, 8, 64, everything);
                rows
            },
        ),
        // The config still says 4 bits.
        ("an MLX 8-bit checkpoint", full_config(), {
            let mut rows = rows();
            requantise(&mut rows, 8, 64, everything);
            rows
        }),
        (
            "an MLX 3-bit checkpoint",
            {
                let mut config = full_config();
                config["quantization"]["bits"] = 3.into();
                config
            },
            {
                let mut rows = rows();
                requantise(&mut rows, 3, 64, |module| !module.ends_with("gate"));
                rows
            },
        ),
        (
            "an MLX 4-bit checkpoint with group size 32 (as some DWQ builds have)",
            {
                let mut config = full_config();
                config["quantization"] = json!({"group_size": 32, "bits": 4, "mode": "affine"});
                config
            },
            {
                let mut rows = rows();
                requantise(&mut rows, 4, 32, everything);
                rows
            },
        ),
        ("a mixed-bit MLX checkpoint (several widths)", full_config(), {
            let mut rows = rows();
            requantise(&mut rows, 6, 64, |module| module.contains("down_proj"));
            rows
        }),
        (
            "an MLX checkpoint in mode mxfp4",
            {
                let mut config = full_config();
                config["quantization"] = json!({"group_size": 32, "bits": 4, "mode": "mxfp4"});
                config
            },
            {
                let mut rows = rows();
                requantise(&mut rows, 4, 32, everything);
                rows.retain(|(name, ..)| !name.ends_with(".biases"));
                rows
            },
        ),
        (
            "an MLX checkpoint in BF16, not quantised",
            {
                let mut config = full_config();
                config.as_object_mut().unwrap().remove("quantization");
                config.as_object_mut().unwrap().remove("quantization_config");
                config
            },
            {
                let mut rows = rows();
                rows.retain(|(name, ..)| !name.ends_with(".scales") && !name.ends_with(".biases"));
                for (_, dtype, shape) in &mut rows {
                    if *dtype == "U32" {
                        *dtype = "BF16";
                        *shape.last_mut().unwrap() *= 8;
                    }
                }
                rows
            },
        ),
        (
            "a Hugging Face checkpoint in BF16, not converted to MLX (`lily quantize` converts it)",
            {
                let mut config = full_config();
                config.as_object_mut().unwrap().remove("quantization");
                config.as_object_mut().unwrap().remove("quantization_config");
                config
            },
            vec![
                ("lm_head.weight".into(), "BF16", vec![248_320, 2048]),
                ("model.language_model.embed_tokens.weight".into(), "BF16", vec![248_320, 2048]),
                ("model.language_model.layers.0.mlp.gate.weight".into(), "BF16", vec![256, 2048]),
                ("model.visual.patch_embed.proj.weight".into(), "BF16", vec![1152, 3]),
            ],
        ),
        (
            "an FP8 checkpoint",
            {
                let mut config = full_config();
                config.as_object_mut().unwrap().remove("quantization");
                config["quantization_config"] = json!({"quant_method": "fp8", "fmt": "e4m3"});
                config
            },
            vec![
                ("model.language_model.layers.0.mlp.x.weight".into(), "F8_E4M3", vec![512, 2048]),
                (
                    "model.language_model.layers.0.mlp.x.weight_scale_inv".into(),
                    "BF16",
                    vec![4, 16],
                ),
            ],
        ),
        // The config says nothing.
        (
            "an FP8 checkpoint",
            full_config(),
            vec![("model.language_model.layers.0.mlp.x.weight".into(), "F8_E4M3", vec![512, 2048])],
        ),
        (
            "an AWQ checkpoint",
            {
                let mut config = full_config();
                config.as_object_mut().unwrap().remove("quantization");
                config["quantization_config"] = json!({"quant_method": "awq", "group_size": 128});
                config
            },
            vec![("model.language_model.layers.0.mlp.x.qweight".into(), "I32", vec![2048, 64])],
        ),
        (
            "an AWQ or GPTQ checkpoint",
            full_config(),
            vec![("model.language_model.layers.0.mlp.x.qweight".into(), "I32", vec![2048, 64])],
        ),
        (
            "a GPTQ checkpoint",
            full_config(),
            vec![
                ("model.language_model.layers.0.mlp.x.qweight".into(), "I32", vec![256, 512]),
                ("model.language_model.layers.0.mlp.x.g_idx".into(), "I32", vec![2048]),
            ],
        ),
        (
            "a compressed-tensors checkpoint (llm-compressor, vLLM)",
            {
                let mut config = full_config();
                config.as_object_mut().unwrap().remove("quantization");
                config["quantization_config"] = json!({"quant_method": "compressed-tensors"});
                config
            },
            vec![("model.layers.0.mlp.x.weight_packed".into(), "I32", vec![512, 256])],
        ),
        (
            "a dense Qwen3.5 or Qwen3.6 model",
            {
                let mut config = full_config();
                config["model_type"] = "qwen3_5".into();
                config["text_config"]["model_type"] = "qwen3_5_text".into();
                config
            },
            {
                let mut rows = rows();
                rename(&mut rows, ".shared_expert.", ".");
                rows.retain(|(name, ..)| !name.contains("switch_mlp"));
                rows
            },
        ),
        (
            "only the MTP head of a Qwen3.5 or Qwen3.6 model",
            { json!({"model_type": "qwen3_5_mtp"}) },
            vec![("fc.weight".into(), "BF16", vec![2048, 4096])],
        ),
        (
            "a model of another architecture (llama)",
            json!({"model_type": "llama"}),
            vec![("model.layers.0.mlp.up_proj.weight".into(), "BF16", vec![64, 64])],
        ),
    ];
    for (kind, config, rows) in kinds {
        let dir = tempfile::tempdir().unwrap();
        write_sparse(dir.path(), &config, &rows);
        let report = look(dir.path());
        let printed = report.to_string().replace(dir.path().to_str().unwrap(), "DIR");
        println!("--- {printed}");
        assert!(!report.ok());
        assert_eq!(report.kind(), Some(kind), "{printed}");
        assert!(
            printed.contains(&format!(
                "It is {kind}. Lily runs MLX affine 4-bit, group 64: get it with `lily pull`."
            )),
            "{printed}"
        );
        assert!(printed.lines().count() < 80, "{printed}");
    }
}

#[test]
fn folders_and_files_of_other_formats_are_named() {
    for (file, kind) in
        [("m-Q4_K_M.gguf", "a GGUF checkpoint"), ("m.bin", "a PyTorch checkpoint (.bin)")]
    {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join(file), b"GGUF\x03").unwrap();
        assert_eq!(look(dir.path()).kind(), Some(kind));
    }
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("model.gguf");
    fs::write(&file, b"GGUF\x03\0\0\0").unwrap();
    assert_eq!(look(&file).kind(), Some("a GGUF file"));
}

#[test]
fn all_differences_come_at_once_and_grouped() {
    let dir = tempfile::tempdir().unwrap();
    let mut config = full_config();
    config["text_config"]["hidden_act"] = "gelu".into();
    let mut rows = rows();
    // The router in 4 bits, as a converter without the override makes it.
    requantise(&mut rows, 4, 64, |module| module.ends_with(".mlp.gate"));
    rows.retain(|(name, ..)| !name.ends_with("k_norm.weight"));
    rows.push(("language_model.model.layers.7.self_attn.k_bias".into(), "BF16", vec![512]));
    rows.push(("vision_tower.blocks.0.attn.qkv.weight".into(), "BF16", vec![16, 16]));
    write_sparse(dir.path(), &config, &rows);
    let report = look(dir.path()).to_string();
    expect_test::expect![[r#"
        DIR: Lily cannot run this checkpoint
        config.json:
          text_config.hidden_act: expected "silu", found "gelu"
        tensors of another dtype or shape (40):
          language_model.model.layers.*.mlp.gate.weight (layers 0-39): expected u32 (256, 512), found u32 (256, 256) in model.safetensors
        missing tensors (10):
          language_model.model.layers.*.self_attn.k_norm.weight (10 layers from 3 to 39)
        tensors that this model does not have (1):
          language_model.model.layers.7.self_attn.k_bias"#]]
    .assert_eq(&report.replace(dir.path().to_str().unwrap(), "DIR"));
}

#[test]
fn other_sizes_are_refused_and_named_unless_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &small_config(), 2, 1).unwrap();
    let refused = look(dir.path());
    assert!(!refused.ok());
    let printed = refused.to_string();
    assert!(printed.contains("(--any-size accepts them)"), "{printed}");
    assert!(printed.contains("hidden_size is 128, Qwen3.6-35B-A3B has 2048"), "{printed}");
    assert_eq!(refused.kind(), None);
    let options = Options { any_size: true, values: true, checksums: true };
    let mut parts = Vec::new();
    let accepted = verify(dir.path(), options, &mut |progress| {
        assert!(progress.done <= progress.total);
        parts.push(progress.part.to_string());
    });
    assert!(accepted.ok(), "{accepted}");
    assert!(accepted.to_string().contains("hidden_size is 128"), "{accepted}");
    parts.dedup();
    assert_eq!(parts, ["values", "checksums"]);
}

#[test]
fn the_full_layout_with_other_weights_is_good_and_said_to_be_other() {
    let dir = tempfile::tempdir().unwrap();
    write_sparse(dir.path(), &full_config(), &rows());
    let report = look(dir.path());
    assert!(report.ok(), "{report}");
    let report = report.to_string();
    assert!(report.contains("1757 tensors, 19.509 GB"), "{report}");
    assert!(report.contains("a fine-tune, a DWQ build"), "{report}");
}

/// The published files' names and sizes, from the manifest, without their 20 GB.
#[test]
fn files_of_the_published_sizes_are_recognised() {
    let Some(shared) = shared() else { return };
    let dir = tempfile::tempdir().unwrap();
    fs::copy(shared.join("spec/mlx_config.json"), dir.path().join("config.json")).unwrap();
    let manifest = fs::read_to_string(shared.join("spec/manifest.tsv")).unwrap();
    let mut weight_map = serde_json::Map::new();
    for published in PUBLISHED {
        let mut rows: Vec<Row> = Vec::new();
        for line in manifest.lines().filter(|line| line.ends_with(published.name)) {
            let field: Vec<_> = line.split('\t').collect();
            let dtype = if field[1] == "U32" { "U32" } else { "BF16" };
            let shape = field[2].split('x').map(|n| n.parse().unwrap()).collect();
            rows.push((field[0].into(), dtype, shape));
            weight_map.insert(field[0].into(), published.name.into());
        }
        // Small tensors first: their offsets have few digits, which leaves room for the spaces that
        // make the header as long as the published one.
        rows.sort_by_key(|(.., shape)| shape.iter().product::<usize>());
        let path = dir.path().join(published.name);
        write_sparse_file(&path, &rows, 0);
        let spaces = published.bytes.checked_sub(path.metadata().unwrap().len()).unwrap();
        write_sparse_file(&path, &rows, spaces as usize);
        assert_eq!(path.metadata().unwrap().len(), published.bytes);
    }
    let index = json!({ "metadata": {}, "weight_map": weight_map });
    fs::write(dir.path().join("model.safetensors.index.json"), index.to_string()).unwrap();
    let report = look(dir.path());
    assert!(report.ok(), "{report}");
    let report = report.to_string();
    assert!(report.contains("sizes of those of mlx-community/Qwen3.6-35B-A3B-4bit"), "{report}");
    let checkpoint = Checkpoint::open(dir.path(), OpenOptions::default()).unwrap();
    assert_eq!(checkpoint.config(), &Config::full());
}

/// Moves the shards where the hub's cache keeps them: in `blobs`, under their SHA-256.
fn into_hub_cache(snapshot: &Path) -> Vec<PathBuf> {
    use sha2::{Digest, Sha256};
    let blobs = snapshot.parent().unwrap().parent().unwrap().join("blobs");
    fs::create_dir(&blobs).unwrap();
    let mut moved = Vec::new();
    for entry in fs::read_dir(snapshot).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "safetensors") {
            let hash = Sha256::digest(fs::read(&path).unwrap());
            let name: String = hash.iter().map(|byte| format!("{byte:02x}")).collect();
            fs::rename(&path, blobs.join(&name)).unwrap();
            symlink(Path::new("../../blobs").join(&name), &path).unwrap();
            moved.push(blobs.join(&name));
        }
    }
    moved
}

#[test]
fn a_hub_cache_opens_and_its_names_are_its_checksums() {
    let root = tempfile::tempdir().unwrap();
    let snapshot = root.path().join("snapshots/abc");
    fs::create_dir_all(&snapshot).unwrap();
    write_checkpoint(&snapshot, &small_config(), 2, 1).unwrap();
    let blobs = into_hub_cache(&snapshot);
    Checkpoint::open(&snapshot, OpenOptions { any_size: true }).unwrap();
    let options = Options { any_size: true, values: true, checksums: true };
    let report = verify(&snapshot, options, &mut |_| ());
    assert!(report.ok(), "{report}");
    assert!(report.to_string().contains("2 of 2 files have the checksum"), "{report}");
    // One bit of one weight.
    let mut bytes = fs::read(&blobs[0]).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&blobs[0], bytes).unwrap();
    let report = verify(&snapshot, options, &mut |_| ());
    assert!(!report.ok());
    assert!(report.to_string().contains("damaged: expected SHA-256"), "{report}");
}

#[test]
fn the_folder_of_a_hub_cache_points_to_its_snapshot() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("snapshots/abc")).unwrap();
    fs::create_dir_all(root.path().join("blobs")).unwrap();
    let report = look(root.path()).to_string();
    assert!(report.contains("give the directory snapshots/abc in it"), "{report}");
}

#[test]
fn only_nan_and_infinity_are_not_finite() {
    let bytes = |values: &[f32]| -> Vec<u8> {
        values.iter().flat_map(|&v| half::bf16::from_f32(v).to_le_bytes()).collect()
    };
    assert_eq!(finite_bf16(&[]), None);
    assert_eq!(finite_bf16(&[0x7f]), None);
    for bits in 0..=u16::MAX {
        let expected = (!half::bf16::from_bits(bits).is_finite()).then_some(0);
        assert_eq!(finite_bf16(&bits.to_le_bytes()), expected, "{bits:#06x}");
    }
    assert_eq!(finite_bf16(&bytes(&[1.0, -2.0, f32::NAN, f32::INFINITY])), Some(2));
    assert_eq!(finite_bf16(&bytes(&[1.0, f32::MIN, f32::NEG_INFINITY])), Some(1));
}
