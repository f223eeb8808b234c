//! Writes a checkpoint in the MLX layout. The files are laid out first; then the tensors' bytes may
//! come in any order and from several threads. The folder gets its name when all of it is there.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;

use serde::Serialize;

use crate::error::{Error, Result};
use crate::safetensors::encode_header;
use crate::shards::{INDEX, SINGLE, is_there};
use crate::tensors::Tensor;

/// A checkpoint that is being written. Dropped before [`Writer::finish`], it leaves nothing.
pub struct Writer {
    /// Where the checkpoint will lie.
    dir: PathBuf,
    /// Where it grows: beside `dir`, so that it can be renamed.
    growing: PathBuf,
    files: Vec<File>,
    /// File, first byte and length of each tensor.
    places: HashMap<String, (usize, u64, u64)>,
    finished: bool,
}

impl Writer {
    /// Lays out a checkpoint that will lie in `dir`: a file for each of `shards`, holding its
    /// tensors in order, and the index. With `odd`, the data of every file begins at an odd byte.
    ///
    /// # Errors
    /// [`Error::File`] where `dir` exists and is not an empty folder, where an earlier run has left
    /// its unfinished folder, or where files cannot be created.
    pub fn create(dir: &Path, shards: &[Vec<Tensor>], odd: bool) -> Result<Writer> {
        let refuse = |path: &Path, what: &str| Error::File { path: path.into(), what: what.into() };
        if is_there(dir) {
            match fs::read_dir(dir).map(|mut entries| entries.next().is_none()) {
                Ok(true) => (),
                Ok(false) => return Err(refuse(dir, "is not empty; name a new folder")),
                Err(_) => return Err(refuse(dir, "is there and is no folder; name a new one")),
            }
        }
        let mut name =
            dir.file_name().ok_or_else(|| refuse(dir, "has no name to create"))?.to_owned();
        name.push(".incomplete");
        let growing = dir.with_file_name(name);
        if is_there(&growing) {
            let what = "is left from a run that was stopped, or belongs to one that still runs; \
                        remove it if no other runs";
            return Err(refuse(&growing, what));
        }
        if let Some(parent) = growing.parent().filter(|parent| !parent.as_os_str().is_empty()) {
            fs::create_dir_all(parent).map_err(failed("cannot be created", parent))?;
        }
        fs::create_dir(&growing).map_err(failed("cannot be created", &growing))?;
        let (files, places) = (Vec::new(), HashMap::new());
        let mut writer = Writer { dir: dir.into(), growing, files, places, finished: false };
        writer.lay_out(shards, odd)?;
        Ok(writer)
    }

    fn lay_out(&mut self, shards: &[Vec<Tensor>], odd: bool) -> Result<()> {
        let mut weight_map = std::collections::BTreeMap::new();
        for (i, tensors) in shards.iter().enumerate() {
            let name = match shards.len() {
                1 => SINGLE.to_string(),
                of => format!("model-{:05}-of-{of:05}.safetensors", i + 1),
            };
            let described =
                || tensors.iter().map(|t| (t.name.as_str(), t.dtype.name(), &t.shape[..]));
            let mut header = encode_header(described(), 0);
            if odd && header.len().is_multiple_of(2) {
                header = encode_header(described(), 1);
            }
            let mut at = header.len() as u64;
            for tensor in tensors {
                let bytes = tensor.bytes();
                self.places.insert(tensor.name.clone(), (i, at, bytes));
                weight_map.insert(tensor.name.clone(), name.clone());
                at += bytes;
            }
            let path = self.growing.join(&name);
            let laid_out = || -> io::Result<File> {
                let file = File::create_new(&path)?;
                file.write_all_at(&header, 0)?;
                file.set_len(at)?;
                Ok(file)
            };
            self.files.push(laid_out().map_err(failed("cannot be written", &path))?);
        }
        let total_size: u64 = self.places.values().map(|place| place.2).sum();
        let index = serde_json::json!({
            "metadata": { "total_size": total_size },
            "weight_map": weight_map,
        });
        self.file(INDEX, &to_json(&index))
    }

    /// Writes a file beside the weights.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn file(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.growing.join(name);
        fs::write(&path, bytes).map_err(failed("cannot be written", &path))
    }

    /// Writes `bytes` into tensor `name` from byte `offset` of it on.
    ///
    /// # Errors
    /// [`Error::File`].
    ///
    /// # Panics
    /// Where the layout has no such tensor, or it has no such bytes.
    pub fn write(&self, name: &str, offset: u64, bytes: &[u8]) -> Result<()> {
        let &(file, start, length) =
            self.places.get(name).unwrap_or_else(|| panic!("no tensor {name} in the layout"));
        assert!(
            offset + bytes.len() as u64 <= length,
            "{name} has {length} bytes, given {} at {offset}",
            bytes.len()
        );
        let written = self.files[file].write_all_at(bytes, start + offset);
        written.map_err(failed("cannot be written", &self.growing))
    }

    /// Brings everything to the disk and gives the folder its name.
    ///
    /// # Errors
    /// [`Error::File`].
    pub fn finish(mut self) -> Result<()> {
        for file in &self.files {
            file.sync_all().map_err(failed("cannot be written", &self.growing))?;
        }
        // Onto an empty folder, which a rename replaces.
        fs::rename(&self.growing, &self.dir).map_err(failed("cannot be renamed to", &self.dir))?;
        self.finished = true;
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        if !self.finished {
            // What cannot be removed is named by the next run.
            let _ = fs::remove_dir_all(&self.growing);
        }
    }
}

fn failed(what: &'static str, path: &Path) -> impl Fn(io::Error) -> Error {
    move |error| {
        let what = match error.kind() {
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                format!("{what}: the disk is full; make room or choose another one")
            }
            _ => format!("{what}: {error}"),
        };
        Error::File { path: path.into(), what }
    }
}

/// JSON as MLX's tools write it, indented by four.
pub(crate) fn to_json(value: &serde_json::Value) -> Vec<u8> {
    let mut text = Vec::new();
    let format = serde_json::ser::PrettyFormatter::with_indent(b"    ");
    let mut serializer = serde_json::Serializer::with_formatter(&mut text, format);
    value.serialize(&mut serializer).expect("a JSON value prints");
    text
}

/// Does jobs 0 to `jobs` on `threads` threads. `work` returns how much of the whole a job was;
/// `progress` hears the sum so far, and says whether to go on.
///
/// # Errors
/// The first error of a job, or [`Error::Stopped`]; no further job is begun then.
pub(crate) fn in_parallel(
    jobs: usize,
    threads: usize,
    progress: &mut dyn FnMut(u64) -> bool,
    work: impl Fn(usize) -> Result<u64> + Sync,
) -> Result<()> {
    let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
    let first_error = Mutex::new(None);
    let (sender, finished) = mpsc::channel();
    std::thread::scope(|scope| {
        for _ in 0..threads.clamp(1, jobs.max(1)) {
            let sender = sender.clone();
            let (next, stop, first_error, work) = (&next, &stop, &first_error, &work);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let job = next.fetch_add(1, Ordering::Relaxed);
                    if job >= jobs {
                        break;
                    }
                    match work(job) {
                        // The receiver outlives the threads.
                        Ok(done) => drop(sender.send(done)),
                        Err(error) => {
                            stop.store(true, Ordering::Relaxed);
                            first_error
                                .lock()
                                .expect("no thread panics with it")
                                .get_or_insert(error);
                        }
                    }
                }
            });
        }
        drop(sender);
        let mut sum = 0;
        for done in finished {
            sum += done;
            if !progress(sum) {
                stop.store(true, Ordering::Relaxed);
                first_error.lock().expect("no thread panics with it").get_or_insert(Error::Stopped);
            }
        }
    });
    first_error.into_inner().expect("no thread panics with it").map_or(Ok(()), Err)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensors::Dtype;

    fn tensor(name: &str, shape: &[usize]) -> Tensor {
        Tensor { name: name.into(), dtype: Dtype::BF16, shape: shape.to_vec() }
    }

    #[test]
    fn a_checkpoint_appears_when_it_is_whole() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        let shards = [vec![tensor("a", &[3]), tensor("b", &[2, 2])], vec![tensor("c", &[1])]];
        let writer = Writer::create(&dir, &shards, true).unwrap();
        assert!(!dir.exists());
        // A second run at the same time is told of the first.
        let error = Writer::create(&dir, &shards, true).err().unwrap().to_string();
        assert!(error.contains("new.incomplete: is left from a run"), "{error}");
        writer.write("c", 0, &[9, 9]).unwrap();
        writer.write("b", 4, &[5, 6, 7, 8]).unwrap();
        writer.write("b", 0, &[1, 2, 3, 4]).unwrap();
        writer.write("a", 0, &[0; 6]).unwrap();
        writer.file("note", b"text").unwrap();
        writer.finish().unwrap();
        let shards = crate::shards::Shards::open(&dir).unwrap();
        let mut bytes = [0; 8];
        shards.read("b", 0, &mut bytes).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(shards.get("c").unwrap().1, "model-00002-of-00002.safetensors");
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        let error = Writer::create(&dir, &[], true).err().unwrap().to_string();
        assert!(error.contains("is not empty"), "{error}");
    }

    #[test]
    fn what_is_not_finished_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        let dir = parent.path().join("new");
        fs::create_dir(&dir).unwrap();
        drop(Writer::create(&dir, &[vec![tensor("a", &[3])]], false).unwrap());
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 1);
        Writer::create(&dir, &[vec![tensor("a", &[3])]], false).unwrap().finish().unwrap();
        assert!(dir.join(SINGLE).exists(), "an empty folder may be filled");
    }

    #[test]
    fn jobs_stop_at_the_first_error_and_on_request() {
        for threads in [1, 3] {
            let mut sum = 0;
            let all = in_parallel(
                100,
                threads,
                &mut |done| {
                    sum = done;
                    true
                },
                |job| Ok(job as u64),
            );
            assert!(all.is_ok() && sum == 4950);
            let begun = AtomicUsize::new(0);
            let stopped = in_parallel(1000, threads, &mut |done| done < 5, |_| {
                begun.fetch_add(1, Ordering::Relaxed);
                std::thread::sleep(std::time::Duration::from_millis(1));
                Ok(1)
            });
            assert!(matches!(stopped, Err(Error::Stopped)));
            assert!(begun.into_inner() < 1000);
            let failed = in_parallel(10, threads, &mut |_| true, |job| match job {
                4 => Err(Error::Config(vec!["four".into()])),
                _ => Ok(1),
            });
            assert!(failed.unwrap_err().to_string().contains("four"));
        }
    }
}
