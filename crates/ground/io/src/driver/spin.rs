//! Looking before sleeping: a worker that has nothing to do looks for what comes for a while before
//! it goes to sleep, where that has paid lately.
//!
//! To wake a processor that sleeps takes tens of microseconds, on a virtual machine most of all, and
//! costs whoever wakes it as much. A client and a server that wait for each other in turn pay that
//! twice for each request: 4 KiB reads one at a time went from 15,600 a second to 106,000 when both
//! looked, with a third of the processor time; when the server alone did, to 37,000 with the same.
//!
//! Nobody looks who moves much at a time, waits for room to send, or for a disk: nothing was gained, and
//! direct reads one at a time cost the server a third more.

use std::thread;
use std::time::{Duration, Instant};

/// A worker looks for so long: about as long as a sleep and the waking up cost in processor time, so that a
/// look in vain at most doubles it. And long enough for a client that has to be woken up itself: under fio, one
/// request at a time, 30 us were often too short (124 us a read, from nbdkit 107; 54 with 60, and less
/// processor time of the server), and little was gained by more.
const LOOK: Duration = Duration::from_micros(60);
/// Sleeps up to this length would have been shorter without the waking up, and count as short. On a machine
/// that is shared, to wake up the client and then the server can take more than 100 us.
const SHORT: Duration = Duration::from_micros(200);
/// So many waits have to be short, one after the other, before a worker looks.
const SURE: u8 = 8;
/// A look in vain costs as much as so many short waits earn: looking has to pay about nine
/// times in ten.
const IN_VAIN: u8 = 8;
/// The highest score: after this many looks that paid, three in vain end it.
const MOST: u8 = 24;
/// Looks between two offers of the processor to whoever else wants it.
const LOOKS: u32 = 16;
/// Who got the processor back only after so long was not alone: looking only takes it from others.
const TAKEN: Duration = Duration::from_micros(20);

/// What a worker has learned about how long it waits.
#[derive(Debug, Default)]
pub(super) struct Spin {
    /// Grows with short waits, falls with looks in vain.
    score: u8,
}

impl Spin {
    /// Whether to look before the next sleep.
    pub(super) fn looks(&self) -> bool {
        self.score >= SURE
    }

    /// Looks until there is something (true), for [`LOOK`] or `most` if that is shorter.
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
        self.score = match seen {
            true => (self.score + 1).min(MOST),
            false => self.score.saturating_sub(IN_VAIN),
        };
        seen
    }

    /// A sleep without a look before it took so long.
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
