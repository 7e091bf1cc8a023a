//! Waits for what other threads and processes do. They poll; where something can be awaited without
//! (the end of a pipe, an answer, the join of a thread), tests do that instead.

use std::fmt::Debug;
use std::time::{Duration, Instant};

/// Far longer than anything that is awaited takes on a busy machine.
const LIMIT: Duration = Duration::from_secs(120);

/// The longest pause between two looks.
const PAUSE: Duration = Duration::from_millis(5);

/// Waits until the condition is true.
///
/// # Panics
/// If it is not within 120 s, with `what`: the condition in words.
#[track_caller]
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    until_some(what, || condition().then_some(()));
}

/// Waits until something is found, and returns it.
///
/// # Panics
/// If nothing is found within 120 s, with `what`.
#[track_caller]
pub fn until_some<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    match poll(LIMIT, || find().ok_or(())) {
        Ok(found) => found,
        Err(()) => panic!("{what}: not within {LIMIT:?}"),
    }
}

/// Waits until the attempt succeeds, and returns its result.
///
/// # Panics
/// If it does not succeed within 120 s, with `what` and the last error.
#[track_caller]
pub fn until_ok<T, E: Debug>(what: &str, attempt: impl FnMut() -> Result<T, E>) -> T {
    match poll(LIMIT, attempt) {
        Ok(done) => done,
        Err(error) => panic!("{what}: not within {LIMIT:?}: {error:?}"),
    }
}

/// The first success, or the last error once the limit has passed. The pauses become longer: most of what
/// is awaited takes next to no time.
fn poll<T, E>(limit: Duration, mut attempt: impl FnMut() -> Result<T, E>) -> Result<T, E> {
    let begun = Instant::now();
    let mut pause = Duration::from_micros(200);
    loop {
        // Before the attempt: one that succeeds late, because this thread did not get to run, counts.
        let last = begun.elapsed() > limit;
        match attempt() {
            Err(_) if !last => std::thread::sleep(pause),
            result => return result,
        }
        pause = (pause * 2).min(PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_success_or_the_last_error_counts() {
        let mut looks = 0;
        let mut third = || {
            looks += 1;
            (looks == 3).then_some(looks)
        };
        assert_eq!(until_some("a third look", &mut third), 3);
        until("a fourth look", || third().is_none());

        let mut attempts = 0;
        let failed: Result<(), u32> = poll(Duration::from_millis(20), || {
            attempts += 1;
            Err(attempts)
        });
        assert_eq!(failed, Err(attempts));
        assert!(attempts > 1, "{attempts}");
        assert_eq!(until_ok("a number", || "7".parse::<u8>()), 7);
    }
}
