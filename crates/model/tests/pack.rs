//! The packed file: whole or not there, made from this checkpoint or made anew.

use lily_checkpoint::{Checkpoint, OpenOptions, testing};
use lily_model::Packed;
use lily_model::pack::{self, Error};
use std::fs;
use std::path::{Path, PathBuf};

/// A small checkpoint of three shards in a folder of its own.
fn checkpoint(seed: u64) -> (tempfile::TempDir, Checkpoint) {
    let dir = tempfile::tempdir().unwrap();
    testing::write_checkpoint(dir.path(), &testing::small_config(), 3, seed).unwrap();
    let checkpoint = open(dir.path());
    (dir, checkpoint)
}

fn open(dir: &Path) -> Checkpoint {
    Checkpoint::open(dir, OpenOptions { any_size: true }).unwrap()
}

fn packed(dir: &Path, checkpoint: &Checkpoint) -> PathBuf {
    let path = dir.join("weights.packed");
    pack::write(&path, checkpoint, &mut |_, _| ()).unwrap();
    path
}

/// Why the file at `path` is not taken for that of `checkpoint`.
fn refusal(path: &Path, checkpoint: &Checkpoint) -> String {
    match Packed::open(path, checkpoint) {
        Ok(_) => panic!("accepted"),
        Err(error) => error.to_string(),
    }
}

#[test]
fn the_file_holds_what_packing_into_memory_gives() {
    let (dir, checkpoint) = checkpoint(1);
    let mut heard = vec![];
    let path = dir.path().join("weights.packed");
    pack::write(&path, &checkpoint, &mut |done, total| heard.push((done, total))).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), pack::file_bytes(checkpoint.config()));
    assert!(!pack::temporary_path(&path).exists());
    assert!(heard.windows(2).all(|w| w[0].0 <= w[1].0 && w[0].1 == w[1].1));

    let file = Packed::open(&path, &checkpoint).unwrap();
    let memory = Packed::in_memory(&checkpoint).unwrap();
    let (file_data, memory_data) = (file.data(), memory.data());
    for array in pack::plan(checkpoint.config()) {
        let (a, b) = (file.range(&array.name), memory.range(&array.name));
        assert!((a.start as u64).is_multiple_of(pack::ALIGN), "{}", array.name);
        let (a, b) = (&(*file_data).as_ref()[a], &(*memory_data).as_ref()[b]);
        assert!(a == b, "{} differs", array.name);
    }
    assert_eq!(file.weights_bytes(), memory.weights_bytes());
    assert_eq!(pack::verify(&path, &checkpoint, &mut |_, _| ()).unwrap(), Vec::<String>::new());
}

#[test]
fn a_matrix_is_its_modules_stacked_and_scales_beside_biases() {
    let (_dir, checkpoint) = checkpoint(2);
    let c = checkpoint.config().clone();
    let packed = Packed::in_memory(&checkpoint).unwrap();
    let data = packed.data();
    let router = &(*data).as_ref()[packed.range("layers.1.router")];
    let read = |name: &str| {
        let name = format!("language_model.model.layers.1.mlp.{name}");
        let mut bytes = vec![0; checkpoint.bytes_of(&name) as usize];
        checkpoint.read(&name, 0, &mut bytes).unwrap();
        bytes
    };
    let mut want = [read("gate.weight"), read("shared_expert_gate.weight")].concat();
    let scales = [read("gate.scales"), read("shared_expert_gate.scales")].concat();
    let biases = [read("gate.biases"), read("shared_expert_gate.biases")].concat();
    for (s, b) in scales.chunks(2).zip(biases.chunks(2)) {
        want.extend([s, b].concat());
    }
    assert_eq!(want.len(), (c.experts + 1) * c.dim * 68 / 64);
    assert!(router == want);

    // Expert 4, row 5 of its up projection: after four experts and the gate of this one.
    let up = &(*data).as_ref()[packed.range("layers.1.up")];
    let row = 4 * 2 * c.expert_hidden + c.expert_hidden + 5;
    let weight = read("switch_mlp.up_proj.weight");
    let bytes = c.dim / 2;
    let from = (4 * c.expert_hidden + 5) * bytes;
    assert!(up[row * bytes..(row + 1) * bytes] == weight[from..from + bytes]);
    let shared = read("shared_expert.gate_proj.weight");
    let row = c.experts * 2 * c.expert_hidden;
    assert!(up[row * bytes..][..shared.len()] == shared);
}

#[test]
fn a_torn_or_foreign_file_is_stale_and_made_anew() {
    let (dir, checkpoint) = checkpoint(3);
    let path = packed(dir.path(), &checkpoint);
    let good = fs::read(&path).unwrap();
    let check = |bytes: &[u8], why: &str| {
        fs::write(&path, bytes).unwrap();
        let said = refusal(&path, &checkpoint);
        assert!(said.contains(why), "{said}, expected: {why}");
        assert!(said.contains("weights.packed"), "{said}");
        pack::write(&path, &checkpoint, &mut |_, _| ()).unwrap();
        assert!(fs::read(&path).unwrap() == good, "not made anew after: {why}");
    };
    check(&[], "too short");
    check(&good[..good.len() - 1], "bytes long, expected");
    check(&[&good[..], b"x"].concat(), "bytes long, expected");
    // The header is written last: without it, all data may be there and none is trusted.
    check(&[&vec![0; 4096][..], &good[4096..]].concat(), "never completed");
    let mut damaged = good.clone();
    damaged[100] ^= 1;
    check(&damaged, "damaged header");
    damaged = good.clone();
    damaged[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    check(&damaged, "never completed");
}

#[test]
fn another_source_is_noticed() {
    let (dir, checkpoint) = checkpoint(4);
    let path = packed(dir.path(), &checkpoint);
    let (_other_dir, other) = self::checkpoint(5);
    assert!(refusal(&path, &other).contains("other files"), "{}", refusal(&path, &other));

    // The same file, written again: its bytes may have changed, so it is not the same source.
    let shard = dir.path().join("model-00001-of-00003.safetensors");
    let file = fs::File::options().append(true).open(&shard).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    let touched = open(dir.path());
    assert!(refusal(&path, &touched).contains("changed since"));
}

#[test]
fn every_damaged_byte_is_found_by_verify() {
    let (dir, checkpoint) = checkpoint(6);
    let path = packed(dir.path(), &checkpoint);
    let good = fs::read(&path).unwrap();
    let range = Packed::open(&path, &checkpoint).unwrap().range("layers.2.down");
    for at in [range.start, range.end - 1, (range.start + range.end) / 2] {
        let mut bytes = good.clone();
        bytes[at] ^= 0x10;
        fs::write(&path, bytes).unwrap();
        let damaged = pack::verify(&path, &checkpoint, &mut |_, _| ()).unwrap();
        assert_eq!(damaged, ["layers.2.down"]);
    }
}

#[test]
fn what_an_earlier_attempt_left_is_overwritten() {
    let (dir, checkpoint) = checkpoint(7);
    let path = dir.path().join("weights.packed");
    fs::write(pack::temporary_path(&path), vec![0xff; 3_000_000]).unwrap();
    pack::write(&path, &checkpoint, &mut |_, _| ()).unwrap();
    assert!(pack::verify(&path, &checkpoint, &mut |_, _| ()).unwrap().is_empty());
}

#[test]
fn two_at_once_make_one_good_file() {
    let (dir, checkpoint) = checkpoint(8);
    let path = dir.path().join("weights.packed");
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| pack::write(&path, &checkpoint, &mut |_, _| ()).unwrap());
        }
    });
    assert!(pack::verify(&path, &checkpoint, &mut |_, _| ()).unwrap().is_empty());
    assert!(!pack::temporary_path(&path).exists());
}

#[test]
fn a_scale_that_is_no_number_is_named() {
    let (dir, checkpoint) = checkpoint(9);
    let name = "language_model.model.layers.1.mlp.switch_mlp.down_proj.scales";
    // Find the tensor by its bytes, and put a NaN where its eleventh element stands.
    let mut bytes = vec![0; checkpoint.bytes_of(name) as usize];
    checkpoint.read(name, 0, &mut bytes).unwrap();
    let found = (1..=3).any(|n| {
        let shard = dir.path().join(format!("model-{n:05}-of-00003.safetensors"));
        let mut file = fs::read(&shard).unwrap();
        let Some(at) = file.windows(bytes.len()).position(|w| w == bytes) else { return false };
        file[at + 22..at + 24].copy_from_slice(&half::bf16::NAN.to_le_bytes());
        fs::write(&shard, file).unwrap();
        true
    });
    assert!(found);
    let path = dir.path().join("weights.packed");
    let error = pack::write(&path, &open(dir.path()), &mut |_, _| ()).unwrap_err();
    assert!(matches!(error, Error::NotFinite { index: 11, .. }), "{error}");
    assert!(error.to_string().starts_with(name), "{error}");
    assert!(!path.exists() && !pack::temporary_path(&path).exists());
}

#[test]
fn a_folder_that_cannot_be_written_is_an_error() {
    let (_dir, checkpoint) = checkpoint(10);
    let path = Path::new("/proc/no/such/place/weights.packed");
    let error = pack::write(path, &checkpoint, &mut |_, _| ()).unwrap_err();
    assert!(error.to_string().contains("/proc/no/such/place"), "{error}");
}
