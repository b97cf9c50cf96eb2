//! How much threads that compute give way to others of the machine.

use std::io;

use super::team;

/// Lowers the calling thread's priority to `nice` (0 to 19), as `nice(1)` does; threads that it starts inherit it. One that is
/// lower already stays as it is.
///
/// Errors: the system refuses.
pub fn give_way(nice: u8) -> io::Result<()> {
    // SAFETY: reads a number of the calling thread, which is what 0 names on Linux.
    if unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) } >= libc::c_int::from(nice) {
        return Ok(());
    }
    // SAFETY: sets a number of the calling thread, which is what 0 names on Linux.
    match unsafe { libc::setpriority(libc::PRIO_PROCESS, 0, libc::c_int::from(nice.min(19))) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// [`team::set_threads`] for threads of that priority. The thread that calls [`team::run`] computes too, and has a
/// priority of its own.
///
/// Errors: as [`give_way`]; no thread can be started.
pub fn set_threads(threads: usize, nice: u8) -> io::Result<bool> {
    let start = move || give_way(nice).map(|()| team::set_threads(threads));
    let thread = std::thread::Builder::new().name("team-start".into()).spawn(start)?;
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_gives_way_alone() {
        // SAFETY: reads a number of the calling thread.
        let nice = || unsafe { libc::getpriority(libc::PRIO_PROCESS, 0) };
        let before = nice();
        let lowered = std::thread::spawn(move || give_way(19).map(|()| nice())).join().unwrap().unwrap();
        assert_eq!((lowered, nice()), (19, before));
    }
}
