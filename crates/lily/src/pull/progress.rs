//! How far a long download is: a bar when someone watches, else a line now and then.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::ProgressBar;

use crate::machine::gigabytes;

/// How often a line is written when there is no terminal.
const LINES_EVERY: Duration = Duration::from_secs(15);

/// Progress of a whole pull, in bytes, on stderr.
pub enum Progress {
    /// A terminal.
    Bar(ProgressBar),
    /// A log file or a pipe.
    Lines {
        /// Bytes present.
        done: u64,
        /// Bytes in all.
        total: u64,
        /// When the last line was written.
        last: Instant,
    },
}

impl Progress {
    /// For `total` bytes.
    pub fn new(total: u64) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress::Lines { done: 0, total, last: Instant::now() };
        }
        Progress::Bar(crate::progress::bytes("", total))
    }

    /// Names the file being worked on.
    pub fn file(&mut self, name: &str) {
        if let Progress::Bar(bar) = self {
            bar.set_message(name.to_string());
        }
    }

    /// `n` bytes more have arrived.
    pub fn add(&mut self, n: u64) {
        match self {
            Progress::Bar(bar) => bar.inc(n),
            Progress::Lines { done, total, last } => {
                *done += n;
                if last.elapsed() >= LINES_EVERY {
                    *last = Instant::now();
                    let percent = *done as f64 * 100.0 / (*total).max(1) as f64;
                    say!("{percent:.1} % of {}", gigabytes(*total));
                }
            }
        }
    }

    /// `n` bytes were there before this run: they count, but not as speed.
    pub fn found(&mut self, n: u64) {
        self.add(n);
        if let Progress::Bar(bar) = self {
            bar.reset_eta();
        }
    }

    /// `n` bytes turned out to be of no use.
    pub fn back(&mut self, n: u64) {
        match self {
            Progress::Bar(bar) => bar.set_position(bar.position().saturating_sub(n)),
            Progress::Lines { done, .. } => *done = done.saturating_sub(n),
        }
    }

    /// Writes a line of text.
    pub fn say(&self, line: &str) {
        match self {
            Progress::Bar(bar) => bar.suspend(|| say!("{line}")),
            Progress::Lines { .. } => say!("{line}"),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
