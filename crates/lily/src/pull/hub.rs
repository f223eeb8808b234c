//! Where files of the Hugging Face Hub come from and where they lie on this machine: the same
//! environment variables and the same cache folder as every other tool that uses the Hub, so
//! that a checkpoint is on the disk once.
//!
//! ```text
//! HUB/models--OWNER--NAME/blobs/CHECKSUM              the bytes, named by their checksum
//!                         blobs/CHECKSUM.incomplete   what has arrived of them
//!                         snapshots/COMMIT/FILE       -> ../../blobs/CHECKSUM
//!                         refs/BRANCH                 the commit a branch stood at
//! HUB/.locks/models--OWNER--NAME/CHECKSUM.lock        held by whoever is fetching
//! ```

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

use super::digest::Digest;
use super::error::Error;

/// What the environment says about the Hub.
#[derive(Clone)]
pub struct Settings {
    /// `HF_ENDPOINT`, without a slash at its end.
    pub endpoint: String,
    /// `HF_TOKEN`, or the contents of the file that logging in writes.
    pub token: Option<String>,
    /// `HF_HUB_CACHE`, or `HF_HOME/hub`, or `~/.cache/huggingface/hub`. `None` without a home.
    pub cache: Option<PathBuf>,
    /// `HF_HUB_OFFLINE`.
    pub offline: bool,
}

impl Settings {
    /// Reads the environment. Errs on an endpoint that is no web address.
    pub fn from_env() -> Result<Settings, Error> {
        Settings::from(|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn from(var: impl Fn(&str) -> Option<String>) -> Result<Settings, Error> {
        let endpoint = var("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".to_string());
        if !(endpoint.starts_with("https://") || endpoint.starts_with("http://")) {
            return Err(Error::Setting {
                what: "HF_ENDPOINT",
                found: endpoint,
                expected: "an address such as https://huggingface.co",
            });
        }
        let user = var("HOME").or_else(|| var("USERPROFILE")).map(PathBuf::from);
        let path = |text: String| match (text.strip_prefix("~/"), &user) {
            (Some(rest), Some(user)) => user.join(rest),
            _ => PathBuf::from(text),
        };
        let home = var("HF_HOME").map(&path).or_else(|| {
            let cache = var("XDG_CACHE_HOME").map(&path);
            Some(cache.or_else(|| Some(user.as_ref()?.join(".cache")))?.join("huggingface"))
        });
        let cache = var("HF_HUB_CACHE")
            .or_else(|| var("HUGGINGFACE_HUB_CACHE"))
            .map(&path)
            .or_else(|| Some(home.as_ref()?.join("hub")));
        let token_file =
            var("HF_TOKEN_PATH").map(&path).or_else(|| Some(home.as_ref()?.join("token")));
        let token = var("HF_TOKEN")
            .or_else(|| var("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| fs::read_to_string(token_file?).ok())
            .map(|token| token.trim().to_string())
            .filter(|token| !token.is_empty());
        if token.as_ref().is_some_and(|token| !token.bytes().all(|b| b.is_ascii_graphic())) {
            return Err(Error::Setting {
                what: "HF_TOKEN",
                found: "(not shown)".to_string(),
                expected: "one word of printable ASCII, as in hf_...",
            });
        }
        let offline = var("HF_HUB_OFFLINE").is_some_and(|v| {
            matches!(v.to_ascii_lowercase().as_str(), "1" | "true" | "yes" | "on")
        });
        Ok(Settings { endpoint: endpoint.trim_end_matches('/').to_string(), token, cache, offline })
    }
}

/// One repository's part of the cache folder.
pub struct Cache {
    root: PathBuf,
    locks: PathBuf,
}

impl Cache {
    /// The part of `hub` that belongs to `repo` (`OWNER/NAME`). Touches nothing.
    pub fn new(hub: &Path, repo: &str) -> Cache {
        let folder = format!("models--{}", repo.replace('/', "--"));
        Cache { root: hub.join(&folder), locks: hub.join(".locks").join(&folder) }
    }

    /// The folder of a commit: the checkpoint, for whoever loads it.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.root.join("snapshots").join(commit)
    }

    /// Where the bytes with this checksum lie or will lie.
    pub fn blob(&self, digest: &Digest) -> PathBuf {
        self.root.join("blobs").join(digest.to_string())
    }

    /// The file to lock while fetching the bytes with this checksum.
    pub fn lock(&self, digest: &Digest) -> PathBuf {
        self.locks.join(format!("{digest}.lock"))
    }

    /// Makes `snapshots/COMMIT/NAME` a link to the blob, whatever stood there before.
    pub fn link(&self, commit: &str, name: &str, digest: &Digest) -> Result<(), Error> {
        let dir = self.snapshot(commit);
        fs::create_dir_all(&dir).map_err(Error::file("create", &dir))?;
        let at = dir.join(name);
        if at.symlink_metadata().is_ok() {
            fs::remove_file(&at).map_err(Error::file("replace", &at))?;
        }
        link(&self.blob(digest), &format!("../../blobs/{digest}"), &at)
            .map_err(Error::file("link", &at))
    }

    /// Records which commit `branch` stood at, as other tools do.
    pub fn note(&self, branch: &str, commit: &str) -> Result<(), Error> {
        let at = self.root.join("refs").join(branch);
        let dir = at.parent().expect("refs/ is its parent");
        fs::create_dir_all(dir).map_err(Error::file("create", dir))?;
        fs::write(&at, commit).map_err(Error::file("write", &at))
    }
}

#[cfg(unix)]
fn link(_blob: &Path, target: &str, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

/// Links need a privilege on other systems: there the file itself moves to the snapshot, as the
/// Hub's own library does.
#[cfg(not(unix))]
fn link(blob: &Path, _target: &str, at: &Path) -> std::io::Result<()> {
    fs::rename(blob, at)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(vars: &[(&str, &str)]) -> Result<Settings, Error> {
        Settings::from(|name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn cache_folder_by_precedence() {
        let cache =
            |vars: &[(&str, &str)]| settings(vars).unwrap().cache.map(|p| p.display().to_string());
        assert_eq!(cache(&[]), None);
        assert_eq!(cache(&[("HOME", "/h")]).unwrap(), "/h/.cache/huggingface/hub");
        let xdg = [("HOME", "/h"), ("XDG_CACHE_HOME", "/x")];
        assert_eq!(cache(&xdg).unwrap(), "/x/huggingface/hub");
        assert_eq!(cache(&[("HOME", "/h"), ("HF_HOME", "~/m")]).unwrap(), "/h/m/hub");
        assert_eq!(cache(&[("HF_HOME", "/m"), ("HF_HUB_CACHE", "/c")]).unwrap(), "/c");
    }

    #[test]
    fn token_from_variable_before_file() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("token"), "from-file\n").unwrap();
        let home = dir.path().to_str().unwrap();
        assert_eq!(settings(&[("HF_HOME", home)]).unwrap().token.unwrap(), "from-file");
        let both = [("HF_HOME", home), ("HF_TOKEN", " from-variable ")];
        assert_eq!(settings(&both).unwrap().token.unwrap(), "from-variable");
        assert!(settings(&[]).unwrap().token.is_none());
    }

    #[test]
    fn settings_that_cannot_work() {
        assert!(settings(&[("HF_ENDPOINT", "huggingface.co")]).is_err());
        let message = settings(&[("HF_TOKEN", "two words")]).err().unwrap().to_string();
        assert!(!message.contains("two words"), "a token is never printed: {message}");
        assert_eq!(settings(&[("HF_ENDPOINT", "http://m/")]).unwrap().endpoint, "http://m");
    }
}
