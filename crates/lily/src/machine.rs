//! What the machine has: processor, memory and disk, with the limits of a container.

use std::path::{Path, PathBuf};

/// Memory as this process may use it, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory {
    /// What the machine has.
    pub total: u64,
    /// What could be had now without swapping, page cache counted as free.
    pub available: u64,
    /// The tightest limit of a control group around this process: where it is written, the
    /// limit, and what is left of it.
    pub limit: Option<Limit>,
}

/// A memory limit of a control group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// The file that holds it.
    pub path: PathBuf,
    /// Its bytes.
    pub bytes: u64,
    /// What is left, page cache counted as free.
    pub left: u64,
}

impl Memory {
    /// Asks the system.
    pub fn now() -> Memory {
        let mut system = sysinfo::System::new();
        system.refresh_memory();
        let groups = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
        Memory {
            total: system.total_memory(),
            available: system.available_memory(),
            limit: limit(&groups, Path::new("/sys/fs/cgroup")),
        }
    }

    /// What a plan may count on: the machine's, or less where a limit says so.
    pub fn usable(&self) -> u64 {
        self.limit.as_ref().map_or(self.available, |limit| limit.left.min(self.available))
    }
}

/// The limit with the least left among the control groups in `groups` (the text of
/// /proc/self/cgroup), below `mount`. Each group also stands under the limits of its parents.
fn limit(groups: &str, mount: &Path) -> Option<Limit> {
    let mut tightest: Option<Limit> = None;
    for line in groups.lines() {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else { continue };
        let files = if controllers.is_empty() {
            (mount.to_owned(), "memory.max", "memory.current", ["inactive_file", "active_file"])
        } else if controllers.split(',').any(|c| c == "memory") {
            let cached = ["total_inactive_file", "total_active_file"];
            (mount.join("memory"), "memory.limit_in_bytes", "memory.usage_in_bytes", cached)
        } else {
            continue;
        };
        let (top, limit, usage, cached) = files;
        let group = top.join(path.trim_start_matches('/'));
        for folder in group.ancestors().take_while(|folder| folder.starts_with(&top)) {
            let file = folder.join(limit);
            let (Some(bytes), Some(used)) = (number(&file), number(&folder.join(usage))) else {
                continue; // no such group as seen from here, or the limit is the word "max"
            };
            let stat = std::fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
            let cache = cached.iter().filter_map(|name| field(&stat, name)).sum();
            let left = bytes.saturating_sub(used.saturating_sub(cache));
            // Version 1 writes "no limit" as a number near 2^63.
            if bytes < 1 << 60 && tightest.as_ref().is_none_or(|t| left < t.left) {
                tightest = Some(Limit { path: file, bytes, left });
            }
        }
    }
    tightest
}

fn number(file: &Path) -> Option<u64> {
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

/// The number after `name` in lines of "name number".
fn field(text: &str, name: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
}

/// The processor in words, and its cores that this process may use.
pub fn processor() -> (String, usize) {
    let mut system = sysinfo::System::new();
    system.refresh_cpu_all();
    let brand = system.cpus().first().map(|cpu| cpu.brand().trim().to_owned());
    let name = brand.filter(|b| !b.is_empty()).unwrap_or_else(|| "unknown processor".into());
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    (name, cores)
}

/// The operating system in words.
pub fn system() -> String {
    let name = sysinfo::System::long_os_version();
    let name = name.unwrap_or_else(|| std::env::consts::OS.to_owned());
    format!("{name}, {}", std::env::consts::ARCH)
}

/// Bytes that this user can still write to the file system of `path`, or of its nearest parent
/// that exists.
pub fn free_disk(path: &Path) -> std::io::Result<u64> {
    let path = std::path::absolute(path)?;
    let there = path.ancestors().find(|p| p.exists()).unwrap_or(Path::new("/"));
    let stat = rustix::fs::statvfs(there)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// `19.5 GB`, `512 MB`: decimal, three digits, as disks and downloads are counted.
pub fn gigabytes(bytes: u64) -> String {
    let (value, unit) = match bytes {
        0..1_000_000 => (bytes as f64 / 1e3, "kB"),
        1_000_000..1_000_000_000 => (bytes as f64 / 1e6, "MB"),
        _ => (bytes as f64 / 1e9, "GB"),
    };
    let digits = if value < 10.0 { 2 } else { usize::from(value < 100.0) };
    format!("{value:.digits$} {unit}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn the_tightest_group_counts() {
        let mount = tempfile::tempdir().unwrap();
        let inner = mount.path().join("user/job");
        fs::create_dir_all(&inner).unwrap();
        let group = |folder: &Path, max: &str, current: &str, stat: &str| {
            fs::write(folder.join("memory.max"), max).unwrap();
            fs::write(folder.join("memory.current"), current).unwrap();
            fs::write(folder.join("memory.stat"), stat).unwrap();
        };
        group(&inner, "max\n", "50\n", "");
        assert_eq!(limit("0::/user/job\n", mount.path()), None);
        group(&inner, "1000\n", "400\n", "anon 100\ninactive_file 250\nactive_file 50\n");
        let found = limit("0::/user/job\n", mount.path()).unwrap();
        assert_eq!((found.bytes, found.left), (1000, 900));
        group(inner.parent().unwrap(), "700\n", "300\n", "");
        let found = limit("0::/user/job\n", mount.path()).unwrap();
        assert_eq!((found.bytes, found.left), (700, 400));
    }

    #[test]
    fn version_1_is_read_too() {
        let mount = tempfile::tempdir().unwrap();
        let folder = mount.path().join("memory/job");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("memory.limit_in_bytes"), "9223372036854771712\n").unwrap();
        fs::write(folder.join("memory.usage_in_bytes"), "10\n").unwrap();
        let groups = "5:cpu,cpuacct:/job\n4:memory:/job\n";
        assert_eq!(limit(groups, mount.path()), None);
        fs::write(folder.join("memory.limit_in_bytes"), "100\n").unwrap();
        assert_eq!(limit(groups, mount.path()).unwrap().left, 90);
    }

    #[test]
    fn this_machine_has_memory_and_disk() {
        let memory = Memory::now();
        assert!(memory.usable() > 0 && memory.usable() <= memory.total, "{memory:?}");
        assert!(free_disk(Path::new("no/such/folder")).unwrap() > 0);
    }

    #[test]
    fn sizes_have_three_digits() {
        let sizes = [999, 1_540_000, 512_000_000, 19_508_787_456, 1_669_560_576];
        assert_eq!(
            sizes.map(gigabytes),
            ["1.00 kB", "1.54 MB", "512 MB", "19.5 GB", "1.67 GB"].map(String::from)
        );
    }
}
