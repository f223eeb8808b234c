//! Whole checkpoints, opened and read.

use std::fs;

use lily_checkpoint::tensors::table;
use lily_checkpoint::testing::{shared, small_config, write_checkpoint};
use lily_checkpoint::{Checkpoint, OpenOptions};

const ANY: OpenOptions = OpenOptions { any_size: true };

#[test]
fn a_split_checkpoint_reads_as_the_same_bytes_as_a_whole_one() {
    let config = small_config();
    let (one, four) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_checkpoint(one.path(), &config, 1, 7).unwrap();
    write_checkpoint(four.path(), &config, 4, 7).unwrap();
    let one = Checkpoint::open(one.path(), ANY).unwrap();
    let four = Checkpoint::open(four.path(), ANY).unwrap();
    assert_eq!(one.config(), &config);
    assert_eq!(one.source().files.len(), 1);
    assert_eq!(four.source().files.len(), 4);
    for tensor in table(&config) {
        let bytes = tensor.bytes();
        assert_eq!(one.bytes_of(&tensor.name), bytes);
        assert_eq!(four.bytes_of(&tensor.name), bytes);
        let mut whole = vec![0; bytes as usize];
        one.read(&tensor.name, 0, &mut whole).unwrap();
        assert!(whole.iter().any(|&byte| byte != 0), "{}", tensor.name);
        // In two parts, cut at an odd byte.
        let cut = (bytes as usize / 2) | 1;
        let mut parts = vec![0; bytes as usize];
        four.read(&tensor.name, 0, &mut parts[..cut]).unwrap();
        four.read(&tensor.name, cut as u64, &mut parts[cut..]).unwrap();
        assert_eq!(whole, parts, "{}", tensor.name);
    }
}

#[test]
fn an_embedded_checkpoint_reads_as_its_file() {
    let config = small_config();
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &config, 1, 3).unwrap();
    let file = fs::read(dir.path().join("model.safetensors")).unwrap();
    let embedded = Checkpoint::embedded(&config.to_json(), file.leak()).unwrap();
    let opened = Checkpoint::open(dir.path(), ANY).unwrap();
    assert_eq!((embedded.dir(), opened.dir()), (None, Some(dir.path())));
    for tensor in table(&config) {
        let (mut a, mut b) = ([1; 3], [2; 3]);
        let offset = tensor.bytes() - 3;
        embedded.read(&tensor.name, offset, &mut a).unwrap();
        opened.read(&tensor.name, offset, &mut b).unwrap();
        assert_eq!(a, b, "{}", tensor.name);
    }
}

#[test]
fn a_file_cut_while_it_is_open_is_an_error_of_read() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &small_config(), 1, 3).unwrap();
    let checkpoint = Checkpoint::open(dir.path(), ANY).unwrap();
    let file = fs::File::options().write(true).open(dir.path().join("model.safetensors")).unwrap();
    file.set_len(100).unwrap();
    let error = checkpoint.read("language_model.model.norm.weight", 0, &mut [0; 4]).unwrap_err();
    assert_eq!(
        error.to_string(),
        "model.safetensors: reading language_model.model.norm.weight: the file became shorter \
         since it was opened"
    );
}

#[test]
fn a_source_changes_with_the_files_and_survives_json() {
    let dir = tempfile::tempdir().unwrap();
    write_checkpoint(dir.path(), &small_config(), 2, 3).unwrap();
    let open = || Checkpoint::open(dir.path(), ANY).unwrap().source();
    let before = open();
    let json = serde_json::to_string(&before).unwrap();
    assert_eq!(serde_json::from_str::<lily_checkpoint::Source>(&json).unwrap(), before);
    assert_eq!(open(), before);
    let path = dir.path().join(&before.files[1].name);
    let bytes = fs::read(&path).unwrap();
    fs::write(&path, bytes).unwrap();
    let later = std::time::SystemTime::now() + std::time::Duration::from_secs(5);
    fs::File::options().write(true).open(&path).unwrap().set_modified(later).unwrap();
    assert_ne!(open(), before);
}

#[test]
fn the_reference_checkpoints_open() {
    let Some(shared) = shared() else { return };
    for dir in ["spec/tiny", "demo-lab/smoke_mlx4"] {
        let checkpoint = Checkpoint::open(&shared.join(dir), ANY).unwrap_or_else(|e| panic!("{e}"));
        let mut scales = [0; 4];
        checkpoint.read("language_model.lm_head.scales", 0, &mut scales).unwrap();
        assert_ne!(scales, [0; 4]);
        let refused = Checkpoint::open(&shared.join(dir), OpenOptions::default()).unwrap_err();
        let refused = refused.to_string();
        assert!(refused.contains("num_experts "), "{refused}");
        assert!(refused.contains("--any-size"), "{refused}");
    }
}
