//! The threads that share one kernel's work.
//!
//! A kernel at decode takes tens of microseconds, so handing it over must take one or two: workers spin for a moment
//! after each job before they sleep. A worker *joins* a job while it is open; whoever calls waits for those that
//! joined and for nobody else, so a worker that sleeps, or whose core is taken by another process, delays nothing.

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, TryLockError};
use std::thread::{self, JoinHandle};

/// Looks for the next job before a worker sleeps: some 50 µs, longer than the gap between the kernels of a step and
/// far shorter than anything that a user of the other core would notice.
const SPINS: u32 = 2_000;

/// Every so many looks the core is offered to others, so that two processes on one core do not spin against each other.
const SPINS_PER_YIELD: u32 = 100;

const OPEN: u64 = 1 << 31;
const MEMBERS: u64 = OPEN - 1;

static TEAM: OnceLock<Team> = OnceLock::new();

/// Fixes the number of threads of [`run`], the caller included. Returns false if they had started already.
pub fn set_threads(threads: usize) -> bool {
    let mut first = false;
    TEAM.get_or_init(|| {
        first = true;
        Team::new(threads)
    });
    first
}

/// Keeps this thread and all that it starts from now on to the cores `cpus`.
///
/// Errors: this process may use none of them.
pub fn pin_thread(cpus: &[usize]) -> io::Result<()> {
    // SAFETY: all-zero is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    for &cpu in cpus.iter().filter(|&&cpu| cpu < libc::CPU_SETSIZE as usize) {
        // SAFETY: the core's bit is inside the set, checked just now.
        unsafe { libc::CPU_SET(cpu, &mut set) };
    }
    // SAFETY: the set is initialised, of the size given, and only read.
    match unsafe { libc::sched_setaffinity(0, size_of_val(&set), &set) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Threads that [`run`] uses, the caller included; one per core this process may use, unless [`set_threads`] came first.
pub fn threads() -> usize {
    global().workers.len() + 1
}

/// Calls `task(0)`, …, `task(tasks - 1)`, each once, on this thread and the process's workers, and returns when all
/// are done. Tasks are taken in order. Within a task, or while another thread's job runs, the caller does it all alone:
/// there are never more computing threads than asked for.
///
/// Panics if a task does, after all threads have left the job.
pub fn run(tasks: usize, task: impl Fn(usize) + Sync) {
    global().run(tasks, task);
}

fn global() -> &'static Team {
    TEAM.get_or_init(|| Team::new(thread::available_parallelism().map_or(1, usize::from)))
}

/// Workers beside the thread that calls [`Team::run`].
pub struct Team {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Held by the thread whose job runs.
    leader: Mutex<()>,
}

struct Shared {
    /// Generation of the job (32 bits), [`OPEN`] while it may be joined, workers inside it ([`MEMBERS`]).
    state: AtomicU64,
    /// The job. Written by the leader while it is neither open nor has members, read by members.
    job: UnsafeCell<Job>,
    /// The next task that nobody has taken.
    next: AtomicUsize,
    sleeping: Vec<AtomicBool>,
    stop: AtomicBool,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `job` is written only by the leader while nobody can be a member, and its closure is Sync.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only while the leader's call is on its stack.
unsafe impl Send for Shared {}

#[derive(Clone, Copy)]
struct Job {
    call: unsafe fn(*const (), usize),
    data: *const (),
    tasks: usize,
}

impl Team {
    /// `threads - 1` workers; with the caller of [`Self::run`] that makes `threads`.
    pub fn new(threads: usize) -> Self {
        let workers = threads.max(1) - 1;
        let nothing = Job { call: |_, _| (), data: std::ptr::null(), tasks: 0 };
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            job: UnsafeCell::new(nothing),
            next: AtomicUsize::new(0),
            sleeping: (0..workers).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            panic: Mutex::new(None),
        });
        let spawn = |index: usize| {
            let shared = shared.clone();
            let builder = thread::Builder::new().name(format!("kernels-{}", index + 1));
            builder.spawn(move || shared.work(index)).expect("no thread for the kernels")
        };
        let workers = (0..workers).map(spawn).collect();
        Self { shared, workers, leader: Mutex::new(()) }
    }

    /// See [`run`].
    pub fn run<F: Fn(usize) + Sync>(&self, tasks: usize, task: F) {
        let leader = match self.leader.try_lock() {
            Ok(guard) if tasks > 1 && !self.workers.is_empty() => guard,
            // A panic in an earlier job left the team as it was: nobody was inside any more.
            Err(TryLockError::Poisoned(guard)) if tasks > 1 && !self.workers.is_empty() => guard.into_inner(),
            _ => return (0..tasks).for_each(task),
        };
        unsafe fn call<F: Fn(usize)>(task: *const (), index: usize) {
            // SAFETY: the pointer is to the leader's `F`, which outlives the job.
            unsafe { (*task.cast::<F>())(index) }
        }
        let job = Job { call: call::<F>, data: (&raw const task).cast(), tasks };
        self.open(job);
        let own = catch_unwind(AssertUnwindSafe(|| self.shared.take_tasks(job)));
        self.close();
        let theirs = self.shared.panic.lock().expect("nothing panics under this lock. This is a bug.").take();
        drop(leader);
        if let Some(panic) = own.err().or(theirs) {
            resume_unwind(panic);
        }
    }

    fn open(&self, job: Job) {
        let shared = &*self.shared;
        // SAFETY: the job before is closed and has no member, and this thread is the only leader.
        unsafe { *shared.job.get() = job };
        shared.next.store(0, Ordering::Relaxed);
        let generation = (shared.state.load(Ordering::Relaxed) >> 32).wrapping_add(1);
        // SeqCst, as in `Shared::sleep`: either we see that a worker sleeps or it sees this job.
        shared.state.store(generation << 32 | OPEN, Ordering::SeqCst);
        for (sleeping, worker) in shared.sleeping.iter().zip(&self.workers).take(job.tasks - 1) {
            if sleeping.load(Ordering::SeqCst) && sleeping.swap(false, Ordering::SeqCst) {
                worker.thread().unpark();
            }
        }
    }

    /// Lets nobody in any more and waits for those inside.
    fn close(&self) {
        self.shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut looks = 0u32;
        while self.shared.state.load(Ordering::Acquire) & MEMBERS != 0 {
            looks += 1;
            // A member may have lost its core, perhaps to this very thread.
            if looks.is_multiple_of(SPINS_PER_YIELD) { thread::yield_now() } else { spin_loop() }
        }
    }
}

impl Drop for Team {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in self.workers.drain(..) {
            worker.thread().unpark();
            // A worker catches its tasks' panics, so it ends well.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(state) = self.next_job(index, seen) {
            seen = state >> 32;
            if !self.join(seen) {
                continue;
            }
            // SAFETY: this thread is a member, so the leader does not write the job and keeps its closure alive.
            let job = unsafe { *self.job.get() };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_tasks(job))) {
                *self.panic.lock().expect("nothing panics under this lock. This is a bug.") = Some(panic);
            }
            self.state.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// The state when its generation is no longer `seen`; `None` when the team ends.
    fn next_job(&self, index: usize, seen: u64) -> Option<u64> {
        loop {
            for look in 1..=SPINS {
                let state = self.state.load(Ordering::Acquire);
                if state >> 32 != seen {
                    return Some(state);
                }
                if look.is_multiple_of(SPINS_PER_YIELD) { thread::yield_now() } else { spin_loop() }
            }
            self.sleeping[index].store(true, Ordering::SeqCst);
            if self.state.load(Ordering::SeqCst) >> 32 == seen && !self.stop.load(Ordering::SeqCst) {
                thread::park();
            }
            self.sleeping[index].store(false, Ordering::SeqCst);
            if self.stop.load(Ordering::SeqCst) {
                return None;
            }
        }
    }

    /// Becomes a member of the job of this generation, unless it is closed or over.
    fn join(&self, generation: u64) -> bool {
        let enter = |state: u64| (state >> 32 == generation && state & OPEN != 0).then_some(state + 1);
        self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_ok()
    }

    fn take_tasks(&self, job: Job) {
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= job.tasks {
                return;
            }
            // SAFETY: the caller leads the job or is a member of it, so its closure is alive.
            unsafe { (job.call)(job.data, index) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(to: &AtomicUsize, count: usize) {
        to.fetch_add(count, Ordering::Relaxed);
    }

    #[test]
    fn every_task_runs_once_whatever_the_number_of_threads() {
        for threads in [1, 2, 3, 8] {
            let team = Team::new(threads);
            for tasks in [0usize, 1, 2, 7, 100] {
                for _ in 0..200 {
                    let counts: Vec<AtomicUsize> = (0..tasks).map(|_| AtomicUsize::new(0)).collect();
                    team.run(tasks, |task| add(&counts[task], 1));
                    assert!(
                        counts.iter().all(|count| count.load(Ordering::Relaxed) == 1),
                        "{threads} {tasks}"
                    );
                }
            }
        }
    }

    #[test]
    fn workers_that_sleep_are_woken_and_jobs_within_jobs_run() {
        let team = Team::new(4);
        let sum = AtomicUsize::new(0);
        for _ in 0..20 {
            while !team.shared.sleeping.iter().all(|sleeping| sleeping.load(Ordering::SeqCst)) {
                thread::yield_now();
            }
            team.run(8, |_| team.run(8, |task| add(&sum, task)));
        }
        assert_eq!(sum.into_inner(), 20 * 8 * 28);
    }

    #[test]
    fn threads_that_share_a_team_all_finish() {
        let team = Team::new(3);
        let sum = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..500).for_each(|_| team.run(5, |task| add(&sum, task))));
            }
        });
        assert_eq!(sum.into_inner(), 4 * 500 * 10);
    }

    #[test]
    fn threads_pinned_to_one_core_do_not_starve_each_other() {
        let done = AtomicUsize::new(0);
        let pinned = || {
            // SAFETY: all-zero is the empty set, the kernel fills in this thread's own.
            let mut allowed: libc::cpu_set_t = unsafe { std::mem::zeroed() };
            // SAFETY: the set is as large as it says.
            unsafe { libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed) };
            // SAFETY: the bit is inside the set.
            let first =
                (0..libc::CPU_SETSIZE as usize).find(|&cpu| unsafe { libc::CPU_ISSET(cpu, &allowed) });
            pin_thread(&[first.expect("a core to run on")]).unwrap();
            let team = Team::new(3);
            (0..300).for_each(|_| team.run(6, |_| add(&done, 1)));
        };
        // Two teams, as two processes would have.
        thread::scope(|scope| drop([scope.spawn(pinned), scope.spawn(pinned)]));
        assert_eq!(done.into_inner(), 2 * 300 * 6);
        assert!(pin_thread(&[]).is_err());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_team_goes_on() {
        let team = Team::new(3);
        let failing = || team.run(64, |task| assert!(task != 40, "task 40"));
        let panic = catch_unwind(AssertUnwindSafe(failing)).unwrap_err();
        assert_eq!(panic.downcast_ref::<&str>(), Some(&"task 40"));
        let done = AtomicUsize::new(0);
        team.run(64, |_| add(&done, 1));
        assert_eq!(done.into_inner(), 64);
    }
}
