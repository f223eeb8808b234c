//! From flags to a model that is ready: the one place that opens checkpoints, plans memory, packs
//! weights and builds devices, for every command.

use crate::args::{DeviceArgs, DeviceKind, KvKind, MemoryArgs, ModelArgs};
use crate::error::Error;
use crate::machine::{self, Memory, gigabytes};
use crate::{demo, packed_files, progress};
use lily_checkpoint::{Checkpoint, Config, OpenOptions};
use lily_device::{Device, cpu};
use lily_model::{Kv, Model, Options, Packed, Plan, pack};
use std::io::{BufRead, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, mpsc};

/// Tokens a sequence may have when `--max-seq` does not say.
const DEFAULT_MAX_SEQ: usize = 32_768;
/// Packed weights up to this many bytes are made in memory at every start; more go to a file.
const PACK_IN_MEMORY: u64 = 256 << 20;
/// Most tokens one step carries: how long a running reply may have to wait for someone's prompt.
pub const CHUNK: usize = 256;
/// Most rows of logits one step gives: the memory they take is this times the vocabulary.
pub const OUTPUTS: usize = 64;

/// The files of a checkpoint: in a folder, or the demo's inside this program.
#[derive(Clone, Debug)]
pub struct Files {
    /// The folder; `None` for the demo.
    pub dir: Option<PathBuf>,
}

impl Files {
    /// Those that the flags name, or the demo's, saying so aloud.
    pub fn of(args: &ModelArgs) -> Result<Files, Error> {
        let dir = args.dir().cloned();
        match &dir {
            None => say!("{}", demo::NOTICE),
            // A link that leads nowhere is there: what is wrong with it is said by those who
            // follow it.
            Some(dir) if std::fs::symlink_metadata(dir).is_err() => {
                return Err(Error::Failed(format!(
                    "{}: no such folder; `lily pull` fetches the model and says where it is",
                    dir.display()
                )));
            }
            Some(_) => {}
        }
        Ok(Files { dir })
    }

    /// A text file; `None` where there is none of that name.
    pub fn text(&self, name: &str) -> Result<Option<String>, Error> {
        let Some(dir) = &self.dir else { return Ok(demo::file(name).map(str::to_owned)) };
        let path = dir.join(name);
        match std::fs::read_to_string(&path) {
            Ok(text) => Ok(Some(text)),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(Error::io(&path, &e)),
        }
    }
}

/// More threads than this for a core are a mistake, and their stacks may not even fit.
const THREADS_PER_CORE: usize = 4;
/// Threads that are needed beside the device's.
const SPARE_THREADS: usize = 8;

/// A checkpoint, opened and checked.
pub struct Source {
    /// Its tensors.
    pub checkpoint: Checkpoint,
    /// What the API calls it: the folder's name, or that of the demo.
    pub id: String,
    /// Its files.
    pub files: Files,
}

impl Source {
    /// Opens what the flags name, or the demo, saying so aloud.
    pub fn open(args: &ModelArgs) -> Result<Source, Error> {
        let files = Files::of(args)?;
        let (checkpoint, id) = match &files.dir {
            None => (Checkpoint::embedded(demo::CONFIG, demo::WEIGHTS)?, demo::ID.to_owned()),
            Some(dir) => {
                let options = OpenOptions { any_size: args.any_size };
                (Checkpoint::open(dir, options)?, id(dir))
            }
        };
        Ok(Source { checkpoint, id, files })
    }

    /// The sizes of the model.
    pub fn config(&self) -> &Config {
        self.checkpoint.config()
    }
}

/// The last folder's name that says something: hub snapshots lie in
/// `models--OWNER--NAME/snapshots/REVISION`.
fn id(dir: &Path) -> String {
    let dir = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let names = dir.components().rev().map(|c| c.as_os_str().to_string_lossy());
    let mut id = String::new();
    for (depth, name) in names.take(3).enumerate() {
        if let Some(name) = name.strip_prefix("models--") {
            return name.replace("--", "/");
        }
        if depth == 0 {
            id = name.into_owned();
        }
    }
    id
}

/// What a model is made for, from the flags. Errs where `--max-seq` is beyond the model.
pub fn options(config: &Config, memory: &MemoryArgs, slots: usize) -> Result<Options, Error> {
    let most = config.max_positions;
    let max_seq = memory.max_seq.map_or(DEFAULT_MAX_SEQ.min(most), |n| n as usize);
    if max_seq > most {
        return Err(Error::Usage(format!(
            "--max-seq {max_seq}: this model has {most} positions; give at most that"
        )));
    }
    let kv = match memory.kv {
        KvKind::F32 => Kv::F32,
        KvKind::Bf16 => Kv::Bf16,
    };
    Ok(Options { slots, max_seq, chunk: CHUNK.max(slots), outputs: OUTPUTS.max(slots), kv })
}

/// The memory plan in a line, for people.
pub fn describe(plan: &Plan, options: &Options) -> String {
    format!(
        "memory: {} = weights {} + {} x {} tokens of context {} + delta-net state {} + scratch {}",
        gigabytes(plan.total()),
        gigabytes(plan.weights),
        options.slots,
        options.max_seq,
        gigabytes(plan.state.kv + plan.state.tables),
        gigabytes(plan.state.delta),
        gigabytes(plan.scratch),
    )
}

/// Errs where the plan needs more memory than this process can have, before any is allocated.
pub fn admit(plan: &Plan, options: &Options, memory: &Memory, force: bool) -> Result<(), Error> {
    let (need, have) = (plan.total(), memory.usable());
    if need <= have {
        return Ok(());
    }
    let limit = match &memory.limit {
        Some(limit) if limit.left < memory.available => {
            format!(" (the limit in {} is {})", limit.path.display(), gigabytes(limit.bytes))
        }
        _ => format!(" (of {})", gigabytes(memory.total)),
    };
    let problem = format!(
        "does not fit: {}, but {} are available{limit}",
        describe(plan, options),
        gigabytes(have),
    );
    if force {
        say!("warning: {problem}; going on because of --force");
        return Ok(());
    }
    let floor = plan.weights + plan.scratch + plan.state.delta;
    let advice = if floor < have && options.max_seq > 1 {
        let per_token = (plan.state.kv + plan.state.tables) / options.max_seq as u64;
        let fits = (have - floor) / per_token.max(1) / 128 * 128;
        format!("--max-seq {} would fit, or fewer --slots", fits.max(1))
    } else {
        "close other programs, or use a machine with more memory".into()
    };
    Err(Error::DoesNotFit(format!("{problem}; {advice}. --force goes on regardless")))
}

/// Builds the device that the flags name.
pub fn device(args: &DeviceArgs) -> Result<Box<dyn Device>, Error> {
    match args.device {
        DeviceKind::Auto | DeviceKind::Cpu => {
            let threads = args.threads.map(usize::from);
            let most = THREADS_PER_CORE * machine::processor().1;
            if let Some(asked) = threads.filter(|&asked| asked > most) {
                return Err(Error::Usage(format!(
                    "--threads {asked}: more than cores makes it slower; give at most {most} here"
                )));
            }
            let device = cpu::Cpu::new(cpu::Options { isa: args.isa, threads })?;
            spare_threads()?;
            Ok(Box::new(device))
        }
    }
}

/// Errs where the device's threads have left none for the engine and the sockets.
fn spare_threads() -> Result<(), Error> {
    // All of them at once: each waits until the gate is dropped.
    let (gate, closed) = mpsc::channel::<()>();
    let closed = Mutex::new(closed);
    let wait = || drop(closed.lock().map(|closed| closed.recv()));
    let all = std::thread::scope(|scope| {
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, wait);
        let spawned: Vec<_> = (0..SPARE_THREADS).map(spawn).collect();
        drop(gate);
        spawned.iter().all(Result::is_ok)
    });
    if all {
        return Ok(());
    }
    Err(Error::Failed(
        "the system gives this process no more threads (ulimit -u); give fewer with --threads"
            .into(),
    ))
}

/// Everything between a checkpoint and a model that can step: plan, admission, weights, device.
pub fn model(
    source: &Source,
    device_args: &DeviceArgs,
    options: Options,
    force: bool,
) -> Result<Model, Error> {
    let device = device(device_args)?;
    let plan = lily_model::plan(source.config(), options);
    admit(&plan, &options, &Memory::now(), force)?;
    let packed = packed(source)?;
    Ok(Model::new(device, source.config().clone(), &packed, options)?)
}

/// Whether the weights of such a model are packed at every start, and not into a file.
pub fn packs_in_memory(config: &Config) -> bool {
    pack::file_bytes(config) <= PACK_IN_MEMORY
}

/// The weights as devices read them: mapped from the packed file, which is made where it is
/// missing or stale; small ones are made in memory.
fn packed(source: &Source) -> Result<Packed, Error> {
    match source.files.dir.as_ref().filter(|_| !packs_in_memory(source.config())) {
        None => Ok(Packed::in_memory(&source.checkpoint)?),
        Some(dir) => {
            let path = packed_files::path(dir)?;
            let packed = packed_file(&source.checkpoint, &path)?;
            packed_files::remember(&path);
            Ok(packed)
        }
    }
}

/// The packed file at `path`, made where it is missing or stale.
fn packed_file(checkpoint: &Checkpoint, path: &Path) -> Result<Packed, Error> {
    if path.is_dir() {
        return Err(Error::Failed(format!(
            "{}: a folder stands where the packed weights belong; move or remove it",
            path.display()
        )));
    }
    match Packed::open(path, checkpoint) {
        Ok(packed) => return Ok(packed),
        Err(pack::Error::Io { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(pack::Error::Stale { path, reason }) => {
            say!("{}: {reason}; making it anew", path.display());
            // Its room is needed for its successor.
            std::fs::remove_file(&path).map_err(|e| Error::io(&path, &e))?;
        }
        Err(error) => return Err(error.into()),
    }
    make_packed(path, checkpoint)?;
    Ok(Packed::open(path, checkpoint)?)
}

fn make_packed(path: &Path, checkpoint: &Checkpoint) -> Result<(), Error> {
    let bytes = pack::file_bytes(checkpoint.config());
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder).map_err(|e| {
            Error::Failed(format!(
                "{}: {e}; the packed weights belong there because the checkpoint's folder cannot \
                 be written: set XDG_CACHE_HOME to a folder that can",
                folder.display()
            ))
        })?;
    }
    let incomplete = pack::temporary_path(path).metadata().map_or(0, |m| m.len());
    let free = machine::free_disk(path).map_err(|e| Error::io(path, &e))? + incomplete;
    let what = format!(
        "The weights are packed once into a file that later starts map at once: {} at {}",
        gigabytes(bytes),
        path.display()
    );
    if free < bytes {
        return Err(Error::DoesNotFit(format!(
            "{what}, but {} are free there; make room, or set XDG_CACHE_HOME to a bigger disk \
             and take the right to write from the checkpoint's folder",
            gigabytes(free)
        )));
    }
    say!("{what} ({} free). `lily doctor` lists such files.", gigabytes(free));
    if !agreed()? {
        return Err(Error::Failed("not packed, as you wished; nothing was written".into()));
    }
    let bar = progress::bytes("packing", bytes);
    pack::write(path, checkpoint, &mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    })?;
    bar.finish_and_clear();
    Ok(())
}

/// Asks whether to go on, where there is someone to ask; a script has said what it wants.
fn agreed() -> Result<bool, Error> {
    let (stdin, stderr) = (std::io::stdin(), std::io::stderr());
    if !stdin.is_terminal() || !stderr.is_terminal() {
        return Ok(true);
    }
    say_on!("Go on? [Y/n] ");
    let _ = stderr.lock().flush();
    let mut answer = String::new();
    stdin.lock().read_line(&mut answer)?;
    Ok(!answer.trim().to_lowercase().starts_with('n'))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Limit;

    fn memory(available: u64, left: Option<u64>) -> Memory {
        let limit =
            left.map(|left| Limit { path: "/sys/fs/cgroup/memory.max".into(), bytes: left, left });
        Memory { total: 64_000_000_000, available, limit }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_numbers_and_a_way_out() {
        let config = Config::full();
        let args = MemoryArgs { max_seq: Some(262_144), kv: KvKind::Bf16, force: false };
        let options = options(&config, &args, 1).unwrap();
        let plan = lily_model::plan(&config, options);
        assert!(admit(&plan, &options, &memory(32_000_000_000, None), false).is_ok());
        let refused = |memory| admit(&plan, &options, &memory, false).unwrap_err().to_string();
        let text = refused(memory(22_000_000_000, None));
        assert!(
            text.contains("weights 19.5 GB") && text.contains("22.0 GB are available"),
            "{text}"
        );
        assert!(text.contains("--max-seq") && text.contains("would fit"), "{text}");
        let text = refused(memory(32_000_000_000, Some(8_000_000_000)));
        assert!(text.contains("memory.max") && text.contains("close other programs"), "{text}");
        assert!(admit(&plan, &options, &memory(1, None), true).is_ok());
    }

    #[test]
    fn positions_beyond_the_model_are_refused() {
        let args = MemoryArgs { max_seq: Some(262_145), kv: KvKind::Bf16, force: false };
        let error = options(&Config::full(), &args, 1).unwrap_err();
        assert!(error.to_string().contains("262144 positions"), "{error}");
    }

    #[test]
    fn a_packed_file_is_made_mapped_and_made_anew() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("checkpoint");
        std::fs::create_dir(&dir).unwrap();
        std::fs::write(dir.join("config.json"), demo::CONFIG).unwrap();
        std::fs::write(dir.join("model.safetensors"), demo::WEIGHTS).unwrap();
        let options = OpenOptions { any_size: true };
        let path = folder.path().join("cache/lily.packed");
        let bytes = |packed: &Packed| (*packed.data()).as_ref().to_vec();
        let checkpoint = Checkpoint::open(&dir, options).unwrap();
        let made = bytes(&packed_file(&checkpoint, &path).unwrap());
        let when = |path: &Path| path.metadata().unwrap().modified().unwrap();
        let first = when(&path);
        let mapped = bytes(&packed_file(&checkpoint, &path).unwrap());
        assert!(mapped == made && when(&path) == first, "made twice");
        // The same bytes, written again: another source, as far as can be told.
        std::fs::remove_file(dir.join("model.safetensors")).unwrap();
        std::fs::write(dir.join("model.safetensors"), demo::WEIGHTS).unwrap();
        let checkpoint = Checkpoint::open(&dir, options).unwrap();
        packed_file(&checkpoint, &path).unwrap();
        assert_ne!(when(&path), first);
        // Damage to the header is noticed at start, too.
        std::fs::write(&path, "torn").unwrap();
        assert!(bytes(&packed_file(&checkpoint, &path).unwrap()).len() == made.len());
    }

    #[test]
    fn a_hub_snapshot_is_called_by_its_repository() {
        let snapshot =
            Path::new("/hub/models--mlx-community--Qwen3.6-35B-A3B-4bit/snapshots/38740b");
        assert_eq!(id(snapshot), "mlx-community/Qwen3.6-35B-A3B-4bit");
        assert_eq!(id(Path::new("/models/mine")), "mine");
    }
}
