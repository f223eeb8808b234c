//! `lily pull`: fetches the checkpoint from the Hugging Face Hub, and only the files that Lily
//! reads. The one command that opens a connection to anywhere else.
//!
//! Files go to the Hub's cache folder, in its own layout, so that other tools share them and
//! what such a tool has fetched is not fetched again; `--to DIR` asks for a plain folder. Each
//! file is checked while it arrives. For the revision Lily is tested with, sizes and checksums
//! are compiled in; for another, they are the server's word.
//!
//! `hub.rs` knows the Hub's folders and variables, `transfer.rs` HTTP.

mod digest;
mod error;
mod hub;
mod progress;
mod transfer;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use lily_checkpoint::shards::{INDEX, SINGLE, parse_index};
use lily_checkpoint::verify::{PUBLISHED, REPOSITORY, REVISION};

use digest::Digest;
use error::Error;
use hub::{Cache, Settings};
use progress::Progress;
use transfer::{Client, File};

use crate::machine::{free_disk, gigabytes};

/// The files of [`REVISION`] that Lily reads beside the weights: name, bytes, checksum.
const FILES: [(&str, u64, &str); 6] = [
    ("config.json", 23_591, "e3a2334ebf2df216742ef3ed4b784417bfffe6fc"),
    ("generation_config.json", 202, "023756cfadf88e5bf69eefeee3e172f38c448d64"),
    ("tokenizer_config.json", 1_139, "a068e2468cff426a9b105006e74e044030a6faf4"),
    ("chat_template.jinja", 7_764, "a8755d827c0a7b614c246c4060dfd58ab352a8ff"),
    (INDEX, 215_755, "f714d295484e01790bad8b40c2ce49323d7d2598"),
    (
        "tokenizer.json",
        19_989_343,
        "87a7830d63fcf43bf241c3c5242e96e62dd3fdc29224ca26fed8ea333db72de4",
    ),
];

/// Files other than the weights. A revision may lack those marked `false`.
const SMALL: [(&str, bool); 5] = [
    ("config.json", true),
    ("generation_config.json", false),
    ("tokenizer_config.json", false),
    ("chat_template.jinja", false),
    ("tokenizer.json", true),
];

/// A cached file up to this size is hashed before it is believed; the weights, which would take
/// minutes, are believed at the right size (`lily verify --checksums` reads them).
const HASHED: u64 = 64 << 20;

/// What to fetch, and where to.
#[derive(clap::Args, Debug)]
pub struct Pull {
    /// Commit, branch or tag to fetch; the default is the commit Lily is tested with
    #[arg(long, value_name = "R", default_value = REVISION)]
    pub revision: String,
    /// Fetch into this folder instead of the Hub's cache (HF_HUB_CACHE, HF_HOME)
    #[arg(long, value_name = "DIR")]
    pub to: Option<PathBuf>,
    /// Give up on a connection that is silent for so many seconds
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
    /// Give up on a file after so many tries in a row that bring nothing
    #[arg(long, value_name = "N", default_value_t = 6)]
    pub retries: u32,
}

/// Fetches what is missing and prints the checkpoint's folder, alone on stdout; everything else
/// goes to stderr.
pub fn run(args: Pull) -> Result<(), crate::error::Error> {
    let dir = pull(&args, &Settings::from_env()?)?;
    Ok(writeln!(std::io::stdout(), "{}", dir.display())?)
}

fn pull(args: &Pull, settings: &Settings) -> Result<PathBuf, Error> {
    check_revision(&args.revision)?;
    let client = Client::new(
        &settings.endpoint,
        settings.token.clone(),
        Duration::from_secs(args.timeout),
        args.retries,
    )?;
    let cache = settings.cache.as_ref().map(|hub| Cache::new(hub, REPOSITORY));
    let source = Source { client, settings, cache: cache.as_ref() };
    let (commit, files) = if args.revision == REVISION {
        (REVISION.to_string(), pinned())
    } else {
        say!("revision {} is not the one Lily is tested with ({REVISION})", args.revision);
        source.list(&args.revision)?
    };
    let place = match (&args.to, &cache) {
        (Some(dir), cache) => {
            let dir = std::path::absolute(dir).map_err(Error::file("find", dir))?;
            Place::Plain { dir, cache: cache.as_ref() }
        }
        (None, Some(cache)) => Place::Cache(cache),
        (None, None) => return Err(Error::NoHome),
    };
    let dir = place.dir(&commit);
    let missing: Vec<&File> = files.iter().filter(|file| !place.has(&commit, file)).collect();
    if missing.is_empty() {
        say!("nothing to fetch: all {} files are in {}", files.len(), dir.display());
    } else {
        source.bring(&place, &commit, &missing)?;
        say!(
            "{} of {} files were there, {} fetched and checked",
            files.len() - missing.len(),
            files.len(),
            missing.len()
        );
    }
    if let Place::Cache(cache) = place
        && args.revision != commit
    {
        cache.note(&args.revision, &commit)?;
    }
    Ok(dir)
}

/// The files of [`REVISION`].
fn pinned() -> Vec<File> {
    let weights = PUBLISHED.map(|file| (file.name, file.bytes, file.sha256));
    let read = |(name, size, digest): (&str, u64, &str)| File {
        name: name.to_string(),
        size,
        digest: Digest::parse(digest).expect("the tables hold checksums"),
    };
    FILES.into_iter().chain(weights).map(read).collect()
}

/// A revision becomes part of addresses and of file names.
fn check_revision(revision: &str) -> Result<(), Error> {
    let plain = |part: &str| {
        !part.is_empty()
            && !part.starts_with('.')
            && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b))
    };
    if revision.len() <= 200 && revision.split('/').all(plain) {
        return Ok(());
    }
    let expected = "a commit, branch or tag: letters, digits, '.', '_', '-', '/'";
    Err(Error::Setting { what: "--revision", found: revision.to_string(), expected })
}

/// Where the files come from.
struct Source<'a> {
    client: Client,
    settings: &'a Settings,
    cache: Option<&'a Cache>,
}

impl Source<'_> {
    fn url(&self, revision: &str, name: &str) -> String {
        format!(
            "{}/{REPOSITORY}/resolve/{}/{name}",
            self.settings.endpoint,
            revision.replace('/', "%2F")
        )
    }

    /// The commit that `revision` stands at, and the files Lily needs of it, by the server's
    /// word. The index is read to learn the shards' names.
    fn list(&self, revision: &str) -> Result<(String, Vec<File>), Error> {
        if self.settings.offline {
            return Err(Error::Offline {
                file: format!("revision {revision}"),
                dir: PathBuf::from("the cache"),
            });
        }
        let progress = Progress::new(0);
        let mut commit = None;
        let mut files = Vec::new();
        let mut look = |name: &str, needed: bool| -> Result<Option<File>, Error> {
            let at = commit.as_deref().unwrap_or(revision).to_string();
            let url = self.url(&at, name);
            let Some(found) = self.client.describe(&url, &progress)? else {
                let missing = || Error::NotFound { url, reason: Some("EntryNotFound".to_string()) };
                return if needed { Err(missing()) } else { Ok(None) };
            };
            check_commit(&found.commit, &url)?;
            commit = Some(found.commit);
            Ok(Some(File { name: name.to_string(), size: found.size, digest: found.digest }))
        };
        for (name, needed) in SMALL {
            files.extend(look(name, needed)?);
        }
        match look(INDEX, false)? {
            None => files.extend(look(SINGLE, true)?),
            Some(index) => {
                for shard in self.shards(revision, &index)? {
                    files.extend(look(&shard, true)?);
                }
                files.push(index);
            }
        }
        Ok((commit.expect("config.json was found"), files))
    }

    /// The names of the files that the index distributes tensors over.
    fn shards(&self, revision: &str, index: &File) -> Result<Vec<String>, Error> {
        let bad = |what: &str| Error::Index { what: what.to_string() };
        if index.size > HASHED {
            return Err(bad("is too large to be one"));
        }
        let scratch = tempfile::tempdir().map_err(Error::file("create", &std::env::temp_dir()))?;
        let cached = self.cache.map(|cache| cache.blob(&index.digest));
        let path = match cached.filter(|path| transfer::holds(path, index)) {
            Some(path) => path,
            None => {
                let path = scratch.path().join(INDEX);
                let url = self.url(revision, INDEX);
                self.client.fetch(index, &url, &path, &mut Progress::new(index.size))?;
                path
            }
        };
        let text = fs::read_to_string(&path).map_err(Error::file("read", &path))?;
        let index = parse_index(&text).map_err(|what| Error::Index { what })?;
        let mut names: Vec<String> = index.weight_map.into_iter().map(|(_, file)| file).collect();
        names.sort_unstable();
        names.dedup();
        let plain =
            |name: &String| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
        match names.iter().find(|name| !plain(name) || name.starts_with('.')) {
            None => Ok(names),
            Some(name) => Err(bad(&format!("names the file {name:?}"))),
        }
    }

    /// Fetches `missing` to where `place` wants them.
    fn bring(&self, place: &Place, commit: &str, missing: &[&File]) -> Result<(), Error> {
        let dir = place.dir(commit);
        if self.settings.offline
            && !missing.iter().all(|file| place.elsewhere(commit, file).is_some())
        {
            return Err(Error::Offline { file: missing[0].name.clone(), dir });
        }
        let _turn = place.turn()?;
        let mut need = 0;
        for file in missing {
            let part = place.part(file);
            let parent = part.parent().expect("a file is in a folder");
            fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
            need += file.size.saturating_sub(transfer::size(&part).unwrap_or(0));
        }
        let at = place.part(missing[0]);
        let at = at.parent().expect("a file is in a folder");
        let free = free_disk(at).map_err(Error::file("measure", at))?;
        if need > free {
            return Err(Error::Space { dir, need, free });
        }
        say!("fetching {} files, {}, to {}", missing.len(), gigabytes(need), dir.display());
        let mut progress = Progress::new(missing.iter().map(|file| file.size).sum());
        for file in missing {
            let _turn = place.file_turn(file)?;
            // Another pull may have brought it while this one waited.
            if !place.arrived(commit, file)? {
                let part = place.part(file);
                let copied = match place.elsewhere(commit, file) {
                    Some(there) => transfer::copy(file, &there, &part, &mut progress)?,
                    None => false,
                };
                if !copied {
                    self.client.fetch(file, &self.url(commit, &file.name), &part, &mut progress)?;
                }
                place.settle(commit, file)?;
            } else {
                progress.found(file.size);
            }
            progress.say(&format!("{} {}", file.name, gigabytes(file.size)));
        }
        Ok(())
    }
}

/// Where the files go.
enum Place<'a> {
    /// The Hub's cache.
    Cache(&'a Cache),
    /// A plain folder; files found in the cache are copied.
    Plain { dir: PathBuf, cache: Option<&'a Cache> },
}

impl Place<'_> {
    /// The folder that is the checkpoint.
    fn dir(&self, commit: &str) -> PathBuf {
        match self {
            Place::Cache(cache) => cache.snapshot(commit),
            Place::Plain { dir, .. } => dir.clone(),
        }
    }

    /// Whether the file is there and right. In the cache, large files are believed by size: it
    /// names files by checksum only when they are complete. In a plain folder all are read.
    fn has(&self, commit: &str, file: &File) -> bool {
        let path = self.dir(commit).join(&file.name);
        match self {
            Place::Cache(_) if file.size > HASHED => transfer::size(&path) == Some(file.size),
            _ => transfer::holds(&path, file),
        }
    }

    /// Where the file grows.
    fn part(&self, file: &File) -> PathBuf {
        let whole = match self {
            Place::Cache(cache) => cache.blob(&file.digest),
            Place::Plain { dir, .. } => dir.join(&file.name),
        };
        let mut name = whole.into_os_string();
        name.push(".incomplete");
        PathBuf::from(name)
    }

    /// A copy of the file outside this place.
    fn elsewhere(&self, commit: &str, file: &File) -> Option<PathBuf> {
        let Place::Plain { cache: Some(cache), .. } = self else { return None };
        let there = [cache.snapshot(commit).join(&file.name), cache.blob(&file.digest)];
        there.into_iter().find(|path| transfer::size(path) == Some(file.size))
    }

    /// Whether the file came by another way since the list of missing ones was made.
    fn arrived(&self, commit: &str, file: &File) -> Result<bool, Error> {
        if let Place::Cache(cache) = self {
            let blob = cache.blob(&file.digest);
            if transfer::size(&blob) == Some(file.size)
                && (file.size > HASHED || transfer::holds(&blob, file))
            {
                cache.link(commit, &file.name, &file.digest)?;
            }
        }
        Ok(self.has(commit, file))
    }

    /// Gives a complete file its name.
    fn settle(&self, commit: &str, file: &File) -> Result<(), Error> {
        let part = self.part(file);
        let whole = part.with_extension("");
        fs::rename(&part, &whole).map_err(Error::file("rename to", &whole))?;
        match self {
            Place::Cache(cache) => cache.link(commit, &file.name, &file.digest),
            Place::Plain { .. } => Ok(()),
        }
    }

    /// Waits until no other pull writes to a plain folder.
    fn turn(&self) -> Result<Option<fs::File>, Error> {
        let Place::Plain { dir, .. } = self else { return Ok(None) };
        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
        // The folder itself is locked: nothing is left in it that is not the checkpoint's.
        let folder = fs::File::open(dir).map_err(Error::file("open", dir))?;
        Ok(lock(folder, dir))
    }

    /// Waits until no other tool fetches this file to the cache.
    fn file_turn(&self, file: &File) -> Result<Option<fs::File>, Error> {
        let Place::Cache(cache) = self else { return Ok(None) };
        let path = cache.lock(&file.digest);
        let parent = path.parent().expect("a lock is in a folder");
        fs::create_dir_all(parent).map_err(Error::file("create", parent))?;
        let opened = fs::OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        Ok(lock(opened.map_err(Error::file("write", &path))?, &path))
    }
}

/// Takes the lock, waiting for it if need be. `None` where the file system knows no locks: two
/// pulls would then disturb each other, which the checksums show.
fn lock(file: fs::File, path: &Path) -> Option<fs::File> {
    match file.try_lock() {
        Ok(()) => return Some(file),
        Err(fs::TryLockError::WouldBlock) => {
            say!("waiting for another download that holds {}", path.display());
            if file.lock().is_ok() {
                return Some(file);
            }
        }
        Err(fs::TryLockError::Error(_)) => {}
    }
    say!("{} cannot be locked: let no other download run at the same time", path.display());
    None
}

/// The commit names a folder, and it is the server's word.
fn check_commit(commit: &str, url: &str) -> Result<(), Error> {
    if commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit()) {
        return Ok(());
    }
    Err(Error::Nameless { url: url.to_string(), what: "commit" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_the_checkpoint() {
        let files = pinned();
        let shards = files.iter().filter(|f| f.name.ends_with(".safetensors"));
        // The sum of the four shards, as the repository's page gives it.
        assert_eq!(shards.map(|f| f.size).sum::<u64>(), 20_402_204_271);
        for (name, _) in SMALL {
            assert!(files.iter().any(|f| f.name == name), "{name}");
        }
    }

    #[test]
    fn revisions_that_are_no_revisions() {
        for good in ["main", "refs/pr/3", "v1.0", REVISION] {
            assert!(check_revision(good).is_ok(), "{good}");
        }
        for bad in ["", "../x", "a/../b", "a//b", "a b", "a?b", ".", "x/.git", &"a".repeat(300)] {
            assert!(check_revision(bad).is_err(), "{bad}");
        }
    }
}
