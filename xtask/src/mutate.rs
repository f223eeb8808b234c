//! `cargo xtask mutate`: a test of the tests. Every mistake that others have made with this model,
//! and that this engine could make too, is made on purpose in a copy of the workspace; a named
//! test must then fail. One that still passes is an error, and so is a mutation that does not
//! compile or whose source line is no longer there.
//!
//! The list is in [`pitfalls`]. The copy and what is built from it lie in `target/mutate` and are
//! kept, so a second run builds little.

mod pitfalls;

use anyhow::{Context, bail};
use pitfalls::{ALL, Mutation, Shown, Test};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a mutated test may run before it counts as caught: a mutation can make it hang.
const PATIENCE: Duration = Duration::from_secs(120);
/// What of the workspace is copied.
const COPIED: [&str; 8] = [
    ".cargo",
    "Cargo.lock",
    "Cargo.toml",
    "crates",
    "demo",
    "reference",
    "rust-toolchain.toml",
    "xtask",
];

/// How a test of the copy ended.
#[derive(Debug, PartialEq)]
enum Verdict {
    Passes,
    /// The names of the tests that failed; none where the test was stopped or died.
    Fails(Vec<String>),
    DoesNotBuild(String),
}

/// Runs the mutations whose name contains `only` (all, where it is empty) or that belong to the
/// pitfall of that number, prints a table, and fails unless every one of them is caught.
pub fn run(root: &Path, only: &str) -> anyhow::Result<()> {
    let chosen: Vec<(u8, &Mutation)> = ALL
        .iter()
        .flat_map(|pitfall| match &pitfall.shown {
            Shown::By(mutations) => mutations.iter().map(|m| (pitfall.number, m)).collect(),
            Shown::Never(_) => Vec::new(),
        })
        .filter(|(number, m)| m.name.contains(only) || number.to_string() == only)
        .collect();
    if chosen.is_empty() {
        bail!("mutate: no mutation is called like {only:?}");
    }
    let copy = Copy::of(root)?;

    // A test that fails anyway, or that is not there, shows nothing.
    let mut tests: Vec<&Test> = chosen.iter().map(|(_, m)| &m.test).collect();
    tests.sort();
    tests.dedup();
    for test in tests {
        match copy.test(test)? {
            (Verdict::Passes, tests) if tests > 0 => {}
            (Verdict::Passes, _) => bail!("mutate: {test} runs no test"),
            (Verdict::DoesNotBuild(why), _) => bail!("mutate: {test} does not build:\n{why}"),
            (Verdict::Fails(names), _) => {
                bail!("mutate: {test} fails before anything is mutated: {}", names.join(", "))
            }
        }
    }

    let (mut problems, start) = (0, Instant::now());
    println!("{:>2}  {:44} {:>5}  caught by", "no", "mutation", "s");
    for (number, mutation) in &chosen {
        let since = Instant::now();
        let result = match copy.mutate(mutation)? {
            Verdict::Fails(names) if names.is_empty() => format!("{} (stopped)", mutation.test),
            Verdict::Fails(names) if names.len() > 2 => {
                format!("{} and {} others", names[0], names.len() - 1)
            }
            Verdict::Fails(names) => names.join(", "),
            bad => {
                problems += 1;
                match bad {
                    Verdict::DoesNotBuild(why) => format!("DOES NOT BUILD: {why}"),
                    _ => format!("NOT CAUGHT by {}", mutation.test),
                }
            }
        };
        let seconds = since.elapsed().as_secs();
        println!("{number:>2}  {:44} {seconds:>5}  {result}", mutation.name);
    }
    if only.is_empty() {
        println!("\nnot mutated:");
        for pitfall in ALL {
            if let Shown::Never(reason) = pitfall.shown {
                println!("{:>2}  {}: {reason}", pitfall.number, pitfall.what);
            }
        }
    }
    println!("\n{} mutations in {} s", chosen.len(), start.elapsed().as_secs());
    if problems > 0 {
        bail!("mutate: {problems} of {} mutations are not caught", chosen.len());
    }
    Ok(())
}

/// A copy of the workspace that may be damaged.
struct Copy {
    root: PathBuf,
    target: PathBuf,
}

impl Copy {
    /// Brings the copy up to date. Files that have not changed keep their times, so that what was
    /// built from them is not built again.
    fn of(root: &Path) -> anyhow::Result<Copy> {
        let place = std::env::var_os("CARGO_TARGET_DIR").map_or(root.join("target"), Into::into);
        let place = place.join("mutate");
        let copy = Copy { root: place.join("workspace"), target: place.join("target") };
        let mut files = BTreeMap::new();
        for name in COPIED {
            collect(&root.join(name), Path::new(name), &mut files)?;
        }
        let mut old = BTreeMap::new();
        collect(&copy.root, Path::new(""), &mut old)?;
        for gone in old.keys().filter(|name| !files.contains_key(*name)) {
            fs::remove_file(copy.root.join(gone))?;
        }
        for (name, data) in files {
            if old.get(&name) != Some(&data) {
                let path = copy.root.join(name);
                fs::create_dir_all(path.parent().expect("a file is in a folder"))?;
                fs::write(path, data)?;
            }
        }
        Ok(copy)
    }

    /// Damages the copy, runs the mutation's test, and repairs the copy.
    fn mutate(&self, mutation: &Mutation) -> anyhow::Result<Verdict> {
        let path = self.root.join(mutation.file);
        let name = mutation.name;
        let text = fs::read_to_string(&path).with_context(|| format!("{name}: {path:?}"))?;
        let found = text.matches(mutation.find).count();
        if found != 1 {
            return Ok(Verdict::DoesNotBuild(format!(
                "{} has its line {found} times, not once",
                mutation.file
            )));
        }
        fs::write(&path, text.replace(mutation.find, mutation.replace))?;
        let verdict = self.test(&mutation.test);
        fs::write(&path, text)?;
        Ok(verdict?.0)
    }

    /// Builds and runs a test of the copy; also how many tests passed.
    fn test(&self, test: &Test) -> anyhow::Result<(Verdict, usize)> {
        let built = self.cargo(test).output().context("cannot start cargo")?;
        let log = String::from_utf8_lossy(&built.stderr);
        let Some(program) = executable(&log).filter(|_| built.status.success()) else {
            let errors = log.lines().filter(|line| line.starts_with("error"));
            return Ok((Verdict::DoesNotBuild(errors.take(3).collect::<Vec<_>>().join("; ")), 0));
        };
        // The output goes to a file: a pipe that nobody empties would stop the test.
        let path = self.root.join("../output");
        let mut child = Command::new(self.root.join(program))
            .arg(test.filter)
            .current_dir(self.root.join("crates").join(test.package.trim_start_matches("lily-")))
            .stdout(fs::File::create(&path)?)
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("cannot start {program}"))?;
        let start = Instant::now();
        let passes = loop {
            if let Some(status) = child.try_wait()? {
                break status.success();
            }
            if start.elapsed() > PATIENCE {
                child.kill()?;
                child.wait()?;
                break false;
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        let text = fs::read_to_string(&path)?;
        Ok(if passes {
            (Verdict::Passes, passed(&text))
        } else {
            (Verdict::Fails(failed(&text)), 0)
        })
    }

    /// Builds one test program. Optimised little: these builds are many, and their tests small.
    fn cargo(&self, test: &Test) -> Command {
        let mut command = Command::new("cargo");
        command
            .current_dir(&self.root)
            .env("CARGO_TARGET_DIR", &self.target)
            .env("CARGO_PROFILE_DEV_DEBUG", "false")
            .args(["test", "--offline", "--no-run"])
            .args(["--config", "profile.dev.package.lily-device.opt-level=1"])
            .args(["--config", "profile.dev.package.lily-model.opt-level=1"])
            .args(["-p", test.package])
            .args(test.target);
        command
    }
}

/// The program that cargo says it has built.
fn executable(log: &str) -> Option<&str> {
    let line = log.lines().find(|line| line.trim_start().starts_with("Executable "))?;
    Some(line.rsplit_once('(')?.1.trim_end_matches(')'))
}

/// Adds the files at `path`, under the name `name`; nothing where there is none.
fn collect(path: &Path, name: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) -> anyhow::Result<()> {
    if path.is_file() {
        files.insert(name.into(), fs::read(path)?);
    } else if path.is_dir() {
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            if entry.file_name() != "target" {
                collect(&entry.path(), &name.join(entry.file_name()), files)?;
            }
        }
    }
    Ok(())
}

/// How many tests passed, by libtest's summary lines.
fn passed(output: &str) -> usize {
    output
        .lines()
        .filter_map(|line| {
            line.strip_prefix("test result: ok. ")?.split(' ').next()?.parse::<usize>().ok()
        })
        .sum()
}

/// The tests that failed, by the lists that libtest prints last.
fn failed(output: &str) -> Vec<String> {
    let list = output.rsplit("\nfailures:\n").next().unwrap_or_default();
    list.lines()
        .take_while(|line| !line.starts_with("test result"))
        .filter_map(|line| line.strip_prefix("    "))
        .filter(|_| output.contains("\nfailures:\n"))
        .map(str::to_owned)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mutation_finds_its_line() {
        let mut lost = Vec::new();
        for pitfall in ALL {
            let Shown::By(mutations) = &pitfall.shown else { continue };
            for m in *mutations {
                let text = fs::read_to_string(crate::root().join(m.file)).unwrap_or_default();
                let found = text.matches(m.find).count();
                if found != 1 || m.find == m.replace {
                    lost.push(format!("{}: found {found} times in {}", m.name, m.file));
                }
            }
        }
        assert!(lost.is_empty(), "bring xtask/src/mutate/pitfalls.rs up to date:\n{lost:#?}");
    }

    #[test]
    fn all_pitfalls_are_accounted_for() {
        let numbers: Vec<u8> = ALL.iter().map(|pitfall| pitfall.number).collect();
        assert_eq!(numbers, (1..=25).collect::<Vec<_>>());
    }

    #[test]
    fn libtest_output_is_understood() {
        let good = "\nrunning 2 tests\n..\ntest result: ok. 2 passed; 0 failed; 0 ignored\n";
        assert_eq!(passed(good), 2);
        let bad = "\nfailures:\n\n---- a stdout ----\nx\n\nfailures:\n    a\n    b::c\n\ntest result: FAILED.";
        assert_eq!(failed(bad), ["a", "b::c"]);
        assert_eq!(failed("error: process died"), [""; 0]);
    }
}
