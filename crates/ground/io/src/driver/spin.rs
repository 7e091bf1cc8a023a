//! Spinning before sleeping: an idle worker polls for completions for a while before it sleeps, if
//! that has paid lately.
//!
//! Waking a sleeping processor takes tens of microseconds, above all on a virtual machine, and
//! costs the waker as much. A client and a server that wait for each other in turn pay that twice
//! per request: 4 KiB reads one at a time went from 15,600 per second to 106,000 when both spun,
//! with a third of the processor time; with only the server, to 37,000 with the same processor
//! time.
//!
//! A worker does not spin if it moves much data at a time, or waits for a writable socket or for a
//! disk: there was no gain, and direct reads one at a time cost the server a third more.

use std::thread;
use std::time::{Duration, Instant};

/// Spin time: about the processor time of a sleep and a wakeup, so that a vain spin at most doubles
/// it. Long enough for a client that must itself be woken: under fio, one request at a time, 30 us
/// were often too short (124 us a read, from nbdkit 107; 54 with 60, and less processor time of the
/// server), and more gained little.
const LOOK: Duration = Duration::from_micros(60);
/// Sleeps up to this length count as short: they would have been shorter without the wakeup. On a
/// shared machine, waking the client and then the server can take more than 100 us.
const SHORT: Duration = Duration::from_micros(200);
/// Number of consecutive short waits before a worker spins.
const SURE: u8 = 8;
/// A vain spin costs as much as this many short waits earn: spinning must pay about nine times in
/// ten.
const IN_VAIN: u8 = 8;
/// The highest score: after this many successful spins, three vain ones end it.
const MOST: u8 = 24;
/// Polls between two yields of the processor.
const LOOKS: u32 = 16;
/// A yield longer than this means that other threads want the processor: spinning only delays them.
const TAKEN: Duration = Duration::from_micros(20);

/// What a worker has learned about its waiting times.
#[derive(Debug, Default)]
pub(super) struct Spin {
    /// Grows with short waits, falls with vain spins.
    score: u8,
}

impl Spin {
    /// Whether to spin before the next sleep.
    pub(super) fn looks(&self) -> bool {
        self.score >= SURE
    }

    /// Spins until `there` (returns true), for [`LOOK`] or `most` if that is shorter.
    pub(super) fn look(&mut self, most: Option<Duration>, mut there: impl FnMut() -> bool) -> bool {
        let begun = Instant::now();
        let most = most.map_or(LOOK, |most| most.min(LOOK));
        let mut looked = Duration::ZERO;
        let mut alone = true;
        let seen = loop {
            if (0..LOOKS).any(|_| {
                std::hint::spin_loop();
                there()
            }) {
                break true;
            }
            if looked >= most || !alone {
                break false;
            }
            thread::yield_now();
            let now = begun.elapsed();
            alone = now - looked < TAKEN;
            looked = now;
        };
        self.score =
            if seen { (self.score + 1).min(MOST) } else { self.score.saturating_sub(IN_VAIN) };
        seen
    }

    /// Records a sleep of `time` without a spin before it.
    pub(super) fn slept(&mut self, time: Duration) {
        self.score = if time <= SHORT { (self.score + 1).min(SURE) } else { 0 };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sure() -> Spin {
        let mut spin = Spin::default();
        (0..SURE).for_each(|_| spin.slept(SHORT));
        spin
    }

    #[test]
    fn only_short_waits_in_a_row_make_a_worker_look() {
        let mut spin = Spin::default();
        (1..SURE).for_each(|_| spin.slept(Duration::ZERO));
        assert!(!spin.looks());
        spin.slept(SHORT + Duration::from_nanos(1));
        spin.slept(SHORT);
        assert!(!spin.looks(), "one long sleep, and all begins anew");
        assert!(sure().looks());
    }

    #[test]
    fn looks_in_vain_end_it_sooner_than_those_that_paid_began_it() {
        let mut spin = sure();
        assert!(!spin.look(None, || false));
        assert!(!spin.looks());

        let mut spin = sure();
        for _ in 0..100 {
            assert!(spin.look(None, || true));
        }
        let mut vain = 0;
        while spin.looks() {
            assert!(!spin.look(Some(Duration::ZERO), || false));
            vain += 1;
        }
        assert_eq!(vain, 3);
    }

    #[test]
    fn what_comes_during_a_look_ends_it() {
        let mut looks = 0;
        let mut spin = sure();
        let seen = spin.look(None, || {
            looks += 1;
            looks == 3
        });
        assert!(seen && spin.looks());
        assert_eq!(looks, 3);
    }
}
