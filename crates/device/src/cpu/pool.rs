//! Threads that share one operation: a fork and a join that cost about a microsecond when hot.
//!
//! An operation is cut into parts, and whoever is awake takes the next one, the caller too: a
//! thread that sleeps, or whose core is busy with something else, delays nobody, and a
//! result must not depend on who computes it. Workers that find nothing to do spin for a
//! moment, because the next operation follows at once while a model runs, and then sleep.
//!
//! Knows no operation.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{Arc, Mutex};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread looks for work, or for the end of it, before it sleeps.
const PATIENCE: Duration = Duration::from_micros(100);
/// How long of it without letting others run: one of them may be whom it waits for.
const ALONE: Duration = Duration::from_micros(10);
/// Parts for each thread: enough that a slow one is not waited for long.
const PARTS_PER_THREAD: usize = 4;

/// Memory that a thread keeps from one part to the next.
pub type Scratch = Vec<f32>;

/// What is done with each part. The number is the part's.
type Work<'a> = dyn Fn(usize, &mut Scratch) + Sync + 'a;

/// A fixed set of threads. The caller of [`Pool::split`] is one of them.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    scratch: Scratch,
}

struct Shared {
    /// The current job: its number (high 32 bits), parts (16), and the next part to take (16).
    /// A job's number changes only when all its parts are done.
    state: AtomicU64,
    /// The job's work, on the stack of the caller. Followed only by who has taken a part, which
    /// the caller waits for.
    work: AtomicPtr<&'static Work<'static>>,
    /// Parts of the job that are done.
    done: AtomicU32,
    /// What a part panicked with.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers that sleep, or are about to.
    sleepers: AtomicU32,
    /// The caller, when it sleeps until the last part is done.
    caller: Mutex<Option<Thread>>,
    caller_sleeps: AtomicBool,
}

#[derive(Clone, Copy)]
struct State {
    job: u32,
    parts: u16,
    next: u16,
}

impl State {
    fn of(bits: u64) -> State {
        State { job: (bits >> 32) as u32, parts: (bits >> 16) as u16, next: bits as u16 }
    }

    fn bits(self) -> u64 {
        u64::from(self.job) << 32 | u64::from(self.parts) << 16 | u64::from(self.next)
    }
}

impl Shared {
    /// Whether there is a part to take, or nothing more to live for.
    fn calls(&self) -> bool {
        let state = State::of(self.state.load(SeqCst));
        state.next < state.parts || self.stop.load(SeqCst)
    }

    /// Takes and runs parts until none is left.
    fn help(&self, scratch: &mut Scratch) {
        let mut bits = self.state.load(Acquire);
        loop {
            let state = State::of(bits);
            if state.next >= state.parts {
                return;
            }
            let work = self.work.load(Relaxed);
            let taken = State { next: state.next + 1, ..state }.bits();
            if let Err(now) = self.state.compare_exchange_weak(bits, taken, AcqRel, Acquire) {
                bits = now;
                continue;
            }
            // SAFETY: this part is taken and not done. The caller set `work` before it published
            // the job, and until this part is done it neither returns nor sets another.
            let work = unsafe { *work };
            let part = usize::from(state.next);
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(part, scratch))) {
                self.panic.lock().expect("not held over a panic").get_or_insert(panic);
            }
            // The part's results are released with this, and the job may end.
            let done = self.done.fetch_add(1, SeqCst) + 1;
            if done == u32::from(state.parts)
                && self.caller_sleeps.load(SeqCst)
                && let Some(caller) = &*self.caller.lock().expect("not held over a panic")
            {
                caller.unpark();
            }
            bits = self.state.load(Acquire);
        }
    }

    fn serve(&self) {
        let mut scratch = Scratch::new();
        while !self.stop.load(SeqCst) {
            self.help(&mut scratch);
            if spin_until(|| self.calls()) {
                continue;
            }
            // Either the caller sees that this thread sleeps, or this thread sees the job.
            self.sleepers.fetch_add(1, SeqCst);
            while !self.calls() {
                std::thread::park();
            }
            self.sleepers.fetch_sub(1, SeqCst);
        }
    }
}

/// Spins until `ready`, for a bounded time. Whether it came true.
fn spin_until(ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        match start.elapsed() {
            waited if waited < ALONE => {}
            waited if waited < PATIENCE => std::thread::yield_now(),
            _ => return false,
        }
    }
}

impl Pool {
    /// A pool of `threads`, the caller among them. With fewer, if the system gives no more.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            work: AtomicPtr::new(std::ptr::null_mut()),
            done: AtomicU32::new(0),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicU32::new(0),
            caller: Mutex::new(None),
            caller_sleeps: AtomicBool::new(false),
        });
        let worker = |i| {
            let shared = shared.clone();
            let name = format!("cpu-{i}");
            std::thread::Builder::new().name(name).spawn(move || shared.serve()).ok()
        };
        let workers = (1..threads).map_while(worker).collect();
        Pool { shared, workers, scratch: Scratch::new() }
    }

    /// Threads, with the caller.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `work` for ranges that together are 0 .. `items`, each with `grain` items or more but
    /// for the last; returns when all are done. Panics if one panicked.
    pub fn split(
        &mut self,
        items: usize,
        grain: usize,
        work: impl Fn(Range<usize>, &mut Scratch) + Sync,
    ) {
        let most = (self.threads() * PARTS_PER_THREAD).min(usize::from(u16::MAX));
        let each = items.div_ceil(most).max(grain).max(1);
        let parts = items.div_ceil(each);
        if self.workers.is_empty() || parts <= 1 {
            work(0..items, &mut self.scratch);
            return;
        }
        let range = |part: usize| part * each..items.min((part + 1) * each);
        self.run(parts as u16, &|part, scratch| work(range(part), scratch));
    }

    fn run(&mut self, parts: u16, work: &Work) {
        let shared = &*self.shared;
        // SAFETY: only the lifetime changes. The reference is followed before this returns.
        let work: &'static Work<'static> = unsafe { std::mem::transmute(work) };
        shared.work.store((&raw const work).cast_mut(), Relaxed);
        shared.done.store(0, Relaxed);
        let job = State::of(shared.state.load(Relaxed)).job.wrapping_add(1);
        shared.state.store(State { job, parts, next: 0 }.bits(), SeqCst);
        if shared.sleepers.load(SeqCst) > 0 {
            self.workers.iter().for_each(|worker| worker.thread().unpark());
        }
        // A panic in a part of ours is caught there too: nobody leaves while others work.
        shared.help(&mut self.scratch);
        let all_done = || shared.done.load(SeqCst) == u32::from(parts);
        if !spin_until(all_done) {
            *shared.caller.lock().expect("not held over a panic") = Some(std::thread::current());
            shared.caller_sleeps.store(true, SeqCst);
            while !all_done() {
                std::thread::park();
            }
            shared.caller_sleeps.store(false, SeqCst);
        }
        let panic = shared.panic.lock().expect("not held over a panic").take();
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches every panic of its work, so there is none to pass on.
            let _ = worker.join();
        }
    }
}

/// A result that threads write in parts. Nothing else may use it meanwhile.
#[derive(Clone, Copy)]
pub struct Parts<'a, T> {
    start: *mut T,
    len: usize,
    whole: std::marker::PhantomData<&'a mut [T]>,
}

// SAFETY: it hands out slices of T, to be used by one thread each, as a `&mut [T]` sent there.
unsafe impl<T: Send> Sync for Parts<'_, T> {}

impl<'a, T> Parts<'a, T> {
    pub fn new(whole: &'a mut [T]) -> Parts<'a, T> {
        Parts { start: whole.as_mut_ptr(), len: whole.len(), whole: std::marker::PhantomData }
    }

    /// `len` elements from `start` on. Panics if they are not in the whole.
    ///
    /// # Safety
    /// No two slices that exist at a time may overlap.
    #[allow(clippy::mut_from_ref)] // the point of this type
    pub unsafe fn slice(&self, start: usize, len: usize) -> &'a mut [T] {
        assert!(start <= self.len && len <= self.len - start, "{start}+{len} of {}", self.len);
        // SAFETY: in range; the caller sees to it that nothing else refers to it.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sum_of_squares(pool: &mut Pool, n: usize) -> u64 {
        let mut squares = vec![0; n];
        let parts = Parts::new(&mut squares);
        pool.split(n, 1, |range, _| {
            // SAFETY: ranges do not overlap.
            let out = unsafe { parts.slice(range.start, range.len()) };
            out.iter_mut().zip(range).for_each(|(out, i)| *out = (i * i) as u64);
        });
        squares.iter().sum()
    }

    #[test]
    fn every_item_is_done_once_whatever_the_threads() {
        for threads in [1, 2, 3, 7] {
            let mut pool = Pool::new(threads);
            for n in [0, 1, 2, 5, 27, 28, 29, 1000] {
                let want: u64 = (0..n as u64).map(|i| i * i).sum();
                assert_eq!(sum_of_squares(&mut pool, n), want, "{threads} threads, {n} items");
            }
        }
    }

    #[test]
    fn many_jobs_in_a_row_with_and_without_sleep_between() {
        let mut pool = Pool::new(3);
        for i in 0..if cfg!(miri) { 20 } else { 2000 } {
            assert_eq!(sum_of_squares(&mut pool, 12), 506);
            if i % 500 == 0 {
                std::thread::sleep(PATIENCE * 3);
            }
        }
    }

    #[test]
    fn a_slow_part_is_waited_for() {
        let mut pool = Pool::new(2);
        let slow = AtomicU32::new(0);
        pool.split(8, 1, |range, _| {
            std::thread::sleep(PATIENCE * 5);
            slow.fetch_add(range.len() as u32, Relaxed);
        });
        assert_eq!(slow.into_inner(), 8);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let mut pool = Pool::new(3);
        for bad in 0..12 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.split(12, 1, |range, _| assert!(!range.contains(&bad), "part {bad}"))
            }));
            let message = result.expect_err("it panics");
            assert_eq!(message.downcast_ref::<String>().unwrap(), &format!("part {bad}"));
            assert_eq!(sum_of_squares(&mut pool, 12), 506);
        }
    }
}
