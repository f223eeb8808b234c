//! The program under test, started in a home folder of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::hub::{COMMIT, Repo, Server};

const REPO: &str = "mlx-community/Qwen3.6-35B-A3B-4bit";

/// A home folder, and `lily pull` in it.
pub struct Home {
    pub dir: TempDir,
}

impl Home {
    pub fn new() -> Home {
        Home { dir: tempfile::tempdir().unwrap() }
    }

    pub fn path(&self, rest: &str) -> PathBuf {
        self.dir.path().join(rest)
    }

    /// The cache's folder of the repository.
    pub fn repo(&self) -> PathBuf {
        self.path("hf/hub").join(format!("models--{}", REPO.replace('/', "--")))
    }

    pub fn snapshot(&self) -> PathBuf {
        self.repo().join("snapshots").join(COMMIT)
    }

    pub fn command(&self, server: &Server, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lily"));
        command.arg("pull").args(args).env_clear();
        command.env("HF_HOME", self.path("hf"));
        command.env("HF_ENDPOINT", format!("http://127.0.0.1:{}", server.port));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    pub fn run(&self, server: &Server, args: &[&str]) -> Ran {
        Ran::of(self.command(server, args).output().unwrap())
    }

    /// Pulls `main` into the cache.
    pub fn pull(&self, server: &Server) -> Ran {
        self.run(server, &["--revision", "main", "--timeout", "2"])
    }

    pub fn assert_complete(&self, dir: &Path) {
        for (name, bytes) in Repo::new().files {
            let found = fs::read(dir.join(&name)).unwrap_or_else(|e| panic!("{name}: {e}"));
            assert!(found == bytes, "{name} has other bytes");
        }
        let left: Vec<_> = walk(self.dir.path());
        let left: Vec<_> =
            left.iter().filter(|p| p.to_string_lossy().ends_with(".incomplete")).collect();
        assert!(left.is_empty(), "left behind: {left:?}");
    }
}

pub fn walk(dir: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() && !path.is_symlink() {
            found.extend(walk(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// What a run came to.
pub struct Ran {
    pub ok: bool,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Ran {
    pub fn of(output: Output) -> Ran {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let (out, err) = (text(output.stdout), text(output.stderr));
        Ran { ok: output.status.success(), code: output.status.code(), out, err }
    }

    #[track_caller]
    pub fn succeeds(&self) -> &Ran {
        assert!(self.ok, "failed: {}", self.err);
        self
    }

    /// Failed as a program should, saying each of `words`.
    #[track_caller]
    pub fn fails(&self, words: &[&str]) {
        assert!(!self.ok, "succeeded: {}", self.err);
        assert!(self.code.is_some_and(|c| c != 101), "crashed: {}", self.err);
        assert!(self.out.is_empty(), "no folder is named after a failure: {}", self.out);
        for word in words {
            assert!(self.err.contains(word), "expected {word:?} in: {}", self.err);
        }
    }

    #[track_caller]
    pub fn says(&self, word: &str) -> &Ran {
        assert!(self.err.contains(word), "expected {word:?} in: {}", self.err);
        self
    }
}
