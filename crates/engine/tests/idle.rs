//! An idle engine takes no processor time. Alone in its process, which it measures.
#![cfg(target_os = "linux")]

use std::time::Duration;

use lily_engine::{Engine, Forward, Options, Span};

/// A model that nobody asks anything.
struct Unused;

impl Forward for Unused {
    fn vocab(&self) -> usize {
        1
    }
    fn slots(&self) -> usize {
        1
    }
    fn max_seq(&self) -> usize {
        1
    }
    fn chunk(&self) -> usize {
        1
    }
    fn outputs(&self) -> usize {
        1
    }
    fn reset(&mut self, _: usize) {}
    fn step(&mut self, _: &[Span], _: &mut dyn FnMut() -> bool) -> Result<Option<&[f32]>, String> {
        unreachable!("nobody asked")
    }
}

/// Ticks of 10 ms that this process has used, in user and kernel mode.
fn ticks() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let after_name = stat.rsplit(')').next().unwrap();
    let fields: Vec<_> = after_name.split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn an_idle_engine_sleeps() {
    let engine = Engine::start(Unused, Options { queue: 1, known_ids: 1 });
    std::thread::sleep(Duration::from_millis(50));
    let before = ticks();
    std::thread::sleep(Duration::from_millis(400));
    let used = ticks() - before;
    assert!(used <= 5, "{used} ticks in 40");
    engine.shutdown();
}
